"""The mixture-of-experts region in floating point: what outlining puts in place of a model's own nodes.

Order of operations and rounding are those of transformers' ``grouped_mm_experts_forward`` (sort by expert, gather,
grouped GEMM, activation, grouped GEMM, times gates, back to token order, sum over k), forward and backward, so on a
CPU in float32 outputs and all gradients, the gates' too, are equal bit for bit. Beyond it, ids below 0 count as not
routed just as ids >= E do, and bias gradients are summed in float32.

Dtype rule, with and without autocast: GEMMs run in ``w13``'s dtype, the gate multiplication in the wider of that and
the gates' dtype, and the result has ``x``'s dtype.

``moe_float`` is the op in graphs. It is defined by ``moe_float_saving``, the op that also returns what a backward
needs; graphs that differentiate therefore run both GEMMs once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .activation import Activation
from .checks import same_device
from .grouped import grouped_mm, grouped_sum, grouped_wgrad
from .routing import Routing, combine, route, routing_of
from .schema import custom_op, schema_of


@dataclass(frozen=True)
class MoEFloatOperands:
    """Operands in schema order; see :func:`moe_float`."""

    x: Tensor  # [T, H]
    expert_ids: Tensor  # i64 [T, K]
    gates: Tensor  # [T, K]
    w13: Tensor  # [E, N1, H]
    w2: Tensor  # [E, H, I]
    b13: Tensor | None  # [E, N1]
    b2: Tensor | None  # [E, H]
    activation: str
    weight_input: bool


@dataclass(frozen=True)
class SavingOperands(MoEFloatOperands):
    save: bool


@dataclass(frozen=True)
class BackwardOperands:
    """Operands of the backward in schema order: the forward's, and what it saved."""

    dy: Tensor  # [T, H]
    x: Tensor
    expert_ids: Tensor
    gates: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None
    pre: Tensor  # [S, N1]
    o: Tensor  # [S, H]
    order: Tensor  # i64 [S]
    offsets: Tensor  # i32 [E]
    activation: str
    weight_input: bool
    need_rows: bool
    need_w13: bool
    need_w2: bool


