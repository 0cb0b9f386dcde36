"""Writing files so that a crash leaves either the old file or the new one, and reading them with suspicion.

The safetensors format is written here rather than through its package for two reasons: the same tensors give the same
bytes (the package orders metadata at random), and tensors are streamed, so that saving a trace of many gigabytes takes
no second copy of it. The reader checks every size in the header against the file before it allocates anything.

Invariants: the header is a multiple of 8 bytes, tensors lie in name order without gaps, the last one ends the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trace_compile.errors import TraceFileError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000
"""Largest header that the safetensors format allows."""
_CHUNK = 1 << 24


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path in the folder of ``path``; on success it becomes ``path``, on error it is removed.

    The content is flushed to the disk before the rename, and the folder after it, so neither a killed process nor a
    power cut leaves a half-written file under the final name. A process that is killed outright can leave its hidden
    temporary ``.name.*.tmp`` behind; it is never read and may be deleted.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{token_hex(4)}.tmp")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync(target.parent)


def atomic_save_safetensors(
    tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one safetensors file atomically; the same arguments give the same bytes.

    Raises ``TraceFileError`` for a dtype that the format does not have. Tensors may lie on any device and need not be
    contiguous; they are copied to the CPU one at a time.
    """
    ordered = sorted(tensors.items())
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES or name == "__metadata__":
            raise TraceFileError(f"{path}: tensor {name!r} of {tensor.dtype} cannot be stored in safetensors")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for _, tensor in ordered:
            file.write(raw_bytes(tensor))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order (little endian, as the machines are), without a copy where it can."""
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def load_safetensors(
    path: str | os.PathLike[str],
    check: Callable[[dict[str, tuple[torch.dtype, tuple[int, ...]]], dict[str, str]], None] | None = None,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads tensors (on the CPU, in memory of their own) and metadata of one safetensors file.

    ``check(specs, metadata)`` runs before any tensor is allocated and may raise. Raises ``TraceFileError`` naming the
    file and the reason if it is truncated, too long, or its header is not a valid one.
    """
    with Path(path).open("rb") as file:
        specs, metadata, start = _read_header(file, path)
        if check is not None:
            check({name: (dtype, shape) for name, dtype, shape, _ in specs}, metadata)
        tensors = {}
        for name, dtype, shape, begin in specs:
            file.seek(start + begin)
            tensor = torch.empty(shape, dtype=dtype)
            view = raw_bytes(tensor)
            for at in range(0, len(view), _CHUNK):
                piece = view[at : at + _CHUNK]
                if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                    raise TraceFileError(f"{path}: the file ends inside tensor {name!r}")
            tensors[name] = tensor
    return tensors, metadata


def _read_header(
    file: BinaryIO, path: str | os.PathLike[str]
) -> tuple[list[tuple[str, torch.dtype, tuple[int, ...], int]], dict[str, str], int]:
    """Tensors as (name, dtype, shape, offset) in file order, the metadata, and where the data starts."""

    def fail(reason: str) -> TraceFileError:
        return TraceFileError(f"{path}: {reason}; the file is truncated or corrupted, record or copy it again")

    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise fail(f"{size} bytes are too few for a safetensors header")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _HEADER_LIMIT):
        raise fail(f"the header claims {length} bytes, the file has {size}")
    try:
        header = json.loads(file.read(length).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise fail(f"the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise fail("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise fail("the metadata is not a map from strings to strings")

    specs = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise fail(f"tensor {name!r} has no valid description")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise fail(f"tensor {name!r} has the unknown dtype {entry['dtype']!r}")
        if not _natural(shape) or not _natural(offsets) or len(offsets) != 2:
            raise fail(f"tensor {name!r} has a malformed shape or offsets")
        dtype = DTYPES[entry["dtype"]]
        if offsets[1] - offsets[0] != prod(shape) * dtype.itemsize:
            raise fail(f"tensor {name!r} of shape {shape} does not fill its bytes {offsets}")
        specs.append((name, dtype, tuple(shape), offsets[0], offsets[1]))

    specs.sort(key=lambda spec: spec[3:])
    expected = 0
    for name, _, _, begin, end in specs:
        if begin != expected:
            raise fail(f"tensor {name!r} starts at byte {begin}, not at {expected}")
        expected = end
    if 8 + length + expected != size:
        raise fail(f"the header describes {8 + length + expected} bytes, the file has {size}")
    return [spec[:4] for spec in specs], metadata, 8 + length


def _natural(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def sync(path: Path) -> None:
    """Flushes a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
