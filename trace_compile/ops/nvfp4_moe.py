"""The quantized mixture-of-experts region: both expert GEMMs on 4-bit operands, in one opaque op.

    rows of token t     xq = q(x[t])              quantized once per token, before dispatch
    pre-activation      pre = (xq . w13q^T) * g13 * gx + b13       GEMM on q*s in x's dtype, scales in float32
    hidden              hq = q(act(pre))          quantized per routed row
    expert output       o  = (hq . w2q^T) * g2 * gh + b2
    result              y[t] = sum over k of gate[t, k] * o[t, k], in slot order

Named after its main format; every 4-bit one runs here. The dequantised operands without outer scales (q*s) are exact in
float32, and for nvfp4, mxfp4 and hif4 in bfloat16, so with power-of-two outer scales a GEMM here equals one on FP4
tensor cores up to the order of summation. A scheme with a residual makes both GEMMs longer: see :mod:`.residual`.

Dtype rule, with and without autocast: ``x``'s dtype (bfloat16 or float32) is the compute dtype; pre, act, h and o are
rounded to it. The masters' dtype does not matter to the forward; their gradients have it. Gates: any float dtype.

A token with NaN or Inf has a NaN output and changes no other token's. Ids outside ``[0, E)`` contribute nothing to
outputs, gradients and statistics; tokens with ``valid`` False contribute nothing to statistics.

Backward: :mod:`.nvfp4_moe_backward`. Operands of the GEMMs are saved packed (4.5 bits per value), the pre-activation in
the compute dtype, or not at all with ``recompute`` (one more run of the first GEMM in the backward).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import GuidanceError, TraceCompileError, UnknownFormatError
from ..numerics import FORMATS, format_of, profile_of
from .activation import Activation
from .checks import same_device, whole_blocks
from .linear import ExpertWeights, expert_linear
from .nvfp4_moe_backward import nvfp4_moe_backward
from .observe import BUCKETS, Diag, diagnosis, expert_amax, expert_counts, histogram, row_amax, saturation
from .quads import packed_shape
from .records import KINDS, RegionRow, payload_of
from .residual import operand, residual_of
from .routing import Routing, combine, route, routed_tokens
from .rows import guide_rows, quantize_rows
from .schema import custom_op
from .scheme import MoEScheme, OperandScheme

GUIDANCE = ("none", *KINDS)
RECORD = ("none", "ranges", *KINDS)
COMPUTE_DTYPES = (torch.bfloat16, torch.float32)


class Out(IntEnum):
    """Positions in the op's result. What was not asked for has no elements."""

    Y = 0  # x.dtype [T, H]
    RECORD = 1  # u8 [T, record_bytes]: the outcome at the gate/up input, and for "+down" at the down input; see records
    RECORD_OUTER = 2  # f32 [T], for "+down" [T, 1 + K]: outer scales of those rows
    AMAX = 3  # f32 [2, E]: largest finite |input| of gate_up and of down, per expert
    COUNTS = 4  # i64 [E]: routed tokens
    HIST = 5  # i64 [2, 64]: see observe.histogram; gate_up counts a token once, down counts routed rows
    SATURATED = 6  # i64 [2]
    DIAG = 7  # f64 [2, 7]: see observe.Diag; gate_up, down (zeros where nothing is recorded)
    X_CODES = 8  # from here on: saved for the backward. u8 [T, H/2]
    X_SCALES = 9  # u8 [T, Format.scale_bytes(H)]
    X_OUTER = 10  # f32 [T]
    PRE = 11  # x.dtype [S, N1]
    H_CODES = 12  # u8 [S, I/2]
    H_SCALES = 13  # u8 [S, Format.scale_bytes(I)]
    H_OUTER = 14  # f32 [S]
    ORDER = 15  # i64 [S]
    OFFSETS = 16  # i32 [E]


