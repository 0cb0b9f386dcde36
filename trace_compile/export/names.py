"""Names and layout that a model family's published checkpoints use, taken from transformers' own conversion mapping.

transformers keeps experts stacked in memory and splits them when it saves: Qwen3-MoE into
``mlp.experts.N.gate_proj.weight``, Mixtral into ``block_sparse_moe.experts.N.w1.weight``. Engines read those names.
They are not repeated here: small marker tensors go through the same conversion that ``save_pretrained`` uses, and
where each marker comes out gives the name. Families whose checkpoints keep experts stacked, and plain modules, get
``<experts>.N.{gate_proj,up_proj,down_proj}``, which is what quantizing tools write for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trace_compile.errors import ExportError
from trace_compile.export.experts import ExpertTensor, LinearWeights, RegionWeights

_LEAF = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def hub_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and split state-dict entries as ``save_pretrained`` would. Other modules: unchanged.

    transformers looks conversions up by class, so a class swapped in must keep its base's name and module.
    """
    if not isinstance(model, PreTrainedModel) or not state:
        return dict(state)
    try:
        return revert_weight_conversion(model, dict(state))
    except ValueError as error:  # conversions that join parameters of several modules want them all at once
        raise ExportError(
            f"transformers' conversion of {type(model).__name__} cannot name {next(iter(state))} by itself: {error}"
        ) from error


def other_state(model: nn.Module, experts: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """Everything but the named expert parameters, under hub names, one layer at a time.

    Conversions never reach across layers, so converting a layer at a time bounds the memory by one layer.
    """
    state = model.state_dict()
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    for name, source in tied_names(model).items():
        if name in state and source in state and state[name].data_ptr() == state[source].data_ptr():
            del state[name]
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if name not in experts:
            layers.setdefault(_layer(name), {})[name] = tensor
    for layer in layers.values():
        yield from hub_state(model, layer).items()


def own_tensors(model: nn.Module, experts: frozenset[str]) -> dict[str, Tensor]:
    """``other_state`` as views of the model's own memory, to write into.

    Raises ExportError where a conversion of the family makes new tensors.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    found = {}
    for name, tensor in other_state(model, experts):
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in memory:
            raise ExportError(f"{name} is computed when a checkpoint is written and cannot be filled; use reload()")
        found[name] = tensor
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Parameter -> the parameter that it repeats, and that a loader ties it to."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


@dataclass(frozen=True)
class RegionNames:
    """Checkpoint names of one region.

    Args:
        modules: projection -> module name with ``{}`` for the expert, as in ``model.layers.0.mlp.experts.{}.up_proj``.
        stacked: ``gate_up`` and ``down`` -> tensor name, where the family's checkpoints keep experts stacked; else
            empty.
    """

    modules: dict[str, str]
    stacked: dict[str, str]


def region_names(model: nn.Module, item: RegionWeights) -> RegionNames:
    """The names of a region's experts. Raises ExportError if the family numbers them in a way that is not
    understood."""
    if isinstance(item, LinearWeights):
        return RegionNames({name: _layer_name(model, f"{module}.weight") for name, module in _leaves(item)}, {})
    modules: dict[str, str] = {}
    stacked: dict[str, str] = {}
    for key, tensor in item.tensors().items():
        projections = [name for name, (source, _) in item.projections().items() if source is tensor]
        markers = hub_state(model, {tensor.name: _markers(tensor, len(projections))})
        templates = _templates(markers, projections, item.num_experts)
        if templates is None:
            stacked[key] = next(iter(markers))
            templates = _default(stacked[key], projections)
        modules |= templates
    return RegionNames(modules, stacked)


def _leaves(item: LinearWeights) -> Iterator[tuple[str, str]]:
    return zip(item.projections(), item.modules, strict=True)


def _layer_name(model: nn.Module, parameter: str) -> str:
    """The module name under which checkpoints have a linear layer. Raises ExportError where they split or join it."""
    found = hub_state(model, {parameter: torch.zeros(2, 2)})
    if len(found) != 1 or not next(iter(found)).endswith(".weight"):
        raise ExportError(f"{parameter} is stored as {sorted(found)}, not as a matrix of its own; add it to ignore")
    return next(iter(found)).removesuffix(".weight")


def _layer(name: str) -> str:
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: index + 1])


def _markers(tensor: ExpertTensor, projections: int) -> Tensor:
    """A small stand-in for the parameter whose every element says which expert and projection it belongs to."""
    experts = tensor.packed.codes.shape[0]
    # Two rows per projection and two columns: no dimension of one, which transformers' split would squeeze away.
    owner = torch.arange(experts)[:, None] * projections + torch.arange(projections)
    marker = owner.repeat_interleave(2, dim=1)[..., None].expand(-1, -1, 2)
    return tensor.layout.parameter(marker)


def _templates(markers: dict[str, Tensor], projections: list[str], experts: int) -> dict[str, str] | None:
    """Templates if the family splits its experts, None if it keeps them stacked."""
    owners: dict[int, str] = {}
    for name, marker in markers.items():
        owner = int(marker.flatten()[0])
        if marker.dim() != 2 or not bool((marker == owner).all()) or not name.endswith(".weight"):
            return None
        owners[owner] = name.removesuffix(".weight")
    if sorted(owners) != list(range(experts * len(projections))):
        return None
    found = {}
    for index, projection in enumerate(projections):
        names = [owners[expert * len(projections) + index] for expert in range(experts)]
        parts = names[0].split(".")
        position = max(i for i, part in enumerate(parts) if part.isdigit())
        parts[position] = "{}"
        template = ".".join(parts)
        if [template.format(expert) for expert in range(experts)] != names:
            raise ExportError(f"experts of {names[0]} are not numbered 0..{experts - 1}: {names}")
        found[projection] = template
    return found


def _default(stacked: str, projections: list[str]) -> dict[str, str]:
    base = stacked.rpartition(".")[0]
    prefix = f"{base}." if base else ""
    return {name: f"{prefix}{{}}.{_LEAF[name]}" for name in projections}
