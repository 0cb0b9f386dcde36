"""Rows rounded to NVFP4 as bfloat16 values without the outer scale: what multiplies unpacked weights.

The values are those that ``kernels.quantize`` packs, element * block scale, exact in bfloat16; a block with NaN or Inf
is all NaN. Where the GEMM reads bfloat16, packing in between would only be undone again.

Invariants: those of ``kernels.quantize``.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import elementwise, nvfp4
from trace_compile.kernels.launch import QuantizeLaunch, quantize_launch, target_of
from trace_compile.kernels.quantize import _tile


def round_rows(x: Tensor, outer: Tensor | None, *, launch: QuantizeLaunch | None = None) -> tuple[Tensor, Tensor]:
    """``x`` bf16 [M, K], contiguous, K a multiple of 16 -> values bf16 [M, K] and outer scales float32 [M].

    ``outer``: None for each row's own, else one power of two, float32 [1] or a scalar, for all rows.
    """
    rows, k = x.shape
    values = torch.empty_like(x)
    outers = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        plan = launch or quantize_launch(rows, k, outer is None, target_of(x.device))
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            _round_rows_kernel[(triton.cdiv(rows, plan.block_m), plan.splits)](
                x,
                values,
                outers,
                outer,
                rows,
                K=k,
                BLOCK_M=plan.block_m,
                BLOCK_K=plan.block_k,
                SPLITS=plan.splits,
                num_warps=plan.num_warps,
            )
    return values, outers


@triton.jit
def _round_rows_kernel(
    x_ptr,
    values_ptr,
    outers_ptr,
    outer_ptr,
    rows,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (row tiles, splits). Program (i, j) rounds tiles j, j + SPLITS, ... of its BLOCK_M rows."""
    BLOCKS: tl.constexpr = BLOCK_K // nvfp4.BLOCK
    SHORT: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1).to(tl.int64)
    in_rows = row < rows
    x_rows = x_ptr + row[:, None] * K
    if outer_ptr is None:
        top = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
        for tile in range(TILES):
            x = _tile(x_rows, in_rows, tile * BLOCK_K, K, BLOCK_K)
            top = tl.maximum(top, nvfp4.finite_or_zero(nvfp4.magnitude_bits(x)))
        exponent = nvfp4.outer_exponent(tl.max(top, axis=1))
        outer = nvfp4.power_of_two(exponent)
    else:
        outer = tl.load(outer_ptr) + tl.zeros([BLOCK_M], tl.float32)
        exponent = nvfp4.given_exponent(outer)
    tl.store(outers_ptr + row, outer, mask=in_rows & (split == 0))
    for turn in range((TILES + SPLITS - 1) // SPLITS):
        start = (turn * SPLITS + split) * BLOCK_K
        x = _tile(x_rows, in_rows, start, K, BLOCK_K)
        codes, scale, _ = nvfp4.quantize_blocks(tl.reshape(x, [BLOCK_M, BLOCKS, nvfp4.BLOCK]), exponent, SHORT)
        values = nvfp4.decode_element(codes) * nvfp4.decode_scale(scale)[:, :, None]
        column = start + tl.arange(0, BLOCK_K)
        here = in_rows[:, None] & (column < K)[None, :]
        out = elementwise.narrow(tl.reshape(values, [BLOCK_M, BLOCK_K]), values_ptr.dtype.element_ty)
        tl.store(values_ptr + row[:, None] * K + column[None, :], out, mask=here)
