"""The quantizer: blocks of K to codes and scale bytes, with own scales or guided by a rollout's, and back.

Invariants (numerics contract):
  decode = element * block scale, exact in float32 except for INT4 (NVFP4, MXFP4, HiF4: exact in bfloat16 too); times
    the outer scale it is the value.
  A block with NaN or Inf gets the NaN scale byte and magnitude codes 0 (signs kept); every other block is what it would
    be without it.
  Every input dtype is rounded to float32 first, so equal values give equal bytes whatever the dtype, layout or
    compiler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_compile.errors import BlockSizeError, OperandError
from trace_compile.numerics import hif4, macro
from trace_compile.numerics.codec import (
    EXPONENT_BIAS,
    EXPONENT_MASK,
    MANTISSA_BITS,
    bits_of,
    decode,
    decode_e4m3,
    encode_magnitude,
    join_sign,
    sign_code,
)
from trace_compile.numerics.formats import (
    E4M3,
    PROFILES,
    Choice,
    Element,
    ElementRule,
    Format,
    Profile,
    ScaleKind,
    format_of,
    profile_of,
)
from trace_compile.numerics.scales import (
    E8M0_NAN,
    block_amax,
    decode_scales,
    divide,
    encode_scales,
    outer_bound,
    reciprocal_of_e8m0,
)


def quantize_blocks(
    x: Tensor, outer: Tensor | None, fmt: str = "nvfp4", profile: str = "pow2"
) -> tuple[Tensor, Tensor]:
    """Float x [..., K] and float32 outer (broadcastable to x.shape[:-1]; None for formats without one) -> codes,
    scales.

    codes: uint8 [..., K], one per element. scales: raw bytes uint8 [..., K/block * bytes per scale]. Raises
    ``BlockSizeError`` when K is not a multiple of the block, ``OperandError`` for other unusable operands.
    """
    f, p = format_of(fmt), profile_of(profile)
    x = _checked(x, f)
    if f.scale is ScaleKind.HIF4:
        return hif4.encode(x)
    g = _outer_column(x, outer, f)
    magnitude, sign = x.abs(), sign_code(x, f.element)
    if f.scale is ScaleKind.MACRO:
        codes, scales = macro.encode(magnitude, p)
        return join_sign(codes, sign, f.element), scales
    a = block_amax(magnitude, f.block)
    scales = encode_scales(a, g, f, p)
    if p.choice is None or f.scale is not ScaleKind.E4M3:
        return join_sign(_encode(magnitude, scales, g, f, p), sign, f.element), scales
    codes = _encode(magnitude.clone(), scales, g, f, p)
    scales_4 = encode_scales(a, g, f, p, target=f.element.codebook[-2])
    codes_4 = _encode(magnitude.clone(), scales_4, g, f, p)
    error_6, error_4 = (
        _block_error(magnitude, c, s, g, f, p.choice) for c, s in ((codes, scales), (codes_4, scales_4))
    )
    better = error_4 < error_6
    codes = torch.where(better.unsqueeze(-1), _blocks(codes_4, f.block), _blocks(codes, f.block)).flatten(-2)
    return join_sign(codes, sign, f.element), torch.where(better, scales_4, scales)


def guided_blocks(
    x: Tensor,
    scales: Tensor,
    outer: Tensor | None,
    *,
    codes: Tensor | None = None,
    bits: Tensor | None = None,
    fmt: str = "nvfp4",
) -> Tensor:
    """Codes of x [..., K] under the rollout's scale bytes and outer scale, rounded toward the rollout's outcome
    (numerics 2).

    Exactly one of ``codes`` (uint8 [..., K], full guidance) and ``bits`` (uint8 0/1 [..., K], the rollout's mantissa
    bits). Formats of 4-bit floats (E2M1, S1P2), whose lowest code bit alternates along the signed line; z = x / (s*g)
    is the IEEE quotient. Returns uint8 [..., K]. A non-finite x gives some code: the caller keeps it visible with
    ``poison_scales``.
    """
    f = format_of(fmt)
    if not f.operand:
        raise OperandError(
            f"guided rounding is defined for E2M1 and S1P2 elements, not for format {fmt!r} ({f.element.name})"
        )
    if (codes is None) == (bits is None):
        raise OperandError("guided rounding takes exactly one of codes= (full) and bits= (1-bit)")
    x = _checked(x, f)
    g = _outer_column(x, outer, f)
    u = _scaled(x.abs(), scales, g, f, PROFILES["pow2"])
    sign = bits_of(x) >> 31  # -1 or 0
    low = bracket(u.nan_to_num_(nan=0.0), sign, f.element)
    negative = (x < 0).to(torch.uint8)
    if bits is not None:
        magnitude = low + ((low ^ bits) & 1)
    else:
        assert codes is not None
        same_side = (codes >> f.element.magnitude_bits) == negative
        magnitude = low + (same_side & ((codes & f.element.top) > low)).to(torch.uint8)
    # -0.0 lies in the bracket {0, +0.5}: its sign survives only in a zero result
    zero = ((magnitude + f.element.top) >> f.element.magnitude_bits).bitwise_xor_(1)
    signs = sign.to(torch.uint8).bitwise_and_(zero).bitwise_or_(negative)
    return magnitude.bitwise_or_(signs << f.element.magnitude_bits)


def bracket(u: Tensor, negative: Tensor, element: Element) -> Tensor:
    """|z| float32 (not NaN) and int32 ``negative`` (-1 where z < 0, else 0) -> uint8 k: z's bracket has magnitudes {k,
    k+1}.

    A codeword's bracket goes up from it, so a negative codeword's goes toward 0: its magnitude is taken one ulp lower.
    k counts codewords up to that magnitude: normal codes are the top bits of the float32, subnormal ones a fixed grid.
    """
    raw = (bits_of(u) + negative).clamp_(min=0)
    shift = MANTISSA_BITS - element.mantissa_bits
    first_normal = 1 << element.mantissa_bits
    subnormal = (raw.view(torch.float32) / element.codebook[1]).clamp_(max=first_normal).to(torch.int32)
    normal = (raw >> shift).sub_((EXPONENT_BIAS - element.bias) << element.mantissa_bits)
    return torch.maximum(normal, subnormal).clamp_(0, element.top - 1).to(torch.uint8)


def poison_scales(x: Tensor, scales: Tensor, fmt: str = "nvfp4") -> Tensor:
    """``scales`` with the NaN byte where x's block holds NaN or Inf: keeps a poisoned token visible under guided
    scales.
    """
    f = format_of(fmt)
    x = _checked(x, f)
    poisoned = bits_of(block_amax(x.abs(), f.block)) >= EXPONENT_MASK
    nan_byte = E4M3.nan_code if f.scale is ScaleKind.E4M3 else E8M0_NAN
    if f.scale.bytes > 1:
        poisoned = poisoned.repeat_interleave(f.scale.bytes, -1) & _holds_nan(scales, f)
    return torch.where(poisoned, nan_byte, scales).to(torch.uint8)


def finite_scales(scales: Tensor, fmt: str = "nvfp4") -> Tensor:
    """bool [...]: no scale byte [..., bytes of a row] is the NaN byte. Formats of 4-bit floats."""
    f = format_of(fmt)
    if f.scale is ScaleKind.E4M3:
        return decode_e4m3(scales).isfinite().all(-1)
    nan = scales == E8M0_NAN
    return ~(nan if f.scale.bytes == 1 else nan & _holds_nan(scales, f)).any(-1)


def _holds_nan(scales: Tensor, f: Format) -> Tensor:
    """bool [bytes of a row]: bytes that carry a poisoned block's NaN (HiF4: the first of four; MACRO: all but m)."""
    position = torch.arange(scales.shape[-1], device=scales.device) % f.scale.bytes
    return position < (1 if f.scale is ScaleKind.HIF4 else f.scale.bytes - 1)


