"""``ops.routing`` in a few launches: a stable counting sort of slots by expert, and its inverse.

Slots are dealt to chunks. One kernel counts each chunk's slots per expert; one adds the counts up, which gives where
each (chunk, expert) starts; one counts, for each slot, those of its expert before it in the chunk. Slots of ids outside
``[0, E)`` count for one more expert behind the last.

Invariants: the results of ``ops.routing.route(..., stable=True)`` and ``routing_of``, element for element; no host
synchronisation, no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels.rows import on
from trace_compile.ops.routing import Routing, check_rows

_CHUNK = 512


def route(expert_ids: Tensor, num_experts: int) -> Routing:
    """Sorts the slots of ``expert_ids i64 [T, K]`` by expert, tokens in order within an expert. Raises ``OperandError``
    for more of them than int32 can number."""
    check_rows(expert_ids)
    ids, slots = expert_ids.contiguous(), expert_ids.numel()
    routing = _empty(slots, num_experts, ids.device)
    bins, chunks = triton.next_power_of_2(num_experts + 1), triton.cdiv(slots, _CHUNK)
    starts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    with on(ids):
        _count_kernel[(chunks,)](ids, starts, slots, num_experts, BINS=bins, CHUNK=_CHUNK, num_warps=4)
        _starts_kernel[(1,)](
            starts, routing.offsets, chunks, num_experts, BINS=bins, TILE=max(1, 8192 // bins), num_warps=8
        )
        _place_kernel[(chunks,)](
            ids,
            starts,
            *_parts(routing),
            slots,
            num_experts,
            TOP_K=expert_ids.shape[1],
            BINS=bins,
            CHUNK=_CHUNK,
            PART=32,
            num_warps=8,
        )
    return routing


def routing_of(order: Tensor, offsets: Tensor, top_k: int) -> Routing:
    """The routing that has this ``order i64 [S]`` and these ``offsets i32 [E]``."""
    slots, experts = order.shape[0], offsets.shape[0]
    found = _empty(slots, experts, order.device)
    steps = experts.bit_length()
    with on(order):
        _inverse_kernel[(triton.cdiv(slots, 256),)](
            order, offsets, *_parts(found)[1:], slots, experts, TOP_K=top_k, STEPS=steps, BLOCK=256, num_warps=4
        )
    return Routing(order, found.inverse, found.token, found.expert, found.dropped, offsets)


def _empty(slots: int, experts: int, device: torch.device) -> Routing:
    order, inverse, token, expert = torch.empty(4, slots, dtype=torch.int64, device=device)
    dropped = torch.empty(slots, 1, dtype=torch.bool, device=device)
    return Routing(order, inverse, token, expert, dropped, torch.empty(experts, dtype=torch.int32, device=device))


def _parts(routing: Routing) -> tuple[Tensor, ...]:
    return routing.order, routing.inverse, routing.token, routing.expert, routing.dropped.view(torch.uint8)


@triton.jit
def _ids_of(ids_ptr, slot, slots, experts):
    """int32 expert ids, those out of range ``experts``; ``experts`` behind the last slot too."""
    ids = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
    return tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, slots, experts, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Grid (chunks)."""
    chunk = tl.program_id(0).to(tl.int64)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    counts = tl.histogram(_ids_of(ids_ptr, slot, slots, experts), BINS)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _starts_kernel(starts_ptr, offsets_ptr, chunks, experts, BINS: tl.constexpr, TILE: tl.constexpr):
    """One program. Counts become the rows of the chunks' first slots of each expert."""
    every = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    at = chunks * 0
    while at < chunks:
        chunk = at + tl.arange(0, TILE)
        where = chunk[:, None] * BINS + every[None, :]
        total += tl.sum(tl.load(starts_ptr + where, mask=(chunk < chunks)[:, None], other=0), axis=0)
        at += TILE
    end = tl.cumsum(total, axis=0)
    tl.store(offsets_ptr + every, end, mask=every < experts)
    before = end - total
    at = chunks * 0
    while at < chunks:
        chunk = at + tl.arange(0, TILE)
        where = chunk[:, None] * BINS + every[None, :]
        counts = tl.load(starts_ptr + where, mask=(chunk < chunks)[:, None], other=0)
        start = before[None, :] + tl.cumsum(counts, axis=0) - counts
        tl.store(starts_ptr + where, start, mask=(chunk < chunks)[:, None])
        before += tl.sum(counts, axis=0)
        at += TILE


@triton.jit
def _place_kernel(
    ids_ptr,
    starts_ptr,
    order_ptr,
    inverse_ptr,
    token_ptr,
    expert_ptr,
    dropped_ptr,
    slots,
    experts,
    TOP_K: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """Grid (chunks)."""
    first = tl.program_id(0).to(tl.int64) * CHUNK
    slot = first + tl.arange(0, CHUNK)
    here = slot < slots
    expert = _ids_of(ids_ptr, slot, slots, experts)
    rank = tl.zeros([CHUNK], tl.int32)
    for part in range(CHUNK // PART):
        other = first + part * PART + tl.arange(0, PART)
        same = _ids_of(ids_ptr, other, slots, experts)[None, :] == expert[:, None]
        rank += tl.sum((same & (other[None, :] < slot[:, None])).to(tl.int32), axis=1)
    row = (tl.load(starts_ptr + tl.program_id(0).to(tl.int64) * BINS + expert) + rank).to(tl.int64)
    tl.store(order_ptr + row, slot, mask=here)
    tl.store(inverse_ptr + slot, row, mask=here)
    tl.store(token_ptr + row, slot // TOP_K, mask=here)
    tl.store(expert_ptr + row, tl.minimum(expert, experts - 1).to(tl.int64), mask=here)
    tl.store(dropped_ptr + row, (expert == experts).to(tl.uint8), mask=here)


@triton.jit
def _inverse_kernel(
    order_ptr,
    offsets_ptr,
    inverse_ptr,
    token_ptr,
    expert_ptr,
    dropped_ptr,
    slots,
    experts,
    TOP_K: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of rows). A row's expert is the number of groups that end at it or before."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row < slots
    slot = tl.load(order_ptr + row, mask=here, other=0)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + experts
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        behind = tl.load(offsets_ptr + middle, mask=middle < experts, other=0).to(tl.int64) <= row
        open_ = low < high
        low = tl.where(open_ & behind, middle + 1, low)
        high = tl.where(open_ & ~behind, middle, high)
    tl.store(inverse_ptr + slot, row, mask=here)
    tl.store(token_ptr + row, slot // TOP_K, mask=here)
    tl.store(expert_ptr + row, tl.minimum(low, experts - 1).to(tl.int64), mask=here)
    tl.store(dropped_ptr + row, (low == experts).to(tl.uint8), mask=here)
