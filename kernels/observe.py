"""What the op records, from kernels: statistics of its quantizers' inputs in two launches, and record rows.

Statistics are those of ``ops.observe``: sums of integers and maxima, so the order in which programs add them up cannot
show. Records are written from the packed rows by ``ops.records``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import nvfp4
from trace_compile.kernels.launch import target_of
from trace_compile.kernels.quantize import QuantizedRows, quantize_rows
from trace_compile.kernels.rows import on, row_warps
from trace_compile.ops.nvfp4_moe import NvFp4MoEOperands, Out
from trace_compile.ops.observe import BUCKETS, LOWEST_EXPONENT
from trace_compile.ops.records import KINDS, RegionRow
from trace_compile.ops.routing import Routing
from trace_compile.ops.rows import Rows

FIRST_EXPONENT = tl.constexpr(127 + LOWEST_EXPONENT)
BINS = tl.constexpr(BUCKETS)
BOUND = tl.constexpr(nvfp4.ELEMENT_MAX.value * nvfp4.SCALE_MAX.value)
_PROGRAMS = 4  # a multiprocessor; each takes many rows, so that few add to one counter


def observed(
    o: NvFp4MoEOperands, x: QuantizedRows | None, h: Tensor, hq: QuantizedRows | None, routing: Routing
) -> dict[int, Tensor]:
    """The results that ``o.record`` asks for. ``h [S, I]`` before it was quantized, rows as ``routing`` orders them;
    ``x`` and ``hq`` with an outer scale a row, None where activations are not quantized."""
    if o.record == "none":
        return {}
    found = _statistics(o, x, h, hq, routing)
    act = o.schemes.act
    if o.record in KINDS:
        assert act is not None and x is not None and hq is not None
        row = RegionRow(o.x.shape[1], o.width, o.expert_ids.shape[1], o.record, act)
        tokens, routed = (Rows.unpack(q.packed, q.scales, q.outer, act.fmt) for q in (x, hq))
        found[Out.RECORD], found[Out.RECORD_OUTER] = row.record(tokens, routed, routing)
    return found


def observed_by_slot(o: NvFp4MoEOperands, h: Tensor) -> dict[int, Tensor]:
    """The same of unquantized rows ``h [S, I]`` numbered by slot, of which those of no expert were not written."""
    if o.record == "none":
        return {}
    ids, experts = o.expert_ids.reshape(-1), o.shape13[0]
    dropped = ((ids < 0) | (ids >= experts)).unsqueeze(-1)
    slots = torch.arange(ids.shape[0], device=ids.device)
    routing = Routing(slots, slots, slots // o.expert_ids.shape[1], ids, dropped, ids.new_empty(experts).int())
    return observed(o, None, h.masked_fill(dropped, 0), None, routing)


def per_row(rows: Tensor, outer: Tensor | None) -> QuantizedRows:
    """``rows [M, K]`` quantized, with one outer scale a row, ``f32 [M]``, also where one is given for all, ``[1]``."""
    q = quantize_rows(rows, outer)
    return q if outer is None else QuantizedRows(q.packed, q.scales, outer.repeat(rows.shape[0]))


def _statistics(
    o: NvFp4MoEOperands, x: QuantizedRows | None, h: Tensor, hq: QuantizedRows | None, routing: Routing
) -> dict[int, Tensor]:
    experts, device = routing.offsets.shape[0], o.x.device
    amax = torch.zeros(2, experts, dtype=torch.float32, device=device)
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    hist = torch.zeros(2, BUCKETS, dtype=torch.int64, device=device)
    saturated = torch.zeros(2, dtype=torch.int64, device=device)
    sites = ((o.x.contiguous(), x, None), (h, hq, routing.order))
    ids, valid = o.expert_ids.contiguous(), None if o.valid is None else o.valid.contiguous().view(torch.uint8)
    with on(o.x):
        for site, (rows, quantized, order) in enumerate(sites):
            block = triton.next_power_of_2(rows.shape[1])
            programs = min(rows.shape[0], _PROGRAMS * target_of(device).multiprocessors)
            _statistics_kernel[(programs,)](
                rows,
                None if quantized is None else quantized.outer,
                order,
                ids,
                valid,
                amax[site].view(torch.int32),
                counts if order is None else None,
                hist[site],
                saturated[site : site + 1],
                rows.shape[0],
                experts,
                K=rows.shape[1],
                TOP_K=ids.shape[1],
                BLOCK=block,
                num_warps=row_warps(block),
            )
    return {Out.AMAX: amax, Out.COUNTS: counts, Out.HIST: hist, Out.SATURATED: saturated}


@triton.jit
def _routed(ids_ptr, token, experts, TOP_K: tl.constexpr):
    """Whether any of the token's slots goes to an expert."""
    any_slot = token < 0
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + k)
        any_slot |= (expert >= 0) & (expert < experts)
    return any_slot


@triton.jit
def _statistics_kernel(
    rows_ptr,
    outer_ptr,
    order_ptr,
    ids_ptr,
    valid_ptr,
    amax_ptr,
    counts_ptr,
    hist_ptr,
    saturated_ptr,
    rows,
    experts,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (programs, each with every so-manieth row). Rows are tokens, or with an order routed rows."""
    column = tl.arange(0, BLOCK)
    here = column < K
    hist = tl.zeros([BINS], tl.int32)
    beyond = tl.zeros([BLOCK], tl.int32)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        token = row
        if order_ptr is not None:
            slot = tl.load(order_ptr + row)
            token = slot // TOP_K
            expert = tl.load(ids_ptr + slot)
            counted = (expert >= 0) & (expert < experts)
        else:
            counted = _routed(ids_ptr, token, experts, TOP_K)
        if valid_ptr is not None:
            counted &= tl.load(valid_ptr + token) != 0
        x = nvfp4.to_float32(tl.load(rows_ptr + row * K + column, mask=here & counted, other=0.0))
        magnitude = nvfp4.magnitude_bits(x)
        bucket = tl.minimum(tl.maximum((magnitude >> nvfp4.MANTISSA) - FIRST_EXPONENT, 0), BINS - 1)
        hist += tl.histogram(bucket, BINS, mask=here & counted)
        if outer_ptr is not None:
            beyond += (tl.abs(x) > tl.load(outer_ptr + row) * BOUND).to(tl.int32)
        top = tl.max(nvfp4.finite_or_zero(magnitude), axis=0)
        if order_ptr is not None:
            tl.atomic_max(amax_ptr + expert, top, mask=counted)
        else:
            for k in tl.static_range(TOP_K):
                expert = tl.load(ids_ptr + token * TOP_K + k)
                mine = counted & (expert >= 0) & (expert < experts)
                tl.atomic_max(amax_ptr + expert, top, mask=mine)
                tl.atomic_add(counts_ptr + expert, 1, mask=mine)
        row += tl.num_programs(0)
    tl.atomic_add(hist_ptr + tl.arange(0, BINS), hist.to(tl.int64))
    if outer_ptr is not None:
        tl.atomic_add(saturated_ptr, tl.sum(beyond, axis=0).to(tl.int64))