@dataclass(frozen=True)
class NvFp4MoEOperands:
    """Operands in schema order. ``None`` masters mean inference: nothing is saved.

    ``outer_in`` holds the traced outer scales of the gate/up and down inputs; ``guide`` rows are described in
    :mod:`.records` (with ``diagnose`` they may also be of codes where bits guide, or be there only to compare with);
    ``hit`` says which tokens have a record (None: all); ``c*``, ``s*``, ``g*`` are ``Packed`` weights,
    without elements when the scheme leaves weights unquantized and w13, w2 are used instead.
    """

    x: Tensor  # [T, H]
    expert_ids: Tensor  # i64 [T, K]
    gates: Tensor  # [T, K]
    w13: Tensor | None  # [E, N1, H]
    w2: Tensor | None  # [E, H, I]
    b13: Tensor | None  # [E, N1]
    b2: Tensor | None  # [E, H]
    c13: Tensor  # u8 [E, N1, H/2], or with s13 and c2, s2 in the form of .quads
    s13: Tensor  # u8 [E, N1, Format.scale_bytes(H)]
    g13: Tensor  # f32 [E]
    c2: Tensor  # u8 [E, H, I/2]
    s2: Tensor  # u8 [E, H, Format.scale_bytes(I)]
    g2: Tensor  # f32 [E]
    outer_in: Tensor | None  # f32 [2]
    guide: Tensor | None  # u8 [T, guide_bytes]: see records
    guide_outer: Tensor | None  # f32 [T], for "+down" [T, 1 + K]
    hit: Tensor | None  # bool [T]
    valid: Tensor | None  # bool [T]
    scheme: str
    activation: str
    guidance: str
    record: str
    diagnose: bool
    recompute: bool

    @property
    def schemes(self) -> MoEScheme:
        return MoEScheme.parse(self.scheme)

    @property
    def trains(self) -> bool:
        return self.w13 is not None

    @property
    def shape13(self) -> tuple[int, int]:
        """(E, N1)."""
        if self.schemes.weight:
            return packed_shape(self.c13)[:2]
        assert self.w13 is not None
        return self.w13.shape[0], self.w13.shape[1]

    @property
    def width(self) -> int:
        """I."""
        return Activation.parse(self.activation).width(self.shape13[1])


def check(o: NvFp4MoEOperands) -> None:
    """Raises the named error for operands that do not fit together. Looks at shapes and dtypes only."""
    same_device(**{name: t for name, t in vars(o).items() if isinstance(t, Tensor)})
    if o.schemes.weight is None and (o.w13 is None or o.w2 is None):
        raise TraceCompileError(
            f"scheme {o.scheme!r} leaves weights unquantized but w13 or w2 is None: pass the weights"
        )
    check_formats(o)  # before the width, which only operands of a weight format have
    check_operands(o, hidden=o.x.shape[1], width=o.width)
    if o.guidance != "none" and guide_row(o) is None:
        act = o.schemes.act
        assert act is not None
        raise wrong_guide(o, RegionRow(o.x.shape[1], o.width, o.expert_ids.shape[1], o.guidance, act).guide_bytes)


def wrong_guide(o: Any, expected: int) -> GuidanceError:
    """The error for guide rows that are not of ``expected`` bytes, or lack outer scales."""
    found = "none" if o.guide is None else f"{o.guide.shape[1]} bytes"
    return GuidanceError(
        f"guidance {o.guidance!r} of width {o.x.shape[1]} needs guide rows of {expected} bytes, got {found},"
        f" and guide_outer, which is {'missing' if o.guide_outer is None else 'given'}"
    )


def check_formats(o: Any) -> None:
    """Raises ``UnknownFormatError`` for a format that weights, or activations, cannot have."""
    for scheme, activations in ((o.schemes.weight, False), (o.schemes.act, True)):
        if scheme is not None:
            _check_format(scheme, activations)


