"""What stands between the expert GEMMs in training: activation and quantization of h, and their gradients.

    forward    pre -> act -> quantize -> packed h (saved for the backward) and its values (what the next GEMM reads)
    backward   dh, pre, packed h, gate -> dpre, gate * h (what dW2 multiplies), dgate

One pass over memory each; a program holds a whole row, so the row's own outer scale costs no second reading.

Invariants: steps of the activation round as its program says (``codegen``); the bytes of h are those of
``numerics.quantize``; a row's results depend on that row alone; 64-bit addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import elementwise, nvfp4, rows
from trace_compile.kernels import words as form
from trace_compile.kernels.codegen import ActivationCode
from trace_compile.kernels.launch import activate_launch, target_of
from trace_compile.kernels.quantize import QuantizedRows, write_own_or_given
from trace_compile.numerics.formats import FORMATS
from trace_compile.ops.routing import Routing

_FORMAT = FORMATS["nvfp4"]


@dataclass(frozen=True)
class Hidden:
    """``values [S, I]``: h, quantized and decoded where ``quantized`` holds its packed form."""

    values: Tensor
    quantized: QuantizedRows | None = None


def activate(
    pre: Tensor,
    bias: Tensor | None,
    routing: Routing,
    code: ActivationCode,
    gated: bool,
    quantize: bool,
    outer: Tensor | None,
) -> Hidden:
    """``pre [S, N1]`` -> h ``[S, I]``. ``bias [E, N1]`` is added first, into ``pre``, rounded to its dtype.

    ``outer``: None for each row's own scale, else the given one, float32 [] or [1].
    """
    slots, columns = pre.shape
    width = columns // 2 if gated else columns
    values = torch.empty(slots, width, dtype=pre.dtype, device=pre.device)
    packed = scales = outers = None
    if quantize:
        packed = torch.empty(slots, width // 2, dtype=torch.uint8, device=pre.device)
        scales = torch.empty(slots, width // _FORMAT.block, dtype=torch.uint8, device=pre.device)
        outers = torch.empty(slots, dtype=torch.float32, device=pre.device)
    if values.numel() and packed is not None and bias is None and pre.dtype == torch.bfloat16:
        own = outer is None
        plan = activate_launch(width // _FORMAT.block, own, target_of(pre.device))
        tiles = triton.cdiv(width // _FORMAT.block, plan.block_b)
        with rows.on(pre):
            _activate_words_kernel[(triton.cdiv(slots, plan.block_m), tiles)](
                pre.view(torch.int32),
                values.view(torch.int32),
                packed.view(torch.int32),
                scales,
                outer,
                outers,
                slots,
                BLOCKS=width // _FORMAT.block,
                GATED=gated,
                ACT=code.forward,
                BLOCK_M=plan.block_m,
                BLOCK_B=plan.block_b,
                num_warps=plan.num_warps,
            )
    elif values.numel():
        block = triton.next_power_of_2(width)
        with rows.on(pre):
            _activate_kernel[(slots,)](
                pre,
                None if bias is None else bias.contiguous(),
                routing.expert,
                outer,
                values,
                packed,
                scales,
                outers,
                WIDTH=width,
                GATED=gated,
                ACT=code.forward,
                BLOCK=block,
                num_warps=rows.row_warps(block),
            )
    if packed is None or scales is None or outers is None:
        return Hidden(values)
    return Hidden(values, QuantizedRows(packed, scales, outers))


@dataclass(frozen=True)
class HiddenGrads:
    """What the activation's backward gives: ``dpre [S, N1]``, the gated h ``[S, I]``, ``dgates [T, K]``."""

    dpre: Tensor
    gated_h: Tensor
    dgates: Tensor


