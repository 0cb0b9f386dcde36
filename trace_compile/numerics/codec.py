"""Codes and bytes: rounding float32 to small floats, decoding them, and packing codes and bits into bytes.

Everything is integer or exactly rounded float32 arithmetic on tensors: no cast to a float8 dtype (PyTorch's saturate or
give NaN on overflow depending on version and compiler), no table that lives on the host, no synchronisation. The same
bytes come out of eager mode and of a compiler, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_compile.errors import BlockSizeError
from trace_compile.numerics.formats import E4M3, Element

# IEEE float32 fields.
MANTISSA_BITS = 23
EXPONENT_BIAS = 127
MAGNITUDE_MASK = 0x7FFFFFFF
EXPONENT_MASK = 0x7F800000  # also the bits of +Inf: larger magnitudes are NaN
# IEEE float16 fields.
HALF_MANTISSA_BITS = 10
HALF_BIAS = 15
HALF_SIGN = -(1 << 15)


def bits_of(x: Tensor) -> Tensor:
    """float32 -> its int32 bit pattern, same shape (a view)."""
    return x.view(torch.int32)


def power_of_two(exponent: Tensor) -> Tensor:
    """int32 exponent in [-126, 127] -> float32 2^exponent, built from the bits."""
    return ((exponent + EXPONENT_BIAS) << MANTISSA_BITS).view(torch.float32)


def encode_magnitude(a: Tensor, element: Element) -> Tensor:
    """Non-negative float32 -> uint8 magnitude code: nearest, ties to the even code, saturating; NaN -> 0.

    ``a`` is overwritten. Adding M = 2^(23 - mantissa_bits + binade of a) makes the float32 adder round ``a`` to the
    element's grid, ties to even; the low bits of the sum are then the number of grid steps.
    """
    a = a.nan_to_num_(nan=0.0).clamp_(max=element.max)
    shift = MANTISSA_BITS - element.mantissa_bits
    lowest = EXPONENT_BIAS + 1 - element.bias
    magic = (bits_of(a) & EXPONENT_MASK).clamp_(min=lowest << MANTISSA_BITS).add_(shift << MANTISSA_BITS)
    steps = bits_of(a.add_(magic.view(torch.float32)))
    # magic's low byte is 0, so the sum's low byte is the step count; each binade above
    # the lowest adds 2^mantissa_bits codes
    offset = ((lowest + shift) << element.mantissa_bits) & 0xFF
    return magic.bitwise_right_shift_(shift).add_(steps).to(torch.uint8).sub_(offset)


def sign_code(x: Tensor, element: Element) -> Tensor:
    """float32 -> uint8 with the element's sign bit where x has its sign bit set (-0.0 and NaN included), else 0."""
    return (bits_of(x) >> (31 - element.magnitude_bits)).to(torch.uint8).bitwise_and_(1 << element.magnitude_bits)


def join_sign(magnitude: Tensor, sign: Tensor, element: Element) -> Tensor:
    """Magnitude code and ``sign_code`` -> the element's code; uint8."""
    if element.twos_complement:
        mask = (1 << element.bits) - 1
        return torch.where(sign > 0, (mask + 1) - magnitude, magnitude).bitwise_and_(mask)
    return magnitude.bitwise_or_(sign)


def decode(codes: Tensor, element: Element) -> Tensor:
    """uint8 codes [...] -> a new float32 tensor of values [...]. Exact.

    The code's fields are moved into a float16's (which has room for every element's), so float16's own subnormals do
    the work; the exponent biases differ by a power of two.
    """
    if element.twos_complement:
        sign = 1 << element.magnitude_bits
        return ((codes ^ sign).to(torch.int16) - sign).float()
    h = codes.to(torch.int16)
    rest = HALF_MANTISSA_BITS - element.mantissa_bits
    magnitude = (h & ((1 << element.magnitude_bits) - 1)) << rest
    values = ((h << (15 - element.magnitude_bits)) & HALF_SIGN).bitwise_or_(magnitude).view(torch.float16).float()
    values = values.mul_(2.0 ** (HALF_BIAS - element.bias))
    if element.nan_from is not None:
        values = torch.where(magnitude >= element.nan_from << rest, torch.nan, values)
    return values


def encode_e4m3(x: Tensor) -> Tensor:
    """float32 [...] -> uint8 E4M3 bytes [...]: nearest even, saturating at 448 (also from Inf), NaN -> 0x7F, sign
    kept.
    """
    code = join_sign(encode_magnitude(x.abs(), E4M3), sign_code(x, E4M3), E4M3)
    return torch.where(x.isnan(), E4M3.nan_code, code).to(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """uint8 E4M3 bytes [...] -> float32 [...]; 0x7F and 0xFF are NaN."""
    return decode(codes, E4M3)


def encode_exponent(g: Tensor) -> Tensor:
    """float32 powers of two [...] -> uint8 biased exponents [...] (127 is 1.0): one byte for a row's outer scale."""
    return (bits_of(g) >> MANTISSA_BITS).to(torch.uint8)


def decode_exponent(exponent: Tensor) -> Tensor:
    """uint8 biased exponents [...] -> float32 powers of two [...]. Inverse of ``encode_exponent``."""
    return (exponent.to(torch.int32) << MANTISSA_BITS).view(torch.float32)


def _grouped(x: Tensor, group: int, what: str) -> Tensor:
    """[..., K] -> [..., K/group, group]; ``BlockSizeError`` unless group divides K."""
    if x.dim() == 0 or x.shape[-1] % group:
        raise BlockSizeError(f"{what} need a last dimension that is a multiple of {group}, got shape {tuple(x.shape)}")
    return x.unflatten(-1, (x.shape[-1] // group, group))


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 4-bit codes [..., K] -> uint8 [..., K/2]; the even element is the low nibble."""
    pairs = _grouped(codes, 2, "packed nibbles")
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> uint8 4-bit codes [..., K]. Inverse of ``pack_nibbles``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_bits(codes: Tensor) -> Tensor:
    """Lowest bits of uint8 codes [..., K] -> uint8 [..., K/8]; element i is bit i % 8 of byte i // 8."""
    groups = _grouped(codes & 1, 8, "packed bits")
    return (groups << _bit_positions(codes.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """uint8 [..., K/8] -> uint8 0/1 [..., K]. Inverse of ``pack_bits``."""
    return ((packed.unsqueeze(-1) >> _bit_positions(packed.device)) & 1).flatten(-2)


def _bit_positions(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
