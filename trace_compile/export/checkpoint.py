"""Exporting a model with NVFP4 experts to a checkpoint folder that engines load.

The experts come packed, the rest from the model's state dict; both go out under the names of the model family's
published checkpoints. Before the folder takes its final name it is read back and checked against the packed experts
bit for bit (see ``verify``), so a checkpoint that exists is one that loads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trace_compile.export.config import export_block, generation_config, model_config
from trace_compile.export.experts import RegionWeights
from trace_compile.export.formats import checkpoint_format
from trace_compile.export.ignore import ancestors, ignore_list
from trace_compile.export.names import tied_names
from trace_compile.export.stream import ModelStream
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
    experts: Iterable[RegionWeights],
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
        ExportError: the checkpoint would not load as what it is, or could not be written (disk full); nothing at
            ``path`` was touched.
    """
    stream = ModelStream.of(model, experts, checkpoint_format(format), activations=activations, dtype=dtype)
    with staged_folder(path, overwrite=overwrite) as folder:
        specs = write_tensors(folder, stream.__iter__, max_shard_bytes=max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        for name, content in _json_files(stream, specs).items():
            write_json(folder / name, content)
        verify_checkpoint(folder, experts)
        files = sorted(entry for entry in folder.rglob("*") if entry.is_file())
        report = ExportReport(
            path=Path(path).resolve(),
            format=format,
            files=tuple(str(file.relative_to(folder)) for file in files),
            bytes=sum(file.stat().st_size for file in files),
            bits_per_expert_weight=_bits_per_expert_weight(stream, specs),
            tensors=len(specs),
            notes=_notes(stream),
        )
    return report


def _json_files(stream: ModelStream, specs: list[TensorSpec]) -> dict[str, dict[str, Any]]:
    """The JSON files by name. config.json comes last: without it a folder is not a checkpoint."""
    model, fmt = stream.model, stream.fmt
    others = [p for p in model.parameters() if p.is_floating_point()]
    config = model_config(model, stream.dtype or (others[0].dtype if others else torch.bfloat16))
    files: dict[str, dict[str, Any]] = {}
    generation = generation_config(model)
    if generation is not None:
        files["generation_config.json"] = generation
    if fmt.quantization_config is not None and fmt.ignore is not None:
        packed = frozenset().union(*(region.packed for region in stream.regions.values()))
        unpacked = _modules(spec.name for spec in specs) | _modules(tied_names(model))
        ignore = ignore_list(fmt.ignore, unpacked - packed - ancestors(packed), packed)
        config["quantization_config"] = fmt.quantization_config(stream.activations, ignore)
        files |= fmt.extra_files(stream.activations, ignore)
    blocks = {name: region.block for name, region in stream.regions.items()}
    config[MARK] = export_block(fmt.name, stream.activations, blocks)
    return {**files, CONFIG: config}


def _bits_per_expert_weight(stream: ModelStream, specs: list[TensorSpec]) -> float:
    names = {n for region in stream.regions.values() for n in (*region.packed, *region.names.stacked.values())}
    matrices = (spec for spec in specs if not spec.name.endswith(".bias"))
    size = sum(spec.nbytes for spec in matrices if spec.name in names or spec.name.rpartition(".")[0] in names)
    return 8 * size / sum(region.weights for region in stream.regions.values())


def _notes(stream: ModelStream) -> tuple[str, ...]:
    if not stream.fmt.packed:
        return ()
    return tuple(
        f"{name}: published checkpoints of this family keep experts stacked; packed ones are named {modules}"
        for name, region in stream.regions.items()
        if region.names.stacked and (modules := sorted(region.names.modules.values()))
    )


def _modules(tensors: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] or name for name in tensors}