def activate_backward(
    dh: Tensor,
    pre: Tensor,
    h: QuantizedRows | None,
    gates: Tensor,
    bias_dots: Tensor | None,
    routing: Routing,
    code: ActivationCode,
    gated: bool,
) -> HiddenGrads:
    """``dh [S, I]``: gradient of h where gates were 1. ``h``: as the forward saved it; None: it was not quantized, and
    is computed again. ``bias_dots f32 [S]``: what the down bias adds to the gates' gradients."""
    (slots, width), columns = dh.shape, pre.shape[1]
    dpre, gated_h, dgates = torch.empty_like(pre), torch.empty_like(dh), torch.empty_like(gates)
    if dh.numel():
        block = triton.next_power_of_2(width)
        with rows.on(dh):
            _activate_backward_kernel[(slots,)](
                dh,
                pre,
                None if h is None else h.packed.view(torch.int32),
                None if h is None else h.scales,
                None if h is None else h.outer,
                gates.contiguous(),
                bias_dots,
                routing.order,
                routing.offsets,
                routing.offsets.shape[0],
                dpre,
                gated_h,
                dgates,
                WIDTH=width,
                COLUMNS=columns,
                GATED=gated,
                ACT=code.forward,
                VJP=code.derivative,
                BLOCK=block,
                num_warps=rows.row_warps(block),
            )
    return HiddenGrads(dpre, gated_h, dgates)


@triton.jit
def _activated(gate, up, ACT: tl.constexpr):
    """Words of two bfloat16 each -> a word of their two results."""
    low = ACT((gate << 16).to(tl.float32, bitcast=True), (up << 16).to(tl.float32, bitcast=True))
    high = ACT((gate & form.UPPER).to(tl.float32, bitcast=True), (up & form.UPPER).to(tl.float32, bitcast=True))
    return (high.to(tl.int32, bitcast=True) & form.UPPER) | ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)


