"""The quantizer on words of two bfloat16 values: the bytes of ``nvfp4``, at the speed of memory.

Why: on a GPU quantization is bound by integer instructions, of which a cycle has half as many as of multiply-adds. Here
an element costs about seven. Elements stay in pairs as they lie in memory; the multiply-add units shift and add; a
quotient becomes a code by one rounding of its bits, for E2M1's values times 2^-126 are the float32 whose exponent and
first mantissa bit are the code, subnormals included.

Exactness: x has 8 significant bits, a step 4, a midpoint of the codebook 3. So a quotient is a midpoint exactly or lies
2^-10 away at least, while the computed one is within 2^-21: what is nearer to a midpoint than ``SLACK`` is on it.

Layout: a block of 16 elements is 8 words, each a tensor [M, B] of its own, so that nothing moves between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trace_compile.kernels import nvfp4
from trace_compile.numerics.formats import FORMATS

_ELEMENT = FORMATS["nvfp4"].element

WORDS = tl.constexpr(FORMATS["nvfp4"].block // 2)
# bfloat16's own layout, in the upper half of a word.
SIGNS = tl.constexpr(-0x7FFF8000)
UPPER = tl.constexpr(-0x10000)
MAGNITUDE_SHIFT = tl.constexpr(17)
INFINITY = tl.constexpr(0x7F80)
# Added to a magnitude it carries Inf and NaN out of the word, below all others: their maximum ignores them.
BEYOND_INFINITY = tl.constexpr(0x8000 - 0x7F80)
# Half of a code's last place in the rounded bits but for the slack, and twice the slack where the code below is odd.
SLACK = 2**10
HALF_LESS_SLACK = tl.constexpr(2 ** (22 - _ELEMENT.mantissa_bits) - SLACK)
ODD_SHIFT = tl.constexpr(23 - _ELEMENT.mantissa_bits - 11)
ODD = tl.constexpr(2 * SLACK)
# Where two codes stand in a word that holds the upper halves of two rounded values, and how far above them their signs.
_PLACE = 23 - _ELEMENT.mantissa_bits - 16
PLACE = tl.constexpr(_PLACE)
MAGNITUDES = tl.constexpr((_ELEMENT.top << _PLACE) * 0x10001)
SIGN_MOVE = tl.constexpr(15 - _ELEMENT.magnitude_bits - _PLACE)
CODE_SIGNS = tl.constexpr((1 << _ELEMENT.magnitude_bits + _PLACE) * 0x10001)
ROUNDED = tl.constexpr((_ELEMENT.top << (23 - _ELEMENT.mantissa_bits)) - 2**31)
TO_CODE = tl.constexpr(2.0 ** (_ELEMENT.bias - 127))
FROM_CODE = tl.constexpr(2.0 ** (127 - _ELEMENT.bias))
LARGEST = tl.constexpr(_ELEMENT.max)


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
    return tl.maximum((w << 1) + (ADDED << MAGNITUDE_SHIFT), (w << MAGNITUDE_SHIFT) + (ADDED << MAGNITUDE_SHIFT))


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
    return tl.maximum(_largest_of(w, BEYOND_INFINITY) - BEYOND_INFINITY, 0) << 16


@triton.jit
def block_scale(amax, exponent):
    """Bits of block amaxes [M, B], biased exponents [M] -> scale bytes, steps, their reciprocals (0 under NaN), masks
    of what is kept of a word: signs alone under NaN."""
    scale = nvfp4.encode_scale(amax, exponent[:, None])
    scale = tl.where((exponent == 0)[:, None], nvfp4.SCALE_NAN, scale)
    step = nvfp4.decode_scale(scale) * nvfp4.power_of_two(exponent)[:, None]
    real = scale != nvfp4.SCALE_NAN
    return scale, step, tl.where(real, 1.0 / step, 0.0), tl.where(real, -1, SIGNS)


@triton.jit
def _round(upper, reciprocal, CLAMP: tl.constexpr):
    """bfloat16 in the upper half of int32 -> sign and rounded bits of the quotient: the code's, the lower ones void."""
    quotient = upper.to(tl.float32, bitcast=True) * reciprocal
    if CLAMP:
        quotient = tl.minimum(tl.maximum(quotient, -LARGEST), LARGEST)
    bits = (quotient * TO_CODE).to(tl.int32, bitcast=True)
    return bits + (((bits >> ODD_SHIFT) & ODD) + HALF_LESS_SLACK)


@triton.jit
def _halves(word, reciprocal, keep, CLAMP: tl.constexpr):
    """A word's two elements, rounded."""
    low = _round((word << 16) & (keep & UPPER), reciprocal, CLAMP)
    return low, _round(word & (keep & UPPER), reciprocal, CLAMP)


@triton.jit
def _nibbles(low, high):
    """Rounded elements j and j + 4 of a word of codes -> their codes, 6 bits up in each half."""
    both = (high & UPPER) | ((low >> 16) & 0xFFFF)
    return (both & MAGNITUDES) | ((both >> SIGN_MOVE) & CODE_SIGNS)


@triton.jit
def encode_words(w0, w1, w2, w3, reciprocal, keep, CLAMP: tl.constexpr):
    """Four words of eight elements -> int32 of eight codes, the first in the lowest bits."""
    e0, e1 = _halves(w0, reciprocal, keep, CLAMP)
    e2, e3 = _halves(w1, reciprocal, keep, CLAMP)
    e4, e5 = _halves(w2, reciprocal, keep, CLAMP)
    e6, e7 = _halves(w3, reciprocal, keep, CLAMP)
    first = _nibbles(e1, e5) * 16 + _nibbles(e0, e4)
    second = _nibbles(e3, e7) * 16 + _nibbles(e2, e6)
    return second * (1 << 8 - PLACE) + (first >> PLACE)


@triton.jit
def _value(rounded, step):
    """Rounded bits -> float32 element * step."""
    return (rounded & ROUNDED).to(tl.float32, bitcast=True) * FROM_CODE * step


@triton.jit
def _round_word(word, reciprocal, keep, step, CLAMP: tl.constexpr):
    low, high = _halves(word, reciprocal, keep, CLAMP)
    low, high = _value(low, step).to(tl.int32, bitcast=True), _value(high, step).to(tl.int32, bitcast=True)
    return (high & UPPER) | ((low >> 16) & 0xFFFF)


@triton.jit
def round_four(w0, w1, w2, w3, reciprocal, keep, step, CLAMP: tl.constexpr):
    """Four words [M, B] quantized and decoded again: [M, B, 4]. Exact: element * step has 6 significant bits."""
    v0 = _round_word(w0, reciprocal, keep, step, CLAMP)
    v1 = _round_word(w1, reciprocal, keep, step, CLAMP)
    v2 = _round_word(w2, reciprocal, keep, step, CLAMP)
    v3 = _round_word(w3, reciprocal, keep, step, CLAMP)
    # What is joined last stands next to each other.
    return tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), [w0.shape[0], w0.shape[1], 4])
