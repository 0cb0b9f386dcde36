"""Rows rounded to NVFP4 as bfloat16 values without the outer scale: what multiplies unpacked weights.

The values are those that ``kernels.quantize`` packs, element * block scale, exact in bfloat16; a block with NaN or Inf
is all NaN. Where the GEMM reads bfloat16, packing in between would only be undone again.

Invariants: those of ``kernels.quantize``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import elementwise, nvfp4, recording
from trace_compile.kernels.launch import QuantizeLaunch, quantize_launch, target_of
from trace_compile.kernels.quantize import _tile
from trace_compile.kernels.recording import Recorder


def round_rows(
    x: Tensor,
    outer: Tensor | None,
    *,
    recorder: Recorder | None = None,
    which: int = 0,
    launch: QuantizeLaunch | None = None,
) -> tuple[Tensor, Tensor]:
    """``x`` bf16 [M, K], contiguous, K a multiple of 16 -> values bf16 [M, K] and outer scales float32 [M].

    ``outer``: None for each row's own, else one power of two, float32 [1] or a scalar, for all rows. ``recorder`` takes
    down what was rounded, as the rows of gate/up (``which`` 0) or down (1).
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
                **(_NOTHING if recorder is None else recorder.arguments(which)),
            )
    return values, outers


_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("ids_ptr", "valid_ptr", "record_ptr", "amax_ptr", "counts_ptr", "hist_ptr", "saturated_ptr")),
    **dict.fromkeys(("token_stride", "row_stride", "experts"), 0),
    **dict.fromkeys(("TOP_K", "PER_TOKEN"), 1),
    **dict.fromkeys(("BITS", "OUTER_BYTE", "SLOTS"), False),
}
"""The recorder's arguments where nothing is recorded."""


@triton.jit
def _round_rows_kernel(
    x_ptr,
    values_ptr,
    outers_ptr,
    outer_ptr,
    rows,
    ids_ptr,
    valid_ptr,
    record_ptr,
    token_stride,
    row_stride,
    amax_ptr,
    counts_ptr,
    hist_ptr,
    saturated_ptr,
    experts,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    TOP_K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BITS: tl.constexpr,
    OUTER_BYTE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Grid (row tiles, splits). Program (i, j) rounds tiles j, j + SPLITS, ... of its BLOCK_M rows, and records them
    where the pointers of a ``Recorder`` are given. SLOTS: rows are slots, and those of no expert are taken for zeros:
    no GEMM wrote them."""
    BLOCKS: tl.constexpr = BLOCK_K // nvfp4.BLOCK
    SHORT: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1).to(tl.int64)
    in_rows = row < rows
    written = in_rows
    if SLOTS:
        written = recording.routed_slots(row, in_rows, ids_ptr, experts)
    x_rows = x_ptr + row[:, None] * K
    if outer_ptr is None:
        top = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
        for tile in range(TILES):
            x = _tile(x_rows, written, tile * BLOCK_K, K, BLOCK_K)
            top = tl.maximum(top, nvfp4.finite_or_zero(nvfp4.magnitude_bits(x)))
        exponent = nvfp4.outer_exponent(tl.max(top, axis=1))
        outer = nvfp4.power_of_two(exponent)
    else:
        outer = tl.load(outer_ptr) + tl.zeros([BLOCK_M], tl.float32)
        exponent = nvfp4.given_exponent(outer)
    tl.store(outers_ptr + row, outer, mask=in_rows & (split == 0))
    if hist_ptr is not None:
        counted = recording.counted_rows(row, in_rows, ids_ptr, valid_ptr, experts, TOP_K, PER_TOKEN)
        largest = tl.zeros([BLOCK_M], dtype=tl.int32)
        hist = tl.zeros([2 * recording.BUCKETS], dtype=tl.int32)
        saturated = tl.full([], 0, tl.int32)
    if record_ptr is not None:
        PAYLOAD: tl.constexpr = K // 8 if BITS else K // 2
        token = row // PER_TOKEN
        record_rows = record_ptr + token * token_stride + (row - token * PER_TOKEN) * row_stride
        if OUTER_BYTE:
            tl.store(record_rows + PAYLOAD + K // nvfp4.BLOCK, exponent.to(tl.uint8), mask=in_rows & (split == 0))
    for turn in range((TILES + SPLITS - 1) // SPLITS):
        start = (turn * SPLITS + split) * BLOCK_K
        x = _tile(x_rows, written, start, K, BLOCK_K)
        codes, scale, _ = nvfp4.quantize_blocks(tl.reshape(x, [BLOCK_M, BLOCKS, nvfp4.BLOCK]), exponent, SHORT)
        values = nvfp4.decode_element(codes) * nvfp4.decode_scale(scale)[:, :, None]
        column = start + tl.arange(0, BLOCK_K)
        here = in_rows[:, None] & (column < K)[None, :]
        out = elementwise.narrow(tl.reshape(values, [BLOCK_M, BLOCK_K]), values_ptr.dtype.element_ty)
        tl.store(values_ptr + row[:, None] * K + column[None, :], out, mask=here)
        if record_ptr is not None:
            recording.record_outcome(codes, scale, record_rows, in_rows, start, K, BLOCK_M, BLOCK_K, BITS)
        if hist_ptr is not None:
            largest = tl.maximum(largest, nvfp4.largest_finite(x))
            seen = counted[:, None] & (column < K)[None, :]
            hist, beyond = recording.record_values(x, seen, outer, hist, BLOCK_M, BLOCK_K)
            saturated += beyond
    if hist_ptr is not None:
        recording.record_ranges(
            row, counted, largest, ids_ptr, amax_ptr, counts_ptr, experts, split == 0, TOP_K, PER_TOKEN
        )
        bucket = tl.arange(0, 2 * recording.BUCKETS)
        some = (bucket < recording.BUCKETS) & (hist > 0)
        tl.atomic_add(hist_ptr + bucket, hist.to(tl.int64), mask=some, sem="relaxed")
        tl.atomic_add(saturated_ptr, saturated.to(tl.int64), mask=saturated > 0, sem="relaxed")
