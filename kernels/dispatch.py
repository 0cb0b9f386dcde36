"""Dispatch and combine on the device: which expert multiplies which slots, and the sum of a token's slots.

A *slot* is (token, k), numbered ``token * K + k``, as in ``ops.routing``. The grouped GEMMs work on *tiles*: up to
``tile`` slots of one expert. There are at most ``tile_limit`` of them, which the host knows without looking at ids;
unused ones are marked. Everything between the GEMMs is indexed by slot, so rows are never sorted or copied.

Invariants: no host synchronisation, no atomics, one launch each, whatever the number of experts; slots stand in order
within an expert; ids outside ``[0, E)`` belong to no tile and contribute nothing; a token's slots are added in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import elementwise, nvfp4
from trace_compile.kernels.launch import target_of
from trace_compile.kernels.moe_launch import DispatchLaunch, dispatch_launch
from trace_compile.ops.routing import check_rows

NO_SLOT = tl.constexpr(-1)


@dataclass(frozen=True)
class Tiles:
    """Tile t multiplies expert ``expert[t]`` by the rows of ``slots[t]``; -1 marks unused tiles and places. Without
    ``slots`` every slot is a tile of its own, and ``expert`` are the slots' ids."""

    expert: Tensor  # i32 [tiles], or i64 [slots]
    slots: Tensor | None  # i32 [tiles, tile]
    tile: int


def tile_limit(slots: int, experts: int, tile: int) -> int:
    """Most tiles that ``slots`` can need: every expert with slots has one that is not full."""
    return min(slots, experts + slots // tile)


def tiles_of(expert_ids: Tensor, experts: int, tile: int, *, launch: DispatchLaunch | None = None) -> Tiles:
    """The tiles of ``expert_ids i64 [T, K]``. Raises ``OperandError`` for more slots than int32 can number."""
    check_rows(expert_ids)
    slots, device = expert_ids.numel(), expert_ids.device
    if slots <= 8 or 8 * slots <= experts:  # an expert that two slots share is read twice, once from the cache
        return Tiles(expert_ids.contiguous().view(-1), None, tile)
    limit = tile_limit(slots, experts, tile)
    lists = torch.empty(limit, tile, dtype=torch.int32, device=device)
    tiles = Tiles(torch.empty(limit, dtype=torch.int32, device=device), lists, tile)
    if slots:
        plan = launch or dispatch_launch(slots, target_of(device))
        _tiles_kernel[(experts,)](
            expert_ids.contiguous(),
            tiles.expert,
            lists,
            slots,
            limit,
            EXPERTS=experts,
            BINS=triton.next_power_of_2(experts),
            TILE=tile,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return tiles


def combine(rows: Tensor, gates: Tensor, expert_ids: Tensor, experts: int) -> Tensor:
    """``y[t] = sum over k of gates[t, k] * rows[t K + k]`` in slot order: bf16 [S, H], [T, K] -> bf16 [T, H].

    As torch rounds it: the products to gates' dtype promoted with bfloat16, the sum to that dtype and to bfloat16.
    """
    (tokens, top_k), hidden = gates.shape, rows.shape[1]
    y = torch.empty(tokens, hidden, dtype=rows.dtype, device=rows.device)
    if y.numel():
        block = min(1024, triton.next_power_of_2(hidden))
        _combine_kernel[(tokens, triton.cdiv(hidden, block))](
            rows,
            gates.contiguous(),
            expert_ids.contiguous(),
            y,
            hidden,
            experts,
            TOP_K=top_k,
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
    return y


@triton.jit
def _tiles_kernel(
    ids_ptr,
    expert_ptr,
    slots_ptr,
    slots,
    limit,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (experts). Every program counts all experts' slots, so that none waits for another; it writes its own."""
    mine = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, BINS)
    block = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    start = slots * 0
    while start < slots:
        ids = tl.load(ids_ptr + start + block, mask=start + block < slots, other=-1)
        counts += tl.histogram(ids.to(tl.int32), BINS, mask=(ids >= 0) & (ids < EXPERTS))
        start += BLOCK
    tiles = (counts + (TILE - 1)) // TILE
    first = tl.sum(tl.where(every < mine, tiles, 0)).to(tl.int64)
    count = tl.sum(tl.where(every == mine, counts, 0))
    number = (count + (TILE - 1)) // TILE

    written = slots_ptr + first * TILE
    before = count * 0
    start = slots * 0
    while start < slots:
        ids = tl.load(ids_ptr + start + block, mask=start + block < slots, other=-1)
        here = (ids == mine).to(tl.int32)
        tl.store(written + before + tl.cumsum(here) - here, start + block, mask=here != 0)
        before += tl.sum(here)
        start += BLOCK
    rest = count + tl.arange(0, TILE)
    tl.store(written + rest, rest * 0 + NO_SLOT, mask=rest < number * TILE)

    place = number * 0
    while place < number:
        tl.store(expert_ptr + first + place + block, mine.to(tl.int32) + block * 0, mask=place + block < number)
        place += BLOCK
    place = tl.sum(tiles)
    while (place < limit) & (mine == 0):
        tl.store(expert_ptr + place + block, block * 0 + NO_SLOT, mask=place + block < limit)
        place += BLOCK


@triton.jit
def _combine_kernel(rows_ptr, gates_ptr, ids_ptr, y_ptr, hidden, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, column blocks)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        expert = tl.load(ids_ptr + slot)
        routed = (expert >= 0) & (expert < experts)
        row = tl.load(rows_ptr + slot * hidden + column, mask=routed & (column < hidden), other=0.0)
        gate = tl.load(gates_ptr + slot)
        product = tl.where(routed, nvfp4.to_float32(row) * nvfp4.to_float32(gate), 0.0)
        if gates_ptr.dtype.element_ty == tl.bfloat16:
            product = elementwise.bfloat16(product)
        total += product
    tl.store(y_ptr + token * hidden + column, elementwise.narrow(total, y_ptr.dtype.element_ty), mask=column < hidden)
