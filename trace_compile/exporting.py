"""``model.export()`` and ``stream_weights()``: from a live session to the neutral items that the export package files.

Of the trainer, regions are packed one at a time as they are asked for, from the masters, with the function that packs
for the training graph and the twin. Of a twin, they are the packed weights that it generates with. Nothing in the
session changes: an export between two training steps leaves no trace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trace_compile.errors import ExportError, UnknownFormatError
from trace_compile.export import (
    FORMATS,
    ExpertTensor,
    ExpertWeights,
    ExportReport,
    LinearWeights,
    ModelStream,
    RegionWeights,
    export_checkpoint,
)
from trace_compile.export.experts import check_experts
from trace_compile.export.formats import checkpoint_format
from trace_compile.ops.scheme import MoEScheme
from trace_compile.ops.weights import Packed, joined
from trace_compile.passes.mode import Mode
from trace_compile.passes.region import LinearRegion, Region
from trace_compile.programs import PROGRAM_FORMATS, Rollout, export_program
from trace_compile.session import Session
from trace_compile.state.origins import Provenance


@dataclass(frozen=True)
class SessionExperts:
    """The packed experts of a session's model or twin, asked for afresh at each iteration, region by region.

    pack: called with a region and the name of one of its weights.
    """

    session: Session
    scheme: MoEScheme
    pack: Callable[[Region, str], tuple[Packed, Provenance]]

    @classmethod
    def of_model(cls, session: Session, model: nn.Module) -> SessionExperts:
        """Packed from the masters when asked for. Raises ExportError where the recipe packs no weights."""
        scheme = rollout_scheme(session)
        params = dict(model.named_parameters(remove_duplicate=False))

        def pack(region: Region, which: str) -> tuple[Packed, Provenance]:
            expert, layout = region.weight(which)
            param = joined(expert.master(params))
            assert scheme.weight is not None
            packed = session.origins.pack(param, layout, scheme.weight, name=expert.name)
            return packed, session.origins.provenance(expert.name, param)

        return cls(session, scheme, pack)

    @classmethod
    def of_twin(
        cls, session: Session, experts: Mapping[str, Packed], provenance: Mapping[str, Provenance]
    ) -> SessionExperts:
        """What a twin generates with. Raises ExportError where the recipe packs no weights."""

        def pack(region: Region, which: str) -> tuple[Packed, Provenance]:
            name = region.weight(which)[0].name
            return experts[name], provenance[name]

        return cls(session, rollout_scheme(session), pack)

    def __iter__(self) -> Iterator[RegionWeights]:
        scales = input_scales(self.session)
        for region in self.session.quantized_regions():
            tensors = (
                self._tensor(region, which, scales.get((region.name, site)))
                for which, site in zip(region.weights, region.projections, strict=True)
            )
            yield _item(region, self.scheme, tensors)

    def _tensor(self, region: Region, which: str, input_outer: float | None) -> ExpertTensor:
        expert, layout = region.weight(which)
        packed, source = self.pack(region, which)
        return ExpertTensor(expert.name, layout, packed.linear, input_outer, source.foreign, source.inverse)


def _item(region: Region, scheme: MoEScheme, tensors: Iterable[ExpertTensor]) -> RegionWeights:
    if isinstance(region, LinearRegion):
        (weight,) = tensors
        return LinearWeights(region.name, scheme, weight, region.modules, region.rows)
    loose = next((w for w in (region.w13, region.w2) if w.parts or w.computed), None)
    if loose is not None:
        what = "computed from several parameters; merge adapters first" if loose.computed else "no stacked tensor"
        raise ExportError(f"{region.name}: {loose.name} is {what}, and no checkpoint of it is written")
    gate_up, down = tensors
    return ExpertWeights(region.name, scheme, gate_up, down, gated=region.activation.gated)


def rollout_scheme(session: Session) -> MoEScheme:
    """The scheme of the rollout. Raises ExportError where it packs no weights."""
    scheme = session.recipe.rollout
    if scheme is None or scheme.weight is None:
        raise ExportError(
            f"recipe {session.recipe.name!r} quantizes no weights, so there is nothing to pack; use save_pretrained() "
            "to write the model unquantized"
        )
    return scheme


def template(session: Session, region: Region, params: Mapping[str, Tensor]) -> RegionWeights:
    """A region's names, layouts and shapes; its bytes are placeholders without memory."""

    def tensor(which: str) -> ExpertTensor:
        expert, layout = region.weight(which)
        parts = tuple(torch.empty(params[p.name].shape, device="meta") for p in expert.parameters)
        experts, rows, columns = layout.canonical(joined(parts)).shape
        codes = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(experts, rows, columns // 16, dtype=torch.uint8, device="meta")
        outer = torch.empty(experts, device="meta")
        return ExpertTensor(expert.name, layout, Packed(codes, scales, outer))

    return _item(region, rollout_scheme(session), map(tensor, region.weights))


def input_scales(session: Session) -> dict[tuple[str, str], float]:
    """Outer input scale of each site: those in force, else those of the last trace, else none."""
    if session.outer:
        return {site: float(g) for site, g in session.outer.as_dict().items()}
    ranges = session.pending_ranges or session.ranges
    return {} if ranges is None else {site: float(g) for site, g in session.scales_from(ranges).items()}


def export_model(
    experts: SessionExperts,
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    format: str = "compressed-tensors",
    activations: bool | None = None,
    **options: Any,
) -> ExportReport:
    """Write the current weights to the folder ``path`` as the rollout would compute with them.

    Args:
        format: a checkpoint, ``"compressed-tensors"``, ``"modelopt"`` or ``"bf16"`` (dequantized; exact, loads
            anywhere), or a program: ``"pt2"`` (torch.export), ``"aoti"`` (AOTInductor) or ``"onnx"``.
        activations: also quantize activations (W4A4). Default: what the recipe's rollout does.
        options: of checkpoints ``tokenizer``, ``overwrite``, ``dtype``, ``max_shard_bytes``, see ``export_checkpoint``;
            of programs ``form``, ``tokenizer``, ``overwrite``, see ``export_program``.

    Raises:
        ExportError: the recipe packs no weights, W4A4 is asked for before a trace gave input scales, or the model
            cannot be written as a program.
        NonFiniteWeightError, UnknownFormatError: see ``export_checkpoint``. Nothing is written then.
    """
    if format not in (*FORMATS, *PROGRAM_FORMATS):
        raise UnknownFormatError(f"unknown export format {format!r}; known: {', '.join((*FORMATS, *PROGRAM_FORMATS))}")
    activations = _activations(experts, format, activations)
    if format in PROGRAM_FORMATS:
        return export_program(rollout_of(experts, model, activations), Path(path), format=format, **options)
    return export_checkpoint(model, experts, Path(path), format=format, activations=activations, **options)


def rollout_of(experts: SessionExperts, model: nn.Module, activations: bool) -> Rollout:
    """What a program of ``model`` is captured from. Packs every region now, and checks it as an export does."""
    session = experts.session
    scheme = replace(experts.scheme, act=experts.scheme.act if activations else None)
    if scheme.act is not None and session.recipe.outer == "traced":
        if not session.outer:
            raise ExportError("no input scales: trace, refit, then export; or pass activations=False")
        scheme = replace(scheme, act=replace(scheme.act, outer="traced"))
    packed: dict[tuple[str, str], Packed] = {}
    for region, item in zip(session.quantized_regions(), experts, strict=True):
        check_experts(item, activations=False)
        tensors = item.tensors().values()
        packed |= {(region.name, which): t.packed for which, t in zip(region.weights, tensors, strict=True)}
    options = session.options
    mode = Mode(
        scheme=scheme,
        unquantized=options.unquantized,
        strict=options.strict,
        include=options.include,
        ignore=options.ignore,
    )
    forward = session.cls.forward
    return Rollout(model, forward, mode, packed, session.outer, session.sites())


def stream_weights(
    experts: SessionExperts,
    model: nn.Module,
    *,
    format: str = "compressed-tensors",
    activations: bool | None = None,
    dtype: torch.dtype | None = None,
    others: bool = True,
) -> ModelStream:
    """The named tensors that ``export`` would write, to hand to a live engine; iterate it as often as needed.

    Args:
        format, activations, dtype: as for ``export``; the format is that of the checkpoint the engine was started with.
        others: also everything but the quantized experts.

    Raises as ``export``, for what can be known before the first tensor: whatever is wrong with packed experts.
    """
    activations = _activations(experts, format, activations)
    fmt = checkpoint_format(format)
    return ModelStream.of(model, experts, fmt, activations=activations, dtype=dtype, others=others)


def _activations(experts: SessionExperts, format: str, activations: bool | None) -> bool:
    act = experts.scheme.act
    chosen = act is not None and format != "bf16" if activations is None else activations
    if chosen and act is not None and act.residual is not None:
        raise ExportError(
            f"the rollout compensates its activations ({act.key}), which no engine does: they would be served "
            "without that. Export the weights alone (activations=False) or dequantized (format='bf16')"
        )
    return chosen
