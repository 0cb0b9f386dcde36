"""The NVFP4 format in device code: outer scale, block scale, element code, each on the bits of a float32.

Why a module: every kernel that quantizes (activations before a GEMM, the requantization in an epilogue) must give the
bytes that ``numerics`` gives, so there is one device definition as there is one host definition. Why bits: Triton's
division is approximate and its fp8 casts saturate on some devices and versions only, while shifts, adds, comparisons
and exact products are the same everywhere, in Triton's interpreter too. (In the interpreter a constant of this module
must stand to the right of a tensor, ``step * MID_1``: its own operators do not know tensors.)

Invariants: no literal of the format stands here; every constant is computed from the formats table at import.
Magnitudes travel as int32 bit patterns (sign cleared), which order as the floats do and keep NaN and Inf apart.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from trace_compile.numerics.formats import E4M3, FORMATS, OUTER_EXPONENTS, PROFILES

_FORMAT = FORMATS["nvfp4"]
_PROFILE = PROFILES["pow2"]


def _bits(value: float) -> int:
    """Bit pattern of a positive float32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _midpoint(code: int) -> float:
    """The value halfway between the magnitudes of two neighbouring element codes, ``code - 1`` and ``code``."""
    return (_FORMAT.element.codebook[code - 1] + _FORMAT.element.codebook[code]) / 2


# float32's own layout.
MANTISSA = tl.constexpr(23)
MANTISSA_MASK = tl.constexpr(2**23 - 1)
MAGNITUDE_MASK = tl.constexpr(2**31 - 1)
SIGN_MASK = tl.constexpr(-(2**31))
INFINITY = tl.constexpr(_bits(float("inf")))
BIAS = tl.constexpr(127)

BLOCK = tl.constexpr(_FORMAT.block)
ELEMENT_MAX = tl.constexpr(_FORMAT.element.max)
ELEMENT_TOP = tl.constexpr(_FORMAT.element.top)
# Where the sign bit of a float32 goes in a code.
SIGN_SHIFT = tl.constexpr(31 - _FORMAT.element.magnitude_bits)
SIGN_CODE = tl.constexpr(1 << _FORMAT.element.magnitude_bits)
# A code's magnitude moved to where float32 keeps the exponent and first mantissa bit, and what that lacks in exponent.
ELEMENT_SHIFT = tl.constexpr(23 - _FORMAT.element.mantissa_bits)
ELEMENT_REBIAS = tl.constexpr(2.0 ** (127 - _FORMAT.element.bias))
MID_1, MID_2, MID_3, MID_4, MID_5, MID_6, MID_7 = (tl.constexpr(_midpoint(code)) for code in range(1, 8))

OUTER_LOWEST = tl.constexpr(127 + OUTER_EXPONENTS[0])
OUTER_HIGHEST = tl.constexpr(127 + OUTER_EXPONENTS[1])
_BOUND = _bits(_FORMAT.element.max * _PROFILE.scale_bound)
BOUND_EXPONENT = tl.constexpr((_BOUND >> 23) - 127)
BOUND_CARRY = tl.constexpr(2**23 - 1 - (_BOUND & (2**23 - 1)))

SCALE_FLOOR = tl.constexpr(_PROFILE.floor)
SCALE_MAX = tl.constexpr(_PROFILE.scale_bound)
SCALE_TOP = tl.constexpr(E4M3.top)
SCALE_NAN = tl.constexpr(E4M3.nan_from)
SCALE_DROPPED = tl.constexpr(23 - E4M3.mantissa_bits)  # mantissa bits of float32 that E4M3 does not have
SCALE_HALF = tl.constexpr(2 ** (22 - E4M3.mantissa_bits))  # half a step of E4M3, in those bits
SCALE_REBIAS = tl.constexpr((127 - E4M3.bias) << E4M3.mantissa_bits)

