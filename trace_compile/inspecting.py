"""``trace-compile inspect``: what a checkpoint, a program or a trace holds, and what is wrong with it.

Facts are plain JSON values. Of packed weights: bits per weight, histograms of the block scales (by binade) and of the
outer scales (by exponent). Problems are those that ``verify`` and an import would refuse (errors) or note (warnings).

Swapped nibbles cannot be seen in a file alone: a swap moves values inside their blocks and leaves every statistic as it
is. Against a ``reference``, another checkpoint of the same weights, dense or packed, it shows, and is named.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trace_compile.errors import ExportError, TraceCompileError
from trace_compile.export.checks import Finding, find_problems
from trace_compile.export.opened import Checkpoint
from trace_compile.export.verify import READERS, swap_pairs
from trace_compile.numerics.formats import E4M3
from trace_compile.programs import PROGRAM_FORMATS
from trace_compile.state.trace import Trace

_EXPECTED_ERROR = 0.25
"""Relative RMS error of 4-bit weights is about 0.1 for Gaussian ones; another matrix is at 1.4."""


@dataclass(frozen=True)
class Inspection:
    """kind: ``"checkpoint"``, ``"program"``, ``"trace"``, or ``"unreadable"``. facts: JSON values by name."""

    path: str
    kind: str
    facts: dict[str, Any]
    problems: tuple[Finding, ...]

    def failed(self, *, strict: bool = False) -> bool:
        """Whether a pipeline should stop: there is an error, or under ``strict`` anything at all."""
        return any(strict or problem.severity == "error" for problem in self.problems)

    def to_json(self) -> str:
        problems = [{"severity": p.severity, "text": p.text} for p in self.problems]
        return json.dumps(
            {"path": self.path, "kind": self.kind, **self.facts, "problems": problems}, indent=2, sort_keys=True
        )


def inspect(path: str | os.PathLike[str], *, reference: str | os.PathLike[str] | None = None) -> Inspection:
    """Look at a folder or file; never raises for what it finds there.

    Args:
        reference: a checkpoint of the same weights to compare packed matrices with.
    """
    try:
        if _is_trace(Path(path)):
            return _inspect_trace(path)
        return _inspect_folder(Path(path), reference)
    except TraceCompileError as error:
        return Inspection(str(path), "unreadable", {}, (Finding("error", str(error)),))


def _is_trace(path: Path) -> bool:
    """A file, or a folder of workers' manifests: no file there is one of a checkpoint or program."""
    if not path.is_dir():
        return path.is_file()
    names = {entry.name for entry in path.glob("*.json")} | {entry.name for entry in path.glob("model*.safetensors")}
    return bool(names) and not any(n in ("config.json", "program.json") or n.startswith("model") for n in names)


def _inspect_trace(path: str | os.PathLike[str]) -> Inspection:
    trace = Trace.load(path)
    layout = trace.layout
    facts: dict[str, Any] = {
        "recipe": trace.recipe,
        "fingerprint": trace.fingerprint,
        "tokens": sum(run.keys.numel() for run in trace.runs),
        "weights_versions": sorted({run.version for run in trace.runs}),
        "bytes_per_token": {"guidance": layout.guidance_bytes, "routing": layout.routing_bytes},
        "sites": {f"{s.region}.{s.projection}": {"kind": s.kind, "width": s.width} for s in layout.sites},
        "ranges": {
            ".".join(site): {
                "amax": float(found.amax.max()),
                "outer_scale": float(trace.ranges.outer_scales([site])[0]),
                "tokens": int(found.tokens.sum()),
                "saturated": int(found.saturated),
            }
            for site, found in trace.ranges.sites.items()
        },
    }
    problems = tuple(Finding("warning", text) for text in trace.ranges.problems())
    if not trace.runs and not trace.ranges.sites:
        problems += (Finding("error", "the trace holds neither records nor ranges"),)
    return Inspection(str(path), "trace", facts, problems)


def _inspect_folder(path: Path, reference: str | os.PathLike[str] | None) -> Inspection:
    program = path / "program.json"
    if program.exists():
        return _inspect_program(path, program)
    checkpoint = Checkpoint(path)
    problems, inputs = find_problems(checkpoint)
    sizes = {name: _numel(checkpoint, name) for name in checkpoint.names}
    facts: dict[str, Any] = {
        "format": checkpoint.format.name,
        "made_by": "another tool" if checkpoint.foreign else "trace_compile",
        "activations": "4-bit" if checkpoint.activations else "unquantized",
        "files": len(list(path.glob("*.safetensors"))),
        "bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "tensors": len(checkpoint.names),
        "dtypes": dict(Counter(checkpoint.spec(name)[0] for name in sorted(checkpoint.names))),
        "architecture": (checkpoint.config.get("architectures") or [None])[0],
    }
    if not checkpoint.foreign:
        facts["regions"] = {
            name: {"experts": entry["experts"], "scheme": entry["scheme"]}
            for name, entry in checkpoint.block["regions"].items()
        }
    if checkpoint.format.packed:
        facts["packed_matrices"] = len(checkpoint.modules)
        facts |= _scales(checkpoint, sizes)
        facts["input_scales"] = {".".join(site): scale for site, scale in sorted(inputs.items())}
    if reference is not None:
        compared, differences = _compare(checkpoint, Checkpoint(reference))
        facts["compared_with_reference"] = compared
        problems = problems + differences
    return Inspection(str(path), "checkpoint", facts, tuple(problems))