def check_operands(o: Any, **widths: int) -> None:
    """The checks that every quantized op makes of dtype, blocks, traced scales and kinds; ``widths`` are those of its
    quantized rows."""
    weight, act = o.schemes.weight, o.schemes.act
    for scheme in (weight, act):
        if scheme is not None:
            whole_blocks(FORMATS[scheme.fmt].block, **widths)
    if o.x.dtype not in COMPUTE_DTYPES:
        raise UnknownFormatError(
            f"x is {o.x.dtype}; products of 4-bit operands need bfloat16 or float32: cast x to one"
        )
    if act is not None and act.outer == "traced" and o.outer_in is None:
        raise UnknownFormatError(f"scheme {o.scheme!r} takes traced outer scales but outer_in is None: trace a rollout")
    if o.guidance not in GUIDANCE or o.record not in RECORD:
        raise GuidanceError(f"guidance {o.guidance!r} must be one of {GUIDANCE}, record {o.record!r} one of {RECORD}")
    if act is None and (o.guidance != "none" or o.record in KINDS):
        raise GuidanceError(
            f"guidance {o.guidance!r}, record {o.record!r}: scheme {o.scheme!r} quantizes no activations"
        )


def guide_row(o: NvFp4MoEOperands) -> RegionRow | None:
    """What the guide rows are: of the kind that guides; or, to be diagnosed with, of whole codes. None: not used."""
    act = o.schemes.act
    if act is None or o.guide is None or o.guide_outer is None or (o.guidance == "none" and not o.diagnose):
        return None
    kinds = ["code", "code+down"] if o.guidance == "none" else [o.guidance]
    if o.diagnose and o.guidance != "none":
        kinds.append(o.guidance.replace("bit", "code"))
    rows = [RegionRow(o.x.shape[1], o.width, o.expert_ids.shape[1], kind, act) for kind in kinds]
    return next((row for row in rows if row.guide_bytes == o.guide.shape[1]), None)


def _check_format(scheme: OperandScheme, activations: bool) -> None:
    fmt = format_of(scheme.fmt)
    profile_of(scheme.profile)
    if fmt.element.bits != 4 or (activations and not fmt.operand):
        known = ", ".join(name for name, f in FORMATS.items() if f.element.bits == 4 and (f.operand or not activations))
        what = "activations" if activations else "weights"
        raise UnknownFormatError(f"{what} are quantized to 4-bit formats ({known}), not to {scheme.fmt!r}")


class Counted(NamedTuple):
    """Which rows statistics are taken of: valid tokens with a route, and their routes."""

    tokens: Tensor  # bool [T]
    rows: Tensor  # bool [S]

    @classmethod
    def of(cls, expert_ids: Tensor, valid: Tensor | None, routing: Routing) -> Counted:
        routed = ~routing.dropped[:, 0]
        tokens = routed_tokens(routing, *expert_ids.shape)
        if valid is not None:
            tokens = tokens & valid
        return cls(tokens, routed & tokens[routing.token])