# Rounding to integers by addition: adding ROUND leaves the nearest integer, ties to even, in the low bits of the sum.
# Adding SNAP first leaves a quotient rounded to a multiple of 2^-14 (see encode_element).
ROUND = tl.constexpr(1.5 * 2**23)
SNAP = tl.constexpr(512.0)
ROUND_TOP = tl.constexpr(_bits(1.5 * 2**23) + _FORMAT.element.top)


@triton.jit
def to_float32(x):
    """bfloat16, float16 or float32 -> float32, exact, with the sign of NaN.

    Triton's interpreter turns bfloat16 subnormals into zeros, and a GPU drops the sign of a float16 NaN.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        sign = (x.to(tl.int16, bitcast=True).to(tl.int32) >> 31) & SIGN_MASK
        return (magnitude_bits(x.to(tl.float32)) | sign).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def magnitude_bits(x):
    """float32 -> int32 bits of |x|; those of Inf and NaN are ``INFINITY`` and above."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE_MASK


@triton.jit
def finite_or_zero(magnitude):
    """Magnitude bits with those of NaN and Inf replaced by zero: ranges ignore them."""
    return tl.where(magnitude < INFINITY, magnitude, 0)


@triton.jit
def outer_exponent(amax):
    """Bits of a finite amax -> biased exponent of the smallest power of two g with amax <= 6*448*g, clamped; 1.0 if 0.

    Adding BOUND_CARRY carries into the exponent exactly where amax's mantissa exceeds the bound's.
    """
    exponent = ((amax + BOUND_CARRY) >> MANTISSA) - BOUND_EXPONENT
    exponent = tl.minimum(tl.maximum(exponent, OUTER_LOWEST), OUTER_HIGHEST)
    return tl.where(amax == 0, BIAS, exponent)


@triton.jit
def given_exponent(outer):
    """float32 outer scale -> biased exponent, or 0 where it is no power of two in the format's range."""
    bits = outer.to(tl.int32, bitcast=True)
    exponent = bits >> MANTISSA
    valid = ((bits & MANTISSA_MASK) == 0) & (exponent >= OUTER_LOWEST) & (exponent <= OUTER_HIGHEST)
    return tl.where(valid, exponent, 0)


@triton.jit
def power_of_two(exponent):
    """Biased exponent in [1, 254] -> float32 power of two."""
    return (exponent << MANTISSA).to(tl.float32, bitcast=True)


@triton.jit
def encode_scale(amax, exponent):
    """Bits of block amaxes, biased exponent of g -> int32 E4M3 bytes of amax/(6g): floored, nearest even, saturating.

    An approximate quotient finds E4M3 neighbours, the amax is then compared with 6g times the middle between them,
    which is exact: where the quotient falls just across a neighbour, the comparison decides the same. A block whose
    amax is Inf or NaN gets E4M3's NaN byte.
    """
    finite = finite_or_zero(amax)
    quotient = finite.to(tl.float32, bitcast=True) * (power_of_two(-exponent + 2 * BIAS) * (1.0 / ELEMENT_MAX))
    bits = tl.minimum(tl.maximum(quotient, SCALE_FLOOR), SCALE_MAX).to(tl.int32, bitcast=True)
    below = bits >> SCALE_DROPPED
    middle = ((below << SCALE_DROPPED) | SCALE_HALF).to(tl.float32, bitcast=True) * (
        ELEMENT_MAX * power_of_two(exponent)
    )
    # Bit patterns of floats are ordered as integers: adding 1 to amax's turns > into >=, for a tie below an even code.
    above = finite + (below & 1) > middle.to(tl.int32, bitcast=True)
    byte = tl.minimum(below + above.to(tl.int32) - SCALE_REBIAS, SCALE_TOP)
    return tl.where(amax < INFINITY, byte, SCALE_NAN)


