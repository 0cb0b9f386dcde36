"""A trace as a folder: every worker of a rollout writes files of its own there, any process reads them meanwhile.

    <worker>.json                   the worker's manifest: what it recorded, and which files hold it
    <worker>-<number>.safetensors   one trace file (see ``trace_file``), never changed once it is there

A file counts once a manifest names it. It is written and flushed before that, and the manifest is replaced as a whole,
so a kill at any moment loses what was not complete yet and nothing else. A worker that is started again under its name
continues: files that no manifest names are remains of a kill and are removed. Readers take the manifests in the order
of the workers' names, so all of them get the same records.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trace_compile.errors import FingerprintMismatchError, TraceFileError
from trace_compile.state.files import atomic_write
from trace_compile.state.layout import RecordLayout
from trace_compile.state.trace import Trace
from trace_compile.state.trace_file import load_trace, save_trace

FORMAT = "trace_compile.trace_folder"
VERSION = "1"
_WORKER = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True)
class Shard:
    """One file: its name, its size in bytes, the weights versions of its records, how many there are."""

    file: str
    size: int
    versions: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class Manifest:
    """What one worker recorded. Fingerprint and layout say which traces fit together; ``recipe`` is for the reader."""

    worker: str
    fingerprint: str
    layout: RecordLayout
    recipe: dict[str, Any]
    shards: tuple[Shard, ...] = ()

    def save(self, folder: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["sha256"] = _digest(content)
        with atomic_write(folder / f"{self.worker}.json") as temporary:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Raises ``TraceFileError`` naming the file if it is no manifest, or was changed."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("format") != FORMAT or content.get("version") != VERSION:
                found = content.get("format"), content.get("version")
                raise TraceFileError(f"{path}: format and version {found}, expected {(FORMAT, VERSION)}")
            digest = content.pop("sha256")
            if _digest(content) != digest:
                raise TraceFileError(f"{path}: its content does not have the checksum that it states; record again")
            shards = tuple(Shard(s["file"], s["size"], tuple(s["versions"]), s["rows"]) for s in content["shards"])
            layout = RecordLayout.from_dict(content["layout"])
            return cls(content["worker"], content["fingerprint"], layout, content["recipe"], shards)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            if isinstance(error, TraceFileError):
                raise
            raise TraceFileError(f"{path}: not a manifest ({type(error).__name__}: {error})") from error


class ShardWriter:
    """Writes the files of one worker. ``like`` is an empty trace of what it records."""

    def __init__(self, folder: str | os.PathLike[str], worker: str, like: Trace) -> None:
        if not _WORKER.fullmatch(worker):
            raise TraceFileError(f"worker {worker!r}: its name becomes a file name, use letters, digits, '_' and '.'")
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._manifest = Manifest(worker, like.fingerprint, like.layout, like.recipe)
        path = self._folder / f"{worker}.json"
        if path.exists():
            earlier = Manifest.load(path)
            _check_fits(path, earlier, like.fingerprint, like.layout)
            self._manifest = earlier
        known = {shard.file for shard in self._manifest.shards}
        for file in self._folder.glob(f"{worker}-*.safetensors"):
            if file.name not in known:
                file.unlink()
        self._next = 1 + max((int(name[len(worker) + 1 :].split(".")[0]) for name in known), default=-1)
        self._manifest.save(self._folder)

    def write(self, trace: Trace) -> None:
        """Add one file; when this returns, its records survive a kill."""
        name = f"{self._manifest.worker}-{self._next:06d}.safetensors"
        path = self._folder / name
        save_trace(trace, path)
        shard = Shard(name, path.stat().st_size, trace.versions, len(trace))
        self._replace((*self._manifest.shards, shard))
        self._next += 1

    def discard(self, before: int) -> None:
        """Remove files all of whose records are older than version ``before``."""
        old = {s.file for s in self._manifest.shards if s.versions and max(s.versions) < before}
        self._replace(tuple(s for s in self._manifest.shards if s.file not in old))
        for file in old:
            (self._folder / file).unlink()

    def _replace(self, shards: tuple[Shard, ...]) -> None:
        m = self._manifest
        new = Manifest(m.worker, m.fingerprint, m.layout, m.recipe, shards)
        new.save(self._folder)
        self._manifest = new


class FolderReader:
    """Reads a folder, and later what has been added to it. Never writes."""

    def __init__(self, folder: str | os.PathLike[str], oldest: int | None = None) -> None:
        self._folder = Path(folder)
        self._oldest = oldest
        self._taken: set[str] = set()

    def manifests(self) -> list[Manifest]:
        return [Manifest.load(path) for path in sorted(self._folder.glob("*.json"))]

    def update(self, trace: Trace) -> int:
        """Merge files that ``trace`` has not got yet into it; their number. Raises as ``Trace.load``."""
        taken = 0
        for manifest in self.manifests():
            _check_fits(self._folder / f"{manifest.worker}.json", manifest, trace.fingerprint, trace.layout)
            for shard in manifest.shards:
                if shard.file in self._taken or self._too_old(shard):
                    continue
                part = self._read(manifest.worker, shard, trace)
                self._taken.add(shard.file)
                if part is not None:
                    trace.merge(part)
                    taken += 1
        return taken

    def _too_old(self, shard: Shard) -> bool:
        return self._oldest is not None and bool(shard.versions) and max(shard.versions) < self._oldest

    def _read(self, worker: str, shard: Shard, trace: Trace) -> Trace | None:
        """The shard; ``None`` if its worker has discarded it since the manifest was read."""
        path = self._folder / shard.file
        try:
            size = path.stat().st_size
            if size != shard.size:
                raise TraceFileError(f"{path}: has {size} bytes, its manifest says {shard.size}; copy it again")
            return load_trace(path, fingerprint=trace.fingerprint, max_bytes=trace.max_bytes)
        except FileNotFoundError:
            now = Manifest.load(self._folder / f"{worker}.json")
            if shard.file not in {s.file for s in now.shards}:
                return None
            raise TraceFileError(f"{path}: its manifest names it, but it is not there; copy it again") from None


def load_folder(
    folder: str | os.PathLike[str], *, fingerprint: str | None, max_bytes: int, oldest: int | None
) -> Trace:
    """See ``Trace.load``."""
    reader = FolderReader(folder, oldest)
    manifests = reader.manifests()
    if not manifests:
        raise TraceFileError(f"{folder}: holds no manifest of a trace (<worker>.json)")
    first = manifests[0]
    if fingerprint is not None and first.fingerprint != fingerprint:
        raise FingerprintMismatchError(
            f"{folder}: recorded with {first.fingerprint!r}, this model and recipe are {fingerprint!r}; record again"
        )
    tokens = sum(s.rows for m in manifests for s in m.shards if not reader._too_old(s))
    trace = Trace(first.layout, first.fingerprint, first.recipe, max_bytes=max_bytes)
    size = tokens * trace.bytes_per_token
    if size > max_bytes:
        raise TraceFileError(
            f"{folder}: holds {size} bytes of records, more than max_bytes={max_bytes}; raise it, or give oldest="
        )
    trace._folder = reader
    reader.update(trace)
    return trace


def _check_fits(path: Path, manifest: Manifest, fingerprint: str, layout: RecordLayout) -> None:
    if manifest.fingerprint != fingerprint or manifest.layout != layout:
        raise FingerprintMismatchError(
            f"{path}: recorded with {manifest.fingerprint!r} and rows of {manifest.layout.row_bytes} bytes, not with "
            f"{fingerprint!r} and {layout.row_bytes}; use another folder"
        )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
