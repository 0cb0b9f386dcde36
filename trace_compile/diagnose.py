"""How far the trainer's quantized operands are from the rollout's, site by site.

The quantized ops count it themselves (``ops.observe.Diag``), in forwards that are asked to; ``SiteReport`` says what
the counts mean. A trainer that quantizes nothing has no such op: its inputs are taken out of the graph and counted by
the same definition here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trace_compile.errors import GuidanceError
from trace_compile.ops.observe import Diag, diagnosis
from trace_compile.ops.rows import Guide, quantize_rows
from trace_compile.runtime import Call
from trace_compile.session import Session
from trace_compile.state.guidance import Guidance
from trace_compile.state.layout import Site
from trace_compile.state.trace import Trace


@dataclass(frozen=True)
class SiteReport:
    """One recorded site over the tokens that have a record (at the down projection: their routed rows).

    Attributes:
        region: name of the region: the experts module, or linear layers.
        tokens: rows compared.
        mismatch_before: share of elements whose own-scale, own-rounding value differs from the rollout's (its mantissa
            bit, where only bits were recorded).
        mismatch_after: share of elements whose value (or bit) as the recipe's trainer uses it differs.
        adjacent: of the elements that differ before, the share whose rollout codeword is one of the two around the
            trainer's own value on the rollout's scale, which guidance can therefore restore; 1.0 if none differs.
        d_before, d_after: ||trainer operand - rollout operand|| / ||rollout operand||, before and after likewise.
        drift: ||x_train - x_rollout|| / ||x_rollout|| of the unquantized inputs; ``None`` unless traced with inputs.
        projection: ``"gate_up"``, ``"down"``, or ``"input"`` of linear layers.

    Bits say nothing about ``adjacent``, ``d_before`` and ``d_after``: they are ``None`` then.
    """

    region: str
    tokens: int
    mismatch_before: float
    mismatch_after: float
    adjacent: float | None
    d_before: float | None
    d_after: float | None
    drift: float | None = None
    projection: str = "gate_up"

    @classmethod
    def of(
        cls, region: str, projection: str, width: int, kind: str, counts: Tensor, drift: float | None = None
    ) -> SiteReport:
        """From the counts float64 [7] of ``Diag``; ``kind`` is what was recorded, ``"bit"`` or ``"code"``."""
        c = counts.tolist()
        elements, norm = max(c[Diag.ELEMENTS], 1.0), max(c[Diag.NORM], torch.finfo(torch.float32).tiny)
        before, whole = c[Diag.MISMATCH_BEFORE], kind == "code"
        return cls(
            region,
            round(c[Diag.ELEMENTS] / width),
            before / elements,
            c[Diag.MISMATCH_AFTER] / elements,
            (c[Diag.ADJACENT] / before if before else 1.0) if whole else None,
            (c[Diag.DISTANCE_BEFORE] / norm) ** 0.5 if whole else None,
            (c[Diag.DISTANCE_AFTER] / norm) ** 0.5 if whole else None,
            drift,
            projection,
        )


def running(session: Session) -> tuple[SiteReport, ...]:
    """What guided forwards counted since ``guide(..., diagnose=True)``; waits for the device."""
    trace, counts = session.guiding, session.diagnostics
    if trace is None or not counts:
        return ()
    return tuple(
        SiteReport.of(site.region, site.projection, site.width, site.kind, _of_site(counts, site))
        for site in trace.layout.sites
        if site.region in counts
    )


@torch.no_grad()
def diagnose(
    session: Session, module: nn.Module, trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[SiteReport, ...]:
    """Compare one training forward on ``args``/``kwargs`` with ``trace``, which must hold whole codes.

    Where the trainer is guided, ``trace`` guides this forward. Raises ``GuidanceError`` for a trace of mantissa bits
    only: a bit does not say which codeword the rollout took.
    """
    kinds = {site.kind for site in trace.layout.sites}
    if kinds != {"code"}:
        raise GuidanceError(
            f"diagnose needs a trace of whole codes, this one has {', '.join(sorted(kinds)) or 'ranges only'}; record "
            "with model.trace(record='code')"
        )
    trajectory_ids = kwargs.pop("trajectory_ids", None)
    arguments = session.arguments(module, args, kwargs)
    tokens = session.tracker.begin(arguments, trajectory_ids)
    records = trace.lookup(tokens.keys, session.version, session.options.max_staleness, valid=tokens.valid)
    train, generate = session.recipe.schemes(traced=bool(session.outer))
    assert generate is not None and generate.act is not None  # else there would be no record
    counts_itself = train is not None and train.act is not None and train.act.fmt == generate.act.fmt
    mode = session.train_mode(trace if counts_itself else None)
    if not counts_itself or trace.inputs is not None:
        mode = replace(mode, inputs=True)
    call = Call(valid=tokens.valid, guidance=records)
    outputs = session.engine.run(module, mode, call, args, kwargs)
    session.tracker.end(arguments, outputs)
    reports = []
    for index, site in enumerate(trace.layout.sites):
        x = call.emits["input"][site.region].float() if mode.inputs and site.projection != "down" else None
        if counts_itself:
            counts = _of_site(call.emits["diag"], site)
        elif x is not None:
            counts = _count(session, site, x, records, index)
        else:
            continue
        drift = None if x is None or trace.inputs is None else _drift(x, trace.inputs.find(tokens.keys, site.region))
        reports.append(SiteReport.of(site.region, site.projection, site.width, site.kind, counts, drift))
    return tuple(reports)


def _of_site(counts: dict[str, Tensor], site: Site) -> Tensor:
    return counts[site.region][int(site.projection == "down")]  # a bool would be a mask


def _count(session: Session, site: Site, x: Tensor, records: Guidance, index: int) -> Tensor:
    """``Diag`` of a trainer whose op does not count: it uses ``x`` [T, H] itself, or quantizes to another format."""
    train, generate = session.recipe.schemes(traced=bool(session.outer))
    assert generate is not None and generate.act is not None
    act, fmt = None if train is None else train.act, generate.act.fmt
    traced = session.outer[site.region, site.projection].to(x.device) if session.outer else None
    every = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    own = quantize_rows(x, act or generate.act, traced, every)
    outer = records.outer[:, records.layout.columns.index(index)]
    guide = Guide.read(records.site(index), outer, records.hit, "code", x.shape[1], fmt)
    return diagnosis(x, own, own if act else None, guide, every, fmt)


def _drift(x: Tensor, rollout: Tensor) -> float:
    """Over the tokens that the rollout logged; the others are NaN."""
    known = rollout.isfinite().all(1)
    return float((x - rollout)[known].norm() / rollout[known].norm().clamp_min(1e-30))