@triton.jit
def decode_scale(byte):
    """int32 E4M3 bytes of normal numbers, or of NaN -> float32."""
    bits = (byte + SCALE_REBIAS) << SCALE_DROPPED
    return tl.where(byte == SCALE_NAN, MAGNITUDE_MASK, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode_element(x, step, SHORT: tl.constexpr):
    """float32 x and step = block scale * g (broadcast) -> int32 codes of x / step: nearest, ties to even, saturating.

    SHORT promises that x came from bfloat16 or float16. A step of NaN gives the magnitude zero.
    """
    if SHORT:
        magnitude = _magnitude_of_short(tl.abs(x), step)
    else:
        magnitude = _magnitude(tl.abs(x), step)
    return magnitude | ((x.to(tl.int32, bitcast=True) >> SIGN_SHIFT) & SIGN_CODE)


@triton.jit
def _magnitude(a, step):
    """Any float32. No quotient: a is compared with midpoint * step, which is exact (7 significant bits).

    Three comparisons find the code bit by bit; a midpoint below an even code belongs to it, one below an odd code does
    not.
    """
    high = a >= step * MID_4
    middle = a >= tl.where(high, step * MID_6, step * MID_2)
    low = a > tl.where(
        high,
        tl.where(middle, step * MID_7, step * MID_5),
        tl.where(middle, step * MID_3, step * MID_1),
    )
    return high.to(tl.int32) * 4 + middle.to(tl.int32) * 2 + low.to(tl.int32)


@triton.jit
def _magnitude_of_short(a, step):
    """Values with at most 11 significant bits: half the instructions of ``_magnitude``, most on the multiply-add units.

    Such a value is either midpoint * step exactly, and then a * (1/step) is within 2^-19 of the midpoint, or its
    quotient is at least 2^-13 away. Rounding the quotient to a multiple of 2^-14 therefore puts the first kind on the
    midpoint and leaves the others on their side, fused multiply-add or not. The E2M1 code is then the least of three
    roundings to integers, one for each spacing of the codebook: 2q, q + 2, q/2 + 4.
    """
    real = step == step
    return rounded_code(a, 1.0 / step, True) & tl.where(real, ELEMENT_TOP, 0)


@triton.jit
def rounded_code(a, reciprocal, CLAMP: tl.constexpr):
    """Magnitudes, reciprocals of steps -> codes in the low bits of ROUND's, as ``_magnitude_of_short`` says. Without
    CLAMP no quotient may round beyond the codebook."""
    snapped = a * reciprocal + SNAP
    halves = (snapped * 2.0 + (ROUND - 2.0 * SNAP)).to(tl.int32, bitcast=True)
    ones = (snapped + (ROUND + 2.0 - SNAP)).to(tl.int32, bitcast=True)
    twos = (snapped * 0.5 + (ROUND + 4.0 - 0.5 * SNAP)).to(tl.int32, bitcast=True)
    least = tl.minimum(tl.minimum(halves, ones), twos)
    return tl.minimum(least, ROUND_TOP) if CLAMP else least


@triton.jit
def decode_element(code):
    """int32 code -> float32 element.

    The magnitude's bits are those of a float32 of the same value but for the exponent's bias, its subnormal included.
    """
    bits = ((code & ELEMENT_TOP) << ELEMENT_SHIFT) | ((code & SIGN_CODE) << SIGN_SHIFT)
    return bits.to(tl.float32, bitcast=True) * ELEMENT_REBIAS


@triton.jit
def quantize_blocks(blocks, exponent, SHORT: tl.constexpr):
    """float32 [M, B, 16] and biased exponents of the rows' outer scales [M] (0: none, NaN scales) -> int32 codes
    [M, B, 16], int32 scale bytes [M, B], float32 block scale * outer scale [M, B]."""
    scale = encode_scale(tl.max(magnitude_bits(blocks), axis=2), exponent[:, None])
    scale = tl.where((exponent == 0)[:, None], SCALE_NAN, scale)
    step = decode_scale(scale) * power_of_two(exponent)[:, None]
    return encode_element(blocks, step[:, :, None], SHORT), scale, step


@triton.jit
def largest_finite(x):
    """float32 [M, K] -> bits of each row's largest finite magnitude [M]."""
    return tl.max(finite_or_zero(magnitude_bits(x)), axis=1)
