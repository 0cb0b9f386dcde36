"""``nvfp4_moe`` for programs that leave this package: the same arithmetic in standard torch operations alone.

Exported programs cannot rely on custom ops, and ONNX has neither bit casts nor grouped GEMMs nor a sort by expert. So
here one ``scan`` runs over the experts: each step unpacks one expert's weights by table look-up, multiplies all tokens
with them, and adds the result where the expert was chosen. Every expert is in the program whatever the routing was
while exporting, no more than one is unpacked at a time, and any number of tokens goes, none included.

Compared with ``nvfp4_moe``: the same codes and scales of weights and activations bit for bit, the same products; GEMMs
and the sum over a token's experts add in another order (expert order instead of slot order), and every token is
multiplied with every expert, so large prefills cost E / top_k times the arithmetic.

Inference only: no guidance, records or statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

from ..errors import UnknownFormatError
from ..numerics import FORMATS, PROFILES, outer_bound
from ..numerics.formats import E4M3, OUTER_EXPONENTS, BlockRule, ElementRule, Format, OuterRule
from .activation import Activation
from .nvfp4_moe import NvFp4MoEOperands, check
from .scheme import OperandScheme
from .weights import Packed

_LARGEST = torch.finfo(torch.float32).max


def portable_moe(*operands: Any) -> tuple[Tensor, ...]:
    """``(y [T, H],)`` of the operands that ``nvfp4_moe`` takes, which stands in for it in a graph.

    Raises ``UnknownFormatError`` for schemes whose arithmetic is not written down here, and what ``nvfp4_moe`` raises.
    """
    o, act, activation = _checked(operands)
    codebook, scale_values, dtype = _codebook(o.x), _scale_values(o.x), o.x.dtype
    outers = _outers(o, act)
    x, x_outer = _operand(o.x, act, outers[0])
    gates, ids = o.gates.float(), o.expert_ids
    biases = [bias for bias in (o.b13, o.b2) if bias is not None]

    def step(y: Tensor, xs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        expert, c13, s13, g13, c2, s2, g2, *given = xs
        b13 = given.pop(0) if o.b13 is not None else None
        b2 = given.pop(0) if o.b2 is not None else None
        pre = _linear(x, x_outer, _weight(c13, s13, codebook, scale_values, dtype), g13, b13)
        h, h_outer = _operand(activation.evaluate(pre), act, outers[1])
        out = _linear(h, h_outer, _weight(c2, s2, codebook, scale_values, dtype), g2, b2)
        chosen = ids == expert
        gate = torch.where(chosen, gates, torch.zeros_like(gates)).sum(-1, keepdim=True)
        # Selected, not multiplied by zero: an expert that was not chosen may overflow.
        mine = torch.where(chosen.any(-1, keepdim=True), out.float() * gate, torch.zeros_like(y))
        return y + mine, y.new_zeros(1)

    numbers = torch.arange(o.c13.shape[0], device=o.x.device)
    stacks = (numbers, o.c13, o.s13, o.g13, o.c2, o.s2, o.g2, *biases)
    y, _ = scan(step, torch.zeros_like(o.x, dtype=torch.float32), stacks)
    return (y.to(dtype),)


def stacked_moe(*operands: Any) -> tuple[Tensor, ...]:
    """``portable_moe`` without a loop: whole layers are dequantized by ``dequantize_experts`` and multiplied as stacks.

    For readers that fold a dequantization into the GEMM that follows (TensorRT) and want no control flow. Takes the
    memory of one dequantized layer, and [E, T, N] for activations.
    """
    o, act, activation = _checked(operands)
    dtype, outers = o.x.dtype, _outers(o, act)
    w13 = torch.ops.trace_compile.dequantize_experts(o.c13, o.s13, o.g13)
    w2 = torch.ops.trace_compile.dequantize_experts(o.c2, o.s2, o.g2)
    b13, b2 = (None if bias is None else bias.unsqueeze(1) for bias in (o.b13, o.b2))
    x, x_outer = _operand(o.x, act, outers[0])
    pre = _stacked_linear(x.unsqueeze(0), x_outer, w13.to(dtype), b13)
    h, h_outer = _operand(activation.evaluate(pre), act, outers[1])
    out = _stacked_linear(h, h_outer, w2.to(dtype), b2).float()
    numbers = torch.arange(w13.shape[0], device=o.x.device).view(-1, 1, 1)
    chosen = o.expert_ids.unsqueeze(0) == numbers  # [E, T, K]
    gates = o.gates.float().unsqueeze(0)
    gate = torch.where(chosen, gates, torch.zeros_like(gates)).sum(-1, keepdim=True)
    y = torch.where(chosen.any(-1, keepdim=True), out * gate, torch.zeros_like(out)).sum(0)
    return (y.to(dtype),)


@torch.library.custom_op("trace_compile::dequantize_experts", mutates_args=())
def dequantize_experts(codes: Tensor, scales: Tensor, outer: Tensor) -> Tensor:
    """u8 [E, N, K/2], u8 [E, N, K/block], f32 [E] -> f32 [E, N, K]: in ONNX two DequantizeLinear nodes, one of the
    block scales by the outer ones and one of the codes by the result."""
    return Packed(codes, scales, outer).dequantize()


@dequantize_experts.register_fake
def _(codes: Tensor, scales: Tensor, outer: Tensor) -> Tensor:
    experts, rows, half = codes.shape
    return codes.new_empty(experts, rows, 2 * half, dtype=torch.float32)


def _checked(operands: tuple[Any, ...]) -> tuple[NvFp4MoEOperands, OperandScheme | None, Activation]:
    o = NvFp4MoEOperands(*operands)
    check(o)
    weight, act = o.schemes.weight, o.schemes.act
    if weight is None or o.guidance != "none" or o.record != "none":
        raise UnknownFormatError(f"scheme {o.scheme!r}: only packed weights without guidance and records are exported")
    if weight.fmt != "nvfp4":
        raise UnknownFormatError(f"weights {weight.key!r} cannot be exported as standard operations; nvfp4 can")
    if act is not None:
        _check(act)
    return o, act, Activation.parse(o.activation)


def _outers(o: NvFp4MoEOperands, act: OperandScheme | None) -> tuple[Tensor | None, Tensor | None]:
    """For the inputs of gate/up and down: the traced outer scale, or the powers of two that rows choose from.

    Made outside of the loop, and apart: a scan's body may neither make constants nor read shared memory.
    """
    if act is None:
        return None, None
    if o.outer_in is not None:
        return o.outer_in[0].clone(), o.outer_in[1].clone()
    low, high = OUTER_EXPONENTS
    first, second = (torch.tensor([2.0**k for k in range(low, high + 1)], device=o.x.device) for _ in range(2))
    return first, second


def _check(act: OperandScheme) -> None:
    profile, fmt = PROFILES[act.profile], FORMATS[act.fmt]
    written = (OuterRule.POWER_OF_TWO, BlockRule.DIVIDE, ElementRule.DIVIDE, None)
    rules = (profile.outer, profile.block, profile.element, profile.choice)
    if rules != written or not fmt.outer or act.outer == "tensor" or act.residual is not None:
        raise UnknownFormatError(
            f"activations {act.key!r} cannot be exported as standard operations; profile pow2 with row or traced outer "
            "scales can"
        )


def _codebook(like: Tensor) -> Tensor:
    """Value of every E2M1 code, f32 [16]."""
    positive = list(FORMATS["nvfp4"].element.codebook)
    return torch.tensor(positive + [-value for value in positive], device=like.device)


def _scale_values(like: Tensor) -> Tensor:
    """Value of every positive E4M3 byte and of NaN, f32 [128]."""
    return torch.tensor([E4M3.magnitude(code) for code in range(E4M3.nan_code + 1)], device=like.device)


def _weight(codes: Tensor, scales: Tensor, codebook: Tensor, scale_values: Tensor, dtype: torch.dtype) -> Tensor:
    """u8 [N, K/2] and u8 [N, K/block] -> element times block scale [N, K], exact."""
    rows, blocks = scales.shape
    pairs = codes.to(torch.int32)
    nibbles = torch.stack((pairs % 16, pairs // 16), -1)
    values = codebook.index_select(0, nibbles.flatten()).view(rows, blocks, -1)
    factors = scale_values.index_select(0, scales.to(torch.int32).flatten()).view(rows, blocks, 1)
    return (values * factors).view(rows, -1).to(dtype)


def _linear(rows: Tensor, row_outer: Tensor | None, weight: Tensor, outer: Tensor, bias: Tensor | None) -> Tensor:
    """As ``linear.expert_linear``: scales one after the other and the bias in float32."""
    out = (rows @ weight.t()).float() * outer
    if row_outer is not None:
        out = out * row_outer
    if bias is not None:
        out = out + bias.float()
    return out.to(rows.dtype)


def _stacked_linear(rows: Tensor, row_outer: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[1 or E, T, K] by dequantized [E, N, K] -> [E, T, N]."""
    out = (rows @ weight.transpose(1, 2)).float()
    if row_outer is not None:
        out = out * row_outer
    if bias is not None:
        out = out + bias.float()
    return out.to(rows.dtype)


