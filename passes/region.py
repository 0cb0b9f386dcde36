"""The records that travel between passes: a region found, a reason why not, an input to feed, an output to hand out.

All are frozen and hold names and numbers, never nodes or tensors, so they outlive the graph they were read from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..ops.activation import Activation
from ..ops.quads import prefers_quads
from ..ops.scheme import MoEScheme
from ..ops.weights import Master, WeightLayout

Projection = Literal["gate_up", "down", "input"]


@dataclass(frozen=True)
class ExpertParam:
    """A parameter: the graph's placeholder for it and its dotted name in the model.

    ``parts``: it is none itself, but stands for several parameters whose rows follow one another.
    ``computed``: what is used is computed from it and other parameters (a cast, adapters added to it).
    """

    placeholder: str
    name: str
    parts: tuple[ExpertParam, ...] = ()
    computed: bool = False

    @classmethod
    def joined(cls, parts: tuple[ExpertParam, ...]) -> ExpertParam:
        """One name for all of ``parts``."""
        return parts[0] if len(parts) == 1 else cls(parts[0].placeholder, "+".join(p.name for p in parts), parts)

    @property
    def parameters(self) -> tuple[ExpertParam, ...]:
        return self.parts or (self,)

    def master(self, tensors: Mapping[str, Tensor]) -> Master:
        """The parameter, or its parts, from ``tensors`` by dotted name."""
        return tuple(tensors[p.name] for p in self.parts) if self.parts else tensors[self.name]


@dataclass(frozen=True)
class MoERegion:
    """One mixture-of-experts block, from the tokens that enter the experts to their weighted sum.

    name: dotted path of the module that owns the expert parameters. source: how the model spelled the expert GEMMs.
    width: expert width I, the columns of the down projection's input. weight_input: gates scale the tokens before the
    first GEMM instead of the result of the second. slots: why the rows that are quantized are no tokens (records go by
    token: such a region has none and is not guided); empty where they are.
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
    source: Literal["grouped_mm", "grouped_mm_fallback", "bmm", "einsum", "loop"]
    weight_input: bool = False
    slots: str = ""

    projections: ClassVar[tuple[Projection, ...]] = ("gate_up", "down")
    weights: ClassVar[tuple[str, ...]] = ("w13", "w2")

    def columns(self, projection: Projection) -> int:
        """Elements per token that the quantizer in front of ``projection`` sees."""
        return self.hidden if projection == "gate_up" else self.width

    @property
    def fed(self) -> tuple[str, ...]:
        """The weights whose packed form comes from outside of the graph: those that are parameters."""
        return tuple(which for which in self.weights if not self.weight(which)[0].computed)

    @property
    def geometry(self) -> tuple[object, ...]:
        """What the meaning of a record depends on."""
        return self.name, self.num_experts, self.top_k, self.hidden, self.width, self.activation.key

    def weight(self, which: str) -> tuple[ExpertParam, WeightLayout]:
        """Parameter and layout of ``"w13"`` or ``"w2"``."""
        return (self.w13, self.w13_layout) if which == "w13" else (self.w2, self.w2_layout)


@dataclass(frozen=True)
class LinearRegion:
    """Linear layers that read one input, which is quantized once for all of them.

    name: the layers' dotted path, ``model.layers.0.self_attn.{q_proj,k_proj,v_proj}`` for several. modules: the path of
    each. rows: output features of each. hidden: input features. w, b: the layers' parameters, joined along rows.
    """

    name: str
    modules: tuple[str, ...]
    rows: tuple[int, ...]
    hidden: int
    w: ExpertParam
    b: ExpertParam | None

    projections: ClassVar[tuple[Projection, ...]] = ("input",)
    weights: ClassVar[tuple[str, ...]] = ("w",)
    fed: ClassVar[tuple[str, ...]] = ("w",)
    num_experts: ClassVar[int] = 1
    slots: ClassVar[str] = ""

    def columns(self, projection: Projection) -> int:
        """Elements per token that the quantizer sees."""
        return self.hidden

    @property
    def geometry(self) -> tuple[object, ...]:
        """What the meaning of a record depends on."""
        return self.name, self.hidden

    def weight(self, which: str) -> tuple[ExpertParam, WeightLayout]:
        """Parameter and layout of ``"w"``."""
        return self.w, WeightLayout(experts=1)


Region = MoERegion | LinearRegion


def keeps_quads(region: Region, scheme: MoEScheme, device: torch.device) -> bool:
    """Whether inference on ``device`` keeps the region's packed weights in the form of ``ops.quads``."""
    if not isinstance(region, MoERegion) or region.fed != region.weights:
        return False
    return prefers_quads(scheme, (region.hidden, region.width), device)


@dataclass(frozen=True)
class NoMatch:
    """An expert-shaped operation that was left as it is: why, at which node, from which line of the model, and the
    parameters that it multiplies by."""

    reason: str
    node: str
    where: str = ""
    weights: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}" + (f" ({self.where})" if self.where else "")


FeedKind = Literal["packed", "outer", "guide", "guide_outer", "hit", "valid", "replay", "experts", "noise"]
EmitKind = Literal["record", "record_outer", "amax", "counts", "hist", "saturated", "diag", "routing", "input"]


@dataclass(frozen=True)
class Feed:
    """One extra graph input, resolved by the runtime at every call.

    ``packed``: ``part`` (codes, scales, outer) of ``weight`` (w13, w2, w) of ``region``. ``experts``: ``part`` of a
    pruned region: ``allowed`` bool [E], ``kept`` i64 [m] in ascending order, ``index`` i64 [E] into those or -1. The
    others are one tensor for the whole graph: ``outer`` f32 [one per site], ``guide`` u8 [T, R], ``guide_outer`` f32
    [T, one per row], ``hit`` and ``valid`` bool [T], ``replay`` i64 [T, top_k of all regions], ``noise`` f32
    [norms, hidden].
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
