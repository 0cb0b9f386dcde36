"""GRPO with truncated importance sampling: the arithmetic, without a model.

Log-probabilities are those of sampled tokens: ``new`` by the weights being updated, ``old`` by the trainer before the
update, ``rollout`` by the rollout that sampled them. The gap is ``old - rollout``. Sources: GRPO's group-normalised
advantage and PPO's clipped ratio; TIS weights ``min(pi_old / pi_rollout, C)`` under a stop-gradient; K1 and K3 are the
usual single-sample estimators of KL(rollout || trainer). All tensors float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log ratios are clipped to +-20 before ``exp``, so that one broken token cannot make the loss infinite."""

_STD_FLOOR = 1e-4


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """``(r - mean) / (std + 1e-4)`` within each group of ``group_size`` consecutive rewards; ``[B] -> [B]``.

    A group of equal rewards has advantage 0: it teaches nothing.
    """
    groups = rewards.float().view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, correction=0, keepdim=True) + _STD_FLOOR)).flatten()


def importance_weights(old: Tensor, rollout: Tensor, bound: float) -> Tensor:
    """Truncated importance weights ``min(pi_old / pi_rollout, bound)``; they carry no gradient."""
    return (old - rollout).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=bound)


def policy_loss(
    new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, *, clip: float, truncate: float
) -> Tensor:
    """Summed loss ``-w * min(r A, clamp(r, 1-clip, 1+clip) A)`` over tokens in ``mask``, ``r = pi_new / pi_old``.

    new, old, rollout, mask: ``[b, L]``; advantages ``[b]``. A sum, so that micro-batches add up: the caller divides by
    the number of sampled tokens in the whole batch.
    """
    weights = importance_weights(old, rollout, truncate)
    ratio = (new - old.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    advantage = advantages[:, None]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(weights * surrogate)[mask].sum()


@dataclass(frozen=True)
class GapStats:
    """Statistics of the gap over sampled tokens. ``k1``: mean of ``-gap``. ``k3``: mean of ``exp(gap) - gap - 1``.

    ``clip_fraction``: share of tokens whose importance weight is truncated.
    """

    mean: float
    max: float
    k1: float
    k3: float
    clip_fraction: float


def gap_stats(gap: Tensor, truncate: float) -> GapStats:
    """``GapStats`` of the gaps ``[n]`` of all sampled tokens of a batch (n > 0)."""
    gap = gap.double()
    bounded = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return GapStats(
        mean=gap.abs().mean().item(),
        max=gap.abs().max().item(),
        k1=-gap.mean().item(),
        k3=(torch.expm1(bounded) - bounded).mean().item(),
        clip_fraction=(bounded.exp() > truncate).double().mean().item(),
    )
