"""Packs expert weights: all experts at once, from the parameter's own dtype to linear codes and scales.

An expert's outer scale follows from its largest magnitude. A weight that was not packed before is read for that first
and then quantized (``quantize``). One that was has, nearly always, the outer scale it had, a power of two: it is
quantized with that and its magnitudes are taken in the same pass; experts whose scale turns out to be another are
quantized again. So a training step reads its weights once.

The bytes are those of ``ops.weights.pack_experts``, whatever was guessed; that stays the reference and gives the named
error for what is not finite.

Invariant: nothing but codes, scales and one float32 an expert is allocated; a transposed or interleaved parameter is
copied once, in its own dtype.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import nvfp4, words
from trace_compile.kernels.launch import target_of, words_launch
from trace_compile.kernels.quantize import INTERPRETING, in_words, quantize_rows, quantize_words, write_blocks
from trace_compile.kernels.rows import on
from trace_compile.numerics.formats import FORMATS
from trace_compile.ops.scheme import OperandScheme
from trace_compile.ops.weights import Packed

_FORMAT = FORMATS["nvfp4"]


def pack(weight: Tensor, scheme: OperandScheme) -> Packed | None:
    """``weight [E, N, K]`` -> its packed form, or None where the reference is to pack it: another device, dtype or
    scheme, no elements, or values that are not finite. Waits for the device once."""
    if not (weight.is_cuda or INTERPRETING) or weight.dim() != 3 or weight.numel() == 0:
        return None
    if weight.shape[-1] % _FORMAT.block:
        return None
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    if FORMATS.get(scheme.fmt) is not _FORMAT or scheme.profile != "pow2" or scheme.residual is not None:
        return None
    weight, shared = weight.contiguous(), scheme.outer == "tensor"
    place = (weight.device, weight.data_ptr(), tuple(weight.shape), weight.dtype, shared)
    guess = _GUESSES.pop(place, None) if in_words(weight.view(-1, weight.shape[-1])) else None
    with on(weight):
        packed, finite = _pack_new(weight, shared) if guess is None else _pack_again(weight, shared, guess)
    if not bool(finite):
        return None
    _GUESSES[place] = packed.outer.clone()
    while len(_GUESSES) > _REMEMBERED:
        _GUESSES.popitem(last=False)
    return packed


_REMEMBERED = 2048
_GUESSES: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
"""Outer scales [E] that weights had, by where they lie. A wrong one costs time, never a byte."""


def _pack_new(weight: Tensor, shared: bool) -> tuple[Packed, Tensor]:
    """The packed weight, and whether all its values are finite."""
    (experts, n, k), size = weight.shape, weight[0].numel()
    top = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    block = 4096
    _amax_kernel[(triton.cdiv(size, 8 * block), experts)](weight, top, size, TURNS=8, BLOCK=block, num_warps=4)
    outer = _outer_scales(top, shared)
    q = quantize_rows(weight.view(experts * n, k), outer.repeat_interleave(n))
    return Packed(q.packed.view(experts, n, -1), q.scales.view(experts, n, -1), outer), _finite(top)


def _pack_again(weight: Tensor, shared: bool, guess: Tensor) -> tuple[Packed, Tensor]:
    """The same for a bfloat16 weight whose experts had the outer scales ``guess``."""
    experts, n, k = weight.shape
    top = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    codes = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(experts, n, k // _FORMAT.block, dtype=torch.uint8, device=weight.device)
    rows = weight.view(experts * n, k)
    quantize_words(rows, guess.repeat_interleave(n), 1, False, (codes, scales), None, top=top)
    outer = _outer_scales(top, shared)
    plan = words_launch(n, k // _FORMAT.block, False, target_of(weight.device))
    _again_kernel[(16, experts)](
        rows.view(torch.int32),
        codes.view(torch.int32),
        scales,
        guess,
        outer,
        n,
        BLOCKS=k // _FORMAT.block,
        BLOCK_M=plan.block_m,
        BLOCK_B=plan.block_b,
        num_warps=plan.num_warps,
    )
    return Packed(codes, scales, outer), _finite(top)


def _outer_scales(top: Tensor, shared: bool) -> Tensor:
    """Bits of experts' largest magnitudes -> outer scales float32 [E], one for all if ``shared``."""
    if shared:
        top = top.amax().expand(top.shape[0]).contiguous()
    outer = torch.empty(top.shape[0], dtype=torch.float32, device=top.device)
    _outer_kernel[(triton.cdiv(top.shape[0], 128),)](top, outer, top.shape[0], BLOCK=128, num_warps=4)
    return outer


def _finite(top: Tensor) -> Tensor:
    return (top < nvfp4.INFINITY.value).all()


@triton.jit
def _amax_kernel(weight_ptr, top_ptr, size, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (parts, experts). A maximum of bit patterns: those of Inf and NaN are above all others."""
    expert = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * (TURNS * BLOCK)
    largest = tl.zeros([BLOCK], tl.int32)
    for turn in range(TURNS):
        i = start + turn * BLOCK + tl.arange(0, BLOCK)
        x = nvfp4.to_float32(tl.load(weight_ptr + expert * size + i, mask=i < size, other=0.0))
        largest = tl.maximum(largest, nvfp4.magnitude_bits(x))
    tl.atomic_max(top_ptr + expert, tl.max(largest, axis=0))


@triton.jit
def _outer_kernel(top_ptr, outer_ptr, experts, BLOCK: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(top_ptr + expert, mask=expert < experts, other=0)
    tl.store(outer_ptr + expert, nvfp4.power_of_two(nvfp4.outer_exponent(top)), mask=expert < experts)


@triton.jit
def _again_kernel(
    words_ptr,
    packed_ptr,
    scales_ptr,
    guess_ptr,
    outer_ptr,
    rows,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Grid (programs, experts): experts whose outer scale was guessed wrong are quantized again, tile by tile."""
    expert = tl.program_id(1).to(tl.int64)
    outer = tl.load(outer_ptr + expert)
    if outer != tl.load(guess_ptr + expert):
        exponent = nvfp4.given_exponent(outer + tl.zeros([BLOCK_M], tl.float32))
        start = tl.program_id(0).to(tl.int64) * BLOCK_M
        while start < rows:
            in_rows = start + tl.arange(0, BLOCK_M) < rows
            row = expert * rows + start + tl.arange(0, BLOCK_M)
            for tile in range((BLOCKS + BLOCK_B - 1) // BLOCK_B):
                block = tl.full([], tile, tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
                here = in_rows[:, None] & (block < BLOCKS)[None, :]
                w = words.load_blocks(words_ptr + row[:, None] * (8 * BLOCKS), block, here)
                targets = (packed_ptr, scales_ptr, None)
                write_blocks(w, exponent, row, block, here, targets, BLOCKS, True, True)
            start += tl.num_programs(0) * BLOCK_M
