"""``model.import_checkpoint()`` and ``rollout.load_weights()``: NVFP4 weights back into a live model.

An import fills the masters with dequantized values (exact in bfloat16 and float32 for power-of-two outer scales) and
keeps the file's bytes as their origin: until a master changes, training graph, twin and export compute with exactly
those bytes, whoever made them. A stream goes into a twin alone, as it would into an engine.

Invariant: everything is read and checked before the first write, so whatever is wrong leaves the model as it was.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trace_compile.errors import ExportError, NonFiniteWeightError, RefitError
from trace_compile.export.assemble import assemble
from trace_compile.export.checks import find_problems
from trace_compile.export.experts import ExpertTensor, RegionWeights, check_experts
from trace_compile.export.formats import CheckpointFormat, checkpoint_format
from trace_compile.export.names import RegionNames, own_tensors, region_names, tied_names
from trace_compile.export.opened import Checkpoint
from trace_compile.export.verify import READERS, refuse
from trace_compile.exporting import template
from trace_compile.ops.weights import Packed
from trace_compile.session import Session
from trace_compile.state.origins import Origin, Provenance

Scales = dict[tuple[str, str], float]


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    format: of the checkpoint. packed: parameters that compute with the file's own bytes. dense: expert parameters
    that were stored unquantized. tensors: others that were filled. input_scales: those adopted for the activations.
    notes: what a reader should know, such as scales that engines flush.
    """

    format: str
    packed: tuple[str, ...]
    dense: tuple[str, ...]
    tensors: int
    input_scales: Scales
    notes: tuple[str, ...]


def import_checkpoint(session: Session, model: nn.Module, path: str | os.PathLike[str]) -> ImportReport:
    """Fill ``model`` from a compressed-tensors, ModelOpt or unquantized checkpoint of this package or another tool.

    Input scales are adopted where the recipe uses traced ones: as they are if they are powers of two, else the next
    power of two, which holds the same range.

    Raises ExportError that lists what is wrong with the checkpoint or does not fit the model, ``UnknownFormatError``,
    ``NonFiniteWeightError``; the model is then unchanged.
    """
    checkpoint = Checkpoint(path)
    found, _ = find_problems(checkpoint)
    refuse(checkpoint, [finding.text for finding in found if finding.severity == "error"])
    notes = [finding.text for finding in found]
    reading = _Reading.of(session, model, checkpoint)
    others = reading.others()
    experts = [reading.experts(name) for name in reading.templates]
    scales: Scales = {}
    for item in experts:
        if isinstance(item, RegionWeights):
            scales |= {(item.region, key): t.input_outer for key, t in item.tensors().items() if t.input_outer}
    scales, rounded = _powers_of_two(scales)
    notes += [f"{region}.{site}: input scale {old!r} became {new!r}" for (region, site), (old, new) in rounded.items()]

    params = dict(model.named_parameters(remove_duplicate=False))
    origins: dict[str, Origin] = {}
    dense: list[str] = []
    with torch.inference_mode(False), torch.no_grad():
        for target, source in others:
            target.copy_(checkpoint.tensor(source) if isinstance(source, str) else source)
        for item in experts:
            if isinstance(item, RegionWeights):
                for tensor in item.tensors().values():
                    origin = Origin(tensor.layout, tensor.packed, _provenance(tensor), item.weight_scheme.fmt)
                    names = list(item.split(tensor, torch.empty(tensor.parameter_shape, device="meta")))
                    for name, value in item.split(tensor, origin.values(params[names[0]].dtype)).items():
                        params[name].copy_(value)
                    origins[tensor.name] = origin
            else:
                for name, value in item.items():
                    params[name].copy_(value)
                    dense.append(name)
    session.origins.set(origins)
    session.weights.refresh()
    adopted = session.recipe.outer == "traced" and scales.keys() == set(session.sites())
    if adopted:
        session.outer.set({site: torch.tensor(scale) for site, scale in scales.items()})
    return ImportReport(
        checkpoint.format.name,
        tuple(origins),
        tuple(dense),
        len(others),
        scales if adopted else {},
        tuple(notes),
    )


