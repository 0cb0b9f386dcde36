"""A quantized linear layer, or several that read the same input, in one opaque op: one GEMM on 4-bit operands.

    rows     xq = q(x[t])                       quantized once, however many layers read them
    result   y[t] = (xq . wq^T) * g * gx + b    GEMM on q*s in x's dtype, scales and bias in float32

The same quantizers, guidance, records and dtype rule as :mod:`.nvfp4_moe`, whose first results this op's are, in the
same order; weights are packed as those of one expert. ``w [N, K]`` may be the rows of several layers one after the
other: they then share one outer scale, as engines that fuse such layers want.

Backward, quantizers passed straight through: ``dx = (dy . wq) * g``, ``dw = dy^T . xq``, ``db`` the sum of dy's rows.
The rows of x are saved packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ..errors import TraceCompileError
from ..numerics import FORMATS
from .checks import same_device
from .linear import ExpertWeights
from .nvfp4_moe import check_formats, check_operands, wrong_guide
from .observe import BUCKETS, Diag, diagnosis, histogram, row_amax, saturation
from .residual import dequantized, operand, residual_of
from .rows import Guide, Rows, guide_bytes, guide_rows, quantize_rows, record_bytes, record_rows
from .schema import custom_op
from .scheme import MoEScheme


class LinearOut(IntEnum):
    """Positions in the op's result; the first eight mean what they mean in ``nvfp4_moe.Out``, with one expert."""

    Y = 0  # x.dtype [T, N]
    RECORD = 1  # u8 [T, record_bytes]
    RECORD_OUTER = 2  # f32 [T]
    AMAX = 3  # f32 [1, 1]
    COUNTS = 4  # i64 [1]
    HIST = 5  # i64 [1, 64]
    SATURATED = 6  # i64 [1]
    DIAG = 7  # f64 [1, 7]
    X_CODES = 8  # from here on: saved for the backward. u8 [T, K/2]
    X_SCALES = 9  # u8 [T, Format.scale_bytes(K)]
    X_OUTER = 10  # f32 [T]


@dataclass(frozen=True)
class NvFp4LinearOperands:
    """Operands in schema order. ``w`` is None for inference: nothing is saved. The others as in ``nvfp4_moe``."""

    x: Tensor  # [T, K]
    w: Tensor | None  # [N, K]
    b: Tensor | None  # [N]
    c: Tensor  # u8 [1, N, K/2]
    s: Tensor  # u8 [1, N, Format.scale_bytes(K)]
    g: Tensor  # f32 [1]
    outer_in: Tensor | None  # f32 [1]
    guide: Tensor | None  # u8 [T, guide_bytes]
    guide_outer: Tensor | None  # f32 [T]
    hit: Tensor | None  # bool [T]
    valid: Tensor | None  # bool [T]
    scheme: str
    guidance: str
    record: str
    diagnose: bool

    @property
    def schemes(self) -> MoEScheme:
        return MoEScheme.parse(self.scheme)

    @property
    def trains(self) -> bool:
        return self.w is not None

    @property
    def columns(self) -> int:
        """N."""
        rows = self.c[0] if self.schemes.weight else self.w
        assert rows is not None
        return rows.shape[0]


def check(o: NvFp4LinearOperands) -> None:
    """Raises the named error for operands that do not fit together. Looks at shapes and dtypes only."""
    same_device(**{name: t for name, t in vars(o).items() if isinstance(t, Tensor)})
    if o.schemes.weight is None and o.w is None:
        raise TraceCompileError(f"scheme {o.scheme!r} leaves weights unquantized but w is None: pass the weight")
    check_formats(o)
    check_operands(o, input=o.x.shape[1])
    act = o.schemes.act
    if o.guidance != "none" and guide_kind(o) is None:
        assert act is not None
        raise wrong_guide(o, guide_bytes(o.x.shape[1], o.guidance, act.fmt))


def guide_kind(o: NvFp4LinearOperands) -> str | None:
    """What the guide rows are: of the kind that guides; or, to be diagnosed with, whole codes. None: not used."""
    act = o.schemes.act
    if act is None or o.guide is None or o.guide_outer is None or (o.guidance == "none" and not o.diagnose):
        return None
    kinds = [*([o.guidance] if o.guidance != "none" else []), *(["code"] if o.diagnose else [])]
    return next((k for k in kinds if guide_bytes(o.x.shape[1], k, act.fmt) == o.guide.shape[1]), None)


