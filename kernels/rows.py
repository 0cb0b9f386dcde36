"""Rows for grouped GEMMs: unpacked, gathered in expert order, added up again; weights unpacked to one layer's scratch.

Where a vendor's bfloat16 GEMM multiplies, its operands are the dequantised values. With power-of-two outer scales they
are exact in bfloat16, so the product is that of the packed operands. Everything here moves memory once: what is read
are codes and scales, what is written is what the GEMM reads.

Invariants: one launch each, whatever the number of experts; no host synchronisation; no atomics; 64-bit addresses. Rows
behind the last expert's are written by no GEMM and are never read.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import elementwise, nvfp4
from trace_compile.kernels.launch import rows_launch
from trace_compile.ops.routing import Routing
from trace_compile.ops.weights import Packed

WORD = tl.constexpr(8)  # codes in 32 bits


def on(t: Tensor) -> torch.cuda.device | nullcontext[None]:
    """The context in which kernels of this tensor's device are launched."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def unpack_rows(
    packed: Tensor, scales: Tensor, outer: Tensor, dtype: torch.dtype, routing: Routing | None = None
) -> Tensor:
    """``u8 [M, K/2]``, ``u8 [M, K/16]``, ``f32 [M]`` -> values ``[M, K]``; by ``routing`` in expert order, [S, K]."""
    return _unpack(packed, scales, outer, 1, dtype, routing)


