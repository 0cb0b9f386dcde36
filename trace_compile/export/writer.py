"""Writing a checkpoint folder: all of it or nothing, one tensor in memory at a time, the same bytes every time.

Atomic. Everything is written into a hidden sibling folder, flushed to the disk, and renamed. An existing folder is
refused unless ``overwrite`` is set, and then only replaced if an earlier export made it; it stays complete until the
new one is. A folder cannot be renamed over a full one, so the replacement is two renames: should the machine stop
between them, both complete folders stand next to the target under hidden names, and neither is half-written.

Streamed. Tensors come from a function that yields them in a fixed order and is called twice: first to learn names,
types and shapes (the safetensors header stands before the data), then to write. Peak memory is what one step of it
holds.

Within a file tensors lie by falling element size, so that every one is aligned for readers that map the file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trace_compile.errors import ExportError
from trace_compile.state.files import DTYPES, raw_bytes, sync

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MARK = "trace_compile"
"""Key of config.json that says an export made the folder, and how."""

Stream = Callable[[], Iterator[tuple[str, Tensor]]]
"""A function that yields named tensors, the same ones at every call."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What a safetensors header says of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@contextmanager
def staged_folder(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """Yields an empty folder next to ``path`` that takes its place when the block ends without an error.

    Raises ExportError before anything is written if ``path`` is taken: a file, a folder that is not empty while
    ``overwrite`` is false, or a folder that no export made; and when the disk fails or is full, with the target as it
    was.
    """
    target = Path(path).resolve()
    _check_target(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{token_hex(6)}.partial")
    staged.mkdir()
    try:
        yield staged
        for entry in staged.rglob("*"):
            sync(entry)
        sync(staged)
        _check_target(target, overwrite)
        _replace(staged, target)
    except BaseException as error:
        shutil.rmtree(staged, ignore_errors=True)
        if isinstance(error, OSError):
            kept = "the folder there is as it was" if target.exists() else "nothing is there"
            raise ExportError(
                f"{target} could not be written ({error}); {kept}. Make room or choose another path"
            ) from error
        raise
    sync(target.parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes ``content`` with sorted keys."""
    with path.open("wb") as file:
        _write(file, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def write_tensors(folder: Path, stream: Stream, *, max_shard_bytes: int) -> list[TensorSpec]:
    """Writes ``model.safetensors``, or numbered shards and then their index, from two passes over ``stream``.

    Raises ExportError if a name comes twice, a dtype has no safetensors name, or the second pass differs from the
    first.
    """
    specs = _specs(stream)
    shards = _shards(specs, max_shard_bytes)
    files = _shard_names(len(shards))
    tensors = stream()
    for name, shard in zip(files, shards):
        with (folder / name).open("wb") as file:
            _write_shard(file, shard, tensors)
    if len(shards) > 1:
        weight_map = {spec.name: name for name, shard in zip(files, shards) for spec in shard}
        total = sum(spec.nbytes for spec in specs)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return specs


def _specs(stream: Stream) -> list[TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for name, tensor in stream():
        if name in specs:
            raise ExportError(f"{name} would be written twice; two parameters map to one checkpoint name")
        if tensor.dtype not in _DTYPE_NAMES:
            raise ExportError(f"{name}: {tensor.dtype} cannot be stored in safetensors; cast it before exporting")
        specs[name] = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
    return list(specs.values())


def _shards(specs: list[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors per file, each file at most ``max_shard_bytes`` unless a single tensor is larger."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _write_shard(file: BinaryIO, shard: list[TensorSpec], tensors: Iterator[tuple[str, Tensor]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    offsets: dict[str, int] = {}
    for spec in sorted(shard, key=lambda spec: -spec.dtype.itemsize):
        offsets[spec.name] = offset
        header[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = 8 + len(encoded)
    _write(file, len(encoded).to_bytes(8, "little") + encoded)
    file.truncate(start + offset)
    for spec in shard:
        name, tensor = next(tensors, ("nothing", torch.empty(0)))
        if TensorSpec(name, tensor.dtype, tuple(tensor.shape)) != spec:
            raise ExportError(
                f"expected {spec}, got {name} {tensor.dtype} {list(tensor.shape)}; do not train meanwhile"
            )
        file.seek(start + offsets[spec.name])
        _write(file, raw_bytes(tensor))


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Every byte of a checkpoint that this package writes itself goes through here."""
    file.write(data)


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise ExportError(f"{target} exists; choose another path or pass overwrite=True")
    try:
        made_here = MARK in json.loads((target / CONFIG).read_text())
    except (OSError, ValueError):
        made_here = False
    if not made_here:
        raise ExportError(
            f"{target} was not made by an export and will not be replaced; remove it or choose another path"
        )


def _replace(staged: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        os.replace(staged, target)
        return
    previous = target.with_name(f".{target.name}.{token_hex(6)}.previous")
    os.rename(target, previous)
    try:
        os.rename(staged, target)
    except BaseException:
        os.rename(previous, target)
        raise
    shutil.rmtree(previous, ignore_errors=True)
