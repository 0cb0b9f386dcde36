"""What a lookup gives, and what is counted on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trace_compile.numerics import decode_exponent
from trace_compile.ops.records import decode_routing
from trace_compile.state.layout import RecordLayout, Site


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
    """Records of M positions: rows uint8 [M, R], outer float32 [M, C] (see ``layout.columns``), hit bool [M]."""

    rows: Tensor
    outer: Tensor
    hit: Tensor
    layout: RecordLayout

    def site(self, index: int) -> Tensor:
        """Guide bytes of one site, uint8 [M, guide_bytes]: payload and scales of each of its rows."""
        start, site = self.layout.offsets[index], self.layout.sites[index]
        return site.split(self.rows[:, start : start + site.row_bytes])[0]

    def routing(self, index: int) -> Tensor:
        """Expert ids of one routing, int64 [M, top_k]; -1 where there is no record."""
        ids = decode_routing(self.routing_bytes(index))
        return torch.where(self.hit[:, None], ids, -1)

    def routing_bytes(self, index: int) -> Tensor:
        """uint8 [M, 2 * top_k]: expert ids of one routing as they are recorded."""
        start = self.layout.routing_offsets[index]
        return self.rows[:, start : start + self.layout.routings[index].row_bytes]

    def to(self, device: torch.device | str) -> Guidance:
        return replace(self, rows=self.rows.to(device), outer=self.outer.to(device), hit=self.hit.to(device))


def own_outer(rows: Tensor, site: Site, start: int) -> Tensor:
    """float32 [M, rows of the site]: the outer scales that rows carry themselves, behind payload and block scales."""
    data = site.split(rows[:, start : start + site.row_bytes])[1].contiguous()
    return decode_exponent(data[..., 0]) if site.outer_bytes == 1 else data.view(torch.float32)[..., 0]
