"""MXFP4 with macro-block scaling (arXiv 2605.20402): 128 values share a factor 1 + m/256, each 32 an E8M0 scale.

E8M0 alone rounds a block's scale down to a power of two, so that its largest element falls anywhere in [4, 8) and is
cut at 6. The common factor takes that bias away: m is the fraction of amax/6 (amax of the 128 values) in steps of
1/256, nearest even, so that the largest element becomes 6; what remains is plain MXFP4 of x / (1 + m/256). 4.3125 bits
per value. How m is chosen is not written down in the source: this rule is ours.

Scale bytes per 128 values: four E8M0 bytes, then m. value = element * 2^(byte - 127) * (1 + m/256): exact in float32,
rounded once in bfloat16 (up to 11 significant bits). A non-finite value poisons its 128: four NaN bytes, m = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_compile.numerics.codec import EXPONENT_MASK, MANTISSA_BITS, bits_of, decode, encode_magnitude
from trace_compile.numerics.formats import FORMATS, Profile
from trace_compile.numerics.scales import E8M0_NAN, block_amax, decode_scales, divide, encode_scales, reciprocal_of_e8m0

_FORMAT, _INNER = FORMATS["mxfp4_macro"], FORMATS["mxfp4"]
_PARTS = _FORMAT.block // _INNER.block
_STEPS = 256


def encode(magnitude: Tensor, profile: Profile) -> tuple[Tensor, Tensor]:
    """float32 |x| [..., K] -> magnitude codes uint8 [..., K] and scale bytes uint8 [..., K/128*5]."""
    amax = block_amax(magnitude, _FORMAT.block)
    finite = bits_of(amax) < EXPONENT_MASK
    target = divide(torch.where(finite, amax, 0.0), _FORMAT.element.max)
    fraction = (bits_of(target) & ((1 << MANTISSA_BITS) - 1)).double() * (_STEPS / (1 << MANTISSA_BITS))
    m = fraction.round() % _STEPS  # a fraction that rounds up to 1 is the next power of two
    m = torch.where(target >= torch.finfo(torch.float32).tiny, m, 0.0).to(torch.uint8)
    reduced = _reduced(magnitude, m)
    inner = encode_scales(block_amax(reduced, _INNER.block), magnitude.new_ones(1), _INNER, profile)
    inner = torch.where(finite.repeat_interleave(_PARTS, -1), inner, E8M0_NAN).to(torch.uint8)
    scales = torch.cat((inner.unflatten(-1, (-1, _PARTS)), m.unsqueeze(-1)), -1).flatten(-2)
    return encode_magnitude(_over_e8m0(reduced, inner), _FORMAT.element), scales


def scaled(magnitude: Tensor, scales: Tensor) -> Tensor:
    """float32 |x| over its scales: elements before rounding; NaN under NaN bytes."""
    inner, m = _split(scales)
    return _over_e8m0(_reduced(magnitude, m), inner)


def decode_values(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., K]."""
    inner, m = _split(scales)
    values = decode(codes, _FORMAT.element).unflatten(-1, (-1, _INNER.block))
    values = values.mul_(decode_scales(inner, _INNER).unsqueeze(-1)).flatten(-2)
    return (values.unflatten(-1, (-1, _FORMAT.block)) * _factor(m).unsqueeze(-1)).flatten(-2)


def _split(scales: Tensor) -> tuple[Tensor, Tensor]:
    """E8M0 bytes [..., K/32] and m [..., K/128]."""
    parts = scales.unflatten(-1, (-1, _PARTS + 1))
    return parts[..., :_PARTS].flatten(-2), parts[..., _PARTS]


def _factor(m: Tensor) -> Tensor:
    return 1.0 + m.float() / _STEPS


def _reduced(magnitude: Tensor, m: Tensor) -> Tensor:
    """|x| / (1 + m/256), the IEEE float32 quotient."""
    return divide(magnitude.unflatten(-1, (-1, _FORMAT.block)), _factor(m).unsqueeze(-1)).flatten(-2)


def _over_e8m0(reduced: Tensor, inner: Tensor) -> Tensor:
    blocks = reduced.unflatten(-1, (-1, _INNER.block))
    return (blocks * reciprocal_of_e8m0(inner).unsqueeze(-1)).flatten(-2)
