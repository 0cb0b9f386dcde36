"""From the tensors of a checkpoint, or of a stream to a live engine, back to packed experts: nothing is quantized.

The inverse of ``stream``: per-expert matrices are stacked, gate rows above up rows, under the names that the model's
family uses. Whoever provides the tensors by name (a file, a received stream) decides what a missing one means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trace_compile.errors import ExportError
from trace_compile.export.experts import ExpertTensor, RegionWeights
from trace_compile.export.formats import CheckpointFormat, Field
from trace_compile.export.names import RegionNames
from trace_compile.ops.weights import Packed

Source = Callable[[str], Tensor]


def assemble(
    template: RegionWeights, names: RegionNames, fmt: CheckpointFormat, source: Source, *, activations: bool
) -> RegionWeights:
    """The region of ``template`` (its names, layouts and shapes; its bytes are not looked at) with what ``source``
    holds.

    Raises ExportError naming the tensor whose shape or dtype does not fit, and where gate and up of an expert have
    different outer scales, which one packed tensor cannot hold.
    """
    return template.with_tensors(
        {key: _stack(template, tensor, names, fmt, source, activations) for key, tensor in template.tensors().items()}
    )


def _stack(
    template: RegionWeights,
    tensor: ExpertTensor,
    names: RegionNames,
    fmt: CheckpointFormat,
    source: Source,
    activations: bool,
) -> ExpertTensor:
    spans = {name: span for name, (owner, span) in template.projections().items() if owner is tensor}
    modules = [[names.modules[p].format(e) for p in spans] for e in range(template.num_experts)]
    fields: dict[str, Field] = {field.role: field for field in fmt.fields_for(activations)}

    def read(module: str, role: str) -> Tensor:
        return source(f"{module}.{fields[role].suffix}")

    experts, rows, half = tensor.packed.codes.shape
    codes = torch.empty(experts, rows, half, dtype=torch.uint8)
    scales = torch.empty(tensor.packed.scales.shape, dtype=torch.uint8)
    stored: list[Tensor] = []
    for expert, parts in enumerate(modules):
        for module, span in zip(parts, spans.values(), strict=True):
            for role, target in (("codes", codes), ("scales", scales)):
                _copy(f"{module}.{fields[role].suffix}", read(module, role), target[expert, span])
        outers = {module: read(module, "outer").reshape(()).float() for module in parts}
        first, *others = outers.values()
        if any(not torch.equal(first, other) for other in others):
            raise ExportError(f"outer scales of {' and '.join(outers)} differ; one packed weight has one for both")
        stored.append(first)
    outer = torch.stack(stored).to("cpu", copy=True)
    inverse = outer if fields["outer"].reciprocal else None
    packed = Packed(codes, scales, 1.0 / outer if inverse is not None else outer)
    scale = (
        _input_scale([read(m, "input") for parts in modules for m in parts], fields["input"]) if activations else None
    )
    found = replace(tensor, packed=packed, input_outer=scale, inverse=inverse)
    return replace(found, foreign=found.flushable)


def _copy(name: str, found: Tensor, target: Tensor) -> None:
    if found.shape != target.shape or found.element_size() != 1:
        raise ExportError(
            f"{name} is {found.dtype} {list(found.shape)}; this model wants bytes of shape {list(target.shape)}"
        )
    target.copy_(found.view(torch.uint8))


def _input_scale(stored: list[Tensor], field: Field) -> float:
    """The largest, which is what engines use for all experts."""
    values = torch.stack([tensor.reshape(()).float().cpu() for tensor in stored])
    return float((1.0 / values if field.reciprocal else values).max())