def native(o: NvFp4LinearOperands) -> tuple[Tensor, ...]:
    """The reference body: torch operations only, any device, no host sync."""
    check(o)
    dtype, act = o.x.dtype, o.schemes.act
    counted = o.x.new_ones(o.x.shape[0], dtype=torch.bool) if o.valid is None else o.valid
    x, own, guide, more, kind = None, None, None, None, guide_kind(o)
    if act is not None:
        x = own = quantize_rows(o.x, act, o.outer_in[0] if o.outer_in is not None else None, counted)
        if kind is not None:
            assert o.guide is not None and o.guide_outer is not None
            use = kind if o.guidance == "none" else o.guidance
            guide = Guide.read(o.guide, o.guide_outer, o.hit, kind, o.x.shape[1], act.fmt, use)
        if guide is not None and o.guidance != "none":
            x = guide_rows(o.x, own, guide)
        more = residual_of(o.x, x, act, torch.ones_like(counted))
    y = _product(*operand(x, o.x, dtype, more), _weight(o.w, o.c, o.s, o.g, o.schemes, dtype).augmented(more))
    if o.b is not None:
        y = y.float() + o.b.float()

    found: dict[int, Tensor] = {LinearOut.Y: y.to(dtype)}
    if o.record in ("bit", "code"):
        assert x is not None and act is not None
        found |= {LinearOut.RECORD: record_rows(x, o.record, act), LinearOut.RECORD_OUTER: x.outer.clone()}
    if o.record != "none":
        beyond = counted.new_zeros((), dtype=torch.int64)
        if x is not None and act is not None and FORMATS[act.fmt].outer:
            beyond = saturation(o.x, x.outer, act, counted)
        largest = torch.where(counted, row_amax(o.x), 0)
        found |= {
            LinearOut.AMAX: torch.cat([largest, largest.new_zeros(1)]).amax().view(1, 1),
            LinearOut.COUNTS: counted.sum().view(1),
            LinearOut.HIST: histogram(o.x, counted).view(1, BUCKETS),
            LinearOut.SATURATED: beyond.view(1),
        }
    if o.diagnose and guide is not None:
        assert own is not None and x is not None
        found[LinearOut.DIAG] = diagnosis(o.x, own, x, guide, counted).unsqueeze(0)
    if o.trains and x is not None:
        found |= {LinearOut.X_CODES: x.packed, LinearOut.X_SCALES: x.scales, LinearOut.X_OUTER: x.outer}
    return _in_order(found, o)


def _weight(w: Tensor | None, c: Tensor, s: Tensor, g: Tensor, schemes: MoEScheme, dtype: torch.dtype) -> ExpertWeights:
    """The weight as that of one expert."""
    master = None if w is None else w.unsqueeze(0)
    return ExpertWeights.load(master, c, s, g, schemes.weight.fmt if schemes.weight else None, dtype)


def _product(rows: Tensor, row_outer: Tensor | None, weight: ExpertWeights) -> Tensor:
    """``(rows . w^T) * g * g_row``, one scale after the other: their product could leave float32's range."""
    out = rows @ weight.values[0].t()
    if weight.outer is not None:
        out = out.float() * weight.outer
    return out if row_outer is None else out.float() * row_outer.unsqueeze(-1)


_DTYPES: dict[int, torch.dtype] = {
    LinearOut.DIAG: torch.float64,
    **dict.fromkeys((LinearOut.COUNTS, LinearOut.HIST, LinearOut.SATURATED), torch.int64),
    **dict.fromkeys((LinearOut.RECORD, LinearOut.X_CODES, LinearOut.X_SCALES), torch.uint8),
    **dict.fromkeys((LinearOut.RECORD_OUTER, LinearOut.AMAX, LinearOut.X_OUTER), torch.float32),
}