@dataclass(frozen=True)
class _Reading:
    """A checkpoint and the model it goes into."""

    model: nn.Module
    checkpoint: Checkpoint
    templates: dict[str, tuple[RegionWeights, RegionNames]]

    @classmethod
    def of(cls, session: Session, model: nn.Module, checkpoint: Checkpoint) -> _Reading:
        params = dict(model.named_parameters(remove_duplicate=False))
        items = [template(session, region, params) for region in session.quantized_regions()]
        return cls(model, checkpoint, {item.region: (item, region_names(model, item)) for item in items})

    def others(self) -> list[tuple[Tensor, str | Tensor]]:
        """The model's tensors outside of the regions, each with the name of its source, or its dequantized value.

        Raises ExportError listing names that only one side has, and shapes that differ.
        """
        checkpoint, problems, found = self.checkpoint, list[str](), list[tuple[Tensor, str | Tensor]]()
        expected = self._expert_names()
        stacked = frozenset(name for item, _ in self.templates.values() for name in item.parameter_shapes())
        for name, target in own_tensors(self.model, stacked).items():
            module = name.rpartition(".")[0]
            if module in checkpoint.modules and name.endswith(".weight"):
                expected |= {f"{module}.{field.suffix}" for field in checkpoint.format.fields}
                value = READERS[checkpoint.format.name](checkpoint, module)
                found.append((target, value))
                shape = tuple(value.shape)
            elif name in checkpoint.names:
                expected.add(name)
                shape = checkpoint.spec(name)[1]
                found.append((target, name))
                if target.is_floating_point() and not bool(torch.isfinite(checkpoint.tensor(name)).all()):
                    raise NonFiniteWeightError(f"{name} in {checkpoint.path} holds NaN or Inf")
            else:
                problems.append(f"{name} is missing")
                continue
            if shape != tuple(target.shape):
                problems.append(f"{name} has shape {list(shape)}, the model's has {list(target.shape)}")
        extra = checkpoint.names - expected - tied_names(self.model).keys()
        problems += [f"{name} is no tensor of this model" for name in sorted(extra)]
        refuse(checkpoint, problems)
        return found

    def _expert_names(self) -> set[str]:
        names: set[str] = set()
        for item, region in self.templates.values():
            for module in _modules(item, region):
                names |= {f"{module}.{field.suffix}" for field in self.checkpoint.format.fields} | {f"{module}.weight"}
            names |= set(region.stacked.values())
        return names

    def experts(self, name: str) -> RegionWeights | dict[str, Tensor]:
        """A region's packed weights, or its dense parameters by name."""
        item, names = self.templates[name]
        checkpoint = self.checkpoint
        packed = [module in checkpoint.modules and checkpoint.format.packed for module in _modules(item, names)]
        if all(packed):
            return assemble(item, names, checkpoint.format, checkpoint.tensor, activations=checkpoint.activations)
        if any(packed):
            raise ExportError(f"{checkpoint.path}: {name} has packed and dense experts; one layer is all of one kind")
        return self._dense(item, names)

    def _dense(self, item: RegionWeights, names: RegionNames) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for key, tensor in item.tensors().items():
            if key in names.stacked and names.stacked[key] in self.checkpoint.names:
                value = self.checkpoint.tensor(names.stacked[key])
                if tuple(value.shape) != tensor.parameter_shape:  # families differ in which way round they stack
                    value = value.transpose(1, 2)
            else:
                parts = [p for p, (owner, _) in item.projections().items() if owner is tensor]
                rows = [
                    torch.cat([self.checkpoint.tensor(f"{names.modules[p].format(e)}.weight") for p in parts])
                    for e in range(item.num_experts)
                ]
                value = tensor.layout.parameter(torch.stack(rows))
            if tuple(value.shape) != tensor.parameter_shape or not bool(torch.isfinite(value).all()):
                raise ExportError(
                    f"{tensor.name}: the checkpoint holds {list(value.shape)}, finite or not; the model's is "
                    f"{list(tensor.parameter_shape)} and must be finite"
                )
            found |= item.split(tensor, value)
        return found


def _provenance(tensor: ExpertTensor) -> Provenance:
    return Provenance(tensor.foreign, tensor.inverse)


def _modules(item: RegionWeights, names: RegionNames) -> list[str]:
    return [names.modules[p].format(e) for p in item.projections() for e in range(item.num_experts)]


def _powers_of_two(scales: Scales) -> tuple[Scales, dict[tuple[str, str], tuple[float, float]]]:
    """Each scale or the next power of two, and (old, new) where that is another."""
    found = {}
    for site, scale in scales.items():
        mantissa, exponent = math.frexp(scale)
        found[site] = scale if mantissa == 0.5 else math.ldexp(1.0, exponent)
    return found, {site: (scales[site], new) for site, new in found.items() if new != scales[site]}


@dataclass(frozen=True)
class Received:
    """A whole stream, taken apart: packed experts by parameter, input scales by site, other tensors with targets."""

    packed: dict[str, Packed]
    provenance: dict[str, Provenance]
    scales: Scales
    others: list[tuple[Tensor, Tensor]]


def receive(session: Session, module: nn.Module, weights: Iterable[tuple[str, Tensor]], format: str) -> Received:
    """Read ``weights``, named as in a checkpoint of ``format``, to the end and check them against ``module``.

    Raises RefitError naming what is missing, unknown or comes twice, ExportError for shapes and scales that do not fit.
    """
    fmt: CheckpointFormat = checkpoint_format(format)
    if not fmt.packed:
        raise RefitError(
            f"format {format!r} is dense; a twin holds packed weights: use 'compressed-tensors' or 'modelopt'"
        )
    got: dict[str, Tensor] = {}
    for name, value in weights:
        if name in got:
            raise RefitError(f"{name} comes twice")
        got[name] = value
    used: set[str] = set()

    def source(name: str) -> Tensor:
        if name not in got:
            raise RefitError(f"{name} is missing; a refit takes the weights of one step, whole")
        used.add(name)
        return got[name]

    params = dict(module.named_parameters(remove_duplicate=False))
    activations = any(
        name.endswith(f".{field.suffix}") for name in got for field in fmt.fields if field.role == "input"
    )
    packed, provenance, scales = dict[str, Packed](), dict[str, Provenance](), Scales()
    replaced: set[str] = set()
    for region in session.quantized_regions():
        item = template(session, region, params)
        replaced |= item.parameter_shapes().keys()
        item = assemble(item, region_names(module, item), fmt, source, activations=activations)
        check_experts(item, activations=activations)
        for key, tensor in item.tensors().items():
            packed[tensor.name], provenance[tensor.name] = tensor.packed, _provenance(tensor)
            if tensor.input_outer is not None:
                scales[item.region, key] = tensor.input_outer
    others = []
    rest = got.keys() - used
    if rest:
        for name, target in own_tensors(module, frozenset(replaced)).items():
            value = source(name)
            if value.shape != target.shape:
                raise RefitError(f"{name} is {list(value.shape)}, this model's is {list(target.shape)}")
            others.append((target, value))
    unknown = sorted(got.keys() - used)
    if unknown:
        raise RefitError(f"{unknown[0]} is no tensor of this model ({len(unknown)} unknown names)")
    return Received(packed, provenance, scales, others)
