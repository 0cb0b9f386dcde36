"""From amax to scales: the outer scale, and the per-block scale bytes of formats with one number per block.

Powers of two are computed on exponent bits. Every other operation of a profile is one correctly rounded float32
operation: a division or reciprocal goes through float64, because float32 division is not IEEE on every compiler, and
rounding a float64 quotient to float32 gives the IEEE float32 quotient (53 >= 2*24 + 2 bits). These tensors are small:
one number per block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trace_compile.numerics.codec import (
    EXPONENT_BIAS,
    EXPONENT_MASK,
    MAGNITUDE_MASK,
    MANTISSA_BITS,
    bits_of,
    decode_e4m3,
    encode_magnitude,
    power_of_two,
)
from trace_compile.numerics.formats import (
    E4M3,
    INT4_SMALLEST_SCALE,
    OUTER_EXPONENTS,
    BlockRule,
    Format,
    OuterRule,
    Profile,
    ScaleKind,
    format_of,
    profile_of,
)

E8M0_NAN = 0xFF


def amax(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """max |x| over ``dim`` in float32, ignoring NaN and Inf; 0 where nothing is left (also over an empty dimension)."""
    magnitude = x.float().abs().nan_to_num_(nan=0.0, posinf=0.0)
    dims = (dim,) if isinstance(dim, int) else dim
    if any(x.shape[d] == 0 for d in dims):
        return magnitude.sum(dims)
    return magnitude.amax(dims)


def outer_bound(fmt: str = "nvfp4", profile: str = "pow2") -> float:
    """Largest |x| / g that does not saturate: largest element times largest block scale of the profile."""
    f, p = format_of(fmt), profile_of(profile)
    return f.element.max * (p.scale_bound if f.scale is ScaleKind.E4M3 else 1.0)


def outer_scale(amax: Tensor, fmt: str = "nvfp4", profile: str = "pow2") -> Tensor:
    """Outer scale g of float32 ``amax`` [...] -> float32 [...], finite and positive, 1 where amax is 0 (numerics 1.2).

    pow2: smallest 2^k with amax <= bound * 2^k; others: amax / bound. Both clamped to ``OUTER_EXPONENTS``: larger
    values saturate.
    """
    bound, (low, high) = outer_bound(fmt, profile), OUTER_EXPONENTS
    if profile_of(profile).outer is OuterRule.POWER_OF_TWO:
        mantissa, exponent = math.frexp(bound)  # bound = 2*mantissa * 2^(exponent - 1), 2*mantissa in [1, 2)
        fraction = int((2 * mantissa - 1) * 2**MANTISSA_BITS)
        # adding this carries into the exponent exactly when amax's fraction exceeds the bound's
        carry = (1 << MANTISSA_BITS) - 1 - fraction
        k = ((bits_of(amax) + carry) >> MANTISSA_BITS) - (EXPONENT_BIAS + exponent - 1)
        g = power_of_two(k.clamp(low, high))
    else:
        g = (amax.double() / bound).float().clamp(2.0**low, 2.0**high)
    return torch.where(amax == 0, 1.0, g)


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """The IEEE float32 quotient a / b of float32 operands, through float64.

    The way over the bits keeps Inductor from merging the casts of a division of a quotient: it drops a float32 between
    two float64, and the rounding with it. It drops a pair of views as well, hence an operation between them.
    """
    a = a.double() if isinstance(a, Tensor) else a
    b = b.double() if isinstance(b, Tensor) else b
    quotient = a / b
    assert isinstance(quotient, Tensor)
    return quotient.float().view(torch.int32).bitwise_or(0).view(torch.float32)


def block_amax(magnitude: Tensor, block: int) -> Tensor:
    """float32 |x| [..., K] -> its maximum per block [..., K/block]; NaN or Inf exactly where the block holds one."""
    bits = bits_of(magnitude).unflatten(-1, (magnitude.shape[-1] // block, block))
    return bits.amax(-1).view(torch.float32)  # as integers, NaN > Inf > finite: no special cases


def encode_scales(a: Tensor, g: Tensor, fmt: Format, profile: Profile, target: float | None = None) -> Tensor:
    """Block amax a [..., K/block] and outer scale g [..., 1] -> raw scale bytes uint8 [..., K/block * bytes].

    ``target``: the element value that the block's amax is mapped to (default: the largest). A non-finite a gives the
    NaN byte.
    """
    finite = bits_of(a) < EXPONENT_MASK
    if fmt.scale is ScaleKind.E4M3:
        scale = _block_scale(a, g, profile, target or fmt.element.max).clamp_(min=profile.floor)
        byte = encode_magnitude(scale, E4M3)
        if profile.zero_scale is not None:
            byte = torch.where((a == 0) | (byte == 0), E4M3.codebook.index(profile.zero_scale), byte)
        return torch.where(finite, byte, E4M3.nan_code).to(torch.uint8)
    if fmt.scale is ScaleKind.E8M0:
        largest_binade = math.frexp(fmt.element.max)[1] - 1
        byte = ((bits_of(a) >> MANTISSA_BITS) - largest_binade).clamp(min=0)  # floor(log2 a) is the exponent field
        return torch.where(finite, byte, E8M0_NAN).to(torch.uint8)
    if fmt.scale is ScaleKind.FLOAT32:
        scale = divide(a, fmt.element.max).clamp(min=INT4_SMALLEST_SCALE)
        return _fresh(torch.where(finite, scale, torch.nan)).view(torch.uint8)
    return a.new_empty((*a.shape[:-1], 0), dtype=torch.uint8)


def _block_scale(a: Tensor, g: Tensor, profile: Profile, m: float) -> Tensor:
    """The profile's block rule, formula by formula as written beside the enum's members; float32."""
    match profile.block:
        case BlockRule.DIVIDE:
            return divide(a, g * m)
        case BlockRule.FOLD:
            return a * divide(1.0, g * m)
        case BlockRule.MAX_THEN_OUTER:
            return divide(divide(a, m), g)
        case BlockRule.ENCODE:
            return divide(1.0, g) * divide(a, m)
        case BlockRule.ENCODE_RECIPROCAL:
            return divide(1.0, g) * (a * torch.full_like(a, 1.0 / m))


def decode_scales(scales: Tensor, fmt: Format) -> Tensor:
    """Raw scale bytes -> float32 [..., K/block], without the outer scale. HiF4 and MACRO have decoders of their own."""
    if fmt.scale is ScaleKind.E4M3:
        return decode_e4m3(scales)
    if fmt.scale is ScaleKind.E8M0:
        bits = scales.to(torch.int32) << MANTISSA_BITS
        bits = torch.where(scales == 0, 1 << (MANTISSA_BITS - 1), bits)  # 2^-127 is subnormal in float32
        return torch.where(scales == E8M0_NAN, MAGNITUDE_MASK, bits).view(torch.float32)
    if scales.shape[-1] == 0:  # strides of a row without bytes cannot be divided by four
        return scales.float()
    return _fresh(scales).view(torch.float32)


def _fresh(x: Tensor) -> Tensor:
    """A copy with unit stride and offset 0, which a view to a dtype of another size asks for even in dimensions of
    size 1.
    """
    return x.clone(memory_format=torch.contiguous_format)


def reciprocal_of_e8m0(scales: Tensor) -> Tensor:
    """E8M0 bytes in [0, 253] -> float32 2^(127 - byte), exact; NaN for the NaN byte."""
    bits = (2 * EXPONENT_BIAS - scales.to(torch.int32)) << MANTISSA_BITS
    return torch.where(scales == E8M0_NAN, MAGNITUDE_MASK, bits).view(torch.float32)