def native(o: NvFp4MoEOperands) -> tuple[Tensor, ...]:
    """The reference body: torch operations only, any device, no host sync, nothing per expert in Python."""
    check(o)
    dtype, (tokens, top_k) = o.x.dtype, o.expert_ids.shape
    experts, _ = o.shape13
    weight, act = o.schemes.weight, o.schemes.act
    weight_fmt = weight.fmt if weight else None
    routing = route(o.expert_ids, experts)
    counted = Counted.of(o.expert_ids, o.valid, routing)

    x, own, more_x, more_h, row = None, None, None, None, guide_row(o)
    guide, guide_h = None, None
    if row is not None:
        assert o.guide is not None and o.guide_outer is not None
        use = row.payload if o.guidance == "none" else payload_of(o.guidance)
        guide, guide_h = row.read(o.guide, o.guide_outer, o.hit, o.expert_ids, routing, use)
    if act is not None:
        x = own = quantize_rows(o.x, act, o.outer_in[0] if o.outer_in is not None else None, counted.tokens)
        if guide is not None and o.guidance != "none":
            x = guide_rows(o.x, own, guide)
        more_x = residual_of(o.x, x, act, routed_tokens(routing, tokens, top_k))
    x_values, x_outer = operand(x, o.x, dtype, more_x)
    x_outer = None if x_outer is None else x_outer[routing.token]
    w13 = ExpertWeights.load(o.w13, o.c13, o.s13, o.g13, weight_fmt, dtype)
    pre = expert_linear(x_values[routing.token], x_outer, w13.augmented(more_x), o.b13, routing)
    h = Activation.parse(o.activation).evaluate(pre)
    hq = own_h = None
    if act is not None:
        hq = own_h = quantize_rows(h, act, o.outer_in[1] if o.outer_in is not None else None, counted.rows)
        if guide_h is not None and o.guidance != "none":
            hq = guide_rows(h, own_h, guide_h)
        more_h = residual_of(h, hq, act, ~routing.dropped[:, 0])
    w2 = ExpertWeights.load(o.w2, o.c2, o.s2, o.g2, weight_fmt, dtype)
    out = expert_linear(*operand(hq, h, dtype, more_h), w2.augmented(more_h), o.b2, routing)
    weighted = (out * o.gates.reshape(-1)[routing.order].unsqueeze(-1)).masked_fill(routing.dropped, 0)

    found: dict[int, Tensor] = {Out.Y: combine(weighted, routing, tokens, top_k).to(dtype)}
    if o.record in KINDS:
        assert x is not None and hq is not None and act is not None
        recorded = RegionRow(o.x.shape[1], o.width, top_k, o.record, act)
        found[Out.RECORD], found[Out.RECORD_OUTER] = recorded.record(x, hq, routing)
    if o.record != "none":
        outers = None if x is None or hq is None else (x.outer, hq.outer)
        found |= _statistics(o.x, h, outers, act, counted, routing)
    if o.diagnose and guide is not None:
        assert own is not None and x is not None and own_h is not None and hq is not None
        sites = [diagnosis(o.x, own, x, guide, counted.tokens)]
        sites.append(torch.zeros_like(sites[0]) if guide_h is None else diagnosis(h, own_h, hq, guide_h, counted.rows))
        found[Out.DIAG] = torch.stack(sites)
    if o.trains:
        found |= {Out.ORDER: routing.order, Out.OFFSETS: routing.offsets}
        if not o.recompute:
            found[Out.PRE] = pre
        if x is not None and hq is not None:
            found |= {Out.X_CODES: x.packed, Out.X_SCALES: x.scales, Out.X_OUTER: x.outer}
            found |= {Out.H_CODES: hq.packed, Out.H_SCALES: hq.scales, Out.H_OUTER: hq.outer}
    return in_order(found, o)


def _statistics(
    x: Tensor,
    h: Tensor,
    outers: tuple[Tensor, Tensor] | None,
    act: OperandScheme | None,
    counted: Counted,
    routing: Routing,
) -> dict[int, Tensor]:
    per_row = (row_amax(x)[routing.token], row_amax(h))
    if outers is None or act is None or not FORMATS[act.fmt].outer:
        beyond = counted.rows.new_zeros(2, dtype=torch.int64)
    else:
        beyond = torch.stack([saturation(t, g, act, c) for t, g, c in zip((x, h), outers, counted, strict=True)])
    return {
        Out.AMAX: torch.stack([expert_amax(amax, counted.rows, routing) for amax in per_row]),
        Out.COUNTS: expert_counts(counted.rows, routing),
        Out.HIST: torch.stack([histogram(t, c) for t, c in zip((x, h), counted, strict=True)]),
        Out.SATURATED: beyond,
    }


_DTYPES: dict[int, torch.dtype] = {
    Out.DIAG: torch.float64,
    Out.OFFSETS: torch.int32,
    **dict.fromkeys((Out.COUNTS, Out.HIST, Out.SATURATED, Out.ORDER), torch.int64),
    **dict.fromkeys((Out.RECORD, Out.X_CODES, Out.X_SCALES, Out.H_CODES, Out.H_SCALES), torch.uint8),
    **dict.fromkeys((Out.RECORD_OUTER, Out.AMAX, Out.X_OUTER, Out.H_OUTER), torch.float32),
}
"""All others have x's dtype."""


