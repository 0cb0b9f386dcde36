"""``nvfp4_moe`` and its backward for training: kernels around a bfloat16 grouped GEMM that multiplies exact values.

    forward    x quantized | xq gathered | W13 unpacked, GEMM | activation, h quantized | W2 unpacked, GEMM | combine
    backward   dy gathered | W2 unpacked, GEMM: dh | activation's gradient | GEMM: dW2 | xq gathered again, GEMM: dW13
               | W13 unpacked, GEMM: dx rows | combine

Why not a GEMM of our own from packed weights: with power-of-two outer scales the dequantised operands are exact in
bfloat16, so the vendor's grouped GEMM gives what FP4 tensor cores would; unpacking a layer's weights costs one reading
of 4.5 and one writing of 16 bits a weight. No copy outlives the op: one weight's values exist at a time.

Same operands, results and rounding as the native bodies, which are the reference. Sums over k slots and over rows may
be added in another order than torch adds them; everything is deterministic, and nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trace_compile.kernels import codegen
from trace_compile.kernels.activate import Hidden, HiddenGrads, activate, activate_backward
from trace_compile.kernels.guided import guide_rows
from trace_compile.kernels.launch import unsuited
from trace_compile.kernels.observe import observed, per_row
from trace_compile.kernels.quantize import QuantizedRows
from trace_compile.kernels.routing import route, routing_of
from trace_compile.kernels.rows import combine_rows, gather_rows, on, sum_rows, unpack_rows, unpack_weights, zero_unused
from trace_compile.numerics.formats import FORMATS
from trace_compile.ops import nvfp4_moe, nvfp4_moe_backward
from trace_compile.ops.activation import Activation
from trace_compile.ops.nvfp4_moe import NvFp4MoEOperands, Out, check, in_order
from trace_compile.ops.nvfp4_moe_backward import BackwardOperands
from trace_compile.ops.routing import Routing
from trace_compile.ops.rows import Guide
from trace_compile.ops.scheme import MoEScheme, OperandScheme
from trace_compile.ops.weights import Packed

_ALIGNED = 8
"""Elements of 16 bits that the grouped GEMM's strides are multiples of."""


def refuses(o: NvFp4MoEOperands) -> str | None:
    """Why these kernels do not run the op on these operands, or None."""
    if not o.trains:
        return "runs training; w13 is None"
    reason = unsuited(o.x, o.gates)
    if reason is not None:
        return reason
    if o.diagnose:
        return "does not diagnose"
    if o.x.shape[1] % _ALIGNED or o.width % _ALIGNED:
        return f"widths {o.x.shape[1]} and {o.width} are not multiples of {_ALIGNED}"
    if o.c13.dtype != torch.uint8:
        return "weights are not packed in the linear form"
    schemes = o.schemes
    return _refuses_scheme("weights", schemes.weight) or _refuses_scheme("activations", schemes.act)


def _refuses_scheme(what: str, scheme: OperandScheme | None) -> str | None:
    if scheme is None:
        return None
    if FORMATS[scheme.fmt] is not FORMATS["nvfp4"] or scheme.profile != "pow2":
        return f"{what} are quantized as nvfp4:pow2, not {scheme.key}"
    if what == "activations" and scheme.outer == "tensor":
        return "the whole batch sets the outer scale"
    if scheme.residual is not None:
        return f"what {scheme.residual.select} keeps of the error is not multiplied"
    return None


def forward(o: NvFp4MoEOperands) -> tuple[Tensor, ...]:
    """The op's results. Without tokens the native body gives them."""
    check(o)
    if o.expert_ids.numel() == 0:
        return nvfp4_moe.native(o)
    with on(o.x):
        return in_order(_forward(o), o)


