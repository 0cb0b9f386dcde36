"""What one token's record of a region holds, and how it is read again as guidance.

    record  [ gate/up row ] [ down row of slot 0 ] ... [ down row of slot K-1 ]          rows as in ``rows``
    guide   the same rows without their outer scales, then K expert ids of two bytes, little endian, 0xFFFF for none

The down rows are there for kinds that end in ``+down``; a kind without it has neither them nor ids. A slot of the
trainer takes the down row of the rollout's slot with the same expert, wherever that stood; an expert that the rollout
did not choose for the token has no record.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import GuidanceError
from .routing import Routing
from .rows import Guide, Rows, guide_bytes, record_bytes, record_rows
from .scheme import OperandScheme

PAYLOADS = ("bit", "code")
KINDS = (*PAYLOADS, *(f"{payload}+down" for payload in PAYLOADS))
ID_BYTES = 2
NO_EXPERT = 0xFFFF
"""Stored id of a route that goes nowhere (-1 in memory)."""


def payload_of(kind: str) -> str:
    """``"bit"`` or ``"code"`` of a kind."""
    return kind.removesuffix("+down")


def encode_routing(ids: Tensor) -> Tensor:
    """Expert ids int64 [..., K] -> uint8 [..., 2K], little endian. Negative ids (no expert) become 0xFFFF.

    Ids must be below 65535, which the region's number of experts decides; it is not checked here, so that recording on
    an accelerator never waits.
    """
    ids = torch.where(ids < 0, NO_EXPERT, ids)
    return torch.stack((ids & 0xFF, (ids >> 8) & 0xFF), dim=-1).to(torch.uint8).flatten(-2)


def decode_routing(data: Tensor) -> Tensor:
    """uint8 [..., 2K] -> expert ids int64 [..., K]; 0xFFFF becomes -1."""
    pairs = data.unflatten(-1, (-1, ID_BYTES)).to(torch.int64)
    ids = pairs[..., 0] | (pairs[..., 1] << 8)
    return torch.where(ids == NO_EXPERT, -1, ids)


@dataclass(frozen=True)
class RegionRow:
    """Sizes of one region's rows: hidden H, width I, top_k K."""

    hidden: int
    width: int
    top_k: int
    kind: str
    act: OperandScheme

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GuidanceError(f"guidance kind {self.kind!r}: use one of {KINDS}")

    @property
    def payload(self) -> str:
        return payload_of(self.kind)

    @property
    def down(self) -> bool:
        return self.kind.endswith("+down")

    @property
    def guide_bytes(self) -> int:
        gate_up = guide_bytes(self.hidden, self.payload, self.act.fmt)
        return gate_up + self.top_k * (self._down_bytes + ID_BYTES) * self.down

    @property
    def record_bytes(self) -> int:
        return self.gate_up_record_bytes + self.top_k * self.down_record_bytes * self.down

    @property
    def gate_up_record_bytes(self) -> int:
        return record_bytes(self.hidden, self.payload, self.act)

    @property
    def down_record_bytes(self) -> int:
        """Of one slot, where there are down rows."""
        return record_bytes(self.width, self.payload, self.act)

    @property
    def outer_shape(self) -> tuple[int, ...]:
        """Shape of a token's outer scales: one, or with down rows 1 + K of them."""
        return (1 + self.top_k,) if self.down else ()

    @property
    def _down_bytes(self) -> int:
        return guide_bytes(self.width, self.payload, self.act.fmt)

    def record(self, x: Rows, h: Rows, routing: Routing) -> tuple[Tensor, Tensor]:
        """uint8 [T, record_bytes] and float32 [T, *outer_shape] from the rows of tokens [T] and of routed rows [S]."""
        row = record_rows(x, self.payload, self.act)
        if not self.down:
            return row, x.outer.clone()
        slots = record_rows(h, self.payload, self.act)[routing.inverse].view(row.shape[0], -1)
        outer = h.outer[routing.inverse].view(row.shape[0], self.top_k)
        return torch.cat((row, slots), 1), torch.cat((x.outer[:, None], outer), 1)

    def read(
        self, guide: Tensor, outer: Tensor, hit: Tensor | None, ids: Tensor, routing: Routing, use: str
    ) -> tuple[Guide, Guide | None]:
        """Guides of the gate/up rows [T] and, with down rows, of the routed rows [S].

        ids: int64 [T, K], the experts of the trainer's slots. use: what rounding takes of the payload, ``"bit"`` or
        ``"code"``; bits can be taken of codes.
        """
        if not self.down:
            return Guide.read(guide, outer, hit, self.payload, self.hidden, self.act.fmt, use), None
        down, tokens = self.top_k * self._down_bytes, guide.shape[0]
        rest = down + self.top_k * ID_BYTES
        gate_up, slots, recorded = guide.tensor_split([guide.shape[1] - rest, guide.shape[1] - rest + down], dim=1)
        same = ids[:, :, None] == decode_routing(recorded)[:, None, :]
        known = same.any(-1) & (ids >= 0) if hit is None else same.any(-1) & (ids >= 0) & hit[:, None]
        source = same.int().argmax(-1) + self.top_k * torch.arange(tokens, device=ids.device)[:, None]
        source = source.view(-1)[routing.order]
        return (
            Guide.read(gate_up, outer[:, 0], hit, self.payload, self.hidden, self.act.fmt, use),
            Guide.read(
                slots.reshape(-1, self._down_bytes)[source],
                outer[:, 1:].reshape(-1)[source],
                known.view(-1)[routing.order],
                self.payload,
                self.width,
                self.act.fmt,
                use,
            ),
        )
