"""A checkpoint folder, opened for reading: one that an export made, or one that another tool made (foreign).

Own checkpoints say in config.json what their matrices are called. In foreign ones that is read off the names: every
module with a field of the declared format is a packed matrix. Both are one ``Checkpoint`` to everything that reads:
``verify``, ``inspect``, ``reload`` and the import.
"""

from __future__ import annotations

import json
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from trace_compile.errors import ExportError, UnknownFormatError
from trace_compile.export.config import read_config
from trace_compile.export.formats import BITS, GROUP, CheckpointFormat, checkpoint_format
from trace_compile.export.writer import INDEX, MARK

HF_QUANT_CONFIG = "hf_quant_config.json"

Place = tuple[str, str, int]
"""Of a matrix: region, projection, expert."""

_PROJECTIONS = {
    **dict.fromkeys(("gate_proj", "w1"), "gate"),
    **dict.fromkeys(("up_proj", "w3"), "up"),
    **dict.fromkeys(("down_proj", "w2"), "down"),
}
_EXPERT = re.compile(r"(?P<region>.*experts)\.(?P<expert>\d+)\.(?P<leaf>\w+)")


class Checkpoint:
    """Tensors are read one at a time.

    Raises ExportError if a file or the configuration is missing or does not parse, UnknownFormatError if the
    configuration declares a quantization that is not a row of ``FORMATS``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        self.foreign = MARK not in self.config
        self.block: dict[str, Any] = _declared(self.path, self.config) if self.foreign else self.config[MARK]
        self.format: CheckpointFormat = checkpoint_format(self.block["format"])
        self._files: dict[str, Any] = {}
        self.duplicates: list[str] = []
        for file in sorted(self.path.glob("*.safetensors")):
            try:
                handle = safe_open(str(file), framework="pt")
            except Exception as error:  # the package raises a type of its own
                raise ExportError(f"{file} cannot be read ({error}); export or copy it again") from error
            for name in handle.keys():  # noqa: SIM118  (the handle is no mapping)
                if name in self._files:
                    self.duplicates.append(name)
                self._files[name] = handle
        if not self._files:
            raise ExportError(f"{self.path} holds no tensors (*.safetensors); is it a checkpoint folder?")
        index = self.path / INDEX
        self.indexed = set(_json(index)["weight_map"]) if index.exists() else set(self._files)

    @property
    def activations(self) -> bool:
        """Whether activations are quantized when served (W4A4)."""
        return bool(self.block["activations"])

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def tensor(self, name: str) -> Tensor:
        """One tensor. Raises ExportError naming it if it is missing."""
        if name not in self._files:
            raise ExportError(f"{self.path}: tensor {name} is missing; export or copy it again")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(safetensors dtype name, shape) of one tensor, from the header."""
        piece = self._files[name].get_slice(name)
        return piece.get_dtype(), tuple(piece.get_shape())

    @cached_property
    def modules(self) -> dict[str, Place]:
        """Every packed or split expert matrix by its module name, and every other packed matrix of a foreign checkpoint
        (region and projection: its own name; expert 0)."""
        if self.foreign:
            return {name: _place(name) for name in sorted(self._packed_modules())}
        return {
            template.format(expert): (region, projection, expert)
            for region, entry in self.block["regions"].items()
            for projection, template in entry["modules"].items()
            for expert in range(entry["experts"])
        }

    def _packed_modules(self) -> set[str]:
        suffixes = {field.suffix for field in self.format.fields}
        found = set()
        for name in self._files:
            module, _, suffix = name.rpartition(".")
            # ModelOpt calls codes what dense weights are called: there their dtype tells them apart.
            if suffix in suffixes and (suffix != "weight" or self.spec(name)[0] == "U8"):
                found.add(module)
        return found

    @property
    def lenient(self) -> frozenset[str]:
        """Regions whose bytes another tool made: zero and subnormal block scales are its choice, and are kept."""
        if self.foreign:
            return frozenset(region for region, _, _ in self.modules.values())
        return frozenset(name for name, entry in self.block["regions"].items() if entry.get("foreign"))


def _place(module: str) -> Place:
    match = _EXPERT.fullmatch(module)
    if match is None or match["leaf"] not in _PROJECTIONS:
        return module, module, 0
    return match["region"], _PROJECTIONS[match["leaf"]], int(match["expert"])


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read ({error}); export or copy it again") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path} is not a JSON object; export or copy it again")
    return content


def _declared(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Format and activation quantization that a foreign configuration declares."""
    quantization = config.get("quantization_config")
    if quantization is None and (path / HF_QUANT_CONFIG).exists():
        inner = _json(path / HF_QUANT_CONFIG).get("quantization", {})
        quantization = {"quant_method": "modelopt", **inner}
    if quantization is None:
        return {"format": "bf16", "activations": False, "regions": {}}
    method = quantization.get("quant_method")
    if method == "modelopt":
        return {"format": "modelopt", "activations": _modelopt_activations(path, quantization), "regions": {}}
    if method == "compressed-tensors":
        activations = _compressed_tensors_activations(path, quantization)
        return {"format": "compressed-tensors", "activations": activations, "regions": {}}
    raise UnknownFormatError(f"{path}: quant_method {method!r} is not known; known: compressed-tensors, modelopt")


def _modelopt_activations(path: Path, quantization: dict[str, Any]) -> bool:
    algorithm, group = quantization.get("quant_algo"), quantization.get("group_size", GROUP)
    if algorithm not in ("NVFP4", "W4A16_NVFP4") or group != GROUP:
        raise UnknownFormatError(
            f"{path}: quant_algo {algorithm!r} with group_size {group!r} is not known; known: NVFP4, W4A16_NVFP4 with "
            f"{GROUP}"
        )
    return algorithm == "NVFP4"


def _compressed_tensors_activations(path: Path, quantization: dict[str, Any]) -> bool:
    groups = list((quantization.get("config_groups") or {}).values())
    expected = {"num_bits": BITS, "type": "float", "group_size": GROUP}
    for group in groups or [{}]:
        fmt = group.get("format") or quantization.get("format")
        weights = group.get("weights") or {}
        found = {key: weights.get(key) for key in expected}
        if fmt != "nvfp4-pack-quantized" or found != expected:
            raise UnknownFormatError(f"{path}: format {fmt!r} with {found} is not known; known: nvfp4-pack-quantized")
    return any(group.get("input_activations") is not None for group in groups)
