"""Grouped GEMM from packed weights, unpacked to bfloat16 in registers, with the activation in the epilogue.

    out[s, n] = (sum over k of row(s)[k] * w[e, n, k]) * g_e * g_row + bias[e, n]      s: slot, e: its expert

Weights are the dot's first operand, so that they go from shared memory to the tensor core through registers once, and
few rows cost little. Rows are gathered: those of tokens for gate/up, those of slots for down.

Invariants: k runs in its natural order through one accumulator; long narrow weights are cut into a few segments of K,
as their shape says, whose sums are added in order. That holds whatever the launch: a row's result depends on that row
and its expert's weights alone, bit for bit. Rounding is that of ``ops.linear.expert_linear``: the sum to bfloat16, then
scales and bias in float32, then to bfloat16. No host synchronisation, 64-bit addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import elementwise, quads
from trace_compile.kernels.dispatch import Tiles
from trace_compile.kernels.moe_launch import GemmLaunch, segments
from trace_compile.ops.quads import packed_shape


@dataclass(frozen=True)
class Rows:
    """``values`` bf16 [M, K] without outer scales, ``outer`` f32 [M] or None; ``top_k`` slots share a row."""

    values: Tensor
    outer: Tensor | None
    top_k: int


@dataclass(frozen=True)
class Weights:
    """Packed in quads, [E, N, K]; ``bias`` [E, N] or None."""

    codes: Tensor  # i16 [E, K/64, N, 16]
    scales: Tensor  # i32 [E, K/64, N]
    outer: Tensor  # f32 [E]
    bias: Tensor | None

    @property
    def columns(self) -> int:
        return packed_shape(self.codes)[1]


@dataclass(frozen=True)
class Epilogue:
    """``act(gate, up)`` for gate rows before up rows where ``gated``, else ``act(x, x)``: device code on float32."""

    act: Any
    gated: bool


def expert_gemm(
    rows: Rows, weights: Weights, tiles: Tiles, launch: GemmLaunch, epilogue: Epilogue | None = None
) -> Tensor:
    """bf16 ``[S, N]``, or the epilogue's ``[S, N]`` or ``[S, N/2]``. Rows of slots in no tile are not written."""
    experts, columns, k = packed_shape(weights.codes)
    slots = rows.values.shape[0] * rows.top_k
    width = columns // 2 if epilogue is not None and epilogue.gated else columns
    out = torch.empty(slots, width, dtype=rows.values.dtype, device=rows.values.device)
    if out.numel() == 0:
        return out
    bias = None if weights.bias is None else weights.bias.contiguous()
    _expert_gemm_kernel[(tiles.expert.shape[0], triton.cdiv(width, launch.block_n))](
        rows.values,
        rows.outer,
        weights.codes,
        weights.scales,
        weights.outer,
        bias,
        out,
        tiles.expert,
        tiles.slots,
        EXPERTS=experts,
        K=k,
        COLUMNS=columns,
        WIDTH=width,
        TOP_K=rows.top_k,
        GATED=epilogue is not None and epilogue.gated,
        ACT=None if epilogue is None else epilogue.act,
        TILE=tiles.tile,
        BLOCK_N=launch.block_n,
        SEGMENTS=segments(columns, k),
        SIDE_BY_SIDE=launch.side_by_side,
        STAGES=launch.stages,
        num_warps=launch.num_warps,
    )
    return out


