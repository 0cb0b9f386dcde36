"""Exporting a model with NVFP4 experts to a checkpoint folder that engines load.

The experts come packed, the rest from the model's state dict; both go out under the names of the model family's
published checkpoints. Before the folder takes its final name it is read back and checked against the packed experts
bit for bit (see ``verify``), so a checkpoint that exists is one that loads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trace_compile.errors import ExportError, NonFiniteWeightError
from trace_compile.export.config import export_block, generation_config, model_config, region_block
from trace_compile.export.experts import ExpertWeights, check_experts, matrices
from trace_compile.export.formats import CheckpointFormat, checkpoint_format
from trace_compile.export.ignore import ancestors, ignore_list
from trace_compile.export.names import RegionNames, hub_state, other_state, region_names, tied_names
from trace_compile.export.verify import verify_checkpoint
from trace_compile.export.writer import CONFIG, MARK, TensorSpec, staged_folder, write_json, write_tensors

DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Args:
        path: the folder. ``files``: names in it, sorted. ``bytes``: of all of them.
        bits_per_expert_weight: bits on disk per expert weight, scales included.
        tensors: number of tensors.
        notes: what a reader should know, such as names that no published checkpoint of the family uses.
    """

    path: Path
    format: str
    files: tuple[str, ...]
    bytes: int
    bits_per_expert_weight: float
    tensors: int
    notes: tuple[str, ...] = ()


