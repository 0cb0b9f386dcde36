"""HiF4 (HiFloat4, arXiv 2602.11287): 64 elements share an E6M2 scale and 8 + 16 one-bit exponents; 4.5 bits per value.

value = sign * E6M2 * 2^(E1_8[j//8] + E1_16[j//4]) * m, with m in {0, 0.25, ..., 1.75}. No outer scale. The encoder
works in bfloat16 steps; each is rounded once, from an exact float64 value. Scale bytes per block: E6M2, E1_8 (bit i =
group i), E1_16 (two bytes, little-endian, bit i = group i).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_compile.numerics.codec import (
    EXPONENT_MASK,
    bits_of,
    join_sign,
    pack_bits,
    power_of_two,
    sign_code,
    unpack_bits,
)
from trace_compile.numerics.codec import decode as decode_elements
from trace_compile.numerics.formats import FORMATS, S1P2
from trace_compile.numerics.scales import divide

BLOCK = FORMATS["hif4"].block
NAN_BYTE = 0xFF
_E6M2_EXPONENT_OFFSET, _E6M2_MANTISSA_BITS = 48, 2
_E6M2_SMALLEST, _E6M2_LARGEST = 2.0**-48, 1.5 * 2.0**15
_BFLOAT16_MANTISSA_BITS = 7
_DOUBLE_MANTISSA_BITS, _DOUBLE_BIAS = 52, 1023
_WIDE, _NARROW = 8, 4  # elements per one-bit factor
_ROUND_HALF_UP = 0.5


def _round_mantissa(x: Tensor, bits: int) -> Tensor:
    """float64 rounded to ``bits`` stored mantissa bits, nearest even (normal numbers)."""
    shift = _DOUBLE_MANTISSA_BITS - bits
    raw = x.view(torch.int64)
    raw = raw + ((1 << (shift - 1)) - 1) + ((raw >> shift) & 1)
    return ((raw >> shift) << shift).view(torch.float64)


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., K] -> codes uint8 [..., K] (sign, 4m) and scales uint8 [..., K/64*4]; a non-finite block: byte
    0xFF.
    """
    finite = bits_of(x.abs()) < EXPONENT_MASK
    poisoned = (~finite).unflatten(-1, (-1, BLOCK)).any(-1)
    magnitude = torch.where(finite, x.abs(), 0.0).double().unflatten(-1, (-1, BLOCK // _NARROW, _NARROW))
    narrow = magnitude.amax(-1)  # [..., blocks, 16]
    wide = narrow.unflatten(-1, (-1, _WIDE // _NARROW)).amax(-1)  # [..., blocks, 8]
    seventh = _round_mantissa(torch.full_like(wide[..., :1], 1.0 / 7.0), _BFLOAT16_MANTISSA_BITS)
    scale = _round_mantissa(wide.amax(-1, keepdim=True) * seventh, _BFLOAT16_MANTISSA_BITS)
    scale = _round_mantissa(scale.clamp(_E6M2_SMALLEST, _E6M2_LARGEST), _E6M2_MANTISSA_BITS)
    reciprocal = _round_mantissa(1.0 / scale, _BFLOAT16_MANTISSA_BITS)
    e8 = wide * reciprocal >= 4.0
    halved = torch.where(e8, 0.5 * reciprocal, reciprocal).repeat_interleave(_WIDE // _NARROW, -1)
    e16 = narrow * halved >= 2.0
    steps = magnitude * torch.where(e16, 0.5 * halved, halved).unsqueeze(-1) * 2.0**S1P2.mantissa_bits
    code = (steps + _ROUND_HALF_UP).floor().clamp(max=S1P2.top).to(torch.uint8).flatten(-3)
    code = torch.where(poisoned.unsqueeze(-1), 0, code.unflatten(-1, (-1, BLOCK))).flatten(-2)
    e6m2 = (scale.view(torch.int64) >> (_DOUBLE_MANTISSA_BITS - _E6M2_MANTISSA_BITS)) - (
        (_DOUBLE_BIAS - _E6M2_EXPONENT_OFFSET) << _E6M2_MANTISSA_BITS
    )
    poisoned = poisoned.unsqueeze(-1)
    factors = torch.cat((pack_bits(e8.to(torch.uint8)), pack_bits(e16.to(torch.uint8))), -1)
    bytes_ = (torch.where(poisoned, NAN_BYTE, e6m2).to(torch.uint8), torch.where(poisoned, 0, factors))
    scales = torch.cat(bytes_, -1).flatten(-2)
    return join_sign(code, sign_code(x, S1P2), S1P2), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of the encoding: float32 [..., K], exact; NaN where the E6M2 byte is 0xFF."""
    values = decode_elements(codes, S1P2).unflatten(-1, (-1, BLOCK // _NARROW, _NARROW))
    return values.mul_(_factors(scales).unsqueeze(-1)).flatten(-3)


def scaled(magnitude: Tensor, scales: Tensor) -> Tensor:
    """float32 |x| [..., K] over its scale, the IEEE quotient: elements before rounding; NaN under the NaN byte.

    For guided rounding, whose bracket is defined by the exact quotient; the encoder multiplies by a reciprocal.
    """
    groups = magnitude.unflatten(-1, (-1, BLOCK // _NARROW, _NARROW))
    return divide(groups, _factors(scales).unsqueeze(-1)).flatten(-3)


def _factors(scales: Tensor) -> Tensor:
    """Scale of each group of four, float32 [..., blocks, 16]."""
    quad = scales.unflatten(-1, (-1, 4))
    byte = quad[..., :1].to(torch.int32)
    mantissa = 1.0 + (byte & 3).float() / 4.0
    scale = mantissa * power_of_two((byte >> _E6M2_MANTISSA_BITS) - _E6M2_EXPONENT_OFFSET)
    scale = torch.where(byte == NAN_BYTE, torch.nan, scale)
    e8, e16 = unpack_bits(quad[..., 1:2]), unpack_bits(quad[..., 2:])
    return scale * (1 << (e8.repeat_interleave(_WIDE // _NARROW, -1) + e16)).float()
