"""How far two correct implementations of one op may lie apart: one rule, derived from rounding and accumulation.

A value that is rounded ``stages`` times to a dtype of unit roundoff u, after sums of k products accumulated in float32,
has a relative root-mean-square error of about ``u * sqrt(stages) + u32 * sqrt(k)`` (rounding errors are independent and
a sum of k of them grows with sqrt(k)). Two implementations differ by at most twice that. Integers and bytes are equal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
SAFETY = 2.0
"""On the root mean square: covers what the independence assumption leaves out."""
PEAK = 16.0
"""Largest error over the root mean square: six standard deviations, times the largest elements' share."""


def relative_rms(*, k: int, dtype: torch.dtype, stages: int = 1) -> float:
    """Allowed relative root-mean-square distance for sums of ``k`` products rounded ``stages`` times to ``dtype``."""
    accumulator = min(UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[torch.float32])
    return 2 * SAFETY * (UNIT_ROUNDOFF[dtype] * math.sqrt(stages) + accumulator * math.sqrt(k))


def check_close(
    actual: Tensor, expected: Tensor, *, k: int, dtype: torch.dtype | None = None, stages: int = 1, name: str = "result"
) -> None:
    """Raises ``AssertionError`` unless ``actual`` is ``expected`` within the table; ``dtype`` is actual's by default.

    Checks shape, the NaN and Inf pattern (with signs), the relative root mean square, and the largest error; the
    message has all of them and the worst index. Where ``expected`` is all zero, ``actual`` has to be.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    a, e = actual.detach().double().cpu(), expected.detach().double().cpu()
    strange = ~(a.isfinite() & e.isfinite())
    if not torch.equal(a[strange].nan_to_num(nan=0.5), e[strange].nan_to_num(nan=0.5)):
        raise AssertionError(
            f"{name}: NaN/Inf pattern differs: {int(a.isnan().sum())} NaN and {int(a.isinf().sum())} Inf,"
            f" expected {int(e.isnan().sum())} and {int(e.isinf().sum())}"
        )
    if a.numel() == 0:
        return
    a, e = a.masked_fill(strange, 0), e.masked_fill(strange, 0)
    limit = relative_rms(k=k, dtype=dtype or actual.dtype, stages=stages)
    error, scale = (a - e).abs(), e.square().mean().sqrt().item()
    rms, worst = error.square().mean().sqrt().item(), error.max().item()
    if rms > limit * scale or worst > PEAK * limit * scale:
        where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{name}: relative RMS {rms / scale if scale else math.inf:.3g} (allowed {limit:.3g}), largest error"
            f" {worst:.3g} (allowed {PEAK * limit * scale:.3g}) at {where}:"
            f" {a[where].item():.6g}, expected {e[where].item():.6g}"
        )
