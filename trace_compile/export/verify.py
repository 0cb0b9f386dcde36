"""Reading a checkpoint back, with no help from the code that wrote it.

The readers below know each format only from its description: they name the tensors themselves, decode E2M1 from its
bits, and apply the outer scale in the direction the format stores it. What they read must equal, bit for bit, what
the training graph multiplies with. The inventory check says whether an engine would load it as that: every tensor
there and of the right type, every scale one an engine keeps, gate and up tied, and every tensor either packed or in
the ignore list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trace_compile.errors import ExportError
from trace_compile.export.config import read_config
from trace_compile.export.experts import FORMAT, ExpertWeights
from trace_compile.export.formats import checkpoint_format
from trace_compile.export.ignore import ancestors
from trace_compile.export.writer import INDEX, MARK

_SHOWN = 10


@dataclass(frozen=True)
class VerifyReport:
    """What was checked: tensors in the files, packed matrices among them, matrices compared with the training graph's
    values, and the input scale of each (region, projection), empty for weight-only checkpoints."""

    format: str
    tensors: int
    matrices: int
    compared: int
    input_scales: dict[tuple[str, str], float]


class Checkpoint:
    """An exported folder, opened for reading. Tensors are read one at a time.

    Raises ExportError if a file, or the config's block about the export, is missing or does not parse.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        self.block: dict[str, Any] = self.config[MARK]
        self.format = checkpoint_format(self.block["format"])
        self._files: dict[str, Any] = {}
        self.duplicates: list[str] = []
        for file in sorted(self.path.glob("*.safetensors")):
            try:
                handle = safe_open(str(file), framework="pt")
            except Exception as error:  # the package raises a type of its own
                raise ExportError(f"{file} cannot be read ({error}); export again") from error
            for name in handle.keys():  # noqa: SIM118  (the handle is no mapping)
                if name in self._files:
                    self.duplicates.append(name)
                self._files[name] = handle
        index = self.path / INDEX
        self.indexed = set(json.loads(index.read_text())["weight_map"]) if index.exists() else set(self._files)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def tensor(self, name: str) -> Tensor:
        """One tensor. Raises ExportError naming it if it is missing."""
        if name not in self._files:
            raise ExportError(f"{self.path}: tensor {name} is missing; export again")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(safetensors dtype name, shape) of one tensor, from the header."""
        piece = self._files[name].get_slice(name)
        return piece.get_dtype(), tuple(piece.get_shape())

    def modules(self) -> dict[str, tuple[str, str, int]]:
        """Module name of every packed or split expert matrix -> (region, projection, expert)."""
        return {
            template.format(expert): (region, projection, expert)
            for region, entry in self.block["regions"].items()
            for projection, template in entry["modules"].items()
            for expert in range(entry["experts"])
        }


Reader = Callable[[Checkpoint, str], Tensor]


def _e2m1(packed: Tensor) -> Tensor:
    """uint8 [N, K/2] -> float32 [N, K]: low nibble first; a nibble is sign, two exponent bits, one mantissa bit."""
    codes = torch.stack((packed % 16, packed // 16), dim=-1).flatten(-2).int()
    exponent, mantissa = (codes // 2) % 4, (codes % 2) / 2
    magnitude = torch.where(exponent == 0, mantissa, torch.ldexp(1 + mantissa, exponent - 1))
    return torch.where(codes >= 8, -magnitude, magnitude)


def _scaled(values: Tensor, scales: Tensor, outer: Tensor) -> Tensor:
    blocks = values.unflatten(-1, (scales.shape[-1], -1)) * scales.float()[..., None]
    return blocks.flatten(-2) * outer


def read_compressed_tensors(checkpoint: Checkpoint, module: str) -> Tensor:
    """Float32 [N, K] of one matrix. Outer scales are stored as what a weight is multiplied with before quantizing."""
    values = _e2m1(checkpoint.tensor(f"{module}.weight_packed"))
    encode = checkpoint.tensor(f"{module}.weight_global_scale")
    return _scaled(values, checkpoint.tensor(f"{module}.weight_scale"), 1.0 / encode)


def read_modelopt(checkpoint: Checkpoint, module: str) -> Tensor:
    """Float32 [N, K] of one matrix. Outer scales are stored as what a quantized weight is multiplied with."""
    values = _e2m1(checkpoint.tensor(f"{module}.weight"))
    return _scaled(values, checkpoint.tensor(f"{module}.weight_scale"), checkpoint.tensor(f"{module}.weight_scale_2"))


def read_bf16(checkpoint: Checkpoint, module: str) -> Tensor:
    """Float32 [N, K] of one matrix."""
    return checkpoint.tensor(f"{module}.weight").float()


READERS: dict[str, Reader] = {
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "bf16": read_bf16,
}


def verify_checkpoint(path: str | os.PathLike[str], experts: Iterable[ExpertWeights] = ()) -> VerifyReport:
    """Check an exported folder, and compare it bit for bit with the packed ``experts`` where they are given.

    Raises ExportError that lists what is wrong: missing, unknown, doubled or mistyped tensors, scales that are not
    finite, positive and normal, untied gate and up, tensors neither packed nor ignored (or both), and different values.
    """
    checkpoint = Checkpoint(path)
    problems = [f"{name} is in two files" for name in checkpoint.duplicates]
    problems += [f"{name} is in the index or in a file, not in both" for name in checkpoint.indexed ^ checkpoint.names]
    modules = checkpoint.modules()
    scales: dict[tuple[str, str], float] = {}
    if checkpoint.format.packed:
        problems += _inventory(checkpoint, modules)
        problems += _coverage(checkpoint, set(modules))
        problems += _declaration(checkpoint)
        if not problems:
            problems += _scales(checkpoint, modules, scales)
    compared = 0
    for item in experts:
        if problems:
            break
        compared += _compare(checkpoint, item.cpu(), problems)
    if problems:
        more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ExportError(f"{checkpoint.path} would not load as exported:\n" + "\n".join(problems[:_SHOWN]) + more)
    matrices = len(modules) if checkpoint.format.packed else 0
    return VerifyReport(checkpoint.format.name, len(checkpoint.names), matrices, compared, scales)


def _inventory(checkpoint: Checkpoint, modules: dict[str, tuple[str, str, int]]) -> list[str]:
    """Every packed matrix has exactly its fields, of the right dtypes and of shapes that agree."""
    fields = checkpoint.format.fields_for(checkpoint.block["activations"])
    dtypes = {"codes": "U8", "scales": "F8_E4M3", "outer": "F32", "input": "F32"}
    names = checkpoint.names
    problems, expected = [], set()
    for module in modules:
        columns = set()
        for field in fields:
            name = f"{module}.{field.suffix}"
            expected.add(name)
            if name not in names:
                problems.append(f"{name} is missing")
                continue
            dtype, shape = checkpoint.spec(name)
            if dtype != dtypes[field.role]:
                problems.append(f"{name} is {dtype}, not {dtypes[field.role]}")
            if field.role in ("outer", "input"):
                if shape != field.shape:
                    problems.append(f"{name} has shape {shape}, not {field.shape}")
            else:
                columns.add((shape[0], shape[-1] * (2 if field.role == "codes" else 16)))
        if len(columns) > 1:
            problems.append(f"{module}: codes and block scales describe different shapes {sorted(columns)}")
    for name in names - expected:
        if name.rpartition(".")[0] in modules:
            problems.append(f"{name} belongs to a packed matrix and is not part of the format")
    return problems


def _coverage(checkpoint: Checkpoint, packed: set[str]) -> list[str]:
    """Every module is packed or ignored, and none is both. A container of packed modules is neither."""
    ignore = checkpoint.config["quantization_config"]["ignore"]
    style = checkpoint.format.ignore
    assert style is not None
    present = {name.rpartition(".")[0] or name for name in checkpoint.names}
    problems = []
    for module in sorted(present - ancestors(packed)):
        ignored = any(style.matches(pattern, module) for pattern in ignore)
        if ignored and module in packed:
            problems.append(f"{module} is packed and matched by the ignore list")
        if not ignored and module not in packed:
            problems.append(f"{module} is neither packed nor matched by the ignore list")
    return problems


def _declaration(checkpoint: Checkpoint) -> list[str]:
    """The configuration declares activation quantization exactly where input scales are stored."""
    groups = checkpoint.config["quantization_config"]["config_groups"].values()
    declared = any(group.get("input_activations") is not None for group in groups)
    if declared != checkpoint.block["activations"]:
        return [f"activation quantization: declared {declared}, exported {checkpoint.block['activations']}"]
    return []


def _scales(
    checkpoint: Checkpoint, modules: dict[str, tuple[str, str, int]], inputs: dict[tuple[str, str], float]
) -> list[str]:
    """Values of all scales; fills ``inputs``."""
    problems = []
    outers: dict[tuple[str, int], dict[str, float]] = {}
    for module, (region, projection, expert) in modules.items():
        for field in checkpoint.format.fields_for(checkpoint.block["activations"]):
            name = f"{module}.{field.suffix}"
            if field.role == "scales":
                blocks = checkpoint.tensor(name).float()
                # 2^-6 is the smallest normal E4M3 number; a NaN byte fails the comparison too.
                if not bool((blocks >= torch.finfo(torch.float8_e4m3fn).smallest_normal).all()):
                    problems.append(f"{name} holds a NaN, zero, negative or subnormal block scale")
            elif field.role in ("outer", "input"):
                value = float(checkpoint.tensor(name).reshape(()))
                if not 0 < value < float("inf"):
                    problems.append(f"{name} is {value}, not finite and positive")
                elif field.role == "outer":
                    outers.setdefault((region, expert), {})[projection] = value
                else:
                    scale = 1.0 / value if field.reciprocal else value
                    if inputs.setdefault((region, projection), scale) != scale:
                        problems.append(f"{name} differs from the input scale of the other experts")
    for (region, expert), values in outers.items():
        if {"gate", "up"} <= values.keys() and values["gate"] != values["up"]:
            problems.append(f"{region}: outer scales of gate and up of expert {expert} differ: {values}")
    for region in {region for region, _ in inputs}:
        if inputs.get((region, "gate"), inputs.get((region, "up"))) != inputs.get((region, "up")):
            problems.append(f"{region}: input scales of gate and up differ")
    return problems


def _compare(checkpoint: Checkpoint, item: ExpertWeights, problems: list[str]) -> int:
    """Compare one region with the training graph's values; the number of matrices compared."""
    entry = checkpoint.block["regions"].get(item.region)
    if entry is None or entry["experts"] != item.num_experts or entry["scheme"] != item.scheme.key:
        problems.append(f"{item.region}: exported as {entry}, compared with {item.num_experts} of {item.scheme.key}")
        return 0
    stacked = entry["stacked"] if not checkpoint.format.packed else {}
    values = {key: tensor.packed.dequantize(fmt=FORMAT) for key, tensor in item.tensors().items()}
    compared = 0
    for key, name in stacked.items():
        stored, expected = checkpoint.tensor(name).float(), item.tensors()[key].parameter()
        if stored.shape != expected.shape:  # families differ in which way round they store stacked experts
            stored = stored.transpose(1, 2)
        if not _same_bits(stored, expected):
            problems.append(f"{name} differs from the training graph's values")
        compared += item.num_experts * sum(source is item.tensors()[key] for source, _ in item.projections().values())
    for projection, (tensor, rows) in item.projections().items():
        key = "down" if tensor is item.down else "gate_up"
        if key in stacked:
            continue
        for expert in range(item.num_experts):
            module = entry["modules"][projection].format(expert)
            if not _same_bits(READERS[checkpoint.format.name](checkpoint, module), values[key][expert, rows]):
                problems.append(f"{module} differs from the training graph's values")
            compared += 1
    return compared


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of float32 bit patterns: zeros of different sign differ."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
