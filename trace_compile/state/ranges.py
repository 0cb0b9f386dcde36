"""Activation ranges seen while tracing, and the outer scales that follow from them.

A ``Ranges`` is an immutable value: observing and merging give new ones. Merging takes the maximum of ranges and the sum
of counts, both exact, so the order of batches, layers and ranks cannot matter. Nothing quantizes with a range that is
still being observed; a refresh replaces the ranges by those of the last rollout.

Invariant: outer scales are finite positive powers of two for every site, whatever was seen.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from trace_compile.errors import FingerprintMismatchError, GuidanceError
from trace_compile.numerics import outer_scale

HEADROOM = 2.0
"""Factor on the traced maximum: activations may double before anything saturates."""
SATURATION_THRESHOLD = 1e-6
"""Fraction of saturated elements above which scales are called stale; with fresh ranges and headroom it is zero."""
BUCKETS = 64
SiteName = tuple[str, str]
"""(region, projection)."""


class RangeWarning(UserWarning):
    """Experts without tokens, or activations that outgrew the traced ranges."""


@dataclass(frozen=True, eq=False)
class SiteRange:
    """What one quantizer saw.

    amax: float32 [E], largest finite |x| per expert, 0 where none was seen. tokens: int64 [E], routed tokens.
    hist: int64 [64], elements per log2 bucket of |x|, all elements counted. saturated: int64 [], elements beyond the
    largest value of the scales then in use.
    """

    amax: Tensor
    tokens: Tensor
    hist: Tensor
    saturated: Tensor

    def __post_init__(self) -> None:
        if self.amax.shape != self.tokens.shape or self.amax.dim() != 1 or self.hist.shape != (BUCKETS,):
            raise GuidanceError(
                f"a range needs amax [E], tokens [E] and hist [{BUCKETS}], got {tuple(self.amax.shape)}, "
                f"{tuple(self.tokens.shape)} and {tuple(self.hist.shape)}"
            )

    @classmethod
    def empty(cls, experts: int) -> SiteRange:
        """Nothing seen."""
        counts = [torch.zeros(shape, dtype=torch.int64) for shape in ((experts,), (BUCKETS,), ())]
        return cls(torch.zeros(experts), *counts)

    def merge(self, other: SiteRange) -> SiteRange:
        return SiteRange(
            torch.maximum(self.amax, other.amax),
            self.tokens + other.tokens,
            self.hist + other.hist,
            self.saturated + other.saturated,
        )

    @property
    def saturation(self) -> float:
        """Saturated fraction of all elements; 0 when nothing was seen."""
        return int(self.saturated) / max(int(self.hist.sum()), 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SiteRange) and all(
            torch.equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges of all observed sites, in the order of the names with numbers compared as numbers (layer 2 before 10)."""

    sites: dict[SiteName, SiteRange]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", dict(sorted(self.sites.items(), key=lambda item: _natural(item[0]))))

    @classmethod
    def empty(cls) -> Ranges:
        return cls({})

    @classmethod
    def observed(
        cls,
        region: str,
        amax: Tensor,
        tokens: Tensor,
        hist: Tensor,
        saturated: Tensor,
        projections: Sequence[str] = ("gate_up", "down"),
    ) -> Ranges:
        """From the outputs of one quantized op: amax [P, E], tokens [E], hist [P, 64], saturated [P], P projections.

        Stays on the device of its arguments and copies them: graph outputs may be overwritten by the next replay.
        """
        return cls(
            {
                (region, name): SiteRange(
                    amax[i].detach().to(torch.float32, copy=True),
                    tokens.detach().to(torch.int64, copy=True),
                    hist[i].detach().to(torch.int64, copy=True),
                    saturated[i].detach().to(torch.int64, copy=True),
                )
                for i, name in enumerate(projections)
            }
        )

    def merge(self, other: Ranges) -> Ranges:
        """Maximum of ranges, sum of counts. Raises ``FingerprintMismatchError`` if a site's expert counts differ."""
        merged = dict(self.sites)
        for name, new in other.sites.items():
            old = merged.get(name)
            if old is not None and old.amax.shape != new.amax.shape:
                raise FingerprintMismatchError(
                    f"{'.'.join(name)} has {old.amax.numel()} experts in one range and {new.amax.numel()} in the "
                    "other: they belong to different models"
                )
            merged[name] = new if old is None else old.merge(new)
        return Ranges(merged)

    def all_reduce(
        self, experts: Mapping[SiteName, int], group: Any = None, *, device: torch.device | str = "cpu"
    ) -> Ranges:
        """Merge over the ranks of a ``torch.distributed`` group (None: all ranks), in one collective of one buffer.

        Every rank passes the same ``experts``, the number of experts at each site of the model: ranks may have seen
        other sites, or none, and sites that no rank saw stay away. ``device`` is one that the group's backend takes.
        Raises ``FingerprintMismatchError`` if the ranks' models differ.
        """
        import torch.distributed as dist

        names = sorted(experts)
        about = json.dumps([(*name, experts[name]) for name in names]).encode()
        mine = [torch.tensor([zlib.crc32(about)])]
        for name in names:
            n = experts[name]
            seen = self.sites.get(name, SiteRange.empty(n))
            if seen.amax.numel() != n:
                raise FingerprintMismatchError(f"{'.'.join(name)} has {n} experts, its range {seen.amax.numel()}")
            bits = seen.amax.cpu().view(torch.int32).long()
            mine += [bits, seen.tokens.cpu(), seen.hist.cpu(), seen.saturated.cpu().reshape(1)]
        buffer = torch.cat(mine).to(device)
        gathered = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, buffer, group=group)
        ranks = torch.stack(gathered).cpu()
        odd = (ranks[:, 0] != mine[0]).nonzero().flatten().tolist()
        if odd:
            raise FingerprintMismatchError(f"ranks {odd} of the group trace another model than this rank")
        return reduce(Ranges.merge, (Ranges._of_buffer(names, experts, row[1:]) for row in ranks))

    @classmethod
    def _of_buffer(cls, names: Sequence[SiteName], experts: Mapping[SiteName, int], row: Tensor) -> Ranges:
        """The sites with tokens of what ``all_reduce`` laid side by side."""
        found = {}
        for name in names:
            n = experts[name]
            amax, tokens, hist, saturated, row = row.split([n, n, BUCKETS, 1, row.numel() - 2 * n - BUCKETS - 1])
            if int(hist.sum()) or int(tokens.sum()):
                found[name] = SiteRange(
                    amax.int().view(torch.float32), tokens.clone(), hist.clone(), saturated[0].clone()
                )
        return cls(found)

    def outer_scales(self, sites: Iterable[SiteName] | None = None) -> Tensor:
        """Outer scale of each site (all observed ones by default), float32 [n] on the CPU.

        The smallest power of two whose NVFP4 range holds ``HEADROOM`` times the site's maximum over all its experts:
        one scale for the experts of a layer, so that an expert without tokens gets its layer's. A site that saw
        nothing, or only zeros, gets 1. Powers of two beyond the contract's exponents are clamped to them, thus finite.
        """
        names = list(self.sites if sites is None else sites)
        amax = torch.zeros(len(names))
        for i, name in enumerate(names):
            if name in self.sites and self.sites[name].amax.numel():
                amax[i] = self.sites[name].amax.max().cpu()
        return outer_scale((amax * HEADROOM).clamp(max=torch.finfo(torch.float32).max))

    def unused_experts(self) -> dict[str, tuple[int, ...]]:
        """Experts of each region that got no token in any of its sites; regions without such experts are left out."""
        totals: dict[str, Tensor] = {}
        for (region, _), site in self.sites.items():
            totals[region] = totals[region] + site.tokens if region in totals else site.tokens
        unused = {region: tuple((tokens == 0).nonzero().flatten().tolist()) for region, tokens in totals.items()}
        return {region: experts for region, experts in unused.items() if experts}

    def stale(self, threshold: float = SATURATION_THRESHOLD) -> tuple[str, ...]:
        """A sentence per site of which more than ``threshold`` (a fraction) saturated under the scales then in use."""
        return tuple(
            f"{'.'.join(name)}: {site.saturation:.2e} of the activations saturate (threshold {threshold:.0e}); "
            "trace again to refresh the ranges, until this ends (sites behind a saturated one see too little)"
            for name, site in self.sites.items()
            if site.saturation > threshold
        )

    def problems(self, threshold: float = SATURATION_THRESHOLD) -> tuple[str, ...]:
        """A sentence per region with unused experts and per site that saturates beyond ``threshold`` (a fraction)."""
        unused = (
            f"{region}: experts {list(experts)} got no token while tracing; they use their layer's scale"
            for region, experts in self.unused_experts().items()
        )
        return (*unused, *self.stale(threshold))

    def warn(self, threshold: float = SATURATION_THRESHOLD) -> tuple[str, ...]:
        """Issues a ``RangeWarning`` for each problem and returns them."""
        problems = self.problems(threshold)
        for problem in problems:
            warnings.warn(problem, RangeWarning, stacklevel=2)
        return problems

    def to(self, device: torch.device | str) -> Ranges:
        return Ranges(
            {
                name: SiteRange(*(getattr(site, f.name).to(device) for f in fields(SiteRange)))
                for name, site in self.sites.items()
            }
        )

    def to_tensors(self) -> tuple[dict[str, Tensor], list[list[str]]]:
        """Tensors for a file, named ``ranges.<i>.<field>``, and the site names by i."""
        tensors = {
            f"ranges.{i}.{f.name}": getattr(site, f.name)
            for i, site in enumerate(self.sites.values())
            for f in fields(SiteRange)
        }
        return tensors, [list(name) for name in self.sites]

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], names: Sequence[Sequence[str]]) -> Ranges:
        return cls(
            {
                (region, projection): SiteRange(*(tensors[f"ranges.{i}.{f.name}"] for f in fields(SiteRange)))
                for i, (region, projection) in enumerate(names)
            }
        )

    def to_json(self) -> list[Any]:
        """Plain lists and numbers, exact."""
        parts = [f.name for f in fields(SiteRange)]
        return [[*name, *(getattr(site, part).tolist() for part in parts)] for name, site in self.sites.items()]

    @classmethod
    def from_json(cls, state: Sequence[Sequence[Any]]) -> Ranges:
        """The inverse of ``to_json``."""
        return cls(
            {
                (region, projection): SiteRange(torch.tensor(amax, dtype=torch.float32), *map(torch.tensor, counts))
                for region, projection, amax, *counts in state
            }
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.sites == other.sites

    __hash__ = None  # type: ignore[assignment]


def _natural(name: SiteName) -> tuple[Any, ...]:
    """Sort key: digits by value; gate_up before down, as they run."""
    region, projection = name
    parts = re.split(r"(\d+)", region)
    return (parts[::2], [int(p) for p in parts[1::2]], region, projection != "gate_up", projection)