def _inspect_program(path: Path, about: Path) -> Inspection:
    try:
        facts: dict[str, Any] = json.loads(about.read_text())
        file, kind = facts["file"], facts["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{about} cannot be read ({error!r}); export again") from error
    problems: list[Finding] = []
    if kind not in PROGRAM_FORMATS:
        problems.append(Finding("error", f"program format {kind!r} is not known; known: {', '.join(PROGRAM_FORMATS)}"))
    if not (path / file).is_file():
        problems.append(Finding("error", f"{file} is missing"))
    facts["bytes"] = sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())
    return Inspection(str(path), "program", facts, tuple(problems))


def _numel(checkpoint: Checkpoint, name: str) -> int:
    return math.prod(checkpoint.spec(name)[1])


def _scales(checkpoint: Checkpoint, sizes: dict[str, int]) -> dict[str, Any]:
    """Bits per packed weight, and histograms over all packed matrices; matrices with missing tensors are left out."""
    by_role = {field.role: field for field in checkpoint.format.fields}
    widths = {"U8": 8, "F8_E4M3": 8, "F32": 32}
    bits = weights = 0
    bytes_seen = torch.zeros(256, dtype=torch.int64)
    outers: Counter[int] = Counter()
    for module in checkpoint.modules:
        names = {role: f"{module}.{field.suffix}" for role, field in by_role.items()}
        present = {role: name for role, name in names.items() if name in checkpoint.names}
        if not {"codes", "scales", "outer"} <= present.keys():
            continue
        weights += 2 * sizes[present["codes"]]
        bits += sum(sizes[name] * widths.get(checkpoint.spec(name)[0], 0) for name in present.values())
        scales = checkpoint.tensor(present["scales"])
        if scales.element_size() == 1:
            bytes_seen += torch.bincount(scales.view(torch.uint8).flatten().int(), minlength=256)
        outer = float(checkpoint.tensor(present["outer"]).reshape(-1)[0])
        if 0 < outer < math.inf:
            outers[math.frexp(1 / outer if by_role["outer"].reciprocal else outer)[1] - 1] += 1
    return {
        "bits_per_packed_weight": bits / weights if weights else 0.0,
        "block_scales": _binades(bytes_seen),
        "outer_scales_by_exponent": {str(exponent): count for exponent, count in sorted(outers.items())},
    }


def _binades(seen: Tensor) -> dict[str, int]:
    """Counts of E4M3 bytes by the binade of their value; zero, subnormal, NaN and negative apart."""
    found: Counter[str] = Counter()
    for byte, count in enumerate(seen.tolist()):
        if count:
            found[_binade(byte)] += count
    return dict(sorted(found.items(), key=lambda entry: _order(entry[0])))


def _binade(byte: int) -> str:
    if byte > E4M3.nan_code:
        return "negative"
    if byte == E4M3.nan_code:
        return "NaN"
    value = E4M3.magnitude(byte)
    if value == 0:
        return "zero"
    return "subnormal" if value < E4M3.smallest_normal else f"2^{math.frexp(value)[1] - 1}"


def _order(name: str) -> float:
    special = {"zero": -99.0, "subnormal": -98.0, "NaN": 98.0, "negative": 99.0}
    return special.get(name, float(name.removeprefix("2^")) if name.startswith("2^") else 0.0)


def _compare(checkpoint: Checkpoint, reference: Checkpoint) -> tuple[int, list[Finding]]:
    """Every packed matrix against the reference's; the number compared, and what is not the same weight."""
    found: list[Finding] = []
    compared = 0
    for module in checkpoint.modules if checkpoint.format.packed else ():
        try:
            expected = _weight(reference, module)
            weight = READERS[checkpoint.format.name](checkpoint, module)
        except (ExportError, RuntimeError) as error:
            found.append(Finding("error", f"{module} cannot be compared: {error}"))
            continue
        compared += 1
        if weight.shape != expected.shape:
            found.append(Finding("error", f"{module} is {list(weight.shape)}, the reference's {list(expected.shape)}"))
            continue
        error_ = _relative_error(weight, expected)
        if not error_ <= _EXPECTED_ERROR:
            cause = ""
            if _relative_error(swap_pairs(weight), expected) <= _EXPECTED_ERROR:
                cause = ": its nibbles are swapped (the first element belongs into the low one)"
            found.append(Finding("error", f"{module} differs from the reference, relative error {error_:.3g}{cause}"))
    return compared, found


def _weight(checkpoint: Checkpoint, module: str) -> Tensor:
    fmt = checkpoint.format.name if module in checkpoint.modules else "bf16"
    return READERS[fmt](checkpoint, module)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float32).tiny))
