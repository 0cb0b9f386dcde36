"""What one compilation is for: which numbers, guided or not, recording or not, training or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from ..errors import GuidanceError, TraceCompileError
from ..ops.records import KINDS
from ..ops.scheme import MoEScheme

GuidanceKind = Literal["none", "bit", "code", "bit+down", "code+down"]
RecordKind = Literal["none", "ranges", "bit", "code", "bit+down", "code+down"]


@dataclass(frozen=True)
class Unquantized:
    """Which regions stay in the model's own dtype: the first, the last, those whose name matches a shell pattern."""

    first: int = 0
    last: int = 0
    patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < 0:
            raise TraceCompileError(f"unquantized regions are counted from 0 up, got {self.first} and {self.last}")

    def of(self, names: Sequence[str]) -> frozenset[str]:
        """Those among the model's regions ``names``, which stand in model order.

        Raises ``TraceCompileError`` for a pattern that matches none, and where no region would be left to quantize.
        """
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise TraceCompileError(f"unquantized pattern {pattern!r} matches none of the regions {list(names)}")
        chosen = {
            name
            for i, name in enumerate(names)
            if i < self.first or i >= len(names) - self.last or any(fnmatchcase(name, p) for p in self.patterns)
        }
        if names and len(chosen) == len(names):
            raise TraceCompileError(f"all {len(names)} regions would stay unquantized; use recipe 'bf16' for that")
        return frozenset(chosen)


@dataclass(frozen=True)
class Mode:
    """Configuration of the pass pipeline; frozen and hashable, so it can key caches.

    scheme: numbers of the expert GEMMs; None stops at the float op (identity: the same function as the model).
    guidance: what guides rounding, see ``ops.records``. guided: names of the regions that take guidance, None for all.
    record: what comes out beside the results; ``ranges`` are amax, counts, histogram and saturation, and the kinds of
    ``ops.records`` add record rows. recorded: regions that give record rows, None for all; ranges always come from all.
    routing: hand out the expert ids of every region. inputs: hand out the recorded regions' tokens, to measure drift.
    diagnose: hand out how far the regions in ``guided`` are from the guide rows (``ops.observe.Diag``), which are then
    of the kind ``rows`` and need not guide. replay: take recorded expert ids instead of the router's.
    train: pass the master weights, so that gradients reach them. recompute: run the first GEMM again in the backward
    instead of keeping its result. unquantized: expert regions that stop at the float op. kept: of a pruned rollout, the
    regions with fewer experts and how many their packed weights hold. noise: add noise to the norms' weights. quads:
    packed experts come in the form of ``ops.quads`` where ``keeps_quads`` says so. strict: an expert-shaped operation
    left as it is raises. include, ignore: patterns of linear layers to quantize too, see ``linears``.
    """

    scheme: MoEScheme | None
    guidance: GuidanceKind = "none"
    guided: frozenset[str] | None = None
    record: RecordKind = "none"
    recorded: frozenset[str] | None = None
    routing: bool = False
    inputs: bool = False
    diagnose: bool = False
    rows: GuidanceKind = "none"
    replay: bool = False
    train: bool = False
    recompute: bool = False
    unquantized: Unquantized = field(default_factory=Unquantized)
    kept: tuple[tuple[str, int], ...] = ()
    noise: bool = False
    strict: bool = True
    quads: bool = False
    include: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        act = self.scheme.act if self.scheme is not None else None
        if self.guidance != "none" and act is None:
            raise GuidanceError(
                f"guidance {self.guidance!r} needs quantized activations; the scheme has none: {self.scheme}"
            )
        if self.record in KINDS and act is None:
            raise GuidanceError(
                f"record {self.record!r} needs quantized activations; the scheme has none: {self.scheme}"
            )
        if self.record == "ranges" and self.scheme is None:
            raise GuidanceError("ranges are recorded by the quantized op; use the scheme UNQUANTIZED instead of None")
        if self.diagnose and (act is None or self.guide_kind == "none"):
            raise GuidanceError(
                f"diagnose compares quantized activations with guide rows; the scheme is {self.scheme}, the rows are "
                f"{self.guide_kind!r}"
            )

    @property
    def guide_kind(self) -> GuidanceKind:
        """What guide rows hold."""
        return self.rows if self.diagnose and self.rows != "none" else self.guidance

    def guides(self, region: str) -> bool:
        """Whether the region is given guide rows."""
        return self.guide_kind != "none" and (self.guided is None or region in self.guided)

    def record_of(self, region: str) -> RecordKind:
        """What the region's quantizers record."""
        rows = self.recorded is None or region in self.recorded
        return self.record if rows or self.record == "none" else "ranges"
