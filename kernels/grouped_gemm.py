"""Grouped GEMM from packed weights, unpacked to bfloat16 in registers, with the activation in the epilogue.

    out[s, n] = (sum over k of row(s)[k] * w[e, n, k]) * g_e * g_row + bias[e, n]      s: slot, e: its expert

Weights are the dot's first operand, so that they go from shared memory to the tensor core through registers once, and
few rows cost little. Rows are gathered: those of tokens for gate/up, those of slots for down.

Invariants: k runs in its natural order through one accumulator, whatever the launch: a row's result depends on that row
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
from trace_compile.kernels.launch import GemmLaunch
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
    _, columns, k = packed_shape(weights.codes)
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
        K=k,
        COLUMNS=columns,
        WIDTH=width,
        TOP_K=rows.top_k,
        GATED=epilogue is not None and epilogue.gated,
        ACT=None if epilogue is None else epilogue.act,
        TILE=tiles.tile,
        BLOCK_N=launch.block_n,
        STAGES=launch.stages,
        num_warps=launch.num_warps,
    )
    return out


@triton.jit
def _scaled(acc, outer, x_outer, bias_ptr, HAS_OUTER: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The accumulator as the layer's result in float32, rounded to bfloat16 as the reference rounds."""
    out = elementwise.bfloat16(acc * quads.RESIDUAL_FACTOR) * outer
    if HAS_OUTER:
        out *= x_outer[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr).to(tl.float32)[:, None]
    return elementwise.bfloat16(out)


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
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles, column blocks of the result)."""
    tile = tl.program_id(0).to(tl.int64)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(column, WIDTH - 1)  # rows of the weight that exist: no masks in the loop
    slot = tl.load(slots_ptr + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    here = (slot >= 0)[None, :]
    row = tl.maximum(slot, 0) // TOP_K

    first = expert * (K // quads.CHUNK * COLUMNS) + inside
    words = codes_ptr + first[:, None] * quads.WORDS + tl.arange(0, quads.WORDS)[None, :]
    scales = scales_ptr + first
    x = x_ptr + row[None, :] * K + tl.arange(0, quads.CHUNK)[:, None]
    acc = tl.zeros([BLOCK_N, TILE], tl.float32)
    acc_up = tl.zeros([BLOCK_N, TILE], tl.float32)
    for _ in tl.range(0, K // quads.CHUNK, num_stages=STAGES):
        rows = quads.dot_operand(tl.load(x, mask=here, other=0.0))
        acc = tl.dot(quads.unpack(tl.load(words), tl.load(scales)), rows, acc)
        if GATED:
            up = quads.unpack(tl.load(words + WIDTH * quads.WORDS), tl.load(scales + WIDTH))
            acc_up = tl.dot(up, rows, acc_up)
        words += COLUMNS * quads.WORDS
        scales += COLUMNS
        x += quads.CHUNK

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
    tl.store(target, elementwise.narrow(out, out_ptr.dtype.element_ty), mask=here & (column < WIDTH)[:, None])
