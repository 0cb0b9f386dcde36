"""The records that travel between passes: a region found, a reason why not, an input to feed, an output to hand out.

All are frozen and hold names and numbers, never nodes or tensors, so they outlive the graph they were read from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..ops.activation import Activation
from ..ops.weights import WeightLayout

Projection = Literal["gate_up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate_up", "down")


@dataclass(frozen=True)
class ExpertParam:
    """One stacked parameter: the graph's placeholder for it and its dotted name in the model."""

    placeholder: str
    name: str


@dataclass(frozen=True)
class MoERegion:
    """One mixture-of-experts block, from the tokens that enter the experts to their weighted sum.

    name: dotted path of the module that owns the expert parameters. source: how the model spelled the expert GEMMs.
    width: expert width I, the columns of the down projection's input. weight_input: gates scale the tokens before the
    first GEMM instead of the result of the second.
    """

    name: str
    w13: ExpertParam
    w2: ExpertParam
    b13: ExpertParam | None
    b2: ExpertParam | None
    w13_layout: WeightLayout
    w2_layout: WeightLayout
    activation: Activation
    top_k: int
    num_experts: int
    hidden: int
    width: int
    source: Literal["grouped_mm", "grouped_mm_fallback", "bmm", "einsum"]
    weight_input: bool = False

    def columns(self, projection: Projection) -> int:
        """Elements per token that the quantizer in front of ``projection`` sees."""
        return self.hidden if projection == "gate_up" else self.width

    def weight(self, which: str) -> tuple[ExpertParam, WeightLayout]:
        """Parameter and layout of ``"w13"`` or ``"w2"``."""
        return (self.w13, self.w13_layout) if which == "w13" else (self.w2, self.w2_layout)


@dataclass(frozen=True)
class NoMatch:
    """An expert-shaped operation that was left as it is: why, at which node, from which line of the model."""

    reason: str
    node: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}" + (f" ({self.where})" if self.where else "")


FeedKind = Literal["packed", "outer", "guide", "guide_outer", "hit", "valid", "replay"]
EmitKind = Literal["record", "record_outer", "amax", "counts", "hist", "saturated", "diag", "routing", "input"]


@dataclass(frozen=True)
class Feed:
    """One extra graph input, resolved by the runtime at every call.

    ``packed``: ``part`` (codes, scales, outer) of ``weight`` (w13, w2) of ``region``. The others are one tensor for the
    whole graph: ``outer`` f32 [2 per region], ``guide`` u8 [T, R], ``guide_outer`` f32 [T, guided regions], ``hit`` and
    ``valid`` bool [T], ``replay`` i64 [T, top_k of all regions].
    """

    kind: FeedKind
    region: str = ""
    weight: str = ""
    part: str = ""


@dataclass(frozen=True)
class Emit:
    """One extra graph output, handed to the runtime after every call."""

    kind: EmitKind
    region: str
