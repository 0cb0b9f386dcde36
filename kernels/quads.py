"""Device code of the quads form (``ops.quads``): words of four codes to bfloat16, times their block scales.

Why inline assembly: a plane of two neighbouring words is one 32-bit register, which is what a tensor core takes; in
Triton's own terms the halves would be taken apart and joined again. Triton's interpreter has no assembly; there the
same bits are moved by the same table in Triton's terms.

The shifter and the logic unit are what a Hopper multiprocessor runs out of first, so products do what they can.

Invariants: results are exact, element * block scale * 2^-RESIDUAL, bfloat16 (float32 in the interpreter, whose dot
products of bfloat16 are wrong); the positions of bits come from ``ops.quads.MOVES``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trace_compile.kernels import nvfp4
from trace_compile.numerics.formats import E2M1, E4M3
from trace_compile.ops import quads as form

INTERPRETING = tl.constexpr(bool(triton.knobs.runtime.interpret))
WORDS = tl.constexpr(form.BLOCK)
CHUNK = tl.constexpr(form.CHUNK)
_BFLOAT16_BIAS, _BFLOAT16_MANTISSA = 127, 7
# A scale byte moved to bfloat16's fields lacks exponent: this is added, the most that keeps its largest below infinity.
_SCALE_SHIFT = _BFLOAT16_MANTISSA - E4M3.mantissa_bits
_SCALE_BIAS = (2 * _BFLOAT16_BIAS - (E4M3.top >> E4M3.mantissa_bits)) << _BFLOAT16_MANTISSA
RESIDUAL = (_BFLOAT16_BIAS - E2M1.bias) - ((_SCALE_BIAS >> _BFLOAT16_MANTISSA) - _BFLOAT16_BIAS + E4M3.bias)
RESIDUAL_FACTOR = tl.constexpr(2.0**RESIDUAL)
"""Sums of products are to be multiplied by it."""


def _twice(half: int) -> str:
    return f"{half << 16 | half:#010x}"


def _moved(target: str, move: form.Move) -> str:
    return f"{'shl' if move.left >= 0 else 'shr'}.b32 {target}, $4, {abs(move.left)};"


def _assembly() -> str:
    """$0..$3: planes; $4: two words; $5: the row's four scale bytes ($6 is $5 again: one for each word)."""
    lines = [".reg .b32 word, part, scale;"]
    for p, moves in enumerate(form.MOVES):
        lines += [_moved("word", moves[0]), f"and.b32 word, word, {_twice(moves[0].mask)};"]
        for move in moves[1:]:
            lines += [_moved("part", move), f"lop3.b32 word, word, part, {_twice(move.mask)}, 0xF8;"]
        lines += [
            f"prmt.b32 scale, $5, 0, {0x4440 + p:#x};",  # byte p alone; the product has it in both halves
            f"mad.lo.u32 scale, scale, {_twice(1 << _SCALE_SHIFT)}, {_twice(_SCALE_BIAS)};",
            f"mul.bf16x2 ${p}, word, scale;",
        ]
    return "{" + " ".join(lines) + "}"


_ASSEMBLY = tl.constexpr(_assembly())
_SHIFT = tl.constexpr(_SCALE_SHIFT)
_BIAS = tl.constexpr(_SCALE_BIAS)
_LEFTS = tl.constexpr(tuple(tuple(m.left for m in moves) for moves in form.MOVES))
_MASKS = tl.constexpr(tuple(tuple(m.mask for m in moves) for moves in form.MOVES))
_HALF = tl.constexpr(16)


@triton.jit
def unpack(words, scales):
    """``words`` int16 [..., 16], ``scales`` int32 [...] -> [..., 64], k in its order: element * scale * 2^-RESIDUAL.

    For one or two leading dimensions. Joining the planes moves nothing: each thread has the columns of all planes that
    it is to hand to the tensor core.
    """
    scales = tl.broadcast_to(tl.expand_dims(scales, -1), words.shape)
    if INTERPRETING:
        p0 = _plane(words, scales, 0)
        p1 = _plane(words, scales, 1)
        p2 = _plane(words, scales, 2)
        p3 = _plane(words, scales, 3)
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _ASSEMBLY,
            "=r,=r,=r,=r,r,r,r",
            [words, scales],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    joined = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # [..., 16, i, j]: plane 2 i + j
    if len(words.shape) == 2:
        return tl.reshape(tl.permute(joined, (0, 2, 3, 1)), (words.shape[0], CHUNK))
    else:
        return tl.reshape(tl.permute(joined, (0, 1, 3, 4, 2)), (words.shape[0], words.shape[1], CHUNK))


@triton.jit
def _plane(words, scales, PLANE: tl.constexpr):
    """In Triton's terms and float32, whose upper half is bfloat16."""
    word = words.to(tl.int32)
    bits = word * 0
    for i in tl.static_range(len(_MASKS[PLANE])):
        left: tl.constexpr = _LEFTS[PLANE][i]
        moved = word << left if left >= 0 else word >> -left
        bits |= moved & _MASKS[PLANE][i]
    scale = (((scales >> (8 * PLANE)) & 0xFF) << _SHIFT) + _BIAS
    return (bits << _HALF).to(tl.float32, bitcast=True) * (scale << _HALF).to(tl.float32, bitcast=True)


@triton.jit
def dot_operand(x):
    """Activations as the planes' partner: as they are, or float32 where the interpreter multiplies."""
    return nvfp4.to_float32(x) if INTERPRETING else x