def export_checkpoint(
    model: nn.Module,
    experts: Iterable[ExpertWeights],
    path: str | os.PathLike[str],
    *,
    format: str,
    activations: bool,
    tokenizer: Any = None,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ExportReport:
    """Write ``model`` with its packed ``experts`` to the folder ``path``.

    Args:
        experts: one item per quantized region. It is iterated more than once and items are not kept, so pass a list, or
            an object whose ``__iter__`` packs region by region; a bare iterator is refused.
        format: a row of ``FORMATS``.
        activations: serve with quantized activations (W4A4; needs the input scales of traced ranges) or without
            (W4A16). ``bf16`` stores dequantized weights, so only False makes sense there.
        tokenizer: saved beside the weights with its ``save_pretrained``.
        overwrite: replace an earlier export at ``path``. It stays complete until the new one is complete.
        dtype: of the unquantized floating-point tensors; None keeps each tensor's own.
        max_shard_bytes: size of one weight file.

    Raises:
        UnknownFormatError: no such format.
        NonFiniteWeightError: a weight holds NaN or Inf.
        ExportError: the checkpoint would not load as what it is; nothing at ``path`` was touched.
    """
    fmt = checkpoint_format(format)
    if not fmt.packed and activations:
        raise ExportError(f"format {format!r} stores dequantized weights and no input scales; pass activations=False")
    if iter(experts) is experts:
        raise ExportError("experts is an iterator, which can be read once; pass a list or an object with __iter__")
    regions = {item.region: _plan(model, item, activations) for item in experts}
    if not regions:
        raise ExportError("no packed experts to export; was the model compiled with a quantizing recipe?")
    export = _Export(model, experts, fmt, activations, dtype, regions)
    with staged_folder(path, overwrite=overwrite) as folder:
        specs = write_tensors(folder, export.stream, max_shard_bytes=max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        for name, content in export.json_files(specs).items():
            write_json(folder / name, content)
        verify_checkpoint(folder, experts)
        files = sorted(entry for entry in folder.rglob("*") if entry.is_file())
        report = ExportReport(
            path=Path(path).resolve(),
            format=format,
            files=tuple(str(file.relative_to(folder)) for file in files),
            bytes=sum(file.stat().st_size for file in files),
            bits_per_expert_weight=export.bits_per_expert_weight(specs),
            tensors=len(specs),
            notes=export.notes(),
        )
    return report


@dataclass(frozen=True)
class _Region:
    """What outlives a region's packed weights: names of parameters and modules, and the number of weights."""

    names: RegionNames
    block: dict[str, Any]
    parameters: frozenset[str]
    packed: frozenset[str]
    weights: int


@dataclass(frozen=True)
class _Export:
    """One call of ``export_checkpoint``."""

    model: nn.Module
    experts: Iterable[ExpertWeights]
    fmt: CheckpointFormat
    activations: bool
    dtype: torch.dtype | None
    regions: dict[str, _Region]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the checkpoint in the order of the files: the rest of the model, then region by region."""
        stacked = frozenset().union(*(region.parameters for region in self.regions.values()))
        for name, tensor in other_state(self.model, stacked):
            if tensor.is_floating_point():
                if not bool(torch.isfinite(tensor).all()):
                    raise NonFiniteWeightError(f"{name} holds NaN or Inf; restore the weights, then export")
                tensor = tensor.to(self.dtype or tensor.dtype)
            yield name, tensor
        for item in self.experts:
            yield from self._expert_tensors(item.cpu())

    def _expert_tensors(self, item: ExpertWeights) -> Iterator[tuple[str, Tensor]]:
        if self.fmt.packed:
            modules = self.regions[item.region].names.modules
            for matrix in matrices(item):
                prefix = modules[matrix.projection].format(matrix.expert)
                yield from self.fmt.tensors(prefix, matrix, activations=self.activations)
            return
        weights = {tensor.name: _exact_bf16(tensor.name, tensor.parameter()) for tensor in item.tensors().values()}
        yield from hub_state(self.model, weights).items()

    def json_files(self, specs: list[TensorSpec]) -> dict[str, dict[str, Any]]:
        """The JSON files by name. config.json comes last: without it a folder is not a checkpoint."""
        others = [p for p in self.model.parameters() if p.is_floating_point()]
        config = model_config(self.model, self.dtype or (others[0].dtype if others else torch.bfloat16))
        files: dict[str, dict[str, Any]] = {}
        generation = generation_config(self.model)
        if generation is not None:
            files["generation_config.json"] = generation
        if self.fmt.quantization_config is not None and self.fmt.ignore is not None:
            packed = frozenset().union(*(region.packed for region in self.regions.values()))
            unpacked = _modules(spec.name for spec in specs) | _modules(tied_names(self.model))
            ignore = ignore_list(self.fmt.ignore, unpacked - packed - ancestors(packed), packed)
            config["quantization_config"] = self.fmt.quantization_config(self.activations, ignore)
            files |= self.fmt.extra_files(self.activations, ignore)
        blocks = {name: region.block for name, region in self.regions.items()}
        config[MARK] = export_block(self.fmt.name, self.activations, blocks)
        return {**files, CONFIG: config}

    def bits_per_expert_weight(self, specs: list[TensorSpec]) -> float:
        names = {n for region in self.regions.values() for n in (*region.packed, *region.names.stacked.values())}
        size = sum(spec.nbytes for spec in specs if spec.name in names or spec.name.rpartition(".")[0] in names)
        return 8 * size / sum(region.weights for region in self.regions.values())

    def notes(self) -> tuple[str, ...]:
        if not self.fmt.packed:
            return ()
        return tuple(
            f"{name}: published checkpoints of this family keep experts stacked; packed ones are named {modules}"
            for name, region in self.regions.items()
            if region.names.stacked and (modules := sorted(region.names.modules.values()))
        )


def _plan(model: nn.Module, item: ExpertWeights, activations: bool) -> _Region:
    """Check a region against the model and settle its names, before anything is written."""
    check_experts(item, activations=activations)
    for tensor in item.tensors().values():
        try:
            parameter = model.get_parameter(tensor.name)
        except AttributeError as error:
            raise ExportError(f"{item.region}: the model has no parameter {tensor.name}") from error
        if parameter.shape != tensor.parameter_shape:
            raise ExportError(
                f"{tensor.name}: packed from shape {tuple(tensor.parameter_shape)}, "
                f"the model's is {tuple(parameter.shape)}; refit, then export"
            )
    names = region_names(model, item)
    packed = frozenset(module.format(e) for module in names.modules.values() for e in range(item.num_experts))
    return _Region(
        names=names,
        block=region_block(item, names),
        parameters=frozenset(tensor.name for tensor in item.tensors().values()),
        packed=packed,
        weights=sum(2 * tensor.packed.codes.numel() for tensor in item.tensors().values()),
    )


def _exact_bf16(name: str, weight: Tensor) -> Tensor:
    rounded = weight.to(torch.bfloat16)
    if not torch.equal(rounded.float(), weight):
        raise ExportError(f"{name}: dequantized values are not exact in bf16; pack with profile pow2")
    return rounded


def _modules(tensors: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] or name for name in tensors}