def result_shapes(o: NvFp4MoEOperands) -> dict[int, tuple[int, ...]]:
    """Shape of every result that was asked for; the others have no elements."""
    (tokens, hidden), top_k = o.x.shape, o.expert_ids.shape[1]
    (experts, columns), width, slots = o.shape13, o.width, tokens * top_k
    act = o.schemes.act
    shapes: dict[int, tuple[int, ...]] = {Out.Y: (tokens, hidden)}
    if o.record in KINDS:
        assert act is not None
        row = RegionRow(hidden, width, top_k, o.record, act)
        shapes |= {Out.RECORD: (tokens, row.record_bytes), Out.RECORD_OUTER: (tokens, *row.outer_shape)}
    if o.record != "none":
        shapes |= {Out.AMAX: (2, experts), Out.COUNTS: (experts,), Out.HIST: (2, BUCKETS), Out.SATURATED: (2,)}
    if o.diagnose and guide_row(o) is not None:
        shapes[Out.DIAG] = (2, len(Diag))
    if o.trains:
        shapes |= {Out.ORDER: (slots,), Out.OFFSETS: (experts,)}
        if not o.recompute:
            shapes[Out.PRE] = (slots, columns)
        if act is not None:
            for first, rows, k in ((Out.X_CODES, tokens, hidden), (Out.H_CODES, slots, width)):
                shapes[first] = (rows, k // 2)
                shapes[first + 1] = (rows, FORMATS[act.fmt].scale_bytes(k))
                shapes[first + 2] = (rows,)
    return shapes


def fake(o: NvFp4MoEOperands) -> tuple[Tensor, ...]:
    """Shapes, dtypes and devices of :func:`native`; contiguous, as there."""
    check(o)
    return in_order({i: o.x.new_empty(s, dtype=_dtype(i, o)) for i, s in result_shapes(o).items()}, o)


def in_order(found: dict[int, Tensor], o: NvFp4MoEOperands) -> tuple[Tensor, ...]:
    return tuple(found[i] if i in found else o.x.new_empty(0, dtype=_dtype(i, o)) for i in Out)


def _dtype(i: int, o: NvFp4MoEOperands) -> torch.dtype:
    return _DTYPES.get(i, o.x.dtype)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Saves what :class:`BackwardOperands` lists: packed operands, and whole ones only where they are not quantized."""
    o = NvFp4MoEOperands(*inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.trains, ctx.options = o.trains, (o.scheme, o.activation, o.recompute)
    if not o.trains:
        return
    ctx.master_dtypes = tuple(w.dtype for w in (o.w13, o.w2) if w is not None)
    weight, act = o.schemes.weight, o.schemes.act
    whole = (
        o.x if act is None or act.residual else None,
        o.gates,
        *((o.w13, o.w2) if weight is None else (None, None)),
        o.b13,
        o.b2,
    )
    ctx.save_for_backward(*whole, o.c13, o.s13, o.g13, o.c2, o.s2, o.g2, *output[Out.X_CODES :])


def backward_with(op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The autograd formula that runs ``op``, a custom op on :class:`BackwardOperands`."""

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        if grads[0] is None:
            return (None,) * len(needs)
        if not ctx.trains:
            raise TraceCompileError(
                "nvfp4_moe ran in its inference form (w13 is None) and saved nothing: pass the masters"
            )
        wanted = tuple(needs[i] for i in (0, 2, 3, 4, 5, 6))  # x, gates, w13, w2, b13, b2
        found = op(grads[0], *ctx.saved_tensors, *ctx.options, *wanted)
        dx, dgates, dw13, dw2, db13, db2 = (g if want else None for g, want in zip(found, wanted, strict=True))
        dw13, dw2 = (None if g is None else g.to(d) for g, d in zip((dw13, dw2), ctx.master_dtypes, strict=True))
        return (dx, None, dgates, dw13, dw2, db13, db2, *(None,) * (len(needs) - 7))

    return backward


nvfp4_moe = custom_op("nvfp4_moe", NvFp4MoEOperands, len(Out), native, fake)
nvfp4_moe.register_autograd(backward_with(nvfp4_moe_backward), setup_context=setup_context)