def native(p: SavingOperands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(y [T, H], pre [S, N1], o [S, H], order i64 [S], offsets i32 [E])``; all but y are empty without ``save``."""
    same_device(**{name: t for name, t in vars(p).items() if isinstance(t, Tensor)})
    tokens, top_k = p.expert_ids.shape
    routing = route(p.expert_ids, p.w13.shape[0], stable=False)
    rows, row_gates = _rows(p.x, p.gates, routing, p.w13.dtype, p.weight_input)
    pre = _linear(rows, p.w13, p.b13, routing)
    o = _linear(Activation.parse(p.activation).evaluate(pre), p.w2, p.b2, routing)
    y = combine(o if p.weight_input else o * row_gates, routing, tokens, top_k).to(p.x.dtype)
    if p.save:
        return y, pre, o, routing.order, routing.offsets
    return y, pre.new_empty(0), o.new_empty(0), routing.order.new_empty(0), routing.offsets.new_empty(0)


def fake(p: SavingOperands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    same_device(**{name: t for name, t in vars(p).items() if isinstance(t, Tensor)})
    (tokens, hidden), slots = p.x.shape, p.expert_ids.shape[0] * p.expert_ids.shape[1]
    return (
        p.x.new_empty(tokens, hidden),
        p.w13.new_empty((slots, p.w13.shape[1]) if p.save else (0,)),
        p.w13.new_empty((slots, hidden) if p.save else (0,)),
        p.expert_ids.new_empty(slots if p.save else 0),
        p.expert_ids.new_empty(p.w13.shape[0] if p.save else 0, dtype=torch.int32),
    )


def native_backward(p: BackwardOperands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dx, dgates, dw13, dw2, db13, db2)`` in the operands' shapes and dtypes; those not needed are empty."""
    tokens, top_k = p.expert_ids.shape
    routing = routing_of(p.order, p.offsets, top_k)
    rows, row_gates = _rows(p.x, p.gates, routing, p.w13.dtype, p.weight_input)
    do = p.dy.to(p.o.dtype if p.weight_input else torch.result_type(p.o, p.gates))[routing.token]
    drow_gates = None
    if not p.weight_input:
        drow_gates = (do * p.o).sum(-1)
        do = (do * row_gates).to(p.o.dtype)
    do = do.masked_fill(routing.dropped, 0)
    h, vjp = Activation.parse(p.activation).evaluate_and_vjp(p.pre)
    dw2 = grouped_wgrad(do, h, routing) if p.need_w2 else do.new_empty(0)
    db2 = grouped_sum(do, routing).to(p.b2.dtype) if p.b2 is not None else do.new_empty(0)
    dpre = vjp(grouped_mm(do, p.w2.transpose(-2, -1), routing)).masked_fill(routing.dropped, 0)
    dw13 = grouped_wgrad(dpre, rows, routing) if p.need_w13 else do.new_empty(0)
    db13 = grouped_sum(dpre, routing).to(p.b13.dtype) if p.b13 is not None else do.new_empty(0)
    dx = p.x.new_empty(0)
    if p.need_rows:
        drows = grouped_mm(dpre, p.w13.transpose(-2, -1), routing)
        if p.weight_input:
            drow_gates = (drows * p.x.to(p.w13.dtype)[routing.token]).sum(-1)
            drows = (drows * row_gates).to(p.w13.dtype)
        dx = _sum_by_row(drows.to(p.x.dtype), routing, tokens, top_k)
    return dx, _to_slots(drow_gates, p.gates, routing), dw13, dw2, db13, db2


def fake_backward(p: BackwardOperands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(t: Tensor | None, needed: bool = True) -> Tensor:
        return p.w13.new_empty(0) if t is None else t.new_empty(t.shape if needed else (0,))

    has_gates = p.need_rows or not p.weight_input
    dw13, dw2 = like(p.w13, p.need_w13), like(p.w2, p.need_w2)
    return like(p.x, p.need_rows), like(p.gates, has_gates), dw13, dw2, like(p.b13), like(p.b2)


moe_float_saving = custom_op("moe_float_saving", SavingOperands, 5, native, fake)
moe_float_backward = custom_op("moe_float_backward", BackwardOperands, 6, native_backward, fake_backward)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, ctx.activation, ctx.weight_input, save = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    if save:
        ctx.save_for_backward(*operands, *output[1:])


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if grads[0] is None:
        return (None,) * len(needs)
    need_rows = needs[0] or (needs[2] and ctx.weight_input)
    dx, dgates, dw13, dw2, db13, db2 = moe_float_backward(
        grads[0], *ctx.saved_tensors, ctx.activation, ctx.weight_input, need_rows, needs[3], needs[4]
    )
    found = (dx, None, dgates, dw13, dw2, db13, db2)
    return (*(g if need else None for g, need in zip(found, needs, strict=False)), None, None, None)


moe_float_saving.register_autograd(_backward, setup_context=_setup_context)


def moe_float(
    x: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    activation: str,
    weight_input: bool,
) -> Tensor:
    """The experts of one mixture-of-experts layer: ``y [T, H]`` of ``x``'s dtype.

    ``x [T, H]``; ``expert_ids i64 [T, K]``, ids outside ``[0, E)`` contribute nothing; ``gates [T, K]``;
    ``w13 [E, N1, H]`` gate rows before up rows; ``w2 [E, H, I]``; biases ``[E, N1]`` and ``[E, H]`` or None;
    ``activation`` is an :attr:`Activation.key`. Gates multiply the experts' outputs, or their inputs when
    ``weight_input``. Differentiable in x, gates, weights and biases.
    """
    operands = (x, expert_ids, gates, w13, w2, b13, b2)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    return moe_float_saving(*operands, activation, weight_input, save)[0]


_library = torch.library.Library("trace_compile", "FRAGMENT")
_library.define("moe_float" + schema_of(MoEFloatOperands, 1))
_library.impl("moe_float", moe_float, "CompositeImplicitAutograd")


def _rows(x: Tensor, gates: Tensor, routing: Routing, dtype: torch.dtype, weight_input: bool) -> tuple[Tensor, Tensor]:
    """Rows in expert order ``[S, H]`` in the GEMM dtype, and their gates ``[S, 1]``."""
    rows, row_gates = x[routing.token].to(dtype), gates.reshape(-1)[routing.order].unsqueeze(-1)
    if weight_input:
        rows = (rows * row_gates).to(dtype)
    return rows.masked_fill(routing.dropped, 0), row_gates


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    out = grouped_mm(rows, weight, routing)
    return out if bias is None else out.add_(bias[routing.expert]).masked_fill_(routing.dropped, 0)


def _to_slots(drow_gates: Tensor | None, gates: Tensor, routing: Routing) -> Tensor:
    if drow_gates is None:
        return gates.new_empty(0)
    return drow_gates.masked_fill(routing.dropped[:, 0], 0)[routing.inverse].view(gates.shape).to(gates.dtype)


def _sum_by_row(rows: Tensor, routing: Routing, tokens: int, top_k: int) -> Tensor:
    """Each token's rows added in the order of their experts: the order in which autograd's scatter-add meets them."""
    position = routing.inverse.view(tokens, top_k).sort(dim=1).values
    total = rows.new_zeros(tokens, rows.shape[1])
    for k in range(top_k):
        total += rows[position[:, k]]
    return total