def unpack_weights(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Linear codes ``u8 [E, N, K/2]`` -> values ``[E, N, K]``: scratch of one layer, exact in bfloat16."""
    experts, n, half = packed.codes.shape
    codes, scales = packed.codes.reshape(-1, half), packed.scales.reshape(experts * n, -1)
    return _unpack(codes, scales, packed.outer, n, dtype, None).view(experts, n, 2 * half)


def _unpack(
    packed: Tensor, scales: Tensor, outer: Tensor, rows_per_outer: int, dtype: torch.dtype, routing: Routing | None
) -> Tensor:
    k = 2 * packed.shape[1]
    rows = packed.shape[0] if routing is None else routing.order.shape[0]
    out = torch.empty(rows, k, dtype=dtype, device=packed.device)
    if out.numel():
        plan = rows_launch(k // WORD.value)
        grid = (triton.cdiv(rows, plan.block_m), triton.cdiv(k // WORD.value, plan.block_k))
        with on(out):
            _unpack_kernel[grid](
                packed.contiguous().view(torch.int32),
                scales.contiguous(),
                outer.contiguous(),
                None if routing is None else routing.token,
                out,
                rows,
                ROWS_PER_OUTER=rows_per_outer,
                WORDS=k // WORD.value,
                BLOCK_M=plan.block_m,
                BLOCK_W=plan.block_k,
                num_warps=plan.num_warps,
            )
    return out


def gather_rows(x: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """``x [T, H]`` -> its rows in expert order ``[S, H]``; with ``bias [E, H]`` also ``f32 [S]``: row . bias of its
    expert."""
    x, (slots, hidden) = x.contiguous(), (routing.order.shape[0], x.shape[1])
    out = torch.empty(slots, hidden, dtype=x.dtype, device=x.device)
    dots = None if bias is None else torch.empty(slots, dtype=torch.float32, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(hidden)
        with on(x):
            _gather_kernel[(slots,)](
                x,
                routing.token,
                routing.expert,
                None if bias is None else bias.contiguous(),
                out,
                dots,
                HIDDEN=hidden,
                BLOCK=block,
                num_warps=row_warps(block),
            )
    return out, dots


def combine_rows(rows: Tensor, routing: Routing, gates: Tensor | None, bias: Tensor | None, top_k: int) -> Tensor:
    """``y [T, H]``: sum over k of ``gates[t, k] * (row + bias of its expert)`` in slot order.

    Rounds as ``ops.nvfp4_moe``: the biased row to the rows' dtype, the product to that promoted with the gates', the
    sum, kept in float32, once.
    """
    tokens, hidden = rows.shape[0] // top_k, rows.shape[1]
    y = torch.empty(tokens, hidden, dtype=rows.dtype, device=rows.device)
    if y.numel():
        plan = rows_launch(hidden // WORD.value)
        block = plan.block_k * WORD.value
        with on(rows):
            _combine_kernel[(tokens, triton.cdiv(hidden, block))](
                rows,
                routing.inverse,
                routing.offsets,
                routing.offsets.shape[0],
                None if gates is None else gates.contiguous(),
                None if bias is None else bias.contiguous(),
                routing.expert,
                y,
                HIDDEN=hidden,
                TOP_K=top_k,
                BLOCK=block,
                num_warps=row_warps(block),
            )
    return y


def zero_unused(grad: Tensor, routing: Routing) -> Tensor:
    """``grad [E, N, K]`` with exact zeros for experts without rows, in place: a GEMM may leave them unwritten."""
    experts, n, k = grad.shape
    if grad.numel():
        with on(grad):
            _zero_kernel[(experts, 8)](grad, routing.offsets, n * k, BLOCK=4096, num_warps=4)
    return grad


def sum_rows(rows: Tensor, gates: Tensor | None, routing: Routing) -> Tensor:
    """``f32 [E, N]``: each expert's ``rows [S, N]``, times ``gates [T, K]`` and rounded to the rows' dtype if given,
    added in float32; zeros for experts without rows."""
    experts, n = routing.offsets.shape[0], rows.shape[1]
    out = torch.zeros(experts, n, dtype=torch.float32, device=rows.device)
    if rows.numel():
        with on(rows):
            _sum_kernel[(experts, triton.cdiv(n, 128))](
                rows, gates, routing.order, routing.offsets, out, n, BLOCK_M=16, BLOCK_N=128, num_warps=4
            )
    return out


def row_warps(block: int) -> int:
    """Warps for one row of ``block`` elements: eight elements a thread, up to 16 warps."""
    return max(1, min(16, block // 256))


@triton.jit
def unpack_words(words, scales):
    """int32 words of eight codes [M, W] and float32 scales of them [M, W] -> float32 [M, W, 8]."""
    codes = (words[:, :, None] >> (tl.arange(0, WORD) * 4)[None, None, :]) & 15
    return nvfp4.decode_element(codes) * scales[:, :, None]


@triton.jit
def _unpack_kernel(
    words_ptr,
    scales_ptr,
    outer_ptr,
    token_ptr,
    out_ptr,
    rows,
    ROWS_PER_OUTER: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid (row tiles, word tiles)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    word = tl.program_id(1).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_rows = row < rows
    source = row
    if token_ptr is not None:
        source = tl.load(token_ptr + row, mask=in_rows, other=0)
    here = in_rows[:, None] & (word < WORDS)[None, :]
    outer = tl.load(outer_ptr + source // ROWS_PER_OUTER, mask=in_rows, other=1.0)
    words = tl.load(words_ptr + source[:, None] * WORDS + word[None, :], mask=here, other=0)
    scales = tl.load(scales_ptr + source[:, None] * (WORDS // 2) + (word // 2)[None, :], mask=here, other=0)
    values = unpack_words(words, nvfp4.decode_scale(scales.to(tl.int32)) * outer[:, None])
    values = tl.reshape(elementwise.narrow(values, out_ptr.dtype.element_ty), [BLOCK_M, BLOCK_W * WORD])
    column = tl.program_id(1).to(tl.int64) * (BLOCK_W * WORD) + tl.arange(0, BLOCK_W * WORD)
    in_matrix = in_rows[:, None] & (column < WORDS * WORD)[None, :]
    tl.store(out_ptr + row[:, None] * (WORDS * WORD) + column[None, :], values, mask=in_matrix)


@triton.jit
def _gather_kernel(
    x_ptr, token_ptr, expert_ptr, bias_ptr, out_ptr, dots_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    column = tl.arange(0, BLOCK)
    here = column < HIDDEN
    x = tl.load(x_ptr + token * HIDDEN + column, mask=here, other=0.0)
    tl.store(out_ptr + row * HIDDEN + column, x, mask=here)
    if bias_ptr is not None:
        expert = tl.load(expert_ptr + row)
        bias = nvfp4.to_float32(tl.load(bias_ptr + expert * HIDDEN + column, mask=here, other=0.0))
        tl.store(dots_ptr + row, tl.sum(nvfp4.to_float32(x) * bias, axis=0))


@triton.jit
def _combine_kernel(
    rows_ptr,
    inverse_ptr,
    offsets_ptr,
    experts,
    gates_ptr,
    bias_ptr,
    expert_ptr,
    y_ptr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens, column blocks)."""
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = column < HIDDEN
    end = tl.load(offsets_ptr + experts - 1)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(inverse_ptr + token * TOP_K + k)
        routed = row < end
        value = nvfp4.to_float32(tl.load(rows_ptr + row * HIDDEN + column, mask=here & routed, other=0.0))
        if bias_ptr is not None:
            expert = tl.load(expert_ptr + row)
            bias = tl.load(bias_ptr + expert * HIDDEN + column, mask=here & routed, other=0.0)
            value = elementwise.rounded(value + nvfp4.to_float32(bias), dtype)
        if gates_ptr is not None:
            value *= nvfp4.to_float32(tl.load(gates_ptr + token * TOP_K + k))
            if gates_ptr.dtype.element_ty == dtype:
                value = elementwise.rounded(value, dtype)
        total += tl.where(routed, value, 0.0)
    tl.store(y_ptr + token * HIDDEN + column, elementwise.narrow(total, dtype), mask=here)


@triton.jit
def _zero_kernel(grad_ptr, offsets_ptr, size, BLOCK: tl.constexpr):
    """Grid (experts, parts)."""
    expert = tl.program_id(0).to(tl.int64)
    end = tl.load(offsets_ptr + expert)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    if start == end:
        at = tl.program_id(1).to(tl.int64) * BLOCK
        while at < size:
            i = at + tl.arange(0, BLOCK)
            tl.store(grad_ptr + expert * size + i, tl.zeros([BLOCK], grad_ptr.dtype.element_ty), mask=i < size)
            at += tl.num_programs(1) * BLOCK


@triton.jit
def _sum_kernel(rows_ptr, gates_ptr, order_ptr, offsets_ptr, out_ptr, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid (experts, column blocks)."""
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offsets_ptr + expert).to(tl.int64)
    at = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    while at < end:
        row = at + tl.arange(0, BLOCK_M)
        here = (row < end)[:, None] & (column < n)[None, :]
        value = nvfp4.to_float32(tl.load(rows_ptr + row[:, None] * n + column[None, :], mask=here, other=0.0))
        if gates_ptr is not None:
            slot = tl.load(order_ptr + row, mask=row < end, other=0)
            value *= nvfp4.to_float32(tl.load(gates_ptr + slot, mask=row < end, other=0.0))[:, None]
            value = elementwise.rounded(value, rows_ptr.dtype.element_ty)
        total += value
        at += BLOCK_M
    tl.store(out_ptr + expert * n + column, tl.sum(total, axis=0), mask=column < n)
