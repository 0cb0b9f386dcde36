"""How far the trainer's quantized operands are from the rollout's, site by site.

Runs one training forward on given tokens, takes the inputs of the recorded sites out of the graph, and compares what
the trainer would quantize by itself, and what it uses under its recipe, with what the rollout recorded for the same
tokens. Everything is recomputed here from the definitions in ``numerics``; the compiled graph only supplies the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trace_compile.errors import GuidanceError
from trace_compile.numerics import decode_blocks, guided_blocks, unpack_nibbles
from trace_compile.ops.rows import quantize_rows
from trace_compile.runtime import Call
from trace_compile.session import Session
from trace_compile.state.guidance import Guidance
from trace_compile.state.trace import Trace


@dataclass(frozen=True)
class SiteReport:
    """One recorded site over the tokens that have a record.

    Attributes:
        region: dotted name of the experts module.
        tokens: tokens compared.
        mismatch_before: share of elements whose own-scale, own-rounding value differs from the rollout's.
        mismatch_after: share of elements whose value as the recipe's trainer uses it differs from the rollout's.
        adjacent: of the elements that differ before, the share whose rollout codeword is one of the two around the
            trainer's own value on the rollout's scale, which guidance can therefore restore; 1.0 if none differs.
        d_before, d_after: ||trainer operand - rollout operand|| / ||rollout operand||, before and after likewise.
        drift: ||x_train - x_rollout|| / ||x_rollout|| of the unquantized inputs; ``None`` unless traced with inputs.
    """

    region: str
    tokens: int
    mismatch_before: float
    mismatch_after: float
    adjacent: float
    d_before: float
    d_after: float
    drift: float | None


@torch.no_grad()
def diagnose(
    session: Session, module: nn.Module, trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[SiteReport, ...]:
    """Compare one training forward on ``args``/``kwargs`` with ``trace``, which must hold whole codes.

    Raises ``GuidanceError`` for a trace of mantissa bits only: a bit does not say which codeword the rollout took.
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
    mode = replace(session.train_mode(), inputs=True)
    call = Call(valid=tokens.valid)
    newest, staleness = session.version, session.options.max_staleness
    if session.guiding is not None and mode.guidance != "none":
        call.guidance = session.guiding.lookup(tokens.keys, newest, staleness, valid=tokens.valid)
    outputs = session.engine.run(module, mode, call, args, kwargs)
    session.tracker.end(arguments, outputs)
    records = trace.lookup(tokens.keys, newest, staleness, valid=tokens.valid)
    reports = []
    for index, site in enumerate(trace.layout.sites):
        x = call.emits["input"][site.region].float()
        x_roll = None if trace.inputs is None else trace.inputs.find(tokens.keys, site.region)
        reports.append(_compare(session, site.region, site.projection, x, x_roll, records, index))
    return tuple(reports)


def _compare(
    session: Session, region: str, projection: str, x: Tensor, x_roll: Tensor | None, records: Guidance, index: int
) -> SiteReport:
    hit = records.hit
    guide, outer = records.site(index)[hit], records.outer[hit, index]
    x = x[hit]
    width = x.shape[-1]
    codes, scales = unpack_nibbles(guide[:, : width // 2]), guide[:, width // 2 :]
    train, generate = session.recipe.schemes(traced=bool(session.outer))
    assert generate is not None and generate.act is not None  # else there would be no record
    fmt = generate.act.fmt
    rollout = _value(codes, scales, outer, fmt)

    act = generate.act if train is None or train.act is None else train.act
    traced = session.outer[region, projection].to(x.device) if session.outer else None
    rows = quantize_rows(x, act, traced, torch.ones(x.shape[0], dtype=torch.bool, device=x.device))
    own = rows.dequantize(torch.float32)

    full = _value(guided_blocks(x, scales, outer, codes=codes, fmt=fmt), scales, outer, fmt)
    guidance = session.recipe.guidance if session.guiding is not None else "none"
    if train is None or train.act is None:
        used = x
    elif guidance == "none":
        used = own
    elif guidance == "bit":
        used = _value(guided_blocks(x, scales, outer, bits=codes & 1, fmt=fmt), scales, outer, fmt)
    else:
        used = full
    differ = own != rollout
    norm = rollout.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return SiteReport(
        region=region,
        tokens=int(hit.sum()),
        mismatch_before=_share(differ),
        mismatch_after=_share(used != rollout),
        adjacent=_share(full[differ] == rollout[differ]) if bool(differ.any()) else 1.0,
        d_before=float((own - rollout).norm() / norm),
        d_after=float((used - rollout).norm() / norm),
        drift=None if x_roll is None else float((x - x_roll[hit]).norm() / x_roll[hit].norm().clamp_min(1e-30)),
    )


def _share(mask: Tensor) -> float:
    return float(mask.float().mean()) if mask.numel() else 0.0


def _value(codes: Tensor, scales: Tensor, outer: Tensor, fmt: str) -> Tensor:
    return decode_blocks(codes, scales, fmt, torch.float32) * outer[:, None]
