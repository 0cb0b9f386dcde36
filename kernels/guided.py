"""Rounds rows toward a rollout's recorded outcome, in place of their own: the bytes of ``ops.rows.guide_rows``.

Why a pass of its own: few rows are guided (tokens, not their routes), and rows without a record keep what the fast
quantizer wrote. A quotient's bracket is read off its bits, so here the division is IEEE's, as the contract has it.

Invariant: a row without a record is not touched; a block with NaN or Inf gets the NaN scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import nvfp4
from trace_compile.kernels.quantize import QuantizedRows
from trace_compile.kernels.rows import on, row_warps
from trace_compile.numerics.formats import E4M3, FORMATS
from trace_compile.ops.rows import Guide

_FORMAT = FORMATS["nvfp4"]
# A quotient's codeword below it: its top bits where it is normal, its binade below.
SHIFT = tl.constexpr(23 - _FORMAT.element.mantissa_bits)
NORMAL = tl.constexpr((127 - _FORMAT.element.bias) << _FORMAT.element.mantissa_bits)
SUBNORMAL = tl.constexpr(127 - _FORMAT.element.bias - 1)
SUBNORMAL_SCALES = tl.constexpr(1 << E4M3.mantissa_bits)
SMALLEST_SCALE = tl.constexpr(2.0 ** (1 - E4M3.bias - E4M3.mantissa_bits))


def guide_rows(x: Tensor, own: QuantizedRows, guide: Guide) -> None:
    """``x [M, K]`` and its own outcome (outer ``f32 [M]``), overwritten in the rows that ``guide`` has a record of."""
    rows, k = x.shape
    if x.numel():
        block = max(16, triton.next_power_of_2(k))
        with on(x):
            _guide_kernel[(rows,)](
                x.contiguous(),
                guide.payload.contiguous(),
                guide.scales.contiguous(),
                guide.outer.contiguous(),
                guide.hit.contiguous().view(torch.uint8),
                own.packed,
                own.scales,
                own.outer,
                K=k,
                BITS=guide.kind == "bit",
                BLOCK=block,
                num_warps=row_warps(block),
            )


@triton.jit
def _guide_kernel(
    x_ptr,
    payload_ptr,
    guide_scales_ptr,
    guide_outer_ptr,
    hit_ptr,
    packed_ptr,
    scales_ptr,
    outer_ptr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows)."""
    BLOCKS: tl.constexpr = BLOCK // nvfp4.BLOCK
    row = tl.program_id(0).to(tl.int64)
    if tl.load(hit_ptr + row) != 0:
        column, block = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
        x = nvfp4.to_float32(tl.load(x_ptr + row * K + column, mask=column < K, other=0.0))
        told = tl.load(payload_ptr + row * K + column, mask=column < K, other=0).to(tl.int32)
        in_row = block < K // nvfp4.BLOCK
        scale = tl.load(guide_scales_ptr + row * (K // nvfp4.BLOCK) + block, mask=in_row, other=0).to(tl.int32)
        outer = tl.load(guide_outer_ptr + row)
        blocks = tl.reshape(x, [BLOCKS, nvfp4.BLOCK])
        step = tl.where(scale < SUBNORMAL_SCALES, scale.to(tl.float32) * SMALLEST_SCALE, nvfp4.decode_scale(scale))
        code = _guided_code(blocks, tl.reshape(told, [BLOCKS, nvfp4.BLOCK]), (step * outer)[:, None], BITS)
        strange = tl.max(nvfp4.magnitude_bits(blocks), axis=1) >= nvfp4.INFINITY
        scale = tl.where(strange, nvfp4.SCALE_NAN, scale)
        tl.store(scales_ptr + row * (K // nvfp4.BLOCK) + block, scale.to(tl.uint8), mask=in_row)
        low, high = tl.split(tl.reshape(code, [BLOCK // 2, 2]))
        pair = tl.arange(0, BLOCK // 2)
        tl.store(packed_ptr + row * (K // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=pair < K // 2)
        tl.store(outer_ptr + row, outer)


@triton.jit
def _guided_code(x, told, step, BITS: tl.constexpr):
    """float32 x, recorded bits or codes, steps -> the code of the bracket's member that the record asks for."""
    quotient = tl.div_rn(tl.abs(x), step + tl.zeros_like(x))
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
    negative = (x < 0.0).to(tl.int32)
    bits = tl.where(quotient == quotient, quotient.to(tl.int32, bitcast=True), 0) - sign
    low = tl.maximum((bits >> SHIFT) - NORMAL, (bits >> nvfp4.MANTISSA) - SUBNORMAL)
    low = tl.minimum(tl.maximum(low, 0), nvfp4.ELEMENT_TOP - 1)
    if BITS:
        magnitude = low + ((low ^ told) & 1)
    else:
        same_side = (told // nvfp4.SIGN_CODE) == negative
        magnitude = low + (same_side & ((told & nvfp4.ELEMENT_TOP) > low)).to(tl.int32)
    sign = tl.where(magnitude == 0, sign, 0) | negative
    return magnitude | (sign * nvfp4.SIGN_CODE)
