"""How often a rollout used each expert, for prompts and for decoded tokens apart, and which experts that says to keep.

Counts come from the routing of traced calls: every valid token of every call, also of prompts that were seen before.
They are integers, so neither order nor batching changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trace_compile.errors import FingerprintMismatchError, PruningError

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Counts = Mapping[str, Tensor]
"""Region name -> int64 [E]."""


@dataclass(frozen=True)
class Kept:
    """The experts that a pruned rollout may route to: region name -> ids, for each phase. A region that is not named
    keeps all of its experts."""

    prefill: Mapping[str, tuple[int, ...]]
    decode: Mapping[str, tuple[int, ...]]

    @classmethod
    def everywhere(cls, experts: Mapping[str, tuple[int, ...]]) -> Kept:
        """The same experts for prompts and decoding."""
        return cls(experts, experts)

    def __getitem__(self, phase: Phase) -> Mapping[str, tuple[int, ...]]:
        return self.prefill if phase == "prefill" else self.decode


@dataclass(frozen=True, eq=False)
class Usage:
    """Routes to each expert, int64 [E] per region, in ``prefill`` (calls of several tokens per sequence) and in
    ``decode`` (one token each)."""

    prefill: dict[str, Tensor] = field(default_factory=dict)
    decode: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, phase: Phase) -> dict[str, Tensor]:
        return self.prefill if phase == "prefill" else self.decode

    def merge(self, other: Usage) -> Usage:
        """Sums. Raises ``FingerprintMismatchError`` where a region's numbers of experts differ."""
        merged = []
        for phase in PHASES:
            counts = dict(self[phase])
            for region, new in other[phase].items():
                old = counts.get(region, torch.zeros_like(new))
                if old.shape != new.shape:
                    raise FingerprintMismatchError(
                        f"{region} has {old.numel()} experts in one usage and {new.numel()} in the other"
                    )
                counts[region] = old + new
            merged.append(counts)
        return Usage(*merged)

    def share(self, kept: Kept) -> dict[Phase, dict[str, float]]:
        """Share of the recorded routes that go to kept experts, per phase and region; 1 where there were none."""
        found: dict[Phase, dict[str, float]] = {}
        for phase in PHASES:
            found[phase] = {}
            for region, counts in self[phase].items():
                ids = kept[phase].get(region)
                total, left = int(counts.sum()), int(counts.sum() if ids is None else counts[list(ids)].sum())
                found[phase][region] = left / total if total else 1.0
        return found

    def top(self, experts: int, *, together: bool = False) -> Kept:
        """The ``experts`` most used of each region; ``together`` adds both phases up and keeps the same for both.

        Raises ``PruningError`` where there are fewer, or nothing was recorded.
        """
        return self._choose(lambda region, counts: experts, together)

    def covering(self, share: float, *, at_least: int = 1, together: bool = False) -> Kept:
        """The fewest experts of each region that got ``share`` of its routes, but ``at_least`` so many (a router needs
        as many as it takes per token)."""
        if not 0.0 < share <= 1.0:
            raise PruningError(f"coverage is a share of routes, 0 < share <= 1, got {share}")

        def needed(region: str, counts: Tensor) -> int:
            covered = counts.sort(descending=True).values.cumsum(0)
            return max(at_least, int((covered < share * int(covered[-1])).sum()) + 1)

        return self._choose(needed, together)

    def _choose(self, count: Any, together: bool) -> Kept:
        both = self.merge(Usage(self.decode, self.prefill)) if together else self
        chosen = [{region: _most_used(region, c, count(region, c)) for region, c in both[p].items()} for p in PHASES]
        if not any(chosen):
            raise PruningError("no expert usage was recorded; generate inside model.trace() first")
        # A phase that was not seen keeps what the other does.
        return Kept(chosen[0] or chosen[1], chosen[1] or chosen[0])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for a file."""
        return {phase: {region: counts.tolist() for region, counts in self[phase].items()} for phase in PHASES}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Usage:
        return cls(*({r: torch.tensor(c, dtype=torch.int64) for r, c in data[phase].items()} for phase in PHASES))


def _most_used(region: str, counts: Tensor, experts: int) -> tuple[int, ...]:
    """Ascending ids; among equals the lower."""
    if not 1 <= experts <= counts.numel():
        raise PruningError(f"{region} has {counts.numel()} experts; {experts} of them cannot be kept")
    return tuple(sorted(torch.sort(counts, descending=True, stable=True).indices[:experts].tolist()))


def count_routes(ids: Tensor, valid: Tensor, experts: int) -> Tensor:
    """int64 [E]: routes of the valid tokens. ids int64 [T, K], -1 for none; valid bool [T]. No wait for the device."""
    counted = torch.where(valid.reshape(-1, 1) & (ids >= 0), ids, experts).reshape(-1)
    return ids.new_zeros(experts + 1).scatter_add_(0, counted, torch.ones_like(counted))[:experts]
