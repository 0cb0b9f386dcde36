"""Recorded routing in every kind of router: the recorded experts run, gates and their gradients stay the trainer's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backends import Compiled, assert_equal
from tests.passes.blocks import E, Grouped, H, K
from tests.test_capture_values import reference
from trace_compile.errors import GuidanceError
from trace_compile.passes import Mode

GROUPS, TAKEN = 4, 2


class Router(nn.Module):
    """Scores from ``logits``, ids and gates as ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H) * 0.3)
        self.bias = nn.Parameter(torch.randn(E), requires_grad=False)
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return getattr(self, self.kind)(F.linear(x, self.weight))

    def softmax_then_top_k(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(logits.softmax(-1), K, dim=-1)

    def top_k_then_softmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        top, ids = torch.topk(logits, K, dim=-1)
        return top.softmax(-1), ids

    def sigmoid(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen with a bias that the gates do not have."""
        scores = logits.sigmoid()
        ids = torch.topk(scores + self.bias, K, dim=-1, sorted=False)[1]
        gates = scores.gather(1, ids)
        return 2.5 * gates / (gates.sum(-1, keepdim=True) + 1e-20), ids

    def group_limited(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Groups by the sum of their two best; gates from all scores (DeepSeek-V3)."""
        scores = logits.sigmoid()
        biased = scores + self.bias
        best = biased.view(-1, GROUPS, E // GROUPS).topk(2, dim=-1)[0].sum(-1)
        mask = torch.zeros_like(best).scatter(1, best.topk(TAKEN, dim=-1, sorted=False)[1], 1)
        mask = mask.unsqueeze(-1).expand(-1, GROUPS, E // GROUPS).reshape(-1, E)
        ids = biased.masked_fill(~mask.bool(), 0.0).topk(K, dim=-1, sorted=False)[1]
        gates = scores.gather(1, ids)
        return gates / (gates.sum(-1, keepdim=True) + 1e-20), ids

    def masked_groups(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Gates read where the other groups' scores are masked (DeepSeek-V2)."""
        scores = logits.softmax(-1)
        best = scores.view(-1, GROUPS, E // GROUPS).max(dim=-1).values
        mask = torch.zeros_like(best).scatter(1, best.topk(TAKEN, dim=-1)[1], 1)
        mask = mask.unsqueeze(-1).expand(-1, GROUPS, E // GROUPS).reshape(-1, E)
        return torch.topk(scores.masked_fill(~mask.bool(), 0.0), K, dim=-1)


def normalised(scores: Tensor, ids: Tensor) -> Tensor:
    return scores[ids] / (scores[ids].sum() + 1e-20)


REFERENCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of one token: logits [E], ids [K] -> gates [K]
    "softmax_then_top_k": lambda logits, ids: logits.softmax(-1)[ids],
    "top_k_then_softmax": lambda logits, ids: logits[ids].softmax(-1),
    "sigmoid": lambda logits, ids: 2.5 * normalised(logits.sigmoid(), ids),
    "group_limited": lambda logits, ids: normalised(logits.sigmoid(), ids),
    "masked_groups": lambda logits, ids: logits.softmax(-1)[ids],
}


@pytest.mark.parametrize("kind", REFERENCE)
def test_recorded_experts_with_the_trainers_own_gates(kind: str) -> None:
    torch.manual_seed(7)
    block, x = Grouped(), torch.randn(6, H, requires_grad=True)
    block.router = Router(kind)  # type: ignore[assignment]
    own = block.router(x)[1]
    expected = block(x)
    before = [expected.detach(), *tokens_and_weights(block, expected, x)]

    replay = Compiled(block, Mode(scheme=None, replay=True, routing=True))
    for recorded in (own, torch.full_like(own, -1)):  # the model's own choice, given or not given
        replay.runtime.replayed = recorded
        out = replay(x)
        assert_equal([out.detach(), *tokens_and_weights(block, out, x)], before)

    other = torch.stack([torch.randperm(E)[:K] for _ in range(len(own))])  # any experts, of groups not chosen too
    other[0], other[1, 1] = -1, -1  # no record, or half of one: the model's own
    replay.runtime.replayed = other
    out = replay(x)
    chosen = replay.runtime.emitted[-1]["routing"]["w13"]
    assert torch.equal(chosen[2:], other[2:]) and torch.equal(chosen[:2], own[:2])
    logits = F.linear(x, block.router.weight)
    gates = torch.stack([REFERENCE[kind](row, ids) for row, ids in zip(logits, chosen, strict=True)])
    y = reference(block, x, gates, chosen)
    torch.testing.assert_close(out, y, rtol=1e-4, atol=1e-4)
    found, wanted = tokens_and_weights(block, out, x), tokens_and_weights(block, y, x)
    assert wanted[1].norm() > 0  # the router's
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def tokens_and_weights(block: Grouped, out: Tensor, x: Tensor) -> list[Tensor]:
    """Gradients of the tokens, the router's weight, w13 and w2."""
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), [x, block.router.weight, block.w13, block.w2]))


def test_ids_that_are_no_top_k_are_refused_by_line() -> None:
    class Hashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, H))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            ids = (x[:, :K].abs() * 100).long() % E
            return F.linear(x, self.weight).softmax(-1).gather(1, ids), ids

    block = Grouped()
    block.router = Hashed()  # type: ignore[assignment]
    replay = Compiled(block, Mode(scheme=None, replay=True))
    with pytest.raises(
        GuidanceError, match=r"routing of w13 cannot be replayed: .* \(.*test_replay.py:.*not from a top"
    ):
        replay(torch.randn(4, H))
