"""Grouped GEMM on FP4 tensor cores: the operands of ``kernels.grouped_gemm`` as they are packed, codes and scales.

For GPUs whose tensor cores multiply E2M1 by E2M1 with an E4M3 scale for every 16 elements (Blackwell). Weights are the
first operand here too, so tiles, slots, epilogue and results are those of the unpacking kernel; only the order of
summation is the hardware's. In Triton's interpreter the operands are decoded and multiplied in float32.

Invariants: as in ``kernels.grouped_gemm``, but for K in segments: k runs in order through one accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import nvfp4
from trace_compile.kernels.dispatch import Tiles
from trace_compile.kernels.grouped_gemm import Epilogue, Weights, finish
from trace_compile.kernels.moe_launch import GemmLaunch
from trace_compile.ops.quads import packed_shape

INTERPRETING = tl.constexpr(bool(triton.knobs.runtime.interpret))
BLOCK_K = tl.constexpr(128)


@dataclass(frozen=True)
class PackedRows:
    """``codes`` u8 [M, K/2], ``scales`` u8 [M, K/16], ``outer`` f32 [M]; ``top_k`` slots share a row."""

    codes: Tensor
    scales: Tensor
    outer: Tensor
    top_k: int


def expert_gemm_fp4(
    rows: PackedRows, weights: Weights, tiles: Tiles, launch: GemmLaunch, epilogue: Epilogue | None = None
) -> Tensor:
    """bf16 ``[S, N]``, or the epilogue's ``[S, N]`` or ``[S, N/2]``; weights in the linear form. Rows of slots in no
    tile are not written."""
    experts, columns, k = packed_shape(weights.codes)
    slots = rows.codes.shape[0] * rows.top_k
    gated = epilogue is not None and epilogue.gated
    width = columns // 2 if gated else columns
    out = torch.empty(slots, width, dtype=torch.bfloat16, device=rows.codes.device)
    if out.numel():
        _expert_gemm_fp4_kernel[(tiles.expert.shape[0], triton.cdiv(width, launch.block_n))](
            rows.codes,
            rows.scales,
            rows.outer,
            weights.codes,
            weights.scales,
            weights.outer,
            None if weights.bias is None else weights.bias.contiguous(),
            out,
            tiles.expert,
            tiles.slots,
            EXPERTS=experts,
            K=k,
            COLUMNS=columns,
            WIDTH=width,
            TOP_K=rows.top_k,
            GATED=gated,
            ACT=None if epilogue is None else epilogue.act,
            TILE=tiles.tile,
            BLOCK_N=launch.block_n,
            STAGES=launch.stages,
            num_warps=launch.num_warps,
        )
    return out


@triton.jit
def _decoded(codes, scales):
    """u8 [R, BLOCK_K / 2] and u8 [R, BLOCK_K / 16] -> float32 [R, BLOCK_K]."""
    R: tl.constexpr = codes.shape[0]
    wide = codes.to(tl.int32)
    values = nvfp4.decode_element(tl.reshape(tl.join(wide & 15, wide >> 4), [R, BLOCK_K // nvfp4.BLOCK, nvfp4.BLOCK]))
    return tl.reshape(values * nvfp4.decode_scale(scales.to(tl.int32))[:, :, None], [R, BLOCK_K])


@triton.jit
def _dot(w, w_scales, x, x_scales, acc):
    """``acc`` + decoded [BLOCK_N, BLOCK_K] . decoded [TILE, BLOCK_K]^T."""
    if INTERPRETING:
        return acc + tl.dot(_decoded(w, w_scales), tl.trans(_decoded(x, x_scales)))
    else:
        w_scales = w_scales.to(tl.float8e4nv, bitcast=True)
        x_scales = x_scales.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(w, w_scales, "e2m1", tl.trans(x), x_scales, "e2m1", acc)


@triton.jit
def _expert_gemm_fp4_kernel(
    x_codes_ptr,
    x_scales_ptr,
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
    STAGES: tl.constexpr,
):
    """Grid (tiles, column blocks of the result)."""
    tile = tl.program_id(0).to(tl.int64)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if (expert < 0) | (expert >= EXPERTS):
        return
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(column, WIDTH - 1)
    place = tl.arange(0, TILE)
    if slots_ptr is None:
        slot = tl.where(place == 0, tile, -1)
    else:
        slot = tl.load(slots_ptr + tile * TILE + place).to(tl.int64)
    row = tl.maximum(slot, 0) // TOP_K
    here = (slot >= 0)[:, None]

    byte = tl.arange(0, BLOCK_K // 2)
    block = tl.arange(0, BLOCK_K // nvfp4.BLOCK)
    # Gate and up rows in turn, so that one product serves both.
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    n = tl.arange(0, ROWS)
    if GATED:
        inside = tl.minimum(tl.program_id(1).to(tl.int64) * BLOCK_N + n // 2, WIDTH - 1) + (n % 2) * WIDTH
    w_row = (expert * COLUMNS + inside)[:, None]
    words, scales = codes_ptr + w_row * (K // 2), scales_ptr + w_row * (K // nvfp4.BLOCK)
    x, x_scales = x_codes_ptr + row[:, None] * (K // 2), x_scales_ptr + row[:, None] * (K // nvfp4.BLOCK)
    acc = tl.zeros([ROWS, TILE], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = start // 2 + byte[None, :]
        scale_at = start // nvfp4.BLOCK + block[None, :]
        in_k, scale_in_k = at < K // 2, scale_at < K // nvfp4.BLOCK
        rows = tl.load(x + at, mask=here & in_k, other=0)
        row_scales = tl.load(x_scales + scale_at, mask=here & scale_in_k, other=0)
        w = tl.load(words + at, mask=in_k, other=0)
        s = tl.load(scales + scale_at, mask=scale_in_k, other=0)
        acc = _dot(w, s, rows, row_scales, acc)
    acc_up = acc
    if GATED:
        acc, acc_up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_N, 2, TILE]), (0, 2, 1)))
    finish(
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
        COLUMNS,
        WIDTH,
        GATED,
        ACT,
    )