@triton.jit
def _sums_in_turn(
    codes_ptr,
    scales_ptr,
    first,
    x_rows,
    here,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TO_UP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """[BLOCK_N, TILE] sums over K of the weight rows ``first`` [BLOCK_N] and of those ``TO_UP`` further on, if any,
    with the rows at ``x_rows`` [TILE] that are ``here``."""
    CHUNKS: tl.constexpr = K // quads.CHUNK
    LENGTH: tl.constexpr = (CHUNKS + SEGMENTS - 1) // SEGMENTS
    words = codes_ptr + first[:, None] * quads.WORDS + tl.arange(0, quads.WORDS)[None, :]
    scales = scales_ptr + first
    x = x_rows[None, :] + tl.arange(0, quads.CHUNK)[:, None]
    LAST: tl.constexpr = CHUNKS - (SEGMENTS - 1) * LENGTH
    FIRST: tl.constexpr = LENGTH if SEGMENTS > 1 else LAST
    acc, acc_up, words, scales, x = _segment(words, scales, x, here, FIRST, COLUMNS, TO_UP, TILE, BLOCK_N, STAGES)
    for _ in range(1, SEGMENTS - 1):
        more, more_up, words, scales, x = _segment(
            words, scales, x, here, LENGTH, COLUMNS, TO_UP, TILE, BLOCK_N, STAGES
        )
        acc += more
        acc_up += more_up
    if SEGMENTS > 1:
        more, more_up, words, scales, x = _segment(words, scales, x, here, LAST, COLUMNS, TO_UP, TILE, BLOCK_N, STAGES)
        acc += more
        acc_up += more_up
    return acc, acc_up


@triton.jit
def _segment(
    words,
    scales,
    x,
    here,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    TO_UP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums over the next COUNT chunks of K, and the pointers behind them."""
    acc = tl.zeros([BLOCK_N, TILE], tl.float32)
    acc_up = tl.zeros([BLOCK_N, TILE], tl.float32)
    for _ in tl.range(0, COUNT, num_stages=STAGES):
        rows = quads.dot_operand(tl.load(x, mask=here[None, :], other=0.0))
        acc = tl.dot(quads.unpack(tl.load(words), tl.load(scales)), rows, acc)
        if TO_UP > 0:
            up = quads.unpack(tl.load(words + TO_UP * quads.WORDS), tl.load(scales + TO_UP))
            acc_up = tl.dot(up, rows, acc_up)
        words += COLUMNS * quads.WORDS
        scales += COLUMNS
        x += quads.CHUNK
    return acc, acc_up, words, scales, x


@triton.jit
def _sums_side_by_side(
    codes_ptr,
    scales_ptr,
    first,
    x_rows,
    here,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TO_UP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``_sums_in_turn`` with a warp for each segment, for few rows of long weights."""
    CHUNKS: tl.constexpr = K // quads.CHUNK
    LENGTH: tl.constexpr = (CHUNKS + SEGMENTS - 1) // SEGMENTS
    segment = tl.arange(0, SEGMENTS)
    start = segment[:, None] * (LENGTH * COLUMNS) + first[None, :]
    words = codes_ptr + start[:, :, None] * quads.WORDS + tl.arange(0, quads.WORDS)[None, None, :]
    scales = scales_ptr + start
    x = (
        x_rows[None, None, :]
        + (segment[:, None] * (LENGTH * quads.CHUNK) + tl.arange(0, quads.CHUNK)[None, :])[:, :, None]
    )
    acc = tl.zeros([SEGMENTS, BLOCK_N, TILE], tl.float32)
    acc_up = tl.zeros([SEGMENTS, BLOCK_N, TILE], tl.float32)
    for i in tl.range(0, LENGTH, num_stages=STAGES):
        inside = segment * LENGTH + i < CHUNKS
        row_here = here[None, None, :] & inside[:, None, None]
        rows = quads.dot_operand(tl.load(x, mask=row_here, other=0.0))
        w = tl.load(words, mask=inside[:, None, None], other=0)
        s = tl.load(scales, mask=inside[:, None], other=0)
        acc = tl.dot(quads.unpack(w, s), rows, acc)
        if TO_UP > 0:
            w = tl.load(words + TO_UP * quads.WORDS, mask=inside[:, None, None], other=0)
            s = tl.load(scales + TO_UP, mask=inside[:, None], other=0)
            acc_up = tl.dot(quads.unpack(w, s), rows, acc_up)
        words += COLUMNS * quads.WORDS
        scales += COLUMNS
        x += quads.CHUNK
    return _in_order(acc, SEGMENTS), _in_order(acc_up, SEGMENTS)


@triton.jit
def _in_order(acc, SEGMENTS: tl.constexpr):
    """Adds up ``acc`` [SEGMENTS, ...] from the first segment to the last."""
    total = _pick(acc, 0, SEGMENTS)
    for i in tl.static_range(1, SEGMENTS):
        total += _pick(acc, i, SEGMENTS)
    return total


@triton.jit
def _pick(acc, i: tl.constexpr, SEGMENTS: tl.constexpr):
    """``acc[i]``, with +0 for -0."""
    return tl.sum(tl.where((tl.arange(0, SEGMENTS) == i)[:, None, None], acc, 0.0), axis=0)


@triton.jit
def _scaled(acc, outer, x_outer, bias_ptr, HAS_OUTER: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The accumulator as the layer's result in float32, rounded to bfloat16 as the reference rounds."""
    out = elementwise.bfloat16(acc) * outer
    if HAS_OUTER:
        out *= x_outer[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr).to(tl.float32)[:, None]
    return elementwise.bfloat16(out)


@triton.jit
def finish(
    acc,
    acc_up,
    x_outer_ptr,
    outer_ptr,
    bias_ptr,
    out_ptr,
    expert,
    column,
    slot,
    row,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
):
    """The epilogue: sums [columns, slots] of one expert to scaled, biased, activated bfloat16 rows."""
    inside = tl.minimum(column, WIDTH - 1)
    outer = tl.load(outer_ptr + expert)
    x_outer = outer
    if x_outer_ptr is not None:
        x_outer = tl.load(x_outer_ptr + row, mask=slot >= 0, other=1.0)
    HAS_OUTER: tl.constexpr = x_outer_ptr is not None
    HAS_BIAS: tl.constexpr = bias_ptr is not None
    bias = bias_ptr + (expert * COLUMNS + inside) if HAS_BIAS else outer_ptr
    out = _scaled(acc, outer, x_outer, bias, HAS_OUTER, HAS_BIAS)
    if GATED:
        out = ACT(out, _scaled(acc_up, outer, x_outer, bias + WIDTH, HAS_OUTER, HAS_BIAS))
    elif ACT is not None:
        out = ACT(out, out)
    target = out_ptr + slot[None, :] * WIDTH + column[:, None]
    tl.store(
        target, elementwise.narrow(out, out_ptr.dtype.element_ty), mask=(slot >= 0)[None, :] & (column < WIDTH)[:, None]
    )


@triton.jit
def _expert_gemm_kernel(
    x_ptr,
    x_outer_ptr,
    codes_ptr,
    scales_ptr,
    outer_ptr,
    bias_ptr,
    out_ptr,
    expert_ptr,
    slots_ptr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles, column blocks of the result)."""
    TO_UP: tl.constexpr = WIDTH if GATED else 0
    tile = tl.program_id(0).to(tl.int64)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if (expert < 0) | (expert >= EXPERTS):
        return
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(column, WIDTH - 1)  # rows of the weight that exist: no masks in the loop
    place = tl.arange(0, TILE)
    if slots_ptr is None:
        slot = tl.where(place == 0, tile, -1)
    else:
        slot = tl.load(slots_ptr + tile * TILE + place).to(tl.int64)
    row = tl.maximum(slot, 0) // TOP_K

    first = expert * (K // quads.CHUNK * COLUMNS) + inside
    if SIDE_BY_SIDE:
        acc, acc_up = _sums_side_by_side(
            codes_ptr, scales_ptr, first, x_ptr + row * K, slot >= 0, K, COLUMNS, TO_UP, TILE, BLOCK_N, SEGMENTS, STAGES
        )
    else:
        acc, acc_up = _sums_in_turn(
            codes_ptr, scales_ptr, first, x_ptr + row * K, slot >= 0, K, COLUMNS, TO_UP, TILE, BLOCK_N, SEGMENTS, STAGES
        )

    finish(
        acc * quads.RESIDUAL_FACTOR,
        acc_up * quads.RESIDUAL_FACTOR,
        x_outer_ptr,
        outer_ptr,
        bias_ptr,
        out_ptr,
        expert,
        column,
        slot,
        row,
        COLUMNS,
        WIDTH,
        GATED,
        ACT,
    )
