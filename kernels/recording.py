"""What the inference kernels record while they round rows: outcomes, ranges per expert, histogram, saturation.

The results are those of ``ops.nvfp4_moe.native``, bit for bit. Maxima are taken of the bits of finite magnitudes and
sums of integers, so the order in which programs add theirs cannot matter. Rows stand by slot here, as everything in the
inference kernels does; records need no sorting then.

Invariant: nothing is read back to the host, and a row that does not count changes no statistic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import nvfp4
from trace_compile.numerics.codec import EXPONENT_BIAS
from trace_compile.numerics.formats import FORMATS, PROFILES
from trace_compile.ops import observe
from trace_compile.ops.nvfp4_moe import NvFp4MoEOperands, Out
from trace_compile.ops.records import KINDS, RegionRow

BUCKETS = tl.constexpr(observe.BUCKETS)
_SHIFTED = tl.constexpr(EXPONENT_BIAS + observe.LOWEST_EXPONENT)
_LARGEST = tl.constexpr(FORMATS["nvfp4"].element.max * PROFILES["pow2"].scale_bound)


@dataclass(frozen=True)
class Recorder:
    """Where one call's records go. ``row`` is None where statistics alone are recorded."""

    ids: Tensor  # i64 [T, K]
    valid: Tensor | None  # bool [T]
    row: RegionRow | None
    record: Tensor | None  # u8 [T, record_bytes]
    amax: Tensor  # f32 [2, E]
    counts: Tensor  # i64 [E]
    hist: Tensor  # i64 [2, 64]
    saturated: Tensor  # i64 [2]

    @classmethod
    def of(cls, o: NvFp4MoEOperands) -> Recorder | None:
        """Empty records for a call with quantized activations; None if it records nothing or has none."""
        if o.record == "none" or o.schemes.act is None:
            return None
        (tokens, hidden), top_k, experts, device = o.x.shape, o.expert_ids.shape[1], o.shape13[0], o.x.device
        row = record = None
        if o.record in KINDS:
            assert o.schemes.act is not None
            row = RegionRow(hidden, o.width, top_k, o.record, o.schemes.act)
            record = torch.empty(tokens, row.record_bytes, dtype=torch.uint8, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            o.expert_ids.contiguous(),
            None if o.valid is None else o.valid.contiguous(),
            row,
            record,
            zeros(2, experts, dtype=torch.float32),
            zeros(experts),
            zeros(2, observe.BUCKETS),
            zeros(2),
        )

    def arguments(self, which: int) -> dict[str, object]:
        """Of the rounding kernel, for the rows of gate/up (0, one per token) or down (1, one per slot)."""
        top_k, row = self.ids.shape[1], self.row
        target, stride, bits = None, 0, False
        if row is not None and self.record is not None and (which == 0 or row.down):
            offset = 0 if which == 0 else row.record_bytes - top_k * row.down_record_bytes
            target, bits = self.record[:, offset:], row.payload == "bit"
            stride = row.gate_up_record_bytes if which == 0 else row.down_record_bytes
        return {
            "ids_ptr": self.ids,
            "valid_ptr": self.valid,
            "record_ptr": target,
            "token_stride": 0 if self.record is None else self.record.stride(0),
            "row_stride": stride,
            "amax_ptr": self.amax[which].view(torch.int32),
            "counts_ptr": self.counts if which == 0 else None,
            "hist_ptr": self.hist[which],
            "saturated_ptr": self.saturated[which],
            "experts": self.amax.shape[1],
            "TOP_K": top_k,
            "PER_TOKEN": 1 if which == 0 else top_k,
            "BITS": bits,
            "OUTER_BYTE": row is not None and row.act.outer != "traced",
            "SLOTS": which == 1,
        }

    def results(self, outers: tuple[Tensor, Tensor]) -> dict[int, Tensor]:
        """The op's results; ``outers`` f32 [T] and [T*K], the scales of the rows."""
        found = {
            Out.AMAX: self.amax,
            Out.COUNTS: self.counts,
            Out.HIST: self.hist,
            Out.SATURATED: self.saturated,
        }
        if self.row is not None and self.record is not None:
            x, h = outers
            down = torch.cat((x[:, None], h.view(self.ids.shape)), 1) if self.row.down else x
            found |= {Out.RECORD: self.record, Out.RECORD_OUTER: down}
        return {int(key): value for key, value in found.items()}