def decode_blocks(codes: Tensor, scales: Tensor, fmt: str = "nvfp4", dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 codes [..., K] and raw scale bytes -> element * block scale [..., K] in ``dtype``, without the outer
    scale.
    """
    f = format_of(fmt)
    if f.scale is ScaleKind.HIF4:
        return hif4.decode(codes, scales).to(dtype)
    if f.scale is ScaleKind.MACRO:
        return macro.decode_values(codes, scales).to(dtype)
    values = decode(codes, f.element)
    if f.scale is not ScaleKind.NONE:
        values = _blocks(values, f.block).mul_(decode_scales(scales, f).unsqueeze(-1)).flatten(-2)
    return values.to(dtype)


def saturated(x: Tensor, outer: Tensor, fmt: str = "nvfp4", profile: str = "pow2") -> Tensor:
    """bool [..., K]: |x| exceeds the largest representable magnitude under float32 outer (broadcastable to
    x.shape[:-1]).
    """
    f = format_of(fmt)
    x = _checked(x, f)
    return x.abs() > _outer_column(x, outer, f) * outer_bound(fmt, profile)


def _encode(magnitude: Tensor, scales: Tensor, g: Tensor, f: Format, p: Profile) -> Tensor:
    """Magnitude codes of float32 |x| (overwritten) under given scale bytes: round to nearest even, saturating."""
    if f.scale is not ScaleKind.NONE:
        return encode_magnitude(_scaled(magnitude, scales, g, f, p), f.element)
    finite = bits_of(magnitude) < EXPONENT_MASK  # no block scale to carry the NaN: the element does
    codes = encode_magnitude(_quotient(magnitude, g), f.element)
    return torch.where(finite, codes, f.element.nan_code).to(torch.uint8)


def _scaled(magnitude: Tensor, scales: Tensor, g: Tensor, f: Format, p: Profile) -> Tensor:
    """float32 |x| (overwritten) over its scales [..., K]; NaN under a NaN scale; 0 under a zero scale of own making."""
    if f.scale is ScaleKind.HIF4:
        return hif4.scaled(magnitude, scales)
    if f.scale is ScaleKind.MACRO:
        return macro.scaled(magnitude, scales)
    blocks = _blocks(magnitude, f.block)
    if f.scale is ScaleKind.E8M0:
        return blocks.mul_(reciprocal_of_e8m0(scales).unsqueeze(-1)).flatten(-2)
    s = decode_scales(scales, f)
    if (
        f.scale is ScaleKind.FLOAT32
    ):  # both operands have 24 bits: a float32 quotient could round into a tie, float64's cannot
        u = blocks.double() / s.double().unsqueeze(-1)
        return u.round_().clamp_(max=f.element.max).float().flatten(-2)
    if p.floor == 0:
        s = torch.where(s == 0, torch.inf, s)
    match p.element:
        case ElementRule.DIVIDE:
            return _quotient(blocks, (s * g).unsqueeze(-1)).flatten(-2)
        case ElementRule.RECIPROCAL:
            factor = divide(divide(1.0, g), s)
        case ElementRule.TWO_RECIPROCALS:
            factor = divide(1.0, s * g)
        case ElementRule.DIVIDE_ENCODED:
            return _quotient(blocks, divide(s, divide(1.0, g)).unsqueeze(-1)).flatten(-2)
    return blocks.mul_(factor.unsqueeze(-1)).flatten(-2)


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """IEEE float32 x / y (x overwritten). Inductor's GPU code divides approximately: there through float64, same
    bits.
    """
    if x.is_cuda and torch.compiler.is_compiling():
        return (x.double() / y.double()).float()
    return x.div_(y)


def _block_error(magnitude: Tensor, codes: Tensor, scales: Tensor, g: Tensor, f: Format, choice: Choice) -> Tensor:
    """Error of one candidate per block [..., K/block], in float64 and summed by halves, so that its bits are
    reproducible.
    """
    values = _blocks(decode(codes, f.element), f.block).double() * (decode_scales(scales, f).double() * g).unsqueeze(-1)
    error = _blocks(magnitude, f.block) - values
    error = error * error if choice is Choice.MSE else error.abs()
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error.squeeze(-1)


def _blocks(x: Tensor, block: int) -> Tensor:
    return x.unflatten(-1, (x.shape[-1] // block, block))


def _checked(x: Tensor, f: Format) -> Tensor:
    """x in float32, or a named error."""
    if not x.dtype.is_floating_point:
        raise OperandError(f"only floating-point tensors can be quantized, got {x.dtype}: convert it first")
    if x.dim() == 0:
        raise OperandError("a 0-dimensional tensor has no reduction dimension to quantize along: reshape it to [1, K]")
    if x.shape[-1] % f.block:
        raise BlockSizeError(
            f"format {f.name!r} shares one scale among {f.block} elements of the last dimension, here {x.shape[-1]} "
            f"in shape {tuple(x.shape)}: pad it to a multiple of {f.block} or leave this tensor unquantized"
        )
    return x.float()


def _outer_column(x: Tensor, outer: Tensor | None, f: Format) -> Tensor:
    """outer broadcast against the blocks: float32 [..., 1]; 1 for formats without an outer scale."""
    if not f.outer:
        return x.new_ones(1)
    if outer is None:
        raise OperandError(f"format {f.name!r} needs a float32 outer scale that broadcasts to {tuple(x.shape[:-1])}")
    lead, shape = x.shape[:-1], outer.shape
    fits = len(shape) <= len(lead) and all(a == b or a == 1 for a, b in zip(reversed(shape), reversed(lead)))
    if not (fits or shape == (1,)) or outer.dtype != torch.float32:
        raise OperandError(
            f"outer scale must be float32 and broadcastable to {tuple(lead)}, got {outer.dtype} {tuple(shape)}"
        )
    return outer.unsqueeze(-1) if len(lead) else outer
