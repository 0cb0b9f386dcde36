"""What goes beside the weights: config.json, and its block that says how the codes were made.

The block stands under its own key, which loaders pass over. It holds every option that changes a code (the scheme of
each region: format, profile, source of the outer scale, for weights and activations), whether activations are quantized
when served, and what the experts of each region are called, so that a checkpoint can be checked without its model.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trace_compile.errors import ExportError, FingerprintMismatchError
from trace_compile.export.experts import RegionWeights
from trace_compile.export.names import RegionNames
from trace_compile.export.writer import CONFIG, MARK
from trace_compile.ops.scheme import MoEScheme

_VERSION = 1


def region_block(item: RegionWeights, names: RegionNames) -> dict[str, Any]:
    """One region's entry in the block."""
    foreign = {"foreign": True} if any(tensor.foreign for tensor in item.tensors().values()) else {}
    return {
        **foreign,
        "experts": item.num_experts,
        "scheme": item.scheme.key,
        "modules": names.modules,
        "stacked": names.stacked,
        "layouts": {key: asdict(tensor.layout) for key, tensor in item.tensors().items()},
    }


def export_block(fmt: str, activations: bool, regions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The block under ``MARK`` in config.json."""
    return {"version": _VERSION, "format": fmt, "activations": activations, "regions": regions}


def model_config(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """The model's own configuration as ``save_pretrained`` writes it; of a module without one, nothing.

    Settings that the family knows under a second name (Qwen3-MoE's ``num_experts``) are written under both, because
    engines that read configurations with an older transformers look for the old one.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    content: dict[str, Any] = json.loads(config.to_json_string())
    content.pop("quantization_config", None)
    for alias, name in type(config).attribute_map.items():
        if name in content:
            content.setdefault(alias, content[name])
    content["architectures"] = [type(model).__name__]
    content["dtype"] = str(dtype).removeprefix("torch.")
    return content


def generation_config(model: nn.Module) -> dict[str, Any] | None:
    """The model's generation settings, if it has any."""
    config: Any = getattr(model, "generation_config", None)
    return json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else None


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises ExportError if it is missing or of an unknown version of export."""
    try:
        content: dict[str, Any] = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ExportError(f"{path / CONFIG} cannot be read ({error}); export or copy it again") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path / CONFIG} is not a JSON object; export or copy it again")
    if MARK in content and content[MARK].get("version") != _VERSION:
        raise ExportError(
            f"{path}: block {MARK!r} has version {content[MARK].get('version')!r}, this package reads {_VERSION}; "
            "export again"
        )
    return content


def check_scheme(config: dict[str, Any], scheme: MoEScheme) -> None:
    """Raises FingerprintMismatchError unless every region of the checkpoint was made with ``scheme``."""
    for region, entry in config.get(MARK, {"regions": {}})["regions"].items():
        if entry["scheme"] != scheme.key:
            raise FingerprintMismatchError(
                f"{region} was exported with scheme {entry['scheme']}, not {scheme.key}; load it with the former, "
                "or export again"
            )
