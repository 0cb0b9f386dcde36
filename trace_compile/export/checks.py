"""Whether an engine would load a packed checkpoint as what it is: every reason why not, as a list of findings.

An ``error`` is a checkpoint that engines refuse, or load as something else (missing input scales are uninitialised
memory, a weight that is neither packed nor ignored becomes NaN). A ``warning`` is what a foreign file may hold and some
engines do badly with: zero and subnormal block scales (flushed), input scales that differ between experts (collapsed to
their maximum). In checkpoints of this package's own both would be errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trace_compile.export.ignore import ancestors
from trace_compile.export.opened import Checkpoint


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a checkpoint."""

    severity: Literal["error", "warning"]
    text: str


def _errors(texts: list[str]) -> list[Finding]:
    return [Finding("error", text) for text in texts]


InputScales = dict[tuple[str, str], float]
"""(region, projection) -> the outer scale of its input; the largest where experts differ, as engines take it."""


def find_problems(checkpoint: Checkpoint) -> tuple[list[Finding], InputScales]:
    """All findings, and the input scales, which are empty for weight-only checkpoints and where tensors are missing."""
    found = _errors([f"{name} is in two files" for name in checkpoint.duplicates])
    unindexed = sorted(checkpoint.indexed ^ checkpoint.names)
    found += _errors([f"{name} is in the index or in a file, not in both" for name in unindexed])
    inputs: InputScales = {}
    if checkpoint.format.packed:
        if not checkpoint.modules:
            found += _errors(["the configuration declares 4-bit weights, and no tensor is one"])
        inventory = _inventory(checkpoint)
        found += inventory + _coverage(checkpoint) + _declaration(checkpoint)
        if not inventory:
            found += _block_scales(checkpoint) + _outer_scales(checkpoint, inputs)
    return found, inputs


def _inventory(checkpoint: Checkpoint) -> list[Finding]:
    """Every packed matrix has exactly its fields, of the right dtypes and of shapes that agree."""
    fields = checkpoint.format.fields_for(checkpoint.activations)
    dtypes = {"codes": "U8", "scales": "F8_E4M3", "outer": "F32", "input": "F32"}
    names = checkpoint.names
    problems, expected = [], set()
    for module in checkpoint.modules:
        shapes = set()
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
                if shape != field.shape and not (checkpoint.foreign and shape in ((), (1,))):
                    problems.append(f"{name} has shape {shape}, not {field.shape}")
            elif len(shape) != 2:
                problems.append(f"{name} has shape {shape}, not two dimensions")
            else:
                shapes.add((shape[0], shape[-1] * (2 if field.role == "codes" else 16)))
        if len(shapes) > 1:
            problems.append(f"{module}: codes and block scales describe different shapes {sorted(shapes)}")
    for name in sorted(names - expected):
        module, _, suffix = name.rpartition(".")
        if module in checkpoint.modules and suffix != "bias":
            problems.append(f"{name} belongs to a packed matrix and is not part of the format")
    return _errors(problems) + _errors(_missing_experts(checkpoint))


def _missing_experts(checkpoint: Checkpoint) -> list[str]:
    """Foreign regions are read off names, so an expert that lacks a whole matrix shows as a gap."""
    if not checkpoint.foreign:
        return []
    regions: dict[str, dict[str, set[int]]] = {}
    for region, projection, expert in checkpoint.modules.values():
        regions.setdefault(region, {}).setdefault(projection, set()).add(expert)
    problems = []
    for region, projections in regions.items():
        every = set(range(max(max(experts) for experts in projections.values()) + 1))
        for projection, experts in projections.items():
            if every - experts:
                problems.append(f"{region}: {projection} of experts {sorted(every - experts)} is missing")
    return problems


def _coverage(checkpoint: Checkpoint) -> list[Finding]:
    """Every module is packed or ignored, and none is both. A container of packed modules is neither."""
    quantization = checkpoint.config.get("quantization_config") or {}
    style, packed = checkpoint.format.ignore, set(checkpoint.modules)
    if checkpoint.foreign and "ignore" not in quantization and "exclude_modules" not in quantization:
        return []  # declared in a file of its own, or by a loader's defaults
    patterns = quantization.get("ignore", quantization.get("exclude_modules")) or []
    assert style is not None
    present = {name.rpartition(".")[0] or name for name in checkpoint.names if _may_be_quantized(checkpoint, name)}
    found = []
    for module in sorted(present - ancestors(packed)):
        ignored = any(style.matches(pattern, module) for pattern in patterns)
        if ignored and module in packed:
            found.append(Finding("error", f"{module} is packed and matched by the ignore list"))
        if not ignored and module not in packed:
            found.append(Finding("error", f"{module} is neither packed nor matched by the ignore list"))
    return found


