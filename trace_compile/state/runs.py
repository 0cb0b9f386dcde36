"""Sorted runs of records: how the trace store keeps rows so that a vectorised search finds them.

A stage gathers what is appended; it becomes a run; runs of one kind are merged while they are of similar size, as in a
log-structured merge tree, so that a store of n rows has about log(n) runs and each row is copied about log(n) times.

Invariants: keys within a run are strictly increasing; runs are values and are replaced, never changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trace_compile.state.offload import Piece

KEY_BYTES = 8
MERGE_BYTES = 512 << 20
"""Runs are not merged beyond this size, which bounds the copy that a merge makes."""


@dataclass(frozen=True)
class Run:
    """Sorted records of one version and one outer table: keys int64 [n], rows uint8 [n, R], outer float32 [S]."""

    version: int
    outer: Tensor
    keys: Tensor
    rows: Tensor

    @property
    def nbytes(self) -> int:
        return self.keys.numel() * KEY_BYTES + self.rows.numel()

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each key (int64 [M], meaningless without a hit) and hit bool [M]."""
        if not self.keys.numel():
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        at = torch.searchsorted(self.keys, keys).clamp_(max=self.keys.numel() - 1)
        return at, self.keys[at] == keys


@dataclass
class Stage:
    """Appended pieces (keys, rows, valid or None) of one version and outer table, on their way to the CPU."""

    version: int
    outer: Tensor
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0

    def collect(self) -> tuple[Tensor, Tensor]:
        """Keys int64 [n] and rows uint8 [n, R] in the order they came, without the invalid ones."""
        keys, rows = [], []
        for piece in self.pieces:
            k, r, valid = piece.wait()
            assert k is not None and r is not None
            keys.append(k if valid is None else k[valid])
            rows.append(r if valid is None else r[valid])
        return torch.cat(keys), torch.cat(rows)


def sort_unique(keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts keys int64 [n] and keeps the first occurrence of each.

    Returns the unique keys [u] in order, the index of each in ``keys`` [u], and the indices of the other n - u
    occurrences with, for each, the index of the occurrence that was kept.
    """
    keys, order = torch.sort(keys, stable=True)  # stable: of equal keys the earliest comes first
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    kept = torch.cummax(torch.where(first, torch.arange(len(keys)), 0), 0).values
    return keys[first], order[first], order[~first], order[kept[~first]]


def add_run(runs: list[Run], run: Run) -> None:
    """Appends a run, merged with the last ones of its kind while they are of similar size."""
    while runs and _mergeable(runs[-1], run):
        last = runs.pop()
        keys, order = torch.sort(torch.cat((last.keys, run.keys)))
        run = replace(run, keys=keys, rows=torch.cat((last.rows, run.rows))[order])
    runs.append(run)


def _mergeable(last: Run, run: Run) -> bool:
    same = last.version == run.version and torch.equal(last.outer, run.outer)
    return same and last.nbytes <= 2 * run.nbytes and last.nbytes + run.nbytes <= MERGE_BYTES
