"""Loss helpers against their formulas over Python floats (float64), and their gradients against finite differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trace_compile import losses
from trace_compile.losses import band_weights, gap_stats, score_centering_loss, triage_weights, truncated_weights

VOCABULARY, K = 7, 3


def logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


def test_truncated_weights_carry_no_gradient_and_survive_broken_tokens() -> None:
    old = torch.tensor([-1.0, -3.0, -1e4, 0.0], requires_grad=True)
    rollout = torch.tensor([-2.0, -1.0, 0.0, -1e4])
    weights = truncated_weights(old, rollout, 2.0)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([2.0, math.exp(-2), math.exp(-20), 2.0])


def test_band_weights() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -1.6, -1.8, -0.3, -0.2])
    weights = band_weights(old, rollout, 0.5, 2.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(0.6), 0.0, 0.0, 0.0]) and not weights.requires_grad


def centered(p: list[float], q: list[float], y: int, bound: float) -> list[float]:
    """Coefficients of log p_v for every token v, for advantage 1: the formula, term by term."""
    top = sorted(range(len(q)), key=lambda v: -q[v])[:K]
    rho = (1 - sum(q[v] for v in top)) / (1 - sum(p[v] for v in top))
    alpha = rho * min(1 / rho, bound)
    coefficients = [0.0] * len(p)
    coefficients[y] -= min(p[y] / q[y], bound)
    for v in top:
        coefficients[v] += q[v] * min(p[v] / q[v], bound) - alpha * p[v]
    return coefficients


@pytest.mark.parametrize("bound", [1.0, 2.0, 5.0])
def test_score_centering_and_its_gradient(bound: float) -> None:
    """The gradient in the trainer's logits, against finite differences of the sum with frozen coefficients."""
    generator = torch.Generator().manual_seed(3)
    for case in range(8):
        new, rollout = logits(case, VOCABULARY), logits(case + 100, VOCABULARY).log_softmax(-1)
        y, advantage = int(torch.randint(VOCABULARY, (), generator=generator)), (1.5, -0.7)[case % 2]
        coefficients = torch.tensor(
            centered(new.softmax(-1).tolist(), rollout.exp().tolist(), y, bound), dtype=torch.float64
        )

        def frozen(z: Tensor, c: Tensor = coefficients, a: float = advantage) -> float:
            return a * float((c * z.log_softmax(-1)).sum())

        leaf = new.float().requires_grad_()
        log_p, top = leaf.log_softmax(-1), rollout.topk(K).indices
        loss = score_centering_loss(
            log_p[y], rollout[y].float(), log_p[top], rollout[top].float(), torch.tensor(advantage), bound
        )
        loss.backward()
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(frozen(new), rel=1e-4, abs=1e-5)
        assert leaf.grad is not None and leaf.grad.tolist() == pytest.approx(differences(frozen, new), abs=2e-5)


def differences(function: Callable[[Tensor], float], at: Tensor, step: float = 1e-5) -> list[float]:
    found = []
    for i in range(at.numel()):
        move = torch.zeros_like(at)
        move[i] = step
        found.append((function(at + move) - function(at - move)) / (2 * step))
    return found


def test_centered_scores_vanish_in_expectation() -> None:
    """Over y ~ q with the whole vocabulary as top-k: truncated weights alone would push, centred ones do not."""
    new, rollout = logits(1, VOCABULARY).float().requires_grad_(), logits(2, VOCABULARY).float().log_softmax(-1)
    order = rollout.argsort(descending=True)
    log_p = new.log_softmax(-1)
    q = rollout.exp()
    losses_of = score_centering_loss(
        log_p, rollout, log_p[order].expand(VOCABULARY, -1), rollout[order].expand(VOCABULARY, -1), torch.ones(()), 1.2
    )
    (gradient,) = torch.autograd.grad((q * losses_of).sum(), new, retain_graph=True)
    (plain,) = torch.autograd.grad(-(q * truncated_weights(log_p, rollout, 1.2) * log_p).sum(), new)
    assert gradient.abs().max() < 1e-5 < 0.01 < plain.abs().max()