def _may_be_quantized(checkpoint: Checkpoint, name: str) -> bool:
    """Foreign lists name linear layers alone: norms and embeddings are not theirs to name."""
    if not checkpoint.foreign or name.rpartition(".")[0] in checkpoint.modules:
        return True
    return name.endswith(".weight") and len(checkpoint.spec(name)[1]) == 2 and "embed" not in name


def _declaration(checkpoint: Checkpoint) -> list[Finding]:
    """The configuration declares activation quantization exactly where input scales are stored."""
    if checkpoint.foreign:
        return []  # there the declaration is what says whether they are stored, and the inventory compares
    groups = checkpoint.config["quantization_config"]["config_groups"].values()
    declared = any(group.get("input_activations") is not None for group in groups)
    if declared != checkpoint.activations:
        return _errors([f"activation quantization: declared {declared}, exported {checkpoint.activations}"])
    return []


def _block_scales(checkpoint: Checkpoint) -> list[Finding]:
    """No block scale is NaN or negative; none is zero or subnormal, except where another tool chose so."""
    (field,) = (field for field in checkpoint.format.fields if field.role == "scales")
    found = []
    for module, (region, _, _) in checkpoint.modules.items():
        name = f"{module}.{field.suffix}"
        scales = checkpoint.tensor(name)
        values = scales.float()
        if not bool((values >= 0).all()) or bool((scales.view(torch.uint8) == 0x80).any()):
            found.append(Finding("error", f"{name} holds a NaN or negative block scale"))
        # 2^-6 is the smallest normal E4M3 number.
        elif not bool((values >= torch.finfo(torch.float8_e4m3fn).smallest_normal).all()):
            text = f"{name} holds a zero or subnormal block scale, which some engines flush"
            found.append(Finding("warning" if region in checkpoint.lenient else "error", text))
    return found


def _outer_scales(checkpoint: Checkpoint, inputs: InputScales) -> list[Finding]:
    """Outer and input scales are finite and positive; gate and up have one; so have all experts' inputs."""
    found: list[Finding] = []
    outers: dict[tuple[str, int], dict[str, float]] = {}
    per_input: dict[tuple[str, str], set[float]] = {}
    for module, (region, projection, expert) in checkpoint.modules.items():
        for field in checkpoint.format.fields_for(checkpoint.activations):
            if field.role not in ("outer", "input"):
                continue
            name = f"{module}.{field.suffix}"
            stored = checkpoint.tensor(name)
            value = float(stored.reshape(()))
            if not 0 < value < float("inf"):
                found.append(Finding("error", f"{name} is {value}, not finite and positive"))
            elif field.role == "outer":
                outers.setdefault((region, expert), {})[projection] = value
            else:
                per_input.setdefault((region, projection), set()).add(float(_decode(stored, field.reciprocal)))
    for (region, expert), values in outers.items():
        if {"gate", "up"} <= values.keys() and values["gate"] != values["up"]:
            text = f"{region}: outer scales of gate and up of expert {expert} differ: {values}"
            found.append(Finding("error", f"{text}; engines use one for both"))
    inputs |= {site: max(scales) for site, scales in per_input.items()}
    loose: Literal["warning", "error"] = "warning" if checkpoint.foreign else "error"
    for (region, projection), scales in per_input.items():
        if len(scales) > 1:
            text = f"{region}.{projection}: input scales differ between experts; engines take the largest"
            found.append(Finding(loose, text))
        if projection == "gate" and inputs.get((region, "up"), inputs[region, "gate"]) != inputs[region, "gate"]:
            found.append(Finding(loose, f"{region}: input scales of gate and up differ; engines take the largest"))
    return found


def _decode(stored: Tensor, reciprocal: bool) -> Tensor:
    """The outer scale that a stored scalar stands for, float32 []."""
    return (1.0 / stored if reciprocal else stored).reshape(())