@triton.jit
def _activate_words_kernel(
    pre_ptr,
    values_ptr,
    packed_ptr,
    scales_ptr,
    outer_ptr,
    outers_ptr,
    slots,
    BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Grid (row tiles, tiles of blocks; one where rows have their own outer scales). bfloat16, two to a word."""
    STRIDE: tl.constexpr = form.WORDS * BLOCKS * (2 if GATED else 1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_rows = row < slots
    here = in_rows[:, None] & (block < BLOCKS)[None, :]
    g = form.load_blocks(pre_ptr + row[:, None] * STRIDE, block, here)
    u = g
    if GATED:
        u = form.load_blocks(pre_ptr + row[:, None] * STRIDE + form.WORDS * BLOCKS, block, here)
    h = (
        _activated(g[0], u[0], ACT),
        _activated(g[1], u[1], ACT),
        _activated(g[2], u[2], ACT),
        _activated(g[3], u[3], ACT),
        _activated(g[4], u[4], ACT),
        _activated(g[5], u[5], ACT),
        _activated(g[6], u[6], ACT),
        _activated(g[7], u[7], ACT),
    )
    if outer_ptr is None:
        # What the program makes of the zeros beyond a row is no part of its range.
        top = tl.where(here, form.block_amax_finite(h), 0)
        exponent = nvfp4.outer_exponent(tl.max(top, axis=1))
        outer = nvfp4.power_of_two(exponent)
    else:
        outer = tl.load(outer_ptr) + tl.zeros([BLOCK_M], tl.float32)
        exponent = nvfp4.given_exponent(outer)
    tl.store(outers_ptr + row, outer, mask=in_rows & (tl.program_id(1).to(tl.int64) == 0))
    targets = (packed_ptr, scales_ptr, values_ptr)
    write_own_or_given(h, exponent, row, block, here, targets, BLOCKS, outer_ptr is None, True)


@triton.jit
def _activate_kernel(
    pre_ptr,
    bias_ptr,
    expert_ptr,
    outer_ptr,
    values_ptr,
    packed_ptr,
    scales_ptr,
    outers_ptr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows)."""
    dtype: tl.constexpr = pre_ptr.dtype.element_ty
    COLUMNS: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    here = column < WIDTH
    pre = pre_ptr + row * COLUMNS + column
    bias = bias_ptr
    if bias_ptr is not None:
        bias = bias_ptr + tl.load(expert_ptr + row) * COLUMNS + column
    gate = _biased(pre, bias, here)
    up = gate
    if GATED:
        up = _biased(pre + WIDTH, bias if bias_ptr is None else bias + WIDTH, here)
    h = tl.where(here, ACT(gate, up), 0.0)
    if packed_ptr is None:
        tl.store(values_ptr + row * WIDTH + column, elementwise.narrow(h, dtype), mask=here)
    else:
        blocks = tl.reshape(h, [1, BLOCK // nvfp4.BLOCK, nvfp4.BLOCK])
        if outer_ptr is None:
            exponent = nvfp4.outer_exponent(nvfp4.largest_finite(tl.reshape(h, [1, BLOCK])))
            outer = nvfp4.power_of_two(exponent)
        else:
            outer = tl.load(outer_ptr) + tl.zeros([1], tl.float32)
            exponent = nvfp4.given_exponent(outer)
        codes, scale, step = nvfp4.quantize_blocks(blocks, exponent, dtype != tl.float32)
        tl.store(outers_ptr + row + tl.zeros([1], tl.int64), outer)
        block = tl.arange(0, BLOCK // nvfp4.BLOCK)
        scale = tl.reshape(scale, [BLOCK // nvfp4.BLOCK]).to(tl.uint8)
        tl.store(scales_ptr + row * (WIDTH // nvfp4.BLOCK) + block, scale, mask=block < WIDTH // nvfp4.BLOCK)
        low, high = tl.split(tl.reshape(codes, [BLOCK // 2, 2]))
        pair = tl.arange(0, BLOCK // 2)
        tl.store(packed_ptr + row * (WIDTH // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=pair < WIDTH // 2)
        values = tl.reshape(nvfp4.decode_element(codes) * step[:, :, None], [BLOCK])
        tl.store(values_ptr + row * WIDTH + column, elementwise.narrow(values, dtype), mask=here)


@triton.jit
def _biased(pre, bias, here):
    """Pre-activations in float32; with a bias, it is added and the sum stored in their place."""
    dtype: tl.constexpr = pre.dtype.element_ty
    value = nvfp4.to_float32(tl.load(pre, mask=here, other=0.0))
    if bias is not None:
        added = value + nvfp4.to_float32(tl.load(bias, mask=here, other=0.0))
        value = elementwise.rounded(added, dtype)
        tl.store(pre, elementwise.narrow(value, dtype), mask=here)
    return value


@triton.jit
def _activate_backward_kernel(
    dh_ptr,
    pre_ptr,
    words_ptr,
    scales_ptr,
    outer_ptr,
    gates_ptr,
    bias_dots_ptr,
    order_ptr,
    offsets_ptr,
    experts,
    dpre_ptr,
    gated_ptr,
    dgates_ptr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    VJP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows)."""
    dtype: tl.constexpr = dh_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    here = column < WIDTH
    slot = tl.load(order_ptr + row)
    gate_of_row = nvfp4.to_float32(tl.load(gates_ptr + slot))
    pre = pre_ptr + row * COLUMNS + column
    gate = nvfp4.to_float32(tl.load(pre, mask=here, other=0.0))
    up = gate
    if GATED:
        up = nvfp4.to_float32(tl.load(pre + WIDTH, mask=here, other=0.0))
    if words_ptr is None:
        h = ACT(gate, up)
    else:
        WORDS: tl.constexpr = WIDTH // rows.WORD
        word = tl.arange(0, BLOCK // rows.WORD)
        words = tl.load(words_ptr + row * WORDS + word, mask=word < WORDS, other=0)
        scales = tl.load(scales_ptr + row * (WORDS // 2) + word // 2, mask=word < WORDS, other=0).to(tl.int32)
        scales = nvfp4.decode_scale(scales) * tl.load(outer_ptr + row)
        h = tl.reshape(rows.unpack_words(words[None, :], scales[None, :]), [BLOCK])
    h = tl.where(here, h, 0.0)
    dh = nvfp4.to_float32(tl.load(dh_ptr + row * WIDTH + column, mask=here, other=0.0))
    dot = tl.sum(dh * h, axis=0)
    if bias_dots_ptr is not None:
        dot += tl.load(bias_dots_ptr + row)
    dot = tl.where(row < tl.load(offsets_ptr + experts - 1), dot, 0.0)
    tl.store(dgates_ptr + slot, elementwise.narrow(dot, dgates_ptr.dtype.element_ty))
    tl.store(gated_ptr + row * WIDTH + column, elementwise.narrow(h * gate_of_row, dtype), mask=here)
    dgate, dup = VJP(gate, up, elementwise.rounded(dh * gate_of_row, dtype))
    tl.store(dpre_ptr + row * COLUMNS + column, elementwise.narrow(dgate, dtype), mask=here)
    if GATED:
        tl.store(dpre_ptr + row * COLUMNS + column + WIDTH, elementwise.narrow(dup, dtype), mask=here)
