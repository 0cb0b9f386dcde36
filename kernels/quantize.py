"""Quantizes rows to NVFP4: packed codes, block scales, and each row's own or a given power-of-two outer scale.

Why a kernel: the torch reference makes several passes over memory; here a row is read once for its amax where it needs
one (the second reading comes from the cache), and what is written is 4.5 bits per value. The bytes are those of
``numerics.quantize(x, "nvfp4", profile="pow2")``, in every dtype, for every K that is a multiple of the block.

Invariants: no division of elements, no float8 cast, 64-bit addresses, every masked load has a value, and a row's bytes
depend on that row alone (and the given scale): not on the batch, the tile sizes or the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.errors import BlockSizeError, DeviceMismatchError, LoweringError, OperandError
from trace_compile.kernels import launch as launches
from trace_compile.kernels import nvfp4
from trace_compile.kernels import words as form
from trace_compile.numerics.formats import FORMATS

INTERPRETING = triton.knobs.runtime.interpret
_FORMAT = FORMATS["nvfp4"]


@dataclass(frozen=True)
class QuantizedRows:
    """packed uint8 [..., K/2] (low nibble = even element), scales uint8 E4M3 bytes [..., K/16], outer float32 [...].

    ``outer`` has one power of two per row; where it was given for all rows at once it is that tensor, [1].
    """

    packed: Tensor
    scales: Tensor
    outer: Tensor


def quantize_rows(
    x: Tensor, outer: Tensor | None = None, *, launch: launches.QuantizeLaunch | None = None
) -> QuantizedRows:
    """Rows ``x [..., K]`` (bfloat16, float16 or float32) -> ``QuantizedRows``; K a multiple of 16.

    ``outer``: None for each row's own scale, else float32 powers of two, one for all rows ([1] or a scalar) or one per
    row (``x.shape[:-1]``); values beyond 6*448*outer saturate. A row whose given scale is no power of two in the
    format's range gets NaN scale bytes. A block with NaN or Inf gets the scale byte 0x7F and zero magnitudes.
    ``launch`` overrides the launch choice; it never changes a byte. No host synchronisation.

    Raises ``BlockSizeError``, ``OperandError`` (dtype, shape), ``DeviceMismatchError``, ``LoweringError`` (no GPU).
    """
    k = x.shape[-1] if x.dim() else 0
    if x.dim() == 0 or k % _FORMAT.block:
        raise BlockSizeError(
            f"nvfp4 needs a last dimension that is a multiple of {_FORMAT.block}, got {tuple(x.shape)}"
        )
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise OperandError(f"quantize_rows takes bfloat16, float16 or float32, got {x.dtype}; convert first")
    if not (x.is_cuda or INTERPRETING):
        raise LoweringError(f"quantize_rows is a GPU kernel and x is on {x.device}; use numerics.quantize there")
    leading = x.shape[:-1]
    flat = x.reshape(-1, k)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    rows = flat.shape[0]
    given, outer_stride = _outer_rows(x, outer)
    packed = torch.empty(*leading, k // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*leading, k // _FORMAT.block, dtype=torch.uint8, device=x.device)
    if flat.numel() == 0:
        return QuantizedRows(packed, scales, given.fill_(1.0) if outer is None else given)
    if launch is None and in_words(flat):
        quantize_words(flat, given, outer_stride, outer is None, (packed, scales), None)
        return QuantizedRows(packed, scales, given)
    plan = launch or launches.quantize_launch(rows, k, outer is None, launches.target_of(x.device))
    grid = (triton.cdiv(rows, plan.block_m), plan.splits)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _quantize_nvfp4_kernel[grid](
            flat,
            packed,
            scales,
            given,
            rows,
            flat.stride(0),
            outer_stride,
            K=k,
            OWN_OUTER=outer is None,
            BLOCK_M=plan.block_m,
            BLOCK_K=plan.block_k,
            SPLITS=plan.splits,
            num_warps=plan.num_warps,
        )
    return QuantizedRows(packed, scales, given)


def round_rows(x: Tensor, outer: Tensor | None = None, *, keep_outer: bool = True) -> tuple[Tensor, Tensor]:
    """Rows bfloat16 ``[..., K]`` -> (the values that ``quantize_rows`` packs ``[..., K]``, outer scales as there).

    The values are exact in bfloat16; without ``keep_outer`` they are element * block scale alone. NaN in a block with
    NaN or Inf, or under an impossible outer scale.
    """
    k = x.shape[-1]
    flat = x.reshape(-1, k).contiguous()
    given, outer_stride = _outer_rows(x, outer)
    values = torch.empty_like(flat)
    if flat.numel():
        quantize_words(flat, given, outer_stride, outer is None, None, values, keep_outer)
    return values.view(x.shape), given


def in_words(flat: Tensor) -> bool:
    """Whether the rows can be read in words of two elements."""
    return flat.dtype == torch.bfloat16 and flat.stride(0) % 2 == 0 and flat.data_ptr() % 4 == 0


def quantize_words(
    flat: Tensor,
    outer: Tensor,
    outer_stride: int,
    own: bool,
    packed: tuple[Tensor, Tensor] | None,
    values: Tensor | None,
    keep_outer: bool = True,
    plan: launches.WordsLaunch | None = None,
    top: Tensor | None = None,
) -> None:
    """``top int32 [E]``: bits of the largest magnitudes of E equal parts of the rows are raised to what they are."""
    rows, k = flat.shape
    plan = plan or launches.words_launch(rows, k // _FORMAT.block, own, launches.target_of(flat.device))
    tiles = triton.cdiv(k // _FORMAT.block, plan.block_b)
    codes, scales = packed if packed is not None else (None, None)
    with torch.cuda.device(flat.device) if flat.is_cuda else nullcontext():
        _quantize_words_kernel[(triton.cdiv(rows, plan.block_m), 1 if own else tiles)](
            flat.view(torch.int32),
            None if codes is None else codes.view(torch.int32),
            scales,
            None if values is None else values.view(torch.int32),
            outer,
            top,
            rows,
            flat.stride(0) // 2,
            outer_stride,
            ROWS_PER_TOP=1 if top is None else rows // top.shape[0],
            BLOCKS=k // _FORMAT.block,
            OWN_OUTER=own,
            KEEP_OUTER=keep_outer,
            BLOCK_M=plan.block_m,
            BLOCK_B=plan.block_b,
            num_warps=plan.num_warps,
        )


def _outer_rows(x: Tensor, outer: Tensor | None) -> tuple[Tensor, int]:
    """The tensor of outer scales (yet to be written where the rows' own are wanted) and its stride from row to row."""
    if outer is None:
        return torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device), 1
    if outer.device != x.device:
        raise DeviceMismatchError(f"x is on {x.device} and its outer scale on {outer.device}: move one of them")
    if outer.dtype != torch.float32 or (outer.numel() != 1 and outer.shape != x.shape[:-1]):
        raise OperandError(
            f"an outer scale is float32, one for all rows or of shape {tuple(x.shape[:-1])}; "
            f"got {outer.dtype} of shape {tuple(outer.shape)}"
        )
    return outer.contiguous(), 0 if outer.numel() == 1 else 1