def _forward(o: NvFp4MoEOperands) -> dict[int, Tensor]:
    dtype, quantizes = o.x.dtype, o.schemes.act is not None
    routing = route(o.expert_ids, o.shape13[0])
    guide, guide_h = _guides(o, routing)
    x = _quantized(o.x, _traced(o, 0), guide) if quantizes else None
    pre = _multiply(_rows(x, o.x, dtype, routing), _weights(o.w13, o.c13, o.s13, o.g13, dtype), routing)
    hidden, h = _activate(pre, o, routing, guide_h)
    out = _multiply(hidden.values, _weights(o.w2, o.c2, o.s2, o.g2, dtype), routing)
    found = {Out.Y: combine_rows(out, routing, o.gates, o.b2, o.expert_ids.shape[1])}
    found |= {Out.ORDER: routing.order, Out.OFFSETS: routing.offsets}
    if not o.recompute:
        found[Out.PRE] = pre
    hq = hidden.quantized
    if x is not None and hq is not None:
        found |= {Out.X_CODES: x.packed, Out.X_SCALES: x.scales, Out.X_OUTER: x.outer}
        found |= {Out.H_CODES: hq.packed, Out.H_SCALES: hq.scales, Out.H_OUTER: hq.outer}
    return {int(key): value for key, value in found.items()} | observed(o, x, h, hq, routing)


def backward(o: BackwardOperands) -> tuple[Tensor, ...]:
    """``(dx, dgates, dw13, dw2, db13, db2)`` as the native body gives them."""
    if o.order.numel() == 0:
        return nvfp4_moe_backward.native(o)
    with on(o.dy):
        return _backward(o)


def _backward(o: BackwardOperands) -> tuple[Tensor, ...]:
    dtype = o.dy.dtype
    routing = routing_of(o.order, o.offsets, o.gates.shape[1])
    quantized = MoEScheme.parse(o.scheme).act is not None
    x = QuantizedRows(o.x_codes, o.x_scales, o.x_outer) if quantized else None
    h = QuantizedRows(o.h_codes, o.h_scales, o.h_outer) if quantized else None
    w13 = (o.w13, o.c13, o.s13, o.g13)
    pre = o.pre
    if o.recompute:
        pre = _multiply(_rows(x, o.x, dtype, routing), _weights(*w13, dtype), routing)
        pre = _with_bias(pre, o.b13, routing)

    dy, bias_dots = gather_rows(o.dy, routing, o.b2 if o.need_gates else None)
    dh = torch._grouped_mm(dy, _weights(o.w2, o.c2, o.s2, o.g2, dtype), offs=routing.offsets)
    grads = _activate_backward(dh, pre, h, bias_dots, o, routing)
    del dh, pre
    dw2, db2, dw13, db13, dx = (o.dy.new_empty(0) for _ in range(5))
    if o.need_w2:
        dw2 = zero_unused(torch._grouped_mm(dy.t(), grads.gated_h, offs=routing.offsets), routing)
    if o.b2 is not None and o.need_b2:
        db2 = sum_rows(dy, o.gates, routing).to(o.b2.dtype)
    del dy
    if o.b13 is not None and o.need_b13:
        db13 = sum_rows(grads.dpre, None, routing).to(o.b13.dtype)
    if o.need_w13:
        rows = _rows(x, o.x, dtype, routing)
        dw13 = zero_unused(torch._grouped_mm(grads.dpre.t(), rows, offs=routing.offsets), routing)
        del rows
    if o.need_x:
        dx = torch._grouped_mm(grads.dpre, _weights(*w13, dtype), offs=routing.offsets)
        dx = combine_rows(dx, routing, None, None, o.gates.shape[1])
    return dx, grads.dgates if o.need_gates else o.gates.new_empty(0), dw13, dw2, db13, db2


def _traced(o: NvFp4MoEOperands, which: int) -> Tensor | None:
    """The outer scale of the gate/up (0) or down (1) input, ``f32 [1]``, or None where rows have their own."""
    act = o.schemes.act
    if act is None or act.outer != "traced":
        return None
    assert o.outer_in is not None
    return o.outer_in[which : which + 1].float()


def _guides(o: NvFp4MoEOperands, routing: Routing) -> tuple[Guide | None, Guide | None]:
    """What a rollout recorded of the tokens' rows and of the routed rows."""
    row = nvfp4_moe.guide_row(o)
    if o.guidance == "none" or row is None:
        return None, None
    assert o.guide is not None and o.guide_outer is not None
    return row.read(o.guide, o.guide_outer, o.hit, o.expert_ids, routing, row.payload)


