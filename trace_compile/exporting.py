"""``model.export()``: from a live session to the neutral items that the export package files.

Regions are packed one at a time as the exporter asks for them, from the masters, with the function that packs for the
training graph and the twin. Nothing in the session changes: an export between two training steps leaves no trace.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trace_compile.errors import ExportError
from trace_compile.export import ExpertTensor, ExpertWeights, ExportReport, export_checkpoint
from trace_compile.ops.scheme import MoEScheme
from trace_compile.ops.weights import pack_experts
from trace_compile.passes.region import MoERegion
from trace_compile.session import Session


@dataclass(frozen=True)
class SessionExperts:
    """The packed experts of a session's model, packed afresh at each iteration, region by region."""

    session: Session
    model: nn.Module
    scheme: MoEScheme

    def __iter__(self) -> Iterator[ExpertWeights]:
        scales = input_scales(self.session)
        params = dict(self.model.named_parameters(remove_duplicate=False))
        for region in self.session.need_regions():
            yield ExpertWeights(
                region.name,
                self._tensor(region, "w13", params, scales.get((region.name, "gate_up"))),
                self._tensor(region, "w2", params, scales.get((region.name, "down"))),
                self.scheme,
                gated=region.activation.gated,
            )

    def _tensor(
        self, region: MoERegion, which: str, params: dict[str, nn.Parameter], input_outer: float | None
    ) -> ExpertTensor:
        expert, layout = region.weight(which)
        assert self.scheme.weight is not None  # export_model refuses recipes without packed weights
        packed = pack_experts(params[expert.name], layout, self.scheme.weight, name=expert.name)
        return ExpertTensor(expert.name, layout, packed, input_outer)


def input_scales(session: Session) -> dict[tuple[str, str], float]:
    """Outer input scale of each site: those in force, else those of the last trace, else none."""
    if session.outer:
        return {site: float(g) for site, g in session.outer.as_dict().items()}
    ranges = session.pending_ranges or session.ranges
    return {} if ranges is None else {site: float(g) for site, g in session.scales_from(ranges).items()}


def export_model(
    session: Session,
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    format: str = "compressed-tensors",
    activations: bool | None = None,
    **options: Any,
) -> ExportReport:
    """Write the current weights to the folder ``path`` as the rollout would compute with them.

    Args:
        format: ``"compressed-tensors"``, ``"modelopt"``, or ``"bf16"`` (dequantized; exact, loads anywhere).
        activations: also declare quantized activations (W4A4). Default: what the recipe's rollout does.
        options: ``tokenizer``, ``overwrite``, ``dtype``, ``max_shard_bytes``; see ``export_checkpoint``.

    Raises:
        ExportError: the recipe packs no weights, or W4A4 is asked for before a trace gave input scales.
        NonFiniteWeightError, UnknownFormatError: see ``export_checkpoint``. Nothing is written then.
    """
    scheme = session.recipe.rollout
    if scheme is None or scheme.weight is None:
        raise ExportError(
            f"recipe {session.recipe.name!r} quantizes no weights, so there is nothing to pack; use save_pretrained() "
            f"to write {Path(path).name!r} unquantized"
        )
    if activations is None:
        activations = scheme.act is not None and format != "bf16"
    experts = SessionExperts(session, model, scheme)
    return export_checkpoint(model, experts, path, format=format, activations=activations, **options)
