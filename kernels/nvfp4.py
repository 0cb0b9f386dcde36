"""The NVFP4 format in device code: outer scale, block scale, element code, each on the bits of a float32.

Why a module: every kernel that quantizes (activations before a GEMM, the requantization in an epilogue) must give the
bytes that ``numerics`` gives, so there is one device definition as there is one host definition. Why bits: Triton's
division is approximate and its fp8 casts saturate on some devices and versions only, while shifts, adds, comparisons
and exact products are the same everywhere, in Triton's interpreter too.

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
INFINITY = tl.constexpr(_bits(float("inf")))
BIAS = tl.constexpr(127)

BLOCK = tl.constexpr(_FORMAT.block)
ELEMENT_MAX = tl.constexpr(_FORMAT.element.max)
# Where the sign bit of a float32 goes in a code.
SIGN_SHIFT = tl.constexpr(31 - _FORMAT.element.magnitude_bits)
SIGN_CODE = tl.constexpr(1 << _FORMAT.element.magnitude_bits)
MID_1, MID_2, MID_3, MID_4, MID_5, MID_6, MID_7 = (tl.constexpr(_midpoint(code)) for code in range(1, 8))

OUTER_LOWEST = tl.constexpr(127 + OUTER_EXPONENTS[0])
OUTER_HIGHEST = tl.constexpr(127 + OUTER_EXPONENTS[1])
_BOUND = _bits(_FORMAT.element.max * _PROFILE.scale_bound)
BOUND_EXPONENT = tl.constexpr((_BOUND >> 23) - 127)
BOUND_CARRY = tl.constexpr(2**23 - 1 - (_BOUND & (2**23 - 1)))

SCALE_FLOOR = tl.constexpr(_PROFILE.floor)
SCALE_MAX = tl.constexpr(_PROFILE.scale_bound)
SCALE_NAN = tl.constexpr(E4M3.nan_from)
SCALE_DROPPED = tl.constexpr(23 - E4M3.mantissa_bits)  # mantissa bits of float32 that E4M3 does not have
SCALE_HALF = tl.constexpr(2 ** (22 - E4M3.mantissa_bits) - 1)  # just under half a step
SCALE_REBIAS = tl.constexpr((127 - E4M3.bias) << E4M3.mantissa_bits)


@triton.jit
def to_float32(x):
    """bfloat16, float16 or float32 -> float32, exact. Triton's interpreter turns bfloat16 subnormals into zeros."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


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
def encode_scale(amax, outer):
    """Bits of block amaxes and the power-of-two g -> int32 E4M3 bytes of amax/(6g): floored, nearest even, saturating.

    A block whose amax is Inf or NaN gets E4M3's NaN byte. One IEEE division for a block of elements.
    """
    quotient = tl.math.div_rn(finite_or_zero(amax).to(tl.float32, bitcast=True), ELEMENT_MAX * outer)
    bits = tl.minimum(tl.maximum(quotient, SCALE_FLOOR), SCALE_MAX).to(tl.int32, bitcast=True)
    odd = (bits >> SCALE_DROPPED) & 1
    byte = ((bits + (SCALE_HALF + odd)) >> SCALE_DROPPED) - SCALE_REBIAS
    return tl.where(amax < INFINITY, byte, SCALE_NAN)


@triton.jit
def decode_scale(byte):
    """int32 E4M3 bytes of normal numbers, or of NaN -> float32."""
    bits = (byte + SCALE_REBIAS) << SCALE_DROPPED
    return tl.where(byte == SCALE_NAN, MAGNITUDE_MASK, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode_element(x, step):
    """float32 x and step = block scale * g (same shape or broadcast) -> int32 codes of x / step: nearest, ties to even.

    No quotient is formed: |x| is compared with midpoint * step, which is exact (7 significant bits). Three comparisons
    find the code bit by bit; a midpoint below an even code belongs to it, one below an odd code does not. A step of NaN
    gives the magnitude zero.
    """
    a = tl.abs(x)
    high = a >= MID_4 * step
    middle = a >= tl.where(high, MID_6 * step, MID_2 * step)
    low = a > tl.where(
        high,
        tl.where(middle, MID_7 * step, MID_5 * step),
        tl.where(middle, MID_3 * step, MID_1 * step),
    )
    magnitude = high.to(tl.int32) * 4 + middle.to(tl.int32) * 2 + low.to(tl.int32)
    return magnitude | ((x.to(tl.int32, bitcast=True) >> SIGN_SHIFT) & SIGN_CODE)
