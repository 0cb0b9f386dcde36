"""What the quantizers saw: ranges per expert, a log2 histogram, saturation, and how guidance changed the outcome.

All are sums and maxima of integers or maxima of floats, so no order of execution can change them, and none makes the
host wait. Every element of a counted row is counted once, non-finite ones too.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ..numerics import amax, saturated
from .routing import Routing
from .rows import Guide, Rows
from .scheme import OperandScheme

BUCKETS = 64
LOWEST_EXPONENT = -32
"""Bucket b counts elements with ``floor(log2 |x|) == b - 32``; the first also all smaller ones and zeros, the last also
all larger ones, Inf and NaN."""
_MANTISSA_BITS, _EXPONENT_BIAS, _MAGNITUDE = 23, 127, 0x7FFFFFFF  # of float32
_SIGN = 8  # sign bit of a 4-bit code


class Diag(IntEnum):
    """Entries of the diagnosis vector, float64 [7], over the counted rows that have a record.

    A mismatch is an element whose code (guidance "code") or mantissa bit ("bit") differs from the rollout's, before
    guidance (own scale, nearest) and after. The rest needs codes and stays 0 for bits: mismatches before that are one
    codeword apart; squared distances of the dequantized rows to the rollout's, whose squared norm is NORM, so that
    ``D = sqrt(DISTANCE / NORM)``.
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


def diagnosis(own: Rows, used: Rows, guide: Guide, counted: Tensor) -> Tensor:
    """float64 [7], see :class:`Diag`. ``own`` is the unguided outcome, ``used`` the guided one."""
    chosen = (counted & guide.hit).unsqueeze(-1)

    def count(condition: Tensor) -> Tensor:
        return (condition & chosen).sum().double()

    elements = count(torch.ones_like(own.codes, dtype=torch.bool))
    if guide.kind == "bit":
        before, after = (count((r.codes & 1) != guide.payload) for r in (own, used))
        return torch.stack([elements, before, after, *[torch.zeros_like(elements)] * 4])
    before, after = (_steps(r.codes, guide.payload) for r in (own, used))
    rollout = Rows(guide.payload, guide.scales, guide.outer, own.fmt).dequantize(torch.float32)
    distances = [_squares(r.dequantize(torch.float32) - rollout, chosen) for r in (own, used)]
    return torch.stack(
        [elements, count(before != 0), count(after != 0), count(before == 1), *distances, _squares(rollout, chosen)]
    )


def _steps(a: Tensor, b: Tensor) -> Tensor:
    """Codewords between two 4-bit codes on the signed line; the two zeros are one point."""
    a, b = (torch.where(c >= _SIGN, _SIGN - c.int(), c.int()) for c in (a, b))
    return (a - b).abs()


def _squares(x: Tensor, chosen: Tensor) -> Tensor:
    """float64 []: sum of squares over the chosen rows."""
    return torch.where(chosen, x, 0).double().square().sum()