def result_shapes(o: NvFp4LinearOperands) -> dict[int, tuple[int, ...]]:
    """Shape of every result that was asked for; the others have no elements."""
    (tokens, width), act = o.x.shape, o.schemes.act
    shapes: dict[int, tuple[int, ...]] = {LinearOut.Y: (tokens, o.columns)}
    if o.record in ("bit", "code"):
        assert act is not None
        shapes |= {LinearOut.RECORD: (tokens, record_bytes(width, o.record, act)), LinearOut.RECORD_OUTER: (tokens,)}
    if o.record != "none":
        shapes |= {LinearOut.AMAX: (1, 1), LinearOut.COUNTS: (1,), LinearOut.HIST: (1, BUCKETS)}
        shapes[LinearOut.SATURATED] = (1,)
    if o.diagnose and guide_kind(o) is not None:
        shapes[LinearOut.DIAG] = (1, len(Diag))
    if o.trains and act is not None:
        scales = FORMATS[act.fmt].scale_bytes(width)
        shapes |= {LinearOut.X_CODES: (tokens, width // 2), LinearOut.X_SCALES: (tokens, scales)}
        shapes[LinearOut.X_OUTER] = (tokens,)
    return shapes


def fake(o: NvFp4LinearOperands) -> tuple[Tensor, ...]:
    """Shapes, dtypes and devices of :func:`native`; contiguous, as there."""
    check(o)
    return _in_order({i: o.x.new_empty(s, dtype=_DTYPES.get(i, o.x.dtype)) for i, s in result_shapes(o).items()}, o)


def _in_order(found: dict[int, Tensor], o: NvFp4LinearOperands) -> tuple[Tensor, ...]:
    return tuple(found[i] if i in found else o.x.new_empty(0, dtype=_DTYPES.get(i, o.x.dtype)) for i in LinearOut)


# --- backward ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearBackwardOperands:
    """In schema order. ``x``, ``w``: where the scheme leaves them unquantized; ``x`` also where there is a residual."""

    dy: Tensor  # [T, N], the compute dtype
    x: Tensor | None
    w: Tensor | None
    c: Tensor
    s: Tensor
    g: Tensor
    x_codes: Tensor
    x_scales: Tensor
    x_outer: Tensor
    scheme: str
    need_x: bool
    need_w: bool
    need_b: bool

    @property
    def extents(self) -> tuple[int, int]:
        """(N, K)."""
        if self.w is not None:
            return self.w.shape[0], self.w.shape[1]
        return self.c.shape[1], 2 * self.c.shape[2]


def backward_native(o: LinearBackwardOperands) -> tuple[Tensor, ...]:
    """``(dx, dw, db)``: dx and dw in dy's dtype, db in float32; what is not needed has no elements."""
    dtype, schemes = o.dy.dtype, MoEScheme.parse(o.scheme)
    dx = dw = o.dy.new_empty(0)
    db = o.dy.new_empty(0, dtype=torch.float32)
    if o.need_x:
        dx = _product(o.dy, None, _weight(o.w, o.c, o.s, o.g, schemes, dtype).transposed).to(dtype)
    if o.need_w:
        rows = o.x
        if schemes.act is not None:
            xq, more = Rows.unpack(o.x_codes, o.x_scales, o.x_outer, schemes.act.fmt), None
            if schemes.act.residual is not None:
                assert o.x is not None
                more = residual_of(o.x, xq, schemes.act, o.x.new_ones(o.x.shape[0], dtype=torch.bool))
            rows = dequantized(xq, more, dtype)
        assert rows is not None
        dw = o.dy.t() @ rows
    if o.need_b:
        db = o.dy.sum(0, dtype=torch.float32)
    return dx, dw, db


def backward_fake(o: LinearBackwardOperands) -> tuple[Tensor, ...]:
    (columns, width), tokens = o.extents, o.dy.shape[0]
    return (
        o.dy.new_empty((tokens, width) if o.need_x else (0,)),
        o.dy.new_empty((columns, width) if o.need_w else (0,)),
        o.dy.new_empty((columns,) if o.need_b else (0,), dtype=torch.float32),
    )


nvfp4_linear_backward = custom_op("nvfp4_linear_backward", LinearBackwardOperands, 3, backward_native, backward_fake)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    o = NvFp4LinearOperands(*inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.trains, ctx.scheme = o.trains, o.scheme
    if not o.trains:
        return
    ctx.dtypes = (o.w.dtype if o.w is not None else None, o.b.dtype if o.b is not None else None)
    weight, act = o.schemes.weight, o.schemes.act
    whole = (o.x if act is None or act.residual else None, o.w if weight is None else None)
    ctx.save_for_backward(*whole, o.c, o.s, o.g, *output[LinearOut.X_CODES :])


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if grads[0] is None:
        return (None,) * len(needs)
    if not ctx.trains:
        raise TraceCompileError("nvfp4_linear ran in its inference form (w is None) and saved nothing: pass the weight")
    wanted = needs[:3]
    found = nvfp4_linear_backward(grads[0], *ctx.saved_tensors, ctx.scheme, *wanted)
    dx, dw, db = (g if want else None for g, want in zip(found, wanted, strict=True))
    dw, db = (None if g is None else g.to(d) for g, d in zip((dw, db), ctx.dtypes, strict=True))
    return (dx, dw, db, *(None,) * (len(needs) - 3))


nvfp4_linear = custom_op("nvfp4_linear", NvFp4LinearOperands, len(LinearOut), native, fake)
nvfp4_linear.register_autograd(_backward, setup_context=_setup_context)
