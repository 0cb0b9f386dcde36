"""The quantizer on words of two bfloat16 values: the bytes of ``nvfp4`` in fewer integer instructions.

Why: on a GPU quantization is bound by integer instructions, of which a cycle has half as many as of multiply-adds.
Elements stay in pairs as they lie in memory, and what can be is shifted, rounded and put together by multiply-adds: in
Hopper's machine code about eight integer instructions an element, everything counted. Codes come from ``nvfp4``'s three
roundings; they are summed with their constant upper bits, which are taken off a whole word of codes at once.

Layout: a block of 16 elements is 8 words, each a tensor [M, B] of its own, so that nothing moves between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trace_compile.kernels import nvfp4
from trace_compile.numerics.formats import FORMATS

_ELEMENT = FORMATS["nvfp4"].element

WORDS = tl.constexpr(FORMATS["nvfp4"].block // 2)
# bfloat16's own layout, in a word's halves.
MAGNITUDE = tl.constexpr(0x7FFF0000)
SIGNS = tl.constexpr(0x80008000 - 2**32)
SIGNS_BELOW = tl.constexpr(0x00800080)
SIGNS_OF_EVEN = tl.constexpr(0x08080808)
UPPER = tl.constexpr(0xFFFF0000 - 2**32)
MAGNITUDE_SHIFT = tl.constexpr(17)
# Added to a magnitude it carries Inf and NaN out of the word, below all others: their maximum ignores them.
BEYOND_INFINITY = tl.constexpr(0x8000 - 0x7F80)
BEYOND_INFINITY_WORD = tl.constexpr((0x8000 - 0x7F80) << 17)
# What the upper bits of eight rounded values come to in a sum of them at four bits' distance.
_ROUND_BITS = nvfp4.ROUND_TOP.value - _ELEMENT.top
_CARRIED = sum(_ROUND_BITS << 4 * i for i in range(8)) % 2**32
CARRIED = tl.constexpr(_CARRIED - 2**32 if _CARRIED >= 2**31 else _CARRIED)


@triton.jit
def load_blocks(row_words, block, here):
    """Pointers to rows of words [M, 1], blocks [B] -> a tuple of the blocks' eight words, each int32 [M, B]."""
    quarter = tl.arange(0, 4)[None, None, :]
    at = row_words[:, :, None] + (block * WORDS)[None, :, None] + quarter
    first = tl.load(at, mask=here[:, :, None], other=0)
    second = tl.load(at + 4, mask=here[:, :, None], other=0)
    a, b = _four(first), _four(second)
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


@triton.jit
def _four(words):
    """[M, B, 4] -> four of [M, B], in order."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1], 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _largest(words, ADDED: tl.constexpr):
    """Largest of both halves' magnitudes, as unsigned words with the magnitude in the upper 15 bits."""
    w = words.to(tl.uint32, bitcast=True)
    return tl.maximum((w << 1) + ADDED, (w << MAGNITUDE_SHIFT) + ADDED)


@triton.jit
def _largest_of(w, ADDED: tl.constexpr):
    a = tl.maximum(_largest(w[0], ADDED), _largest(w[1], ADDED))
    b = tl.maximum(_largest(w[2], ADDED), _largest(w[3], ADDED))
    c = tl.maximum(_largest(w[4], ADDED), _largest(w[5], ADDED))
    d = tl.maximum(_largest(w[6], ADDED), _largest(w[7], ADDED))
    return (tl.maximum(tl.maximum(a, b), tl.maximum(c, d)) >> MAGNITUDE_SHIFT).to(tl.int32)


@triton.jit
def block_amax(w):
    """float32 bits of each block's largest magnitude, Inf and NaN included: int32 [M, B]."""
    return _largest_of(w, 0) << 16


@triton.jit
def block_amax_finite(w):
    """float32 bits of each block's largest finite magnitude, 0 if there is none: int32 [M, B]."""
    return tl.maximum(_largest_of(w, BEYOND_INFINITY_WORD) - BEYOND_INFINITY, 0) << 16


