"""Gradients of the quantized mixture-of-experts region, from the packed operands the forward multiplied.

Quantizers are passed straight through: their gradient is the identity for every element, saturated ones too (a mask on
``|x/s| > 6`` would cut off the largest element of half of all blocks). With r the row of (token t, slot k, expert e):

    gates   dgate = <dy[t], o[r]> = <dy[t] W2q[e], hq[r]> + <dy[t], b2[e]>     so o is neither saved nor recomputed
    down    dh = gate dy[t] W2q[e]       dW2[e] = sum of dy[t] (gate hq[r])^T       db2[e] = sum of gate dy[t]
    act     dpre = vjp of the activation at the saved (or recomputed) pre-activation
    gate/up dx[t] = sum over k in slot order of dpre W13q[e]    dW13[e] = sum of dpre xq[t]^T    db13[e] = sum of dpre

Forward and dgrad use the same quantized weight, wgrad the same quantized (guided) rows. Experts without rows get exact
zeros. ``recompute`` runs the first GEMM again from the saved packed rows, with the forward's bits, instead of keeping
``[S, N1]`` pre-activations: about 2/9 more GEMM work per training step when gated. A residual is computed again from
the whole rows, which are then saved (x) or follow from the pre-activation (h).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .activation import Activation
from .grouped import grouped_sum, grouped_wgrad
from .linear import ExpertWeights, expert_linear
from .quads import packed_shape
from .residual import dequantized, operand, residual_of
from .routing import combine, routed_tokens, routing_of
from .rows import Rows
from .schema import custom_op
from .scheme import MoEScheme


@dataclass(frozen=True)
class BackwardOperands:
    """In schema order. ``x``, ``w13``, ``w2`` are given where the scheme leaves them unquantized (x also where it has a
    residual); the packed tensors have no elements there. Shapes as in ``NvFp4MoEOperands`` and ``Out``."""

    dy: Tensor  # [T, H], the compute dtype
    x: Tensor | None
    gates: Tensor
    w13: Tensor | None
    w2: Tensor | None
    b13: Tensor | None
    b2: Tensor | None
    c13: Tensor
    s13: Tensor
    g13: Tensor
    c2: Tensor
    s2: Tensor
    g2: Tensor
    x_codes: Tensor
    x_scales: Tensor
    x_outer: Tensor
    pre: Tensor
    h_codes: Tensor
    h_scales: Tensor
    h_outer: Tensor
    order: Tensor
    offsets: Tensor
    scheme: str
    activation: str
    recompute: bool
    need_x: bool
    need_gates: bool
    need_w13: bool
    need_w2: bool
    need_b13: bool
    need_b2: bool

    @property
    def shape13(self) -> tuple[int, int]:
        """(E, N1)."""
        return packed_shape(self.c13)[:2] if self.w13 is None else (self.w13.shape[0], self.w13.shape[1])


def native(o: BackwardOperands) -> tuple[Tensor, ...]:
    """``(dx, dgates, dw13, dw2, db13, db2)``: dx and weight gradients in dy's dtype, the others in their operand's;
    what is not needed has no elements."""
    dtype, (tokens, top_k) = o.dy.dtype, o.gates.shape
    schemes, activation = MoEScheme.parse(o.scheme), Activation.parse(o.activation)
    routing = routing_of(o.order, o.offsets, top_k)
    weight_fmt = schemes.weight.fmt if schemes.weight else None
    w13 = ExpertWeights.load(o.w13, o.c13, o.s13, o.g13, weight_fmt, dtype)
    w2 = ExpertWeights.load(o.w2, o.c2, o.s2, o.g2, weight_fmt, dtype)
    x, hq, more_x, more_h, act = None, None, None, None, schemes.act
    if act is not None:
        x = Rows.unpack(o.x_codes, o.x_scales, o.x_outer, act.fmt)
        hq = Rows.unpack(o.h_codes, o.h_scales, o.h_outer, act.fmt)
        if act.residual is not None:
            assert o.x is not None
            more_x = residual_of(o.x, x, act, routed_tokens(routing, tokens, top_k))
    pre = o.pre
    if o.recompute:
        values, outer = operand(x, o.x, dtype, more_x)
        outer = None if outer is None else outer[routing.token]
        pre = expert_linear(values[routing.token], outer, w13.augmented(more_x), o.b13, routing)
    h, vjp = activation.evaluate_and_vjp(pre)
    if hq is not None:
        assert act is not None
        more_h = residual_of(h, hq, act, ~routing.dropped[:, 0])
        h = dequantized(hq, more_h, dtype)

    dy, gates = o.dy[routing.token], o.gates.reshape(-1)[routing.order].unsqueeze(-1)
    dh = expert_linear(dy, None, w2.transposed, None, routing)

    dgates = o.gates.new_empty(0)
    if o.need_gates:
        row = (dh.float() * h.float()).sum(-1)
        if o.b2 is not None:
            row = row + (dy.float() * o.b2[routing.expert].float()).sum(-1)
        row = row.masked_fill(routing.dropped[:, 0], 0)
        dgates = row[routing.inverse].view(tokens, top_k).to(o.gates.dtype)
    dw2 = grouped_wgrad(dy, (h * gates).to(dtype), routing) if o.need_w2 else dy.new_empty(0)
    db2 = dy.new_empty(0)
    if o.b2 is not None and o.need_b2:
        db2 = grouped_sum((dy * gates).to(dtype), routing).to(o.b2.dtype)
    dpre = vjp((dh * gates).to(dtype))
    db13 = grouped_sum(dpre, routing).to(o.b13.dtype) if o.b13 is not None and o.need_b13 else dy.new_empty(0)
    dw13, dx = dy.new_empty(0), dy.new_empty(0)
    if o.need_w13:
        rows = o.x if x is None else dequantized(x, more_x, dtype)
        assert rows is not None
        dw13 = grouped_wgrad(dpre, rows[routing.token], routing)
    if o.need_x:
        dx = combine(expert_linear(dpre, None, w13.transposed, None, routing), routing, tokens, top_k)
    return dx, dgates, dw13, dw2, db13, db2


def fake(o: BackwardOperands) -> tuple[Tensor, ...]:
    (tokens, top_k), hidden, (experts, columns) = o.gates.shape, o.dy.shape[1], o.shape13
    width = Activation.parse(o.activation).width(columns)

    def like(t: Tensor | None, needed: bool, *shape: int) -> Tensor:
        return o.dy.new_empty(shape, dtype=t.dtype) if needed and t is not None else o.dy.new_empty(0)

    return (
        like(o.dy, o.need_x, tokens, hidden),
        o.gates.new_empty((tokens, top_k) if o.need_gates else (0,)),
        like(o.dy, o.need_w13, experts, columns, hidden),
        like(o.dy, o.need_w2, experts, hidden, width),
        like(o.b13, o.need_b13, experts, columns),
        like(o.b2, o.need_b2, experts, hidden),
    )


nvfp4_moe_backward = custom_op("nvfp4_moe_backward", BackwardOperands, 6, native, fake)
