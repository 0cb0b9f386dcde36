"""What a policy loss needs where the rollout is not quite the policy: weights, diagnostics, bounded ratios.

Everything takes log-probabilities of sampled tokens: ``new`` by the weights being updated, ``old`` by the trainer
before the update, ``rollout`` by the generator that sampled them; the gap is ``old - rollout``. Results are float32.
Weights carry no gradient. Log ratios are clipped to +-20 before ``exp``, so that one broken token cannot make a loss
infinite.

- Truncated importance sampling (TIS): ``min(pi_old / pi_rollout, C)``.
- Masked (MIS, IcePop): the ratio inside a band, 0 outside.
- Score Centering (arXiv 2609.20807): subtracts the expected score, so that weights alone push no token.
- TRIAGE (2610.07043): segments far below the rollout count less when the advantage is negative.
- TBPO (QaRL, 2604.07853): one ratio per sequence, bounded on both sides for negative advantages.
- K1 and K3: single-sample estimators of KL(rollout || trainer).

B sequences, L positions, k tokens of the rollout's top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
TRIAGE_RULES = ((-0.5, 0.3), (-1.5, 0.1))
"""(mean gap, weight): a segment takes the weight of the lowest threshold that its mean gap lies below."""
TRIAGE_SEGMENT = 64


def log_ratio(a: Tensor, b: Tensor) -> Tensor:
    """``a - b`` in float32, clipped to +-20 (no gradient beyond)."""
    return (a.float() - b.float()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """``exp(a - b)``, with :func:`log_ratio`'s clipping; differentiable."""
    return log_ratio(a, b).exp()


def truncated_weights(old: Tensor, rollout: Tensor, bound: float) -> Tensor:
    """TIS: ``min(pi_old / pi_rollout, bound)``, the shape of ``old``."""
    return ratio(old, rollout).detach().clamp(max=bound)


def band_weights(old: Tensor, rollout: Tensor, low: float, high: float) -> Tensor:
    """MIS, IcePop: ``pi_old / pi_rollout`` where it lies in [low, high], 0 elsewhere."""
    weights = ratio(old, rollout).detach()
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def clipped_surrogate(new: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's ``min(r A, clamp(r, 1-clip, 1+clip) A)`` per token, ``r = pi_new / pi_old``: to be maximised.

    new, old ``[B, L]``; advantages broadcastable to them.
    """
    r = ratio(new, old.detach())
    return torch.minimum(r * advantages, r.clamp(1 - clip, 1 + clip) * advantages)


@dataclass(frozen=True)
class GapStats:
    """Statistics of the gap over sampled tokens. ``k1``: mean of ``-gap``. ``k3``: mean of ``exp(gap) - gap - 1``.

    ``mean`` and ``max`` are of ``|gap|``. ``clip_fraction``: share of tokens whose importance weight is truncated.
    """

    mean: float
    max: float
    k1: float
    k3: float
    clip_fraction: float


def gap_stats(gap: Tensor, truncate: float) -> GapStats:
    """``GapStats`` of the gaps ``old - rollout [n]`` of all sampled tokens of a batch (n > 0), summed in float64."""
    gap = gap.double()
    bounded = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return GapStats(
        mean=gap.abs().mean().item(),
        max=gap.abs().max().item(),
        k1=-gap.mean().item(),
        k3=(torch.expm1(bounded) - bounded).mean().item(),
        clip_fraction=(bounded.exp() > truncate).double().mean().item(),
    )


def score_centering_loss(
    new: Tensor, rollout: Tensor, new_top: Tensor, rollout_top: Tensor, advantages: Tensor, bound: float
) -> Tensor:
    """Score Centering per token, ``[...]``, to be minimised (sum it over sampled tokens):

        -A [sg(w(p_y/q_y)) log p_y - sum over v in top-k(q) of sg(q_v w(p_v/q_v) - alpha p_v) log p_v]

    with ``w(r) = min(r, bound)``, ``alpha = rho w(1/rho)``, ``rho = (1 - sum q_v) / (1 - sum p_v)``; p is the trainer,
    q the rollout. With the whole vocabulary as top-k, the expected gradient over y ~ q vanishes for a constant A.

    Args:
        new, rollout: log p and log q of the sampled token y, ``[...]``.
        new_top, rollout_top: log p and log q of the rollout's k likeliest tokens, ``[..., k]``.
        advantages: broadcastable to ``new``. bound: upper bound of w.
    """
    p, q = new_top.detach().float().exp(), rollout_top.float().exp()
    tail_q, tail_p = ((1 - x.sum(-1)).clamp(min=torch.finfo(torch.float32).eps) for x in (q, p))
    alpha = (bound * (tail_q / tail_p)).clamp(max=1.0)  # rho * min(1 / rho, bound)
    expected = q * truncated_weights(new_top, rollout_top, bound) - alpha.unsqueeze(-1) * p
    own = truncated_weights(new, rollout, bound) * new.float()
    return -advantages * (own - (expected * new_top.float()).sum(-1))


def triage_weights(
    old: Tensor,
    rollout: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    segment: int = TRIAGE_SEGMENT,
    rules: Sequence[tuple[float, float]] = TRIAGE_RULES,
) -> Tensor:
    """TRIAGE's weight of each token, float32 ``[B, L]``, 0 outside ``mask``.

    Sampled tokens (bool mask ``[B, L]``) are counted through in segments of ``segment``; a segment whose mean gap lies
    below a rule's threshold has that rule's weight if the sequence's advantage ``[B]`` is negative, else 1.
    """
    mask = mask.bool()
    index = ((mask.cumsum(1) - 1).clamp(min=0) // segment).long()
    gap = torch.where(mask, log_ratio(old, rollout).detach(), 0.0)
    sums, counts = (torch.zeros_like(gap).scatter_add_(1, index, x) for x in (gap, mask.float()))
    mean = (sums / counts.clamp(min=1)).gather(1, index)
    weights = torch.ones_like(gap)
    for threshold, weight in sorted(rules, reverse=True):
        weights = torch.where(mean < threshold, weight, weights)
    return torch.where(advantages[:, None] < 0, weights, 1.0) * mask


def sequence_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Geometric mean of ``pi_new / pi_old`` over the sampled tokens of each sequence, ``[B]``; 1 without any.

    Differentiable in ``new [B, L]``.
    """
    mask = mask.bool()
    total = torch.where(mask, log_ratio(new, old.detach()), 0.0).sum(1)
    return (total / mask.sum(1).clamp(min=1)).exp()


def two_sided_surrogate(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """TBPO's ``A min(r, high)`` for A >= 0 and ``A clamp(r, low, high)`` for A < 0, ``[B]``: to be maximised.

    The usual clipping leaves r unbounded above for negative advantages, where it grows without limit.
    """
    return advantages * torch.where(advantages < 0, ratios.clamp(low, high), ratios.clamp(max=high))
