"""Records on the accelerator: a lookup there is one search and one gather, and the host waits for nothing.

Made from the runs that a lookup may use, once for as long as those stay the same. Of one key only the row of the newest
run is kept. Behind the last row lies one of zeros, which is what a position without a record gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_compile.state.runs import Run


@dataclass(frozen=True)
class Resident:
    """keys int64 [n], increasing; row int64 [n], where the record of each lies; rows uint8 [N + 1, R], the last 0.

    source int64 [N + 1] is the run of each row, outer float32 [runs + 1, S] their scales, the last ones; stale bool
    [runs + 1], runs that are older than the newest version.
    """

    keys: Tensor
    row: Tensor
    rows: Tensor
    source: Tensor
    outer: Tensor
    stale: Tensor

    @classmethod
    def of(cls, runs: list[Run], newest: int, device: torch.device, row_bytes: int, sites: int) -> Resident:
        """From runs, the newest first."""
        keys = torch.cat([run.keys for run in runs] or [torch.zeros(0, dtype=torch.int64)]).to(device)
        counts = torch.tensor([run.keys.numel() for run in runs], dtype=torch.int64)
        total = keys.numel()
        rows = torch.zeros(total + 1, row_bytes, dtype=torch.uint8, device=device)
        begin = 0
        for run in runs:
            rows[begin : begin + run.keys.numel()].copy_(run.rows, non_blocking=True)
            begin += run.keys.numel()
        source = torch.repeat_interleave(torch.arange(len(runs)), counts)
        keys, row = torch.sort(keys, stable=True)  # of equal keys the newest run's comes first
        first = torch.ones_like(keys, dtype=torch.bool)
        first[1:] = keys[1:] != keys[:-1]
        return cls(
            keys[first],
            row[first],
            rows,
            torch.cat((source, torch.tensor([len(runs)]))).to(device),
            torch.stack([*(run.outer for run in runs), torch.ones(sites)]).to(device),
            torch.tensor([*(run.version < newest for run in runs), False]).to(device),
        )

    def find(self, query: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """rows uint8 [M, R], outer float32 [M, S], hit bool [M], stale bool [M] of keys int64 [M], where ``wanted``."""
        none = self.rows.shape[0] - 1
        if not self.keys.numel():
            row = torch.full_like(query, none)
        else:
            at = torch.searchsorted(self.keys, query).clamp_(max=self.keys.numel() - 1)
            row = torch.where((self.keys[at] == query) & wanted, self.row[at], none)
        source = self.source[row]
        return self.rows[row], self.outer[source], row != none, self.stale[source]
