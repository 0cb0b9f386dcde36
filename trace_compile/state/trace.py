"""The trace store: what a rollout recorded, found again by token prefix.

Rows are appended while generating (from any device, without waiting for it) and looked up while training. The key of a
row is (prefix key, weights version). Rows lie in *runs*: each run is one version with one table of traced outer scales,
its keys sorted. New rows are staged as they come; a full stage becomes a run in a thread of its own, the last one at
the next lookup. Runs of one version are merged while they are of similar size, so every row moves a logarithmic number
of times. With a folder each stage also becomes a file there (see ``shards``), which outlives the process.

Rules
- Several rows under one key: the first stays. Later ones are compared with it and counted: ``duplicates``, those of
  them that differ (``conflicts``), and how many bytes differ. So a recomputed forward changes nothing.
- A lookup takes the newest version within the allowed staleness. No record: hit False, zeros, outer scale 1, counted.
- Memory is bounded by ``max_bytes`` (plus a few stages on their way). Rows that do not fit are dropped from memory,
  counted, and warned of once: a position without a record costs alignment there, an exception would cost the run.
  ``discard`` makes room.
- Keys on an accelerator are looked up there, in a copy of the runs concerned, while that fits into ``device_bytes``.

Invariants: keys within a run are strictly increasing; a key occurs at most once per version.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from trace_compile.errors import FingerprintMismatchError, GuidanceError, TraceFileError
from trace_compile.numerics import pack_bits, unpack_nibbles
from trace_compile.state.guidance import Counters, Guidance, own_outer
from trace_compile.state.inputs import InputLog
from trace_compile.state.layout import RecordLayout
from trace_compile.state.offload import Offload
from trace_compile.state.ranges import Ranges
from trace_compile.state.resident import Resident
from trace_compile.state.runs import KEY_BYTES, Run, Stage, add_run, sort_unique
from trace_compile.state.usage import Usage

if TYPE_CHECKING:
    from trace_compile.state.shards import FolderReader, ShardWriter

STAGE_BYTES = 64 << 20
"""Staged rows become a run at this size."""
DEFAULT_MAX_BYTES = 16 << 30
DEVICE_BYTES = 8 << 30
_QUEUED_STAGES = 2
_CONVERT_ROWS = 1 << 14


class TraceFullWarning(UserWarning):
    """Rows were dropped because the store reached ``max_bytes``."""


class Trace:
    """See the module docstring. ``fingerprint`` names model and recipe; ``recipe`` is kept with it for the reader.

    max_bytes bounds keys and rows; one record takes ``bytes_per_token``. device_bytes: what copies of the records may
    take on an accelerator; larger ones are looked up on the CPU. Appending and looking up may happen in different
    threads.
    """

    def __init__(
        self,
        layout: RecordLayout,
        fingerprint: str,
        recipe: Mapping[str, Any] | None = None,
        *,
        ranges: Ranges | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        stage_bytes: int = STAGE_BYTES,
        device_bytes: int = DEVICE_BYTES,
    ) -> None:
        self.layout = layout
        self.fingerprint = fingerprint
        self.recipe = dict(recipe or {})
        self.ranges = Ranges.empty() if ranges is None else ranges
        self.max_bytes = max_bytes
        self.stage_bytes = stage_bytes
        self.device_bytes = device_bytes
        self.inputs: InputLog | None = None
        self._counters = Counters()
        self._tallies: dict[torch.device, Tensor] = {}
        self.usage = Usage()
        """Routes to each expert while this was recorded; not stored in files (``Usage.to_dict``)."""
        self._runs: list[Run] = []
        self._stage: Stage | None = None
        self._offload = Offload()
        self._lock = threading.RLock()
        self._worker: ThreadPoolExecutor | None = None
        self._queue: deque[tuple[Future[None], int]] = deque()
        self._full = False
        self._resident: tuple[torch.device, int, list[Run], Resident] | None = None
        self._shards: ShardWriter | None = None
        self._folder: FolderReader | None = None

    @property
    def counters(self) -> Counters:
        """What was counted so far; lookups on an accelerator are waited for."""
        with self._lock:
            for tally in self._tallies.values():
                lookups, hits, stale = tally.tolist()
                self._counters.lookups += lookups
                self._counters.hits += hits
                self._counters.stale += stale
                tally.zero_()
            self._counters.waits += self._offload.waits
            self._offload.waits = 0
        return self._counters

    @property
    def bytes_per_token(self) -> int:
        """Memory of one record: its row and its key."""
        return self.layout.row_bytes + KEY_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes held on the host, rows on their way included."""
        with self._lock:
            staged = self._stage.nbytes if self._stage else 0
            queued = sum(nbytes for future, nbytes in self._queue if not future.done())
            return sum(run.nbytes for run in self._runs) + staged + queued

    @property
    def runs(self) -> tuple[Run, ...]:
        """All records, staged rows included. Read only."""
        return tuple(self._settled())

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted({run.version for run in self.runs}))

    def __len__(self) -> int:
        return sum(run.keys.numel() for run in self.runs)

    def append(
        self, keys: Tensor, rows: Tensor, version: int, outer: Tensor | None = None, *, valid: Tensor | None = None
    ) -> None:
        """Records rows: keys int64 [...], rows uint8 [..., R], valid bool [...] (None: all), any device, copied.

        outer: the table of traced outer scales, float32 [S], one entry per site, needed unless every site carries its
        own; entries of sites that do are ignored. Keep it on the CPU: it is compared at every call.
        Raises ``GuidanceError`` for shapes that do not fit the layout.
        """
        keys, count = keys.reshape(-1), keys.numel()
        if rows.dtype != torch.uint8 or rows.shape[-1:] != (self.layout.row_bytes,):
            raise GuidanceError(
                f"rows are {rows.dtype} {tuple(rows.shape)}, the layout records uint8 [..., {self.layout.row_bytes}]"
            )
        rows = rows.reshape(rows.shape[:-1].numel(), self.layout.row_bytes)
        if keys.dtype != torch.int64 or rows.shape[0] != count or (valid is not None and valid.numel() != count):
            raise GuidanceError(f"{keys.dtype} keys for {count} positions, but {rows.shape[0]} rows of records")
        table, mask = self._table(outer), None if valid is None else valid.reshape(-1).to(torch.bool)
        with self._lock:
            stage = self._stage_for(version, table)
            stage.pieces.append(self._offload.take(keys, rows, mask))
            stage.nbytes += count * self.bytes_per_token
            if stage.nbytes >= self.stage_bytes:
                self._hand_over()

    def lookup(self, keys: Tensor, newest: int, staleness: int = 0, *, valid: Tensor | None = None) -> Guidance:
        """Records of the newest version in [newest - staleness, newest] for each key.

        keys: int64, any shape, M positions; valid: bool, the same shape; where it is False there is no hit and nothing
        is counted. Returns a ``Guidance`` on the device of the keys.
        """
        runs = [run for run in self._settled() if newest - staleness <= run.version <= newest]
        runs.sort(key=lambda run: -run.version)
        flat = keys.reshape(-1)
        wanted = torch.ones_like(flat, dtype=torch.bool) if valid is None else valid.reshape(-1).bool()
        if flat.device.type != "cpu" and sum(run.nbytes for run in runs) <= self.device_bytes:
            return self._lookup_there(flat, wanted, runs, newest)
        guidance = self._gather(flat.cpu(), wanted.cpu(), runs, newest)
        with self._lock:
            self._counters.lookups += int(wanted.sum())
            self._counters.hits += int(guidance.hit.sum())
        return guidance.to(keys.device)

    def merge(self, *others: Trace) -> Trace:
        """Takes in what other workers recorded of the same model and recipe, as if it had been appended here next.

        Ranges are merged, counters added. Returns this trace. Raises ``FingerprintMismatchError`` and ``GuidanceError``
        for traces that do not belong together; nothing has changed then.
        """
        for other in others:
            if other.fingerprint != self.fingerprint:
                raise FingerprintMismatchError(
                    f"a trace of {other.fingerprint!r} cannot be merged into one of {self.fingerprint!r}: they were "
                    "recorded with different models or recipes"
                )
            if other.layout != self.layout:
                raise GuidanceError(
                    f"traces with rows of {other.layout.row_bytes} and {self.layout.row_bytes} bytes, or other sites, "
                    "cannot be merged; record both with the same settings"
                )
        ranges, usage = self.ranges, self.usage
        for other in others:
            ranges, usage = ranges.merge(other.ranges), usage.merge(other.usage)
        for other in others:
            runs, counted = other._settled(), other.counters
            self._settled()
            with self._lock:
                for run in runs:
                    self._absorb(run.version, run.outer, run.keys, run.rows)
                for name in ("duplicates", "conflicts", "conflict_bytes", "dropped", "waits"):
                    setattr(self._counters, name, getattr(self._counters, name) + getattr(counted, name))
        self.ranges, self.usage = ranges, usage
        self._warn_if_full()
        return self

    def discard(self, before: int) -> None:
        """Forgets all records of versions below ``before``."""
        kept = [run for run in self._settled() if run.version >= before]
        with self._lock:
            self._runs, self._resident = kept, None
            if self._shards is not None:
                self._shards.discard(before)

    def compact(self, kind: Literal["bit"] = "bit") -> Trace:
        """A trace with the codes reduced to mantissa bits: the bytes that recording bits would have given.

        Guided rounding from bits needs no more than that (see ``numerics``). Other fields and counters are copied.
        """
        compacted = self._like(self.layout.compact(kind))
        compacted._runs = [replace(run, rows=self._compact_rows(run.rows)) for run in self.runs]
        return compacted

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file, atomically. See ``trace_file``."""
        from trace_compile.state.trace_file import save_trace

        save_trace(self, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        fingerprint: str | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        oldest: int | None = None,
    ) -> Trace:
        """Reads what ``save`` wrote, or a folder that one or several workers record into (see ``shards``).

        fingerprint: the expected one. oldest: from a folder, leave out files of versions below it.
        Raises ``TraceFileError`` (truncated, corrupted, unknown version, larger than ``max_bytes``) and
        ``FingerprintMismatchError``, each naming the file and the reason.
        """
        from trace_compile.state.shards import load_folder
        from trace_compile.state.trace_file import load_trace

        if os.path.isdir(path):
            return load_folder(path, fingerprint=fingerprint, max_bytes=max_bytes, oldest=oldest)
        return load_trace(path, fingerprint=fingerprint, max_bytes=max_bytes)

    def update(self) -> int:
        """Of a trace loaded from a folder: takes in what was written there since; returns the number of new files."""
        if self._folder is None:
            raise TraceFileError("only a trace that was loaded from a folder can be updated from it")
        return self._folder.update(self)

    def record_into(self, folder: str | os.PathLike[str], worker: str = "0") -> Trace:
        """From now on also writes what is recorded into ``folder``, as ``worker``, whose earlier files there stay.

        What is complete there survives a kill at any moment; ``close()`` completes the rest. Returns this trace.
        Raises ``TraceFileError`` for names that are no file names, and ``FingerprintMismatchError`` when the worker's
        earlier files belong to another model, recipe or layout.
        """
        from trace_compile.state.shards import ShardWriter

        self._shards = ShardWriter(folder, worker, self._alone())
        return self

    def close(self) -> None:
        """Waits until everything is recorded; with a folder, also until it is written, with the ranges."""
        self._settled()
        if self._shards is not None:
            if self.ranges.sites:
                self._shards.write(self._alone(ranges=self.ranges))
            self._shards = None

    def _table(self, outer: Tensor | None) -> Tensor:
        sites = self.layout.sites
        if outer is None:
            traced = [site.region for site in sites if not site.outer_bytes]
            if traced:
                raise GuidanceError(
                    f"sites without an outer scale of their own ({traced}) need the table of traced outer scales [S] "
                    "(ones for formats that have no outer scale)"
                )
            return torch.ones(len(sites))
        if outer.shape != (len(sites),):
            raise GuidanceError(f"outer scales {tuple(outer.shape)} for {len(sites)} sites")
        return outer.detach().to("cpu", torch.float32, copy=True)

    def _stage_for(self, version: int, outer: Tensor) -> Stage:
        stage = self._stage
        if stage is None or stage.version != version or not torch.equal(stage.outer, outer):
            self._hand_over()
            stage = self._stage = Stage(version, outer)
        return stage

    def _hand_over(self) -> None:
        """Has the stage made a run in the background; waits where too many are under way."""
        stage, self._stage = self._stage, None
        while self._queue and self._queue[0][0].done():
            self._queue.popleft()[0].result()
        while len(self._queue) >= _QUEUED_STAGES:
            self._counters.waits += 1
            self._queue.popleft()[0].result()
        self._warn_if_full()
        if stage is None or not stage.pieces:
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "trace")
        self._queue.append((self._worker.submit(self._make_run, stage), stage.nbytes))

    def _settled(self) -> list[Run]:
        """The runs, when everything appended so far is in them."""
        with self._lock:
            self._hand_over()
            while self._queue:
                self._queue.popleft()[0].result()
            self._warn_if_full()
            return self._runs

    def _make_run(self, stage: Stage) -> None:
        """In the background; the only writer of ``_runs`` while there is a queue."""
        self._absorb(stage.version, stage.outer, *stage.collect())

    def _absorb(self, version: int, outer: Tensor, keys: Tensor, rows: Tensor) -> None:
        """Makes rows a run: drops what is already there (first kept) and what does not fit."""
        for run in self._runs:
            at, found = run.find(keys)
            if run.version == version and bool(found.any()):
                self._compare(rows[found], run.rows[at[found]], not self._same_scales(run.outer, outer))
                keys, rows = keys[~found], rows[~found]
        keys, order, later, earlier = sort_unique(keys)
        self._compare(rows[later], rows[earlier])
        if self._shards is not None and len(keys):
            self._shards.write(self._alone(Run(version, outer, keys, rows[order])))
        room = max(0, (self.max_bytes - sum(run.nbytes for run in self._runs)) // self.bytes_per_token)
        if len(keys) > room:
            self._counters.dropped += len(keys) - room
            # The earliest rows stay, as they would have with smaller stages.
            earliest = torch.sort(order).indices[:room].sort().values
            keys, order = keys[earliest], order[earliest]
        self._counters.appended += len(keys)
        if len(keys):
            runs = list(self._runs)
            add_run(runs, Run(version, outer, keys, rows[order]))
            self._runs = runs

    def _same_scales(self, a: Tensor, b: Tensor) -> bool:
        """Whether two tables agree at the sites that use them."""
        traced = torch.tensor([site.outer_bytes == 0 for site in self.layout.sites], dtype=torch.bool)
        return torch.equal(a[traced], b[traced])

    def _compare(self, later: Tensor, first: Tensor, other_scale: bool = False) -> None:
        different = later != first
        self._counters.duplicates += later.shape[0]
        self._counters.conflict_bytes += int(different.sum())
        self._counters.conflicts += later.shape[0] if other_scale else int(different.any(1).sum())

    def _warn_if_full(self) -> None:
        """Once, in the thread of the caller."""
        if self._counters.dropped and not self._full:
            self._full = True
            warnings.warn(
                f"the trace is full at max_bytes={self.max_bytes} ({self.bytes_per_token} bytes per token): further "
                f"rows are {'in its folder only' if self._shards else 'dropped'} and their positions round by "
                "themselves; raise max_bytes or discard old versions",
                TraceFullWarning,
                stacklevel=4,
            )

    def _lookup_there(self, query: Tensor, wanted: Tensor, runs: list[Run], newest: int) -> Guidance:
        """The lookup on the device of ``query``; counts stay there until somebody asks for them."""
        device = query.device
        with self._lock:
            rows, outer, hit, stale = self._resident_on(device, runs, newest).find(query, wanted)
            if device not in self._tallies:
                self._tallies[device] = torch.zeros(3, dtype=torch.int64, device=device)
            self._tallies[device] += torch.stack((wanted.sum(), hit.sum(), stale.sum()))
        return Guidance(rows, self._with_own_scales(rows, outer, hit), hit, self.layout)

    def _gather(self, query: Tensor, wanted: Tensor, runs: list[Run], newest: int) -> Guidance:
        """Rows, outer scales and hits, from the first run that has the key."""
        count, sites = query.numel(), len(self.layout.sites)
        rows = torch.zeros(count, self.layout.row_bytes, dtype=torch.uint8)
        outer = torch.ones(count, sites)
        hit = torch.zeros(count, dtype=torch.bool)
        for run in runs:
            at, found = run.find(query)
            found &= wanted & ~hit
            index = found.nonzero().flatten()
            if len(index) == count:
                torch.index_select(run.rows, 0, at, out=rows)
                outer[:] = run.outer
            else:
                rows[index] = run.rows[at[index]]
                outer[index] = run.outer
            hit |= found
            self._counters.stale += len(index) if run.version < newest else 0
        return Guidance(rows, self._with_own_scales(rows, outer, hit), hit, self.layout)

    def _resident_on(self, device: torch.device, runs: list[Run], newest: int) -> Resident:
        found = self._resident
        if found is not None and found[:2] == (device, newest) and len(found[2]) == len(runs):
            if all(a is b for a, b in zip(found[2], runs)):
                return found[3]
        self._resident = None  # frees the old copy first
        resident = Resident.of(runs, newest, device, self.layout.row_bytes, len(self.layout.sites))
        self._resident = (device, newest, runs, resident)
        return resident

    def _with_own_scales(self, rows: Tensor, outer: Tensor, hit: Tensor) -> Tensor:
        """A scale per row, float32 [M, C], from one per site, ``outer`` [M, S]: those that rows carry themselves where
        they do."""
        if not any(site.outer_bytes or site.rows > 1 for site in self.layout.sites):
            return outer
        columns = []
        for i, (site, start) in enumerate(zip(self.layout.sites, self.layout.offsets)):
            if site.outer_bytes:
                columns.append(torch.where(hit[:, None], own_outer(rows, site, start), 1.0))
            else:
                columns.append(outer[:, i : i + 1].expand(-1, site.rows))
        return torch.cat(columns, 1)

    def _alone(self, *runs: Run, ranges: Ranges | None = None) -> Trace:
        """A trace of these runs, to be written as one file."""
        other = Trace(self.layout, self.fingerprint, self.recipe, ranges=ranges)
        other._runs = list(runs)
        return other

    def _like(self, layout: RecordLayout) -> Trace:
        other = Trace(
            layout,
            self.fingerprint,
            self.recipe,
            ranges=self.ranges,
            max_bytes=self.max_bytes,
            stage_bytes=self.stage_bytes,
            device_bytes=self.device_bytes,
        )
        other._counters, other.usage = replace(self.counters), self.usage
        return other

    def _compact_rows(self, rows: Tensor) -> Tensor:
        new = self.layout.compact("bit")
        out = torch.empty(rows.shape[0], new.row_bytes, dtype=torch.uint8)
        for begin in range(0, rows.shape[0], _CONVERT_ROWS):
            part = slice(begin, begin + _CONVERT_ROWS)
            for old, site, source, target in zip(self.layout.sites, new.sites, self.layout.offsets, new.offsets):
                each = rows[part, source : source + old.row_bytes].unflatten(1, (old.rows, -1))
                payload, rest = each.tensor_split([old.payload_bytes], dim=2)
                if old.kind == "code":
                    payload = pack_bits(unpack_nibbles(payload.contiguous()))
                out[part, target : target + site.row_bytes] = torch.cat((payload, rest), 2).flatten(1)
            out[part, new.guidance_bytes :] = rows[part, self.layout.guidance_bytes :]
        return out
