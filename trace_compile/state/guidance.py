"""What a lookup gives, and what is counted on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trace_compile.numerics import decode_exponent
from trace_compile.state.layout import RecordLayout, Site, decode_routing


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
    waits: int = 0
    """How often the recording host waited for copies or for runs to be made, to keep memory bounded."""

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


def own_outer(rows: Tensor, site: Site, start: int) -> Tensor:
    """float32 [M]: the outer scale that a row carries itself, behind payload and block scales."""
    data = rows[:, start + site.guide_bytes : start + site.row_bytes].contiguous()
    return decode_exponent(data[:, 0]) if site.outer_bytes == 1 else data.view(torch.float32)[:, 0]
