"""Experts in a ModuleList: what is no such block, what is one and is refused, and blocks under checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.backends import Compiled
from tests.passes.blocks import E, H, I, capture, run_with_gradients
from tests.passes.foreign import Adapted, Capacity, Expert, Sequential, ThreeWeights
from tests.passes.test_match import assert_same_function
from trace_compile.errors import NoMoERegionError
from trace_compile.ops import W4A16
from trace_compile.passes import PIPELINE, Mode, PassRunner


class Gelu(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


class Written(Sequential):
    """A view of the tokens is written to between two experts."""

    def every_token(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        mix = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, gates)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = x[torch.arange(e, x.shape[0])]
            seen = out[e:]
            seen.add_(expert(rows) * mix[e:, e : e + 1])
        return out


def other_activation() -> nn.Module:
    block = Sequential("every_token")
    block.experts[3] = Gelu(False, False)
    return block


class Normalised(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x).softmax(-1) * self.up_proj(x))


def normalised() -> nn.Module:
    block = Sequential("selected")
    block.experts = nn.ModuleList([Normalised(False, False) for _ in range(E)])
    return block


class Narrow(Sequential):
    """One expert is narrower than the others: they are no stack."""

    def __init__(self) -> None:
        super().__init__("every_token")
        for name, shape in (("gate_proj", (I // 2, H)), ("up_proj", (I // 2, H)), ("down_proj", (H, I // 2))):
            getattr(self.experts[2], name).weight = nn.Parameter(torch.randn(shape))


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (other_activation, r"experts: expert 3 has another activation than expert 0 \(.*test_loops.py"),
    (lambda: Written("every_token"), "add_ writes in place between two experts"),
    (Narrow, "expert 2 is built otherwise than expert 0"),
    (normalised, "activation of expert 0 not understood: .*softmax is no elementwise operation"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=["activation", "written", "narrow", "normalised"])
def test_refused_with_the_reason(make: Callable[[], nn.Module], reason: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = capture(make(), torch.randn(10, H))
    gm = found.graph()
    before = str(gm.graph)
    with pytest.raises(NoMoERegionError, match=reason):
        PassRunner(PIPELINE, disabled=("canonicalize",)).run(gm, found.inputs, config=Mode(scheme=None))
    assert str(gm.graph) == before


class Heads(nn.Module):
    """Networks side by side on the same rows, their results stacked: nothing is routed."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Expert(False, False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


class Layers(Heads):
    """The same networks one behind the other."""

    def forward(self, x: Tensor) -> Tensor:
        for head in self.heads:
            x = x + head(x) * 0.5
        return x


@pytest.mark.parametrize("make", [Heads, Layers])
def test_what_is_not_routed_is_left_alone(make: Callable[[], nn.Module]) -> None:
    found = capture(make(), torch.randn(10, H))
    with pytest.raises(NoMoERegionError, match="no operation is expert-shaped"):
        PassRunner(PIPELINE).run(found.graph(), found.inputs, config=Mode(scheme=None))


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.block, x, use_reentrant=False)  # type: ignore[operator]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "three weights": ThreeWeights,
    "capacity": lambda: Capacity(split=True),
    "every token": lambda: Sequential("every_token", bias=True),
    "adapted": Adapted,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_under_a_checkpoint(name: str) -> None:
    """The same region as without, the same function, and quantized the same numbers."""
    torch.manual_seed(1)
    block, x = BLOCKS[name](), torch.randn(10, H, requires_grad=True)
    found = capture(Checkpointed(block), x.detach())
    gm = PassRunner(PIPELINE).run(found.graph(), found.inputs, config=Mode(scheme=None))
    (region,) = gm.meta["regions"]
    assert region.name.startswith("block") and region.num_experts == E and gm.meta["unmatched"] == ()
    assert_same_function(run_with_gradients(found.graph(), found.args), run_with_gradients(gm, found.args))
    results = []
    for module in (block, Checkpointed(block)):
        out = Compiled(module, Mode(scheme=W4A16, train=True))(x)
        out = out + x if module is block else out
        grads = torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
        results.append([out.detach(), *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
