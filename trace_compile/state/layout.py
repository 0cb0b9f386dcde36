"""Where everything lies in one record row.

A record row holds, for one token, what the rollout's quantizers decided and which experts its router chose:

    [ site 0: payload | block scales | outer ] [ site 1: ... ] ... [ routing 0 ] [ routing 1 ] ...

One layout describes one recipe on one model and never changes while a trace lives. The bytes of a site are exactly the
record row that the quantized op emits and (without the outer bytes) the guide row that it takes, so nothing is repacked
between recording and use.

Invariants: segments are adjacent, in the order given, without padding; offsets follow from widths alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from trace_compile.errors import BlockSizeError, GuidanceError
from trace_compile.ops.records import ID_BYTES, encode_routing

_PAYLOAD_BITS = {"bit": 1, "code": 4}
_OUTER_BYTES = (0, 1, 4)


@dataclass(frozen=True)
class Site:
    """One quantizer whose outcome is recorded.

    region: dotted path of the experts module. projection: ``"gate_up"`` or ``"down"``. width: elements per token.
    kind: ``"bit"`` records the mantissa bit of each code (8 per byte), ``"code"`` the whole 4-bit code (2 per byte).
    outer_bytes: 0 where the outer scale is traced (one per site, kept beside the rows), 1 for a power of two per token
    (its exponent), 4 for a float32 per token. block: elements that share a block scale, of ``block_bytes`` bytes. rows:
    how many rows a token has there: 1 in front of gate and up, top-k in front of down.

    Raises ``BlockSizeError`` if the width is not a positive multiple of the block, ``GuidanceError`` for other values.
    """

    region: str
    projection: str
    width: int
    kind: Literal["bit", "code"]
    outer_bytes: Literal[0, 1, 4]
    block: int = 16
    block_bytes: int = 1
    rows: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise GuidanceError(f"{self.region}.{self.projection}: {self.rows} rows per token, must be positive")
        if self.kind not in _PAYLOAD_BITS:
            raise GuidanceError(f"{self.region}.{self.projection}: kind {self.kind!r} is not one of 'bit', 'code'")
        if self.outer_bytes not in _OUTER_BYTES:
            raise GuidanceError(
                f"{self.region}.{self.projection}: outer_bytes {self.outer_bytes!r} not in {_OUTER_BYTES}"
            )
        if self.block < 8 or self.block % 8 or self.width <= 0 or self.width % self.block:
            raise BlockSizeError(
                f"{self.region}.{self.projection}: width {self.width} is not a positive multiple of the block of "
                f"{self.block} (itself a multiple of 8); such a site cannot be recorded, leave it out"
            )

    @property
    def payload_bytes(self) -> int:
        """Of one row."""
        return self.width * _PAYLOAD_BITS[self.kind] // 8

    @property
    def scale_bytes(self) -> int:
        """Of one row."""
        return self.width // self.block * self.block_bytes

    @property
    def guide_bytes(self) -> int:
        """Bytes of a token's rows that the quantized op takes as guidance: payload and block scales."""
        return self.rows * (self.payload_bytes + self.scale_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's rows in the record."""
        return self.guide_bytes + self.rows * self.outer_bytes

    def split(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes uint8 [M, row_bytes] -> the guide's [M, guide_bytes] and the outer scales' [M, rows, outer_bytes]."""
        if not self.outer_bytes:
            return data, data.new_empty(data.shape[0], self.rows, 0)
        each = data.unflatten(1, (self.rows, -1))
        guide = self.payload_bytes + self.scale_bytes
        return each[..., :guide].flatten(1), each[..., guide:]


@dataclass(frozen=True)
class Routing:
    """The recorded expert ids of one region: ``top_k`` little-endian uint16 per token."""

    region: str
    top_k: int

    def __post_init__(self) -> None:
        if self.top_k <= 0:
            raise GuidanceError(f"{self.region}: top_k is {self.top_k}, must be positive")

    @property
    def row_bytes(self) -> int:
        return self.top_k * ID_BYTES


@dataclass(frozen=True)
class RecordLayout:
    """All sites, then all routings, of one record row. Offsets are in bytes."""

    sites: tuple[Site, ...]
    routings: tuple[Routing, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))
        object.__setattr__(self, "routings", tuple(self.routings))
        for names in ([(s.region, s.projection) for s in self.sites], [r.region for r in self.routings]):
            if len(set(names)) != len(names):
                raise GuidanceError(f"the layout names a site twice: {sorted(names)}")  # type: ignore[type-var]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each site."""
        return tuple(accumulate((s.row_bytes for s in self.sites), initial=0))[:-1]

    @cached_property
    def routing_offsets(self) -> tuple[int, ...]:
        """Start of each routing."""
        return tuple(accumulate((r.row_bytes for r in self.routings), initial=self.guidance_bytes))[:-1]

    @cached_property
    def guidance_bytes(self) -> int:
        """Bytes per token of all sites. 1 bit: sum of width * (1 + 8/16) / 8, plus 1 per site with row scales."""
        return sum(s.row_bytes for s in self.sites)

    @cached_property
    def routing_bytes(self) -> int:
        return sum(r.row_bytes for r in self.routings)

    @property
    def row_bytes(self) -> int:
        return self.guidance_bytes + self.routing_bytes

    @property
    def kind(self) -> str:
        """What rows hold of each region, as ``ops.records`` names it; ``"none"`` without sites."""
        if not self.sites:
            return "none"
        down = any(site.projection == "down" for site in self.sites)
        return f"{self.sites[0].kind}+down" if down else self.sites[0].kind

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Site of each outer scale of a token: one per row of a site."""
        return tuple(i for i, site in enumerate(self.sites) for _ in range(site.rows))

    def site_index(self, region: str, projection: str = "gate_up") -> int:
        """Position of a site in ``sites``; ``GuidanceError`` if it is not recorded."""
        for index, site in enumerate(self.sites):
            if (site.region, site.projection) == (region, projection):
                return index
        raise GuidanceError(f"{region}.{projection} is not recorded; recorded: {[s.region for s in self.sites]}")

    def routing_index(self, region: str) -> int:
        """Position of a routing in ``routings``; ``GuidanceError`` if it is not recorded."""
        for index, routing in enumerate(self.routings):
            if routing.region == region:
                return index
        raise GuidanceError(f"routing of {region} is not recorded; recorded: {[r.region for r in self.routings]}")

    def compact(self, kind: Literal["bit"] = "bit") -> RecordLayout:
        """The same layout with every site in the 1-bit form."""
        if kind != "bit":
            raise GuidanceError(f"a trace can only be compacted to 'bit', not {kind!r}")
        return replace(self, sites=tuple(replace(site, kind=kind) for site in self.sites))

    def assemble(self, records: Sequence[Tensor], ids: Sequence[Tensor] = ()) -> Tensor:
        """Join the op outputs of one forward: uint8 [T, bytes] per region that has sites, in their order, and int64
        [T, top_k] per routing -> [T, R].

        Raises ``GuidanceError`` when a piece does not have the width that the layout states.
        """
        regions: dict[str, int] = {}
        for site in self.sites:
            regions[site.region] = regions.get(site.region, 0) + site.row_bytes
        widths = [*regions.values(), *(r.row_bytes for r in self.routings)]
        found = [*(int(r.shape[-1]) for r in records), *(int(i.shape[-1]) * ID_BYTES for i in ids)]
        if found != widths:
            raise GuidanceError(f"record pieces are {found} bytes wide, the layout says {widths}")
        pieces = [piece.reshape(-1, piece.shape[-1]) for piece in records]
        if ids:  # all at once: recording runs in every decode step, and each operation there is a launch
            pieces.append(encode_routing(torch.cat([i.reshape(-1, i.shape[-1]) for i in ids], dim=1)))
        return torch.cat(pieces, dim=1) if pieces else torch.zeros(0, 0, dtype=torch.uint8)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RecordLayout:
        return cls(tuple(Site(**s) for s in data["sites"]), tuple(Routing(**r) for r in data["routings"]))
