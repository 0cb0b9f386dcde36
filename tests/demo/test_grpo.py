"""GRPO's arithmetic against loops over Python floats."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_compile.demo.grpo import group_advantages, policy_loss
from trace_compile.losses import truncated_weights

REWARDS = st.lists(st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4), min_size=1, max_size=5)


@given(REWARDS)
def test_advantages_are_normalised_within_each_group(groups: list[list[float]]) -> None:
    flat = torch.tensor([reward for group in groups for reward in group])
    found = group_advantages(flat, 4).tolist()
    for index, group in enumerate(groups):
        mean, std = statistics.fmean(group), statistics.pstdev(group)
        expected = [(reward - mean) / (std + 1e-4) for reward in group]
        assert found[4 * index : 4 * index + 4] == pytest.approx(expected, abs=2e-3)


def test_equal_rewards_teach_nothing() -> None:
    assert group_advantages(torch.full((8,), 0.3), 4).abs().max() < 1e-3


def _case() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(3, 5, generator=generator)
    old = rollout + torch.randn(3, 5, generator=generator)
    new = old + 0.5 * torch.randn(3, 5, generator=generator)
    advantages = torch.tensor([1.5, -0.7, 0.0])
    mask = torch.rand(3, 5, generator=generator) < 0.7
    return new, old, rollout, advantages, mask


def _reference(new: float, old: float, rollout: float, advantage: float, clip: float, truncate: float) -> float:
    weight = min(math.exp(min(max(old - rollout, -20.0), 20.0)), truncate)
    ratio = math.exp(min(max(new - old, -20.0), 20.0))
    clipped = min(max(ratio, 1 - clip), 1 + clip)
    return -weight * min(ratio * advantage, clipped * advantage)


@pytest.mark.parametrize("truncate", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("clip", [0.1, 0.2])
def test_policy_loss_is_the_written_formula(clip: float, truncate: float) -> None:
    new, old, rollout, advantages, mask = _case()
    loss = policy_loss(new, old, rollout, advantages, mask, clip=clip, truncate=truncate)
    expected = sum(
        _reference(float(new[i, j]), float(old[i, j]), float(rollout[i, j]), float(advantages[i]), clip, truncate)
        for i in range(3)
        for j in range(5)
        if mask[i, j]
    )
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_gradient_at_the_old_policy_is_reinforce_with_truncated_weights() -> None:
    _, old, rollout, advantages, mask = _case()
    new = old.clone().requires_grad_()
    policy_loss(new, old, rollout, advantages, mask, clip=0.2, truncate=2.0).backward()
    weights = truncated_weights(old, rollout, 2.0)
    assert new.grad is not None
    assert torch.equal(new.grad, torch.where(mask, -weights * advantages[:, None], 0.0))


def test_clipping_stops_the_gradient_only_where_the_step_went_too_far() -> None:
    old = torch.zeros(1, 4)
    new = torch.tensor([[0.5, -0.5, 0.5, -0.5]], requires_grad=True)
    for advantage, moving in ((1.0, [0, 1, 0, 1]), (-1.0, [1, 0, 1, 0])):
        new.grad = None
        mask = torch.ones(1, 4, dtype=torch.bool)
        policy_loss(new, old, old, torch.tensor([advantage]), mask, clip=0.2, truncate=5.0).backward()
        assert new.grad is not None and new.grad.ne(0).int().tolist() == [moving]