def test_triage() -> None:
    lengths, gaps = (5, 4, 0), torch.full((3, 6), 0.0)
    gaps[0, :3], gaps[0, 3:] = torch.tensor([-2.0, -1.0, -0.5]), torch.tensor([-2.0, -2.0, 9.0])
    gaps[1] = gaps[0]
    mask = torch.tensor([[i < n for i in range(6)] for n in lengths])
    rollout = torch.full((3, 6), -1.0)
    found = triage_weights(rollout + gaps, rollout, torch.tensor([-1.0, 1.0, -1.0]), mask, segment=3)
    # Means -1.17 and -2.0 of the sampled tokens of row 0; row 1's advantage is positive; row 2 sampled nothing.
    assert torch.equal(found, torch.tensor([[0.3, 0.3, 0.3, 0.1, 0.1, 0.0], [1, 1, 1, 1, 0, 0], [0.0] * 6]))
    shifted = torch.zeros(1, 8, dtype=torch.bool)
    shifted[0, 2:7] = True  # positions before the response belong to no segment
    padded = triage_weights(
        torch.full((1, 8), -3.0), torch.full((1, 8), -2.2), torch.tensor([-1.0]), shifted, segment=3
    )
    assert torch.equal(padded, torch.where(shifted, 0.3, 0.0))


def test_sequence_ratio_and_its_two_sided_bound() -> None:
    old, new = -torch.rand(4, 5, dtype=torch.float64), -torch.rand(4, 5, dtype=torch.float64) - 0.2
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 0]]).bool()
    leaf = new.clone().requires_grad_()
    found = losses.sequence_ratio(leaf, old, mask)
    expected = [
        math.prod(math.exp(float(new[i, j] - old[i, j])) for j in range(5) if mask[i, j]) ** (1 / max(1, n))
        for i, n in enumerate(mask.sum(1).tolist())
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-6) and expected[2] == 1.0
    found.sum().backward()
    slopes = [[e / n if m else 0.0 for m in row] for e, n, row in zip(expected, mask.sum(1).tolist(), mask.tolist())]
    assert leaf.grad is not None and torch.allclose(leaf.grad, torch.tensor(slopes, dtype=torch.float64), rtol=1e-5)

    ratios = torch.tensor([0.5, 1.0, 2.0] * 2, requires_grad=True)
    surrogate = losses.two_sided_surrogate(ratios, torch.tensor([2.0] * 3 + [-2.0] * 3), 0.8, 1.2)
    assert surrogate.tolist() == pytest.approx([1.0, 2.0, 2.4, -1.6, -2.0, -2.4])
    surrogate.sum().backward()
    assert ratios.grad is not None and ratios.grad.tolist() == [2.0, 2.0, 0.0, 0.0, -2.0, 0.0]


@given(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=20))
def test_gap_statistics_are_their_definitions(gaps: list[float]) -> None:
    stats = gap_stats(torch.tensor(gaps), truncate=5.0)
    assert stats.mean == pytest.approx(statistics.fmean(map(abs, gaps)))
    assert stats.max == max(map(abs, gaps))
    assert stats.k1 == pytest.approx(-statistics.fmean(gaps), abs=1e-12)
    assert stats.k3 == pytest.approx(statistics.fmean(math.exp(g) - g - 1 for g in gaps), abs=1e-12)
    assert stats.clip_fraction == pytest.approx(statistics.fmean(math.exp(g) > 5.0 for g in gaps))


def test_k3_is_exact_for_tiny_gaps_and_finite_for_huge_ones() -> None:
    assert gap_stats(torch.full((4,), 1e-6), 5.0).k3 == pytest.approx(5e-13, rel=1e-3)
    assert math.isfinite(gap_stats(torch.tensor([1e4]), 5.0).k3)
