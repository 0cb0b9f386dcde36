"""The trace file: one safetensors file whose metadata says what the tensors must be.

    run.<i>.keys   int64 [n_i]        run.<i>.rows  uint8 [n_i, R]     run.<i>.outer  float32 [S]
    ranges.<j>.amax | tokens | hist | saturated                        see ``SiteRange``
    metadata: format, version, fingerprint, layout, recipe, runs (versions), ranges (site names), sha256

The layout and the lists in the metadata fix every name, dtype and all but two sizes (n_i, E_j), so the header is
checked completely before memory is taken. ``sha256`` covers the other metadata and every tensor's name, dtype, shape
and bytes.
The conflict counters belong to a session and are not stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trace_compile.errors import FingerprintMismatchError, TraceCompileError, TraceFileError
from trace_compile.state.files import atomic_save_safetensors, load_safetensors, raw_bytes
from trace_compile.state.layout import RecordLayout
from trace_compile.state.ranges import BUCKETS, Ranges
from trace_compile.state.runs import KEY_BYTES, Run
from trace_compile.state.trace import Trace

FORMAT = "trace_compile.trace"
VERSION = "1"
_FIELDS = frozenset({"format", "version", "fingerprint", "layout", "recipe", "runs", "ranges", "sha256"})
Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes the file atomically: a crash leaves the old one. Equal traces give equal bytes."""
    tensors, range_names = trace.ranges.to_tensors()
    for i, run in enumerate(trace.runs):
        tensors |= {f"run.{i}.keys": run.keys, f"run.{i}.rows": run.rows, f"run.{i}.outer": run.outer}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": trace.fingerprint,
        "layout": _json(trace.layout.to_dict()),
        "recipe": _json(trace.recipe),
        "runs": _json([run.version for run in trace.runs]),
        "ranges": _json(range_names),
    }
    metadata["sha256"] = _digest(tensors, metadata)
    atomic_save_safetensors(tensors, path, metadata)


def load_trace(path: str | os.PathLike[str], *, fingerprint: str | None, max_bytes: int) -> Trace:
    """See ``Trace.load``."""
    described: list[_Description] = []

    def check(specs: Specs, metadata: dict[str, str]) -> None:
        described.append(_describe(path, specs, metadata, fingerprint, max_bytes))

    tensors, metadata = load_safetensors(path, check)
    digest = metadata.pop("sha256")
    if _digest(tensors, metadata) != digest:
        raise _corrupt(path, "its content does not have the checksum that it states")
    found = described[0]
    runs = [
        Run(version, tensors[f"run.{i}.outer"], tensors[f"run.{i}.keys"], tensors[f"run.{i}.rows"])
        for i, version in enumerate(found.versions)
    ]
    if not all(bool((run.keys[1:] > run.keys[:-1]).all()) for run in runs):
        raise _corrupt(path, "the keys of a run are not increasing")
    trace = Trace(
        found.layout,
        metadata["fingerprint"],
        found.recipe,
        ranges=Ranges.from_tensors(tensors, found.range_names),
        max_bytes=max_bytes,
    )
    trace._runs = runs
    trace.counters.appended = sum(run.keys.numel() for run in runs)
    return trace


class _Description:
    """The metadata, parsed; raises ``KeyError``, ``TypeError`` or ``ValueError`` when it is malformed."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        if metadata.keys() != _FIELDS:
            raise ValueError(f"metadata fields {sorted(metadata)}")
        self.layout = RecordLayout.from_dict(json.loads(metadata["layout"]))
        self.recipe: dict[str, Any] = json.loads(metadata["recipe"])
        self.versions: list[int] = json.loads(metadata["runs"])
        self.range_names: list[list[str]] = json.loads(metadata["ranges"])
        versions_ok = isinstance(self.versions, list) and all(type(v) is int for v in self.versions)
        names_ok = isinstance(self.range_names, list) and all(
            isinstance(name, list) and len(name) == 2 and all(isinstance(part, str) for part in name)
            for name in self.range_names
        )
        if not isinstance(self.recipe, dict) or not versions_ok or not names_ok:
            raise ValueError("recipe, runs or ranges are malformed")

    def expected(self, specs: Specs) -> Specs:
        """All tensors of the file; the free sizes are taken from the file's own keys and amax tensors."""
        row, sites = self.layout.row_bytes, len(self.layout.sites)
        out: Specs = {}
        for i in range(len(self.versions)):
            count = specs[f"run.{i}.keys"][1][0]
            out[f"run.{i}.keys"] = (torch.int64, (count,))
            out[f"run.{i}.rows"] = (torch.uint8, (count, row))
            out[f"run.{i}.outer"] = (torch.float32, (sites,))
        for j in range(len(self.range_names)):
            experts = specs[f"ranges.{j}.amax"][1][0]
            out[f"ranges.{j}.amax"] = (torch.float32, (experts,))
            out[f"ranges.{j}.tokens"] = (torch.int64, (experts,))
            out[f"ranges.{j}.hist"] = (torch.int64, (BUCKETS,))
            out[f"ranges.{j}.saturated"] = (torch.int64, ())
        return out


def _describe(
    path: str | os.PathLike[str], specs: Specs, metadata: dict[str, str], fingerprint: str | None, max_bytes: int
) -> _Description:
    if metadata.get("format") != FORMAT:
        raise TraceFileError(f"{path}: not a trace file (format {metadata.get('format')!r}, expected {FORMAT!r})")
    if metadata.get("version") != VERSION:
        raise TraceFileError(
            f"{path}: trace file version {metadata.get('version')!r}, this package reads {VERSION!r}; record it again"
        )
    try:
        description = _Description(metadata)
        expected = description.expected(specs)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError, TraceCompileError) as error:
        raise _corrupt(path, f"its header is inconsistent ({type(error).__name__}: {error})") from error
    for name in sorted(specs.keys() | expected.keys()):
        if specs.get(name) != expected.get(name):
            raise _corrupt(path, f"tensor {name!r} is {specs.get(name)}, the layout says {expected.get(name)}")
    found = metadata["fingerprint"]
    if fingerprint is not None and found != fingerprint:
        raise FingerprintMismatchError(
            f"{path}: recorded with {found!r}, but this model and recipe are {fingerprint!r}; record it again"
        )
    tokens = sum(shape[0] for name, (_, shape) in specs.items() if name.endswith(".keys"))
    size = tokens * (description.layout.row_bytes + KEY_BYTES)
    if size > max_bytes:
        raise TraceFileError(f"{path}: holds {size} bytes of records, more than max_bytes={max_bytes}; raise it")
    return description


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(_json(dict(metadata)).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(_json([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _corrupt(path: str | os.PathLike[str], reason: str) -> TraceFileError:
    return TraceFileError(f"{path}: {reason}; the file is corrupted, record or copy it again")
