"""GRPO with truncated importance sampling: group-normalised advantages and the demo's loss.

The parts are ``trace_compile.losses``; see there for what ``new``, ``old`` and ``rollout`` are.
"""

from __future__ import annotations

from torch import Tensor

from trace_compile.losses import clipped_surrogate, truncated_weights

_STD_FLOOR = 1e-4


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """``(r - mean) / (std + 1e-4)`` within each group of ``group_size`` consecutive rewards; ``[B] -> [B]``.

    A group of equal rewards has advantage 0: it teaches nothing.
    """
    groups = rewards.float().view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, correction=0, keepdim=True) + _STD_FLOOR)).flatten()


def policy_loss(
    new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, *, clip: float, truncate: float
) -> Tensor:
    """Summed loss ``-w * min(r A, clamp(r, 1-clip, 1+clip) A)`` over tokens in ``mask``, ``r = pi_new / pi_old``.

    new, old, rollout, mask: ``[b, L]``; advantages ``[b]``. A sum, so that micro-batches add up: the caller divides by
    the number of sampled tokens in the whole batch.
    """
    weights = truncated_weights(old, rollout, truncate)
    return -(weights * clipped_surrogate(new, old, advantages[:, None], clip))[mask].sum()