@triton.jit
def _tile(x_rows, in_rows, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns start .. start + BLOCK_K of the rows at ``x_rows`` [M, 1] in float32, zeros beyond the matrix."""
    column = start + tl.arange(0, BLOCK_K)
    here = in_rows[:, None] & (column < K)[None, :]
    return nvfp4.to_float32(tl.load(x_rows + column[None, :], mask=here, other=0.0))


@triton.jit
def _quantize_nvfp4_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    outer_ptr,
    rows,
    x_stride,
    outer_stride,
    K: tl.constexpr,
    OWN_OUTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (row tiles, splits). Program (i, j) quantizes tiles j, j + SPLITS, ... of its BLOCK_M rows."""
    BLOCKS: tl.constexpr = BLOCK_K // nvfp4.BLOCK
    SHORT: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1).to(tl.int64)
    in_rows = row < rows
    x_rows = x_ptr + row[:, None] * x_stride

    if OWN_OUTER:
        top = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
        for tile in range(TILES):
            x = _tile(x_rows, in_rows, tile * BLOCK_K, K, BLOCK_K)
            top = tl.maximum(top, nvfp4.finite_or_zero(nvfp4.magnitude_bits(x)))
        exponent = nvfp4.outer_exponent(tl.max(top, axis=1))
        outer = nvfp4.power_of_two(exponent)
        tl.store(outer_ptr + row, outer, mask=in_rows & (split == 0))
    else:
        given = tl.load(outer_ptr + row * outer_stride, mask=in_rows, other=1.0)
        exponent = nvfp4.given_exponent(given)
        outer = nvfp4.power_of_two(exponent)

    for turn in range((TILES + SPLITS - 1) // SPLITS):
        start = (turn * SPLITS + split) * BLOCK_K
        # Read again, from the cache: keeping a tile in registers was measured to be slower.
        x = _tile(x_rows, in_rows, start, K, BLOCK_K)
        blocks = tl.reshape(x, [BLOCK_M, BLOCKS, nvfp4.BLOCK])
        amax = tl.max(nvfp4.magnitude_bits(blocks), axis=2)
        scale = nvfp4.encode_scale(amax, exponent[:, None])
        if not OWN_OUTER:
            scale = tl.where((exponent == 0)[:, None], nvfp4.SCALE_NAN, scale)
        step = nvfp4.decode_scale(scale) * outer[:, None]
        codes = nvfp4.encode_element(blocks, step[:, :, None], SHORT)
        low, high = tl.split(tl.reshape(codes, [BLOCK_M, BLOCK_K // 2, 2]))

        block = start // nvfp4.BLOCK + tl.arange(0, BLOCKS)
        scale_here = in_rows[:, None] & (block < K // nvfp4.BLOCK)[None, :]
        tl.store(scales_ptr + row[:, None] * (K // nvfp4.BLOCK) + block[None, :], scale.to(tl.uint8), mask=scale_here)
        pair = start // 2 + tl.arange(0, BLOCK_K // 2)
        pair_here = in_rows[:, None] & (pair < K // 2)[None, :]
        tl.store(packed_ptr + row[:, None] * (K // 2) + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=pair_here)


@triton.jit
def _quantize_words_kernel(
    words_ptr,
    packed_ptr,
    scales_ptr,
    values_ptr,
    outer_ptr,
    top_ptr,
    rows,
    words_stride,
    outer_stride,
    ROWS_PER_TOP: tl.constexpr,
    BLOCKS: tl.constexpr,
    OWN_OUTER: tl.constexpr,
    KEEP_OUTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Grid (row tiles, tiles of blocks; one where rows have their own outer scales): codes and scales, or values."""
    TILES: tl.constexpr = (BLOCKS + BLOCK_B - 1) // BLOCK_B
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1).to(tl.int64) * BLOCK_B
    in_rows = row < rows
    words = words_ptr + row[:, None] * words_stride
    block = first + tl.arange(0, BLOCK_B)
    here = in_rows[:, None] & (block < BLOCKS)[None, :]
    w = form.load_blocks(words, block, here)
    if OWN_OUTER:
        top = form.block_amax_finite(w)
        for tile in range(1, TILES):
            top = tl.maximum(top, form.block_amax_finite(_tile_of_blocks(words, in_rows, tile, BLOCKS, BLOCK_B)))
        exponent = nvfp4.outer_exponent(tl.max(top, axis=1))
        tl.store(outer_ptr + row, nvfp4.power_of_two(exponent), mask=in_rows)
    else:
        exponent = nvfp4.given_exponent(tl.load(outer_ptr + row * outer_stride, mask=in_rows, other=1.0))
        if top_ptr is not None:
            tl.atomic_max(top_ptr + row // ROWS_PER_TOP, tl.max(form.block_amax(w), axis=1), mask=in_rows)
    targets = (packed_ptr, scales_ptr, values_ptr)
    write_own_or_given(w, exponent, row, block, here, targets, BLOCKS, OWN_OUTER, KEEP_OUTER)
    if OWN_OUTER and TILES > 1:
        for tile in range(1, TILES):
            more = tl.full([], tile, tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
            in_tile = in_rows[:, None] & (more < BLOCKS)[None, :]
            v = form.load_blocks(words, more, in_tile)
            write_blocks(v, exponent, row, more, in_tile, targets, BLOCKS, True, KEEP_OUTER)


@triton.jit
def _tile_of_blocks(words, in_rows, tile, BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr):
    block = tile * BLOCK_B + tl.arange(0, BLOCK_B)
    return form.load_blocks(words, block, in_rows[:, None] & (block < BLOCKS)[None, :])


@triton.jit
def write_own_or_given(
    w, exponent, row, block, here, targets, BLOCKS: tl.constexpr, OWN_OUTER: tl.constexpr, KEEP_OUTER: tl.constexpr
):
    """Under its own outer scale no element of a row is beyond the codebook, but where that is the largest there is."""
    if OWN_OUTER:
        if tl.max(exponent, axis=0) == nvfp4.OUTER_HIGHEST:
            write_blocks(w, exponent, row, block, here, targets, BLOCKS, True, KEEP_OUTER)
        else:
            write_blocks(w, exponent, row, block, here, targets, BLOCKS, False, KEEP_OUTER)
    else:
        write_blocks(w, exponent, row, block, here, targets, BLOCKS, True, KEEP_OUTER)


@triton.jit
def write_blocks(
    w, exponent, row, block, here, targets, BLOCKS: tl.constexpr, CLAMP: tl.constexpr, KEEP_OUTER: tl.constexpr
):
    """Quantizes a tile of blocks, to codes and scales, to values, or to both; CLAMP unless no element is beyond the
    codebook."""
    scale, step, reciprocal, keep = form.block_scale(form.block_amax(w), exponent)
    packed_ptr, scales_ptr, values_ptr = targets
    at = row[:, None, None] * BLOCKS + block[None, :, None]
    if packed_ptr is not None:
        low = form.encode_words(w[0], w[1], w[2], w[3], reciprocal, keep, CLAMP)
        high = form.encode_words(w[4], w[5], w[6], w[7], reciprocal, keep, CLAMP)
        tl.store(scales_ptr + row[:, None] * BLOCKS + block[None, :], scale.to(tl.uint8), mask=here)
        tl.store(packed_ptr + at * 2 + tl.arange(0, 2)[None, None, :], tl.join(low, high), mask=here[:, :, None])
    if values_ptr is not None:
        if not KEEP_OUTER:
            step *= nvfp4.power_of_two(-exponent + 2 * nvfp4.BIAS)[:, None]
        first = form.round_four(w[0], w[1], w[2], w[3], reciprocal, keep, step, CLAMP)
        second = form.round_four(w[4], w[5], w[6], w[7], reciprocal, keep, step, CLAMP)
        target = values_ptr + at * 8 + tl.arange(0, 4)[None, None, :]
        tl.store(target, first, mask=here[:, :, None])
        tl.store(target + 4, second, mask=here[:, :, None])