@triton.jit
def routed_slots(slot, in_rows, ids_ptr, experts):
    """bool [M]: slots that go to an expert."""
    expert = tl.load(ids_ptr + slot, mask=in_rows, other=-1)
    return (expert >= 0) & (expert < experts) & in_rows


@triton.jit
def counted_rows(row, in_rows, ids_ptr, valid_ptr, experts, TOP_K: tl.constexpr, PER_TOKEN: tl.constexpr):
    """bool [M]: rows that count: of valid tokens with a route, and where rows are slots, only routed ones."""
    token = row // PER_TOKEN
    if PER_TOKEN == 1:
        counted = row < 0
        for k in tl.static_range(TOP_K):
            expert = tl.load(ids_ptr + token * TOP_K + k, mask=in_rows, other=-1)
            counted = counted | ((expert >= 0) & (expert < experts))
    else:
        counted = routed_slots(row, in_rows, ids_ptr, experts)
    if valid_ptr is not None:
        counted = counted & (tl.load(valid_ptr + token, mask=in_rows, other=0) != 0)
    return counted & in_rows


@triton.jit
def record_ranges(
    row, counted, top, ids_ptr, amax_ptr, counts_ptr, experts, first, TOP_K: tl.constexpr, PER_TOKEN: tl.constexpr
):
    """Adds magnitude bits ``top`` i32 [M] of counted rows to their experts' maxima, and the rows to their counts if
    ``first`` (one of the programs that share a row)."""
    for k in tl.static_range(TOP_K if PER_TOKEN == 1 else 1):
        slot = row * TOP_K + k if PER_TOKEN == 1 else row
        expert = tl.load(ids_ptr + slot, mask=counted, other=-1)
        here = counted & (expert >= 0) & (expert < experts)
        tl.atomic_max(amax_ptr + expert, top, mask=here, sem="relaxed")
        if counts_ptr is not None:
            tl.atomic_add(counts_ptr + expert, tl.full(expert.shape, 1, tl.int64), mask=here & first, sem="relaxed")


@triton.jit
def record_values(x, here, outer, hist, M: tl.constexpr, N: tl.constexpr):
    """Adds the counted elements ``here`` of x f32 [M, N] to the histogram i32 [128], whose upper half is for the rest;
    returns it and how many exceed the largest value under ``outer`` f32 [M]."""
    bucket = (nvfp4.magnitude_bits(x) >> nvfp4.MANTISSA) - _SHIFTED
    bucket = tl.minimum(tl.maximum(bucket, 0), BUCKETS - 1)
    bucket = tl.where(here, bucket, BUCKETS)
    hist += tl.histogram(tl.reshape(bucket, [M * N]), 2 * BUCKETS)
    beyond = (tl.abs(x) > outer[:, None] * _LARGEST) & here
    return hist, tl.sum(tl.sum(beyond.to(tl.int32), axis=1), axis=0)


@triton.jit
def record_outcome(
    codes,
    scale,
    row_ptr,
    in_rows,
    start,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
):
    """Writes codes i32 [M, N/16, 16] and block scales i32 [M, N/16] of columns start .. start + N to the record rows
    at ``row_ptr`` [M]."""
    PER_BYTE: tl.constexpr = 8 if BITS else 2
    if BITS:
        groups = tl.reshape(codes & 1, [M, N // 8, 8])
        packed = tl.sum(groups << tl.arange(0, 8)[None, None, :], axis=2)
    else:
        low, high = tl.split(tl.reshape(codes, [M, N // 2, 2]))
        packed = low | (high << 4)
    at = start // PER_BYTE + tl.arange(0, N // PER_BYTE)
    here = in_rows[:, None] & (at < K // PER_BYTE)[None, :]
    tl.store(row_ptr[:, None] + at[None, :], packed.to(tl.uint8), mask=here)
    block = start // nvfp4.BLOCK + tl.arange(0, N // nvfp4.BLOCK)
    here = in_rows[:, None] & (block < K // nvfp4.BLOCK)[None, :]
    tl.store(row_ptr[:, None] + K // PER_BYTE + block[None, :], scale.to(tl.uint8), mask=here)