@triton.jit
def block_scale(amax, exponent):
    """Bits of block amaxes [M, B], biased exponents [M] -> scale bytes, steps, their reciprocals, and what is kept of
    an element: its magnitude, nothing under NaN."""
    scale = nvfp4.encode_scale(amax, exponent[:, None])
    scale = tl.where((exponent == 0)[:, None], nvfp4.SCALE_NAN, scale)
    step = nvfp4.decode_scale(scale) * nvfp4.power_of_two(exponent)[:, None]
    real = scale != nvfp4.SCALE_NAN
    return scale, step, tl.where(real, 1.0 / step, 0.0), tl.where(real, MAGNITUDE, 0)


@triton.jit
def _codes(word, reciprocal, keep, CLAMP: tl.constexpr):
    """The magnitude codes of a word's two elements, below the upper bits of a rounded value."""
    low = ((word << 16) & keep).to(tl.float32, bitcast=True)
    high = (word & keep).to(tl.float32, bitcast=True)
    return nvfp4.rounded_code(low, reciprocal, CLAMP), nvfp4.rounded_code(high, reciprocal, CLAMP)


@triton.jit
def _signs(w0, w1, w2, w3):
    """The signs of eight elements, each in the highest bit of its code's place."""
    first = ((w0 >> 8) & SIGNS_BELOW) | (w1 & SIGNS)
    second = ((w2 >> 8) & SIGNS_BELOW) | (w3 & SIGNS)
    even = (second << 16) | (first & 0xFFFF)
    odd = (second & UPPER) | ((first >> 16) & 0xFFFF)
    return ((even >> 4) & SIGNS_OF_EVEN) | odd


@triton.jit
def encode_words(w0, w1, w2, w3, reciprocal, keep, CLAMP: tl.constexpr):
    """Four words of eight elements -> int32 of eight codes, the first in the lowest bits."""
    c0, c1 = _codes(w0, reciprocal, keep, CLAMP)
    c2, c3 = _codes(w1, reciprocal, keep, CLAMP)
    c4, c5 = _codes(w2, reciprocal, keep, CLAMP)
    c6, c7 = _codes(w3, reciprocal, keep, CLAMP)
    first = (c3 * 16 + c2) * 256 + (c1 * 16 + c0)
    second = (c7 * 16 + c6) * 256 + (c5 * 16 + c4)
    return second * 65536 + first - CARRIED + _signs(w0, w1, w2, w3)


@triton.jit
def _round_word(word, reciprocal, keep, step, CLAMP: tl.constexpr):
    """The shift leaves nothing of a rounded value but its code, where float32 has exponent and first mantissa bit."""
    low, high = _codes(word, reciprocal, keep, CLAMP)
    low = (low << nvfp4.ELEMENT_SHIFT).to(tl.float32, bitcast=True) * nvfp4.ELEMENT_REBIAS * step
    high = (high << nvfp4.ELEMENT_SHIFT).to(tl.float32, bitcast=True) * nvfp4.ELEMENT_REBIAS * step
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    return (high & UPPER) | ((low >> 16) & 0xFFFF) | (word & SIGNS)


@triton.jit
def round_four(w0, w1, w2, w3, reciprocal, keep, step, CLAMP: tl.constexpr):
    """Four words [M, B] quantized and decoded again: [M, B, 4]. Exact: element * step has 6 significant bits."""
    v0 = _round_word(w0, reciprocal, keep, step, CLAMP)
    v1 = _round_word(w1, reciprocal, keep, step, CLAMP)
    v2 = _round_word(w2, reciprocal, keep, step, CLAMP)
    v3 = _round_word(w3, reciprocal, keep, step, CLAMP)
    # What is joined last stands next to each other.
    return tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), [w0.shape[0], w0.shape[1], 4])
