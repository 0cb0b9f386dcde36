"""What the quantizers saw: ranges per expert, a log2 histogram, saturation, and how guidance changed the outcome.

All are sums and maxima of integers or maxima of floats, so no order of execution can change them, and none makes the
host wait. Every element of a counted row is counted once, non-finite ones too.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ..numerics import amax, guided_blocks, saturated
from .routing import Routing
from .rows import Guide, Rows
from .scheme import OperandScheme

BUCKETS = 64
LOWEST_EXPONENT = -32
"""Bucket b counts elements with ``floor(log2 |x|) == b - 32``; the first also all smaller ones and zeros, the last also
all larger ones, Inf and NaN."""
_MANTISSA_BITS, _EXPONENT_BIAS, _MAGNITUDE = 23, 127, 0x7FFFFFFF  # of float32


class Diag(IntEnum):
    """Entries of a site's diagnosis, float64 [7], over the counted rows that have a record.

    A mismatch is an element whose value (from records of codes) or mantissa bit (from records of bits) differs from the
    rollout's, before guidance (own scales, nearest) and as used. The rest needs codes and stays 0 for bits: mismatches
    before that whole codes can restore, the rollout's codeword being one of the two around the own value; squared
    distances to the rollout's rows, whose squared norm is NORM, so that ``D = sqrt(DISTANCE / NORM)``.
    """

    ELEMENTS = 0
    MISMATCH_BEFORE = 1
    MISMATCH_AFTER = 2
    ADJACENT = 3
    DISTANCE_BEFORE = 4
    DISTANCE_AFTER = 5
    NORM = 6


def expert_amax(row_amax: Tensor, counted: Tensor, routing: Routing) -> Tensor:
    """f32 [E]: largest of ``row_amax f32 [S]`` over each expert's ``counted bool [S]`` rows, 0 where there are none."""
    experts = routing.offsets.shape[0]
    largest = torch.where(counted, row_amax, 0)
    return largest.new_zeros(experts).scatter_reduce_(0, routing.expert, largest, "amax")


def expert_counts(counted: Tensor, routing: Routing) -> Tensor:
    """i64 [E]: counted rows of each expert."""
    experts = routing.offsets.shape[0]
    return routing.expert.new_zeros(experts).scatter_add_(0, routing.expert, counted.long())


def row_amax(x: Tensor) -> Tensor:
    """f32 [M]: largest finite magnitude of each row of ``x [M, K]``."""
    return amax(x, -1)


def histogram(x: Tensor, counted: Tensor) -> Tensor:
    """i64 [64]: elements of the counted rows of ``x [M, K]`` per power of two; see ``LOWEST_EXPONENT``."""
    exponent = ((x.float().contiguous().view(torch.int32) & _MAGNITUDE) >> _MANTISSA_BITS) - _EXPONENT_BIAS
    bucket = torch.where(counted.unsqueeze(-1), (exponent - LOWEST_EXPONENT).clamp(0, BUCKETS - 1), -1)
    # histc ignores what lies outside [min, max]. It counts exactly in float64 on a CPU, in integers on CUDA.
    bucket = bucket.double() if bucket.device.type == "cpu" else bucket.int()
    return torch.histc(bucket, bins=BUCKETS, min=0, max=BUCKETS - 1).long()


def saturation(x: Tensor, outer: Tensor, scheme: OperandScheme, counted: Tensor) -> Tensor:
    """i64 []: elements of the counted rows beyond the largest value of their outer scale."""
    return (saturated(x, outer, scheme.fmt, scheme.profile) & counted.unsqueeze(-1)).sum()


def diagnosis(x: Tensor, own: Rows, used: Rows | None, guide: Guide, counted: Tensor, fmt: str | None = None) -> Tensor:
    """float64 [7], see :class:`Diag`: rows ``x [M, K]``, their unguided outcome ``own`` and what is ``used`` (None: x
    itself); ``counted bool [M]``; ``fmt`` of the record, ``own``'s by default.

    Residual compensation is left out: it is not what guidance is about.
    """
    chosen = (counted & guide.hit).unsqueeze(-1)

    def count(condition: Tensor) -> Tensor:
        return (condition & chosen).sum().double()

    elements = count(torch.ones_like(own.codes, dtype=torch.bool))
    if guide.codes is None:
        counts = [count((rows.codes & 1) != guide.payload) for rows in (own, own if used is None else used)]
        return torch.stack([elements, *counts, *[torch.zeros_like(elements)] * 4])
    fmt = fmt or own.fmt
    rollout = Rows(guide.codes, guide.scales, guide.outer, fmt).dequantize(torch.float32)
    before = own.dequantize(torch.float32)
    after = x.float() if used is None else used.dequantize(torch.float32)
    nearest = guided_blocks(x.float(), guide.scales, guide.outer, fmt=fmt, codes=guide.codes)
    restored = Rows(nearest, guide.scales, guide.outer, fmt).dequantize(torch.float32)
    differs = before != rollout
    return torch.stack(
        [
            elements,
            count(differs),
            count(after != rollout),
            count(differs & (restored == rollout)),
            *(torch.where(chosen, value - rollout, 0).double().square().sum() for value in (before, after)),
            torch.where(chosen, rollout, 0).double().square().sum(),
        ]
    )
