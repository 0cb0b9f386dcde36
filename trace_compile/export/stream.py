"""Every tensor of a model in one checkpoint format, one at a time: what files hold and what live engines are sent.

A stream is ``(name, tensor)`` pairs under the names of the model family's published checkpoints: first everything but
the quantized experts, then the experts region by region, one 2-D matrix per expert and projection (engines' stacked
paths differ in how they turn packed weights round). The same code feeds ``export_checkpoint`` and ``refit``, so an
engine that is refitted holds what a file would have given it.

Invariants: a region is checked against the model before its first tensor comes out; of the packed experts no more than
one region is alive at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trace_compile.errors import ExportError, NonFiniteWeightError
from trace_compile.export.config import region_block
from trace_compile.export.experts import RegionWeights, check_experts, matrices
from trace_compile.export.formats import CheckpointFormat
from trace_compile.export.names import RegionNames, hub_state, other_state, region_names


@dataclass(frozen=True)
class Region:
    """What outlives a region's packed weights.

    names: of its modules and tensors. block: its entry in the configuration. parameters: dotted names in the model.
    packed: module names of its matrices. weights: number of weights.
    """

    names: RegionNames
    block: dict[str, Any]
    parameters: frozenset[str]
    packed: frozenset[str]
    weights: int


@dataclass(frozen=True)
class ModelStream:
    """The tensors of ``model`` with its packed ``experts`` in a format; iterate it as often as needed.

    Build it with ``of``. ``dtype``: of the unquantized floating-point tensors; None keeps each one's own. ``others``:
    whether everything but the quantized experts comes too.
    """

    model: nn.Module
    experts: Iterable[RegionWeights]
    fmt: CheckpointFormat
    activations: bool
    regions: dict[str, Region]
    dtype: torch.dtype | None = None
    others: bool = True

    @classmethod
    def of(
        cls,
        model: nn.Module,
        experts: Iterable[RegionWeights],
        fmt: CheckpointFormat,
        *,
        activations: bool,
        dtype: torch.dtype | None = None,
        others: bool = True,
    ) -> ModelStream:
        """Checks everything that can be checked before a tensor goes out; see ``export_checkpoint`` for what it raises.

        ``experts`` is iterated once here and once per pass over the stream.
        """
        if not fmt.packed and activations:
            raise ExportError(
                f"format {fmt.name!r} stores dequantized weights and no input scales; pass activations=False"
            )
        if iter(experts) is experts:
            raise ExportError("experts is an iterator, which can be read once; pass a list or an object with __iter__")
        regions = {item.region: _plan(model, item, activations) for item in experts}
        if not regions:
            raise ExportError("no packed experts to export; was the model compiled with a quantizing recipe?")
        return cls(model, experts, fmt, activations, regions, dtype, others)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """In the order of the files: the rest of the model on its own device, then region by region on the CPU."""
        if self.others:
            yield from self._other_tensors()
        for item in self.experts:
            yield from self._expert_tensors(item.cpu())

    def _other_tensors(self) -> Iterator[tuple[str, Tensor]]:
        stacked = frozenset().union(*(region.parameters for region in self.regions.values()))
        for name, tensor in other_state(self.model, stacked):
            if tensor.is_floating_point():
                if not bool(torch.isfinite(tensor).all()):
                    raise NonFiniteWeightError(f"{name} holds NaN or Inf; restore the weights, then export")
                tensor = tensor.to(self.dtype or tensor.dtype)
            yield name, tensor

    def _expert_tensors(self, item: RegionWeights) -> Iterator[tuple[str, Tensor]]:
        if self.fmt.packed:
            modules = self.regions[item.region].names.modules
            for matrix in matrices(item):
                prefix = modules[matrix.projection].format(matrix.expert)
                yield from self.fmt.tensors(prefix, matrix, activations=self.activations)
            return
        for tensor in item.tensors().values():
            yield from hub_state(self.model, item.split(tensor, tensor.parameter(torch.bfloat16))).items()


def _plan(model: nn.Module, item: RegionWeights, activations: bool) -> Region:
    """Check a region against the model and settle its names, before anything is written."""
    check_experts(item, activations=activations)
    shapes = item.parameter_shapes()
    for name, shape in shapes.items():
        try:
            parameter = model.get_parameter(name)
        except AttributeError as error:
            raise ExportError(f"{item.region}: the model has no parameter {name}") from error
        if parameter.shape != shape:
            raise ExportError(
                f"{name}: packed from shape {shape}, the model's is {tuple(parameter.shape)}; refit, then export"
            )
    names = region_names(model, item)
    packed = frozenset(module.format(e) for module in names.modules.values() for e in range(item.num_experts))
    return Region(
        names=names,
        block=region_block(item, names),
        parameters=frozenset(shapes),
        packed=packed,
        weights=sum(2 * tensor.packed.codes.numel() for tensor in item.tensors().values()),
    )
