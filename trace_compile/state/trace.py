"""The trace store: what a rollout recorded, found again by token prefix.

Rows are appended while generating (from any device, without waiting for it) and looked up while training. The key of a
row is (prefix key, weights version). Rows lie in *runs*: each run is one version with one table of traced outer scales,
its keys sorted. New rows are staged as they come, and become a run at the next lookup or when the stage is full; runs
of one version are merged while they are of similar size, so every row moves a logarithmic number of times.

Rules
- Several rows under one key: the first stays. Later ones are compared with it and counted: ``duplicates``, those of
  them that differ (``conflicts``), and how many bytes differ. So a recomputed forward changes nothing.
- A lookup takes the newest version within the allowed staleness. No record: hit False, zeros, outer scale 1, counted.
- Memory is bounded by ``max_bytes`` (plus one stage). Rows that do not fit are dropped, counted, and warned of once: a
  position without a record costs alignment there, an exception would cost the run. ``discard`` makes room.

Invariants: keys within a run are strictly increasing; a key occurs at most once per version.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from trace_compile.errors import GuidanceError
from trace_compile.numerics import decode_exponent, pack_bits, unpack_nibbles
from trace_compile.state.inputs import InputLog
from trace_compile.state.layout import RecordLayout, Site, decode_routing
from trace_compile.state.ranges import Ranges
from trace_compile.state.runs import KEY_BYTES, Run, Stage, add_run, sort_unique

STAGE_BYTES = 64 << 20
"""Staged rows become a run at this size."""
DEFAULT_MAX_BYTES = 16 << 30
_CONVERT_ROWS = 1 << 14


class TraceFullWarning(UserWarning):
    """Rows were dropped because the store reached ``max_bytes``."""


@dataclass
class Counters:
    """Rows and lookups so far. Only valid positions count."""

    appended: int = 0
    duplicates: int = 0
    conflicts: int = 0
    conflict_bytes: int = 0
    dropped: int = 0
    lookups: int = 0
    hits: int = 0
    stale: int = 0
    """Hits of an older version than the newest allowed."""

    @property
    def fallbacks(self) -> int:
        return self.lookups - self.hits

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.lookups, 1)


@dataclass(frozen=True)
class Guidance:
    """Records of M positions: rows uint8 [M, R], outer float32 [M, S] (one per site), hit bool [M]."""

    rows: Tensor
    outer: Tensor
    hit: Tensor
    layout: RecordLayout

    def site(self, index: int) -> Tensor:
        """Guide rows of one site, uint8 [M, payload + scales]: a view."""
        start = self.layout.offsets[index]
        return self.rows[:, start : start + self.layout.sites[index].guide_bytes]

    def routing(self, index: int) -> Tensor:
        """Expert ids of one routing, int64 [M, top_k]; -1 where there is no record."""
        start = self.layout.routing_offsets[index]
        ids = decode_routing(self.rows[:, start : start + self.layout.routings[index].row_bytes])
        return torch.where(self.hit[:, None], ids, -1)

    def to(self, device: torch.device | str) -> Guidance:
        return replace(self, rows=self.rows.to(device), outer=self.outer.to(device), hit=self.hit.to(device))


class Trace:
    """See the module docstring. ``fingerprint`` names model and recipe; ``recipe`` is kept with it for the reader.

    max_bytes bounds keys and rows; one record takes ``bytes_per_token``.
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
    ) -> None:
        self.layout = layout
        self.fingerprint = fingerprint
        self.recipe = dict(recipe or {})
        self.ranges = Ranges.empty() if ranges is None else ranges
        self.max_bytes = max_bytes
        self.stage_bytes = stage_bytes
        self.counters = Counters()
        self.inputs: InputLog | None = None
        self._runs: list[Run] = []
        self._stage: Stage | None = None

    @property
    def bytes_per_token(self) -> int:
        """Memory of one record: its row and its key."""
        return self.layout.row_bytes + KEY_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes held, staged rows included."""
        return sum(run.nbytes for run in self._runs) + (self._stage.nbytes if self._stage else 0)

    @property
    def runs(self) -> tuple[Run, ...]:
        """All records, staged rows included. Read only."""
        self._flush()
        return tuple(self._runs)

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
        stage = self._stage_for(version, self._table(outer))
        mask = None if valid is None else valid.reshape(-1).to(torch.bool, copy=True)
        stage.pieces.append((keys.clone(), rows.detach().clone(), mask))
        stage.nbytes += count * self.bytes_per_token
        if stage.nbytes >= self.stage_bytes:
            self._flush()

    def lookup(self, keys: Tensor, newest: int, staleness: int = 0, *, valid: Tensor | None = None) -> Guidance:
        """Records of the newest version in [newest - staleness, newest] for each key.

        keys: int64, any shape, M positions; valid: bool, the same shape; where it is False there is no hit and nothing
        is counted. Returns a ``Guidance`` on the device of the keys.
        """
        self._flush()
        query = keys.reshape(-1).cpu()
        wanted = torch.ones_like(query, dtype=torch.bool) if valid is None else valid.reshape(-1).cpu().bool()
        allowed = [run for run in self._runs if newest - staleness <= run.version <= newest]
        rows, outer, hit = self._gather(query, wanted, sorted(allowed, key=lambda run: -run.version), newest)
        self.counters.lookups += int(wanted.sum())
        self.counters.hits += int(hit.sum())
        return Guidance(rows, outer, hit, self.layout).to(keys.device)

    def discard(self, before: int) -> None:
        """Forgets all records of versions below ``before``."""
        self._flush()
        self._runs = [run for run in self._runs if run.version >= before]

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
        cls, path: str | os.PathLike[str], *, fingerprint: str | None = None, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> Trace:
        """Reads what ``save`` wrote. ``fingerprint``: the expected one.

        Raises ``TraceFileError`` (truncated, corrupted, unknown version, larger than ``max_bytes``) and
        ``FingerprintMismatchError``, each naming the file and the reason.
        """
        from trace_compile.state.trace_file import load_trace

        return load_trace(path, fingerprint=fingerprint, max_bytes=max_bytes)

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
            self._flush()
            stage = self._stage = Stage(version, outer)
        return stage

    def _flush(self) -> None:
        """Makes the stage a run: drops what is already there (first kept) and what does not fit."""
        stage, self._stage = self._stage, None
        if stage is None or not stage.pieces:
            return
        keys, rows = stage.collect()
        for run in self._runs:
            at, found = run.find(keys)
            if run.version == stage.version and bool(found.any()):
                self._compare(rows[found], run.rows[at[found]], not self._same_scales(run.outer, stage.outer))
                keys, rows = keys[~found], rows[~found]
        keys, order, later, earlier = sort_unique(keys)
        self._compare(rows[later], rows[earlier])
        room = max(0, (self.max_bytes - sum(run.nbytes for run in self._runs)) // self.bytes_per_token)
        if len(keys) > room:
            self._drop(len(keys) - room)
            # The earliest rows stay, as they would have with smaller stages.
            earliest = torch.sort(order).indices[:room].sort().values
            keys, order = keys[earliest], order[earliest]
        self.counters.appended += len(keys)
        if len(keys):
            add_run(self._runs, Run(stage.version, stage.outer, keys, rows[order]))

    def _same_scales(self, a: Tensor, b: Tensor) -> bool:
        """Whether two tables agree at the sites that use them."""
        traced = torch.tensor([site.outer_bytes == 0 for site in self.layout.sites], dtype=torch.bool)
        return torch.equal(a[traced], b[traced])

    def _compare(self, later: Tensor, first: Tensor, other_scale: bool = False) -> None:
        different = later != first
        self.counters.duplicates += later.shape[0]
        self.counters.conflict_bytes += int(different.sum())
        self.counters.conflicts += later.shape[0] if other_scale else int(different.any(1).sum())

    def _drop(self, count: int) -> None:
        if not self.counters.dropped:
            warnings.warn(
                f"the trace is full at max_bytes={self.max_bytes} ({self.bytes_per_token} bytes per token): further "
                "rows are dropped and their positions round by themselves; raise max_bytes or discard old versions",
                TraceFullWarning,
                stacklevel=3,
            )
        self.counters.dropped += count

    def _gather(self, query: Tensor, wanted: Tensor, runs: list[Run], newest: int) -> tuple[Tensor, Tensor, Tensor]:
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
            self.counters.stale += len(index) if run.version < newest else 0
        for i, (site, start) in enumerate(zip(self.layout.sites, self.layout.offsets)):
            if site.outer_bytes:
                outer[:, i] = torch.where(hit, _own_outer(rows, site, start), 1.0)
        return rows, outer, hit

    def _like(self, layout: RecordLayout) -> Trace:
        other = Trace(
            layout,
            self.fingerprint,
            self.recipe,
            ranges=self.ranges,
            max_bytes=self.max_bytes,
            stage_bytes=self.stage_bytes,
        )
        other.counters = replace(self.counters)
        return other

    def _compact_rows(self, rows: Tensor) -> Tensor:
        new = self.layout.compact("bit")
        out = torch.empty(rows.shape[0], new.row_bytes, dtype=torch.uint8)
        for begin in range(0, rows.shape[0], _CONVERT_ROWS):
            part = slice(begin, begin + _CONVERT_ROWS)
            for old, site, source, target in zip(self.layout.sites, new.sites, self.layout.offsets, new.offsets):
                payload = rows[part, source : source + old.payload_bytes]
                if old.kind == "code":
                    payload = pack_bits(unpack_nibbles(payload.contiguous()))
                rest = rows[part, source + old.payload_bytes : source + old.row_bytes]
                out[part, target : target + site.row_bytes] = torch.cat((payload, rest), 1)
            out[part, new.guidance_bytes :] = rows[part, self.layout.guidance_bytes :]
        return out


def _own_outer(rows: Tensor, site: Site, start: int) -> Tensor:
    """float32 [M]: the outer scale that a row carries itself, behind payload and block scales."""
    data = rows[:, start + site.guide_bytes : start + site.row_bytes].contiguous()
    return decode_exponent(data[:, 0]) if site.outer_bytes == 1 else data.view(torch.float32)[:, 0]