def _quantized(rows: Tensor, outer: Tensor | None, guide: Guide | None) -> QuantizedRows:
    """With one outer scale a row, ``f32 [M]``."""
    q = per_row(rows, outer)
    if guide is not None:
        guide_rows(rows, q, guide)
    return q


def _rows(quantized: QuantizedRows | None, plain: Tensor | None, dtype: torch.dtype, routing: Routing) -> Tensor:
    """What the first GEMM multiplies, ``[S, H]`` in expert order."""
    if quantized is not None:
        return unpack_rows(quantized.packed, quantized.scales, quantized.outer, dtype, routing)
    assert plain is not None
    return gather_rows(plain, routing)[0]


def _weights(master: Tensor | None, codes: Tensor, scales: Tensor, outer: Tensor, dtype: torch.dtype) -> Tensor:
    """``[E, N, K]``: a weight's values, in scratch; the master's own where it is not packed."""
    if codes.numel():
        return unpack_weights(Packed(codes, scales, outer), dtype)
    assert master is not None
    return master.to(dtype).contiguous()


def _multiply(rows: Tensor, weight: Tensor, routing: Routing) -> Tensor:
    """``[S, N]``; rows behind the last group are not written."""
    return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=routing.offsets)


def _with_bias(rows: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    return rows if bias is None else (rows.float() + bias[routing.expert].float()).to(rows.dtype)


def _activate(pre: Tensor, o: NvFp4MoEOperands, routing: Routing, guide: Guide | None) -> tuple[Hidden, Tensor]:
    """h as the second GEMM takes it, and before it was quantized if it is recorded; the bias is added into ``pre``.

    Programs without a device form run as torch operations; rows that are guided or recorded are quantized after the
    activation, not with it.
    """
    activation, quantizes, bias = Activation.parse(o.activation), o.schemes.act is not None, o.b13
    if o.record != "none":  # rows of no expert are written by no GEMM, and may be recorded
        pre.copy_(_with_bias(pre, bias, routing)).masked_fill_(routing.dropped, 0)
        bias = None
    if codegen.unsupported(activation, pre.dtype) is None:
        code, fused = codegen.compile_activation(activation, pre.dtype), guide is None and o.record == "none"
        hidden = activate(pre, bias, routing, code, activation.gated, quantizes and fused, _traced(o, 1))
        if fused:
            return hidden, hidden.values
        h = hidden.values
    else:
        h = activation.evaluate(pre.copy_(_with_bias(pre, bias, routing)))
    if not quantizes:
        return Hidden(h), h
    q = _quantized(h, _traced(o, 1), guide)
    return Hidden(unpack_rows(q.packed, q.scales, q.outer, pre.dtype), q), h


def _activate_backward(
    dh: Tensor, pre: Tensor, h: QuantizedRows | None, bias_dots: Tensor | None, o: BackwardOperands, routing: Routing
) -> HiddenGrads:
    activation = Activation.parse(o.activation)
    if codegen.unsupported(activation, pre.dtype) is None:
        code = codegen.compile_activation(activation, pre.dtype)
        return activate_backward(dh, pre, h, o.gates, bias_dots, routing, code, activation.gated)
    values, vjp = activation.evaluate_and_vjp(pre)
    if h is not None:
        values = unpack_rows(h.packed, h.scales, h.outer, pre.dtype)
    gates = o.gates.reshape(-1)[routing.order].unsqueeze(-1)
    dots = (dh.float() * values.float()).sum(-1) + (0 if bias_dots is None else bias_dots)
    dgates = dots.masked_fill(routing.dropped[:, 0], 0)[routing.inverse].view(o.gates.shape).to(o.gates.dtype)
    return HiddenGrads(vjp((dh * gates).to(dh.dtype)), (values * gates).to(dh.dtype), dgates)


def register_autograd(op: Any, backward_op: Any) -> None:
    """Gives the forward op the autograd formula of ``nvfp4_moe``, with these kernels behind it."""
    op.register_autograd(nvfp4_moe.backward_with(backward_op), setup_context=nvfp4_moe.setup_context)