def _operand(x: Tensor, act: OperandScheme | None, outers: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Element times block scale [M, K] and outer scales f32 [] or [M, 1]; ``x`` itself if it is not quantized."""
    if act is None:
        return x, None
    assert outers is not None
    fmt, profile = FORMATS[act.fmt], PROFILES[act.profile]
    wide = x.float()
    finite = wide.abs() <= _LARGEST  # false for NaN too
    magnitude = torch.where(finite, wide.abs(), torch.zeros_like(wide))
    outer = outers if act.outer == "traced" else _row_outer(magnitude.amax(-1, keepdim=True), act, outers)
    blocks = magnitude.unflatten(-1, (-1, fmt.block))
    largest = blocks.amax(-1, keepdim=True)
    scale_outer = outer if outer.dim() == 0 else outer.unsqueeze(-1)
    scale = (largest / (scale_outer * fmt.element.max)).clamp(profile.floor, profile.scale_bound)
    scale = scale.to(torch.float8_e4m3fn).float()
    code_value = _round(blocks / (scale * scale_outer), fmt)
    value = (code_value * scale).flatten(-2)
    value = torch.where(wide < 0, -value, value)
    # NaN and Inf make their own token NaN and no other.
    value = torch.where(finite, value, torch.full_like(value, torch.nan))
    return value.to(x.dtype), outer


def _round(u: Tensor, fmt: Format) -> Tensor:
    """Non-negative f32 to the nearest value of the element's codebook, ties to the even code, saturating."""
    book = fmt.element.codebook
    value = torch.zeros_like(u)
    for code in range(1, len(book)):
        middle, step = (book[code - 1] + book[code]) / 2, book[code] - book[code - 1]
        beyond = u >= middle if code % 2 == 0 else u > middle
        value = value + beyond.to(u.dtype) * step
    return value


def _row_outer(largest: Tensor, act: OperandScheme, powers: Tensor) -> Tensor:
    """The smallest of ``powers`` that holds each row, f32 [..., 1], 1 for an empty row: as ``numerics.outer_scale``."""
    bound = outer_bound(act.fmt, act.profile)
    too_small = (largest > powers[:-1] * bound).to(torch.int64).sum(-1)
    outer = powers.index_select(0, too_small.flatten()).view_as(largest)
    return torch.where(largest == 0, torch.ones_like(outer), outer)
