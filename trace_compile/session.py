"""What one trained model and its generation twins share: regions, recipe, scales, trace, weights version.

A ``Session`` hangs on the model outside of its state dict. It decides in which mode a training forward runs and looks
the guidance up; the twin's side is ``rollout.Twin``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trace_compile.engine import Engine
from trace_compile.errors import GuidanceError, NoMoERegionError
from trace_compile.numerics import FORMATS
from trace_compile.ops.rows import outer_bytes
from trace_compile.ops.weights import Master, Packed
from trace_compile.passes.mode import Mode, Unquantized
from trace_compile.passes.region import MoERegion, Region
from trace_compile.recipes import Recipe
from trace_compile.runtime import Call, Emits, GraphRuntime, OuterScales, SiteKey
from trace_compile.state.inputs import InputLog
from trace_compile.state.layout import RecordLayout, Routing, Site
from trace_compile.state.origins import Origins
from trace_compile.state.packed import PackedWeights, WeightsVersion
from trace_compile.state.ranges import Ranges
from trace_compile.state.trace import Trace
from trace_compile.state.usage import Phase, Usage, count_routes
from trace_compile.tokens import Tokens, TokenTracker

RecordKind = Literal["ranges", "bit", "code"]


@dataclass(frozen=True)
class Options:
    """What ``trace_compile`` was called with; see there."""

    strict: bool = True
    compiler: str | None = None
    last: float = 0.5
    max_staleness: int = 3
    replay_routing: bool = False
    recompute: bool = False
    unquantized: Unquantized = field(default_factory=Unquantized)
    disabled_passes: tuple[str, ...] = ()
    dump_dir: str | None = None
    include: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


@dataclass
class RangeAccumulator:
    """Running maxima and counts per region, on the device, updated in place call by call.

    experts: number of experts of each region whose use is counted.
    """

    experts: Mapping[str, int]
    totals: dict[str, list[Tensor]] = field(default_factory=dict)
    used: dict[tuple[Phase, str], Tensor] = field(default_factory=dict)

    def add(self, emits: Emits, valid: Tensor, phase: Phase) -> None:
        """The statistics of one forward of tokens ``valid`` bool [T], per region."""
        for region, amax in emits.get("amax", {}).items():
            self._add(region, [amax, *(emits[kind][region] for kind in ("counts", "hist", "saturated"))])
        for region, ids in emits.get("routing", {}).items():
            self._use((phase, region), count_routes(ids, valid, self.experts[region]))

    def merge(self, other: RangeAccumulator) -> None:
        for region, values in other.totals.items():
            self._add(region, values)
        for key, counts in other.used.items():
            self._use(key, counts)

    def reset(self) -> None:
        """Forget, in place: the tensors stay where they are."""
        for total in (*(t for values in self.totals.values() for t in values), *self.used.values()):
            total.zero_()

    def _use(self, key: tuple[Phase, str], counts: Tensor) -> None:
        with torch.inference_mode(False):
            if key in self.used:
                self.used[key] += counts
            else:
                self.used[key] = counts.detach().clone()

    def _add(self, region: str, values: list[Tensor]) -> None:
        with torch.inference_mode(False):  # totals outlive the call: inference tensors could not be added to
            if region not in self.totals:
                self.totals[region] = [t.detach().clone() for t in values]
                return
            top, *sums = self.totals[region]
            torch.maximum(top, values[0], out=top)
            for total, new in zip(sums, values[1:], strict=True):
                total += new

    def usage(self) -> Usage:
        """On the CPU."""
        phases: dict[Phase, dict[str, Tensor]] = {"prefill": {}, "decode": {}}
        for (phase, region), counts in self.used.items():
            phases[phase][region] = counts.cpu()
        return Usage(phases["prefill"], phases["decode"])

    def ranges(self) -> Ranges:
        merged = Ranges.empty()
        for region, (amax, counts, hist, saturated) in self.totals.items():
            projections = ("gate_up", "down") if len(amax) == 2 else ("input",)  # one row per site of the region
            merged = merged.merge(Ranges.observed(region, amax, counts, hist, saturated, projections))
        return merged


@dataclass
class Recording:
    """A trace being filled by the twins."""

    trace: Trace
    kind: RecordKind
    accumulator: RangeAccumulator
    inputs: InputLog | None = None


def record_rows(layout: RecordLayout, tokens: Tokens, emits: Emits) -> Tensor:
    """Record rows uint8 [T, R] of one forward; R is 0 where no region works on tokens."""
    if not layout.row_bytes:
        return tokens.keys.new_empty((len(tokens.keys), 0), dtype=torch.uint8)
    return layout.assemble(
        [emits["record"][site.region] for site in layout.sites],
        [emits["routing"][routing.region] for routing in layout.routings],
    )


class Session:
    """State of one trained model. ``cls`` is the model's own class, whose forward is compiled."""

    def __init__(self, model: nn.Module, cls: type[nn.Module], recipe: Recipe, options: Options) -> None:
        self.cls = cls
        self.recipe = recipe
        self.options = options
        self.signature = inspect.signature(cls.forward)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.regions: tuple[Region, ...] = ()
        self._learned: dict[Mode, int] = {}
        self.outer = OuterScales()
        self.ranges: Ranges | None = None
        self.pending_ranges: Ranges | None = None
        self.versions = WeightsVersion()
        self.guiding: Trace | None = None
        self.recording: Recording | None = None
        self.origins = Origins()
        self.weights = PackedWeights(self.origins.pack)
        self.tracker = TokenTracker()
        self._twins: list[tuple[weakref.ref[nn.Module], Engine]] = []
        self.engine = self.new_engine(self._pack_live)

    @property
    def version(self) -> int:
        """The newest version of the weights that a twin was fitted to."""
        return self.versions.number

    def new_engine(self, pack: Callable[[Region, str, Master], Packed]) -> Engine:
        """An engine for the trainer or for a twin; ``pack`` says where its packed weights come from."""
        o = self.options
        runtime = GraphRuntime(pack, self.outer, self.device)
        return Engine(
            self.cls.forward, runtime, compiler=o.compiler, disabled_passes=o.disabled_passes, dump_dir=o.dump_dir
        )

    def add_twin(self, module: nn.Module, engine: Engine) -> None:
        """Know of a new twin without keeping it alive."""
        self._twins = [(twin, e) for twin, e in self._twins if twin() is not None]
        self._twins.append((weakref.ref(module), engine))

    @property
    def twin_engines(self) -> list[Engine]:
        """Those of the twins that there are, oldest first."""
        return [engine for twin, engine in self._twins if twin() is not None]

    def _pack_live(self, region: Region, which: str, param: Master) -> Packed:
        expert, layout = region.weight(which)
        scheme = self.recipe.train
        assert scheme is not None and scheme.weight is not None  # graphs without packed feeds never ask
        return self.weights.get(expert.name, param, layout, scheme.weight)

    # --- regions and sites ------------------------------------------------------------------------------------------

    def discover(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture the training graph once to learn the regions. Raises what capture raises."""
        mode = self.train_mode()
        with torch.no_grad():
            self.engine.run(module, mode, Call(), args, kwargs)
        self._learn_regions(mode)

    def _learn_regions(self, mode: Mode) -> None:
        """Of the latest graph: adapters that were added since, or taken away, rename parameters."""
        reports = self.engine.reports[mode]
        if len(reports) > self._learned.get(mode, 0):
            self._learned[mode], latest = len(reports), reports[-1].regions
            if self.recording is None and _facts(latest) != _facts(self.regions):
                self._plain(latest)  # raises where the rule does not fit
                self.regions = latest

    def need_regions(self) -> tuple[Region, ...]:
        if not self.regions:
            raise NoMoERegionError(
                "the model has not been captured yet, so its expert regions are not known; call it once, or pass "
                "example_inputs={...} to trace_compile()"
            )
        return self.regions

    def quantized_regions(self) -> tuple[Region, ...]:
        """Regions that the recipe applies to; the others compute in the model's own dtype."""
        regions = self.need_regions()
        plain = self._plain(regions)
        return tuple(region for region in regions if region.name not in plain)

    def _plain(self, regions: Sequence[Region]) -> frozenset[str]:
        return self.options.unquantized.of([r.name for r in regions if isinstance(r, MoERegion)])

    @property
    def experts(self) -> dict[str, int]:
        """Number of experts of each region whose routing is known."""
        return {r.name: r.num_experts for r in self.need_regions() if isinstance(r, MoERegion) and not r.slots}

    def guided_regions(self) -> frozenset[str]:
        """Regions whose outcome is recorded and replayed: the last ``options.last`` of the quantized ones in graph
        order, or one. Of those that work on tokens, by which records go."""
        names = [r.name for r in self.quantized_regions() if not r.slots]
        return frozenset(names[-max(1, round(len(names) * self.options.last)) :])

    def sites(self) -> tuple[SiteKey, ...]:
        return tuple((r.name, p) for r in self.quantized_regions() for p in r.projections)

    def layout(self, kind: RecordKind) -> RecordLayout:
        """Row layout of a trace of this model under the scales now in force."""
        routed = (r for r in self.need_regions() if isinstance(r, MoERegion) and not r.slots)
        routings = tuple(Routing(r.name, r.top_k) for r in routed)
        _, scheme = self.recipe.schemes(traced=bool(self.outer))
        if kind == "ranges" or scheme is None or scheme.act is None:
            return RecordLayout((), routings)
        guided, fmt = self.guided_regions(), FORMATS[scheme.act.fmt]
        sites = (
            Site(r.name, r.projections[0], r.hidden, kind, outer_bytes(scheme.act), fmt.block, fmt.scale.bytes)
            for r in self.regions
            if r.name in guided
        )
        return RecordLayout(tuple(sites), routings)

    @property
    def fingerprint(self) -> str:
        """Names expert geometry and rollout arithmetic, on which the meaning of a record depends (not the weights)."""
        regions = self.need_regions()
        facts = {
            "class": self.cls.__name__,
            "regions": [r.geometry for r in regions],
            "rollout": self.recipe.rollout.key if self.recipe.rollout else "none",
        }
        if self.options.unquantized != Unquantized():
            facts["quantized"] = [r.name for r in self.quantized_regions()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def scales_from(self, ranges: Ranges) -> dict[SiteKey, Tensor]:
        """The outer input scale of every site.

        Raises ``GuidanceError`` naming the sites that the trace never observed: a scale would be a guess there.
        """
        sites = self.sites()
        unseen = [site for site in sites if site not in ranges.sites or not int(ranges.sites[site].tokens.sum())]
        if unseen:
            raise GuidanceError(
                f"the trace observed nothing at {', '.join('.'.join(site) for site in unseen)}; generate inside "
                "model.trace() before ranges can set scales"
            )
        return dict(zip(sites, ranges.outer_scales(sites).unbind(), strict=True))

    def ranges_to_adopt(self) -> Ranges | None:
        """The ranges of the last trace, if the recipe traces scales. While a trace records they wait: rows of one trace
        share a layout."""
        return self.pending_ranges if self.recipe.outer == "traced" and self.recording is None else None

    def adopt_ranges(self, ranges: Ranges) -> None:
        """Set the outer input scales of both graphs; the first time, say which experts got no token.

        Raises as ``scales_from``; nothing has changed then.
        """
        scales, first = self.scales_from(ranges), self.ranges is None
        self.outer.set(scales)
        self.ranges, self.pending_ranges = ranges, None
        if first:
            ranges.warn()

    def inherit(self, other: Session) -> None:
        """Start from what ``other``, the session of a model that this one's was copied from, knows of the model."""
        self.regions = other.regions
        self.ranges, self.pending_ranges = other.ranges, other.pending_ranges
        self.outer.set(other.outer.as_dict())
        self.origins.inherit(other.origins)

    # --- one training forward ---------------------------------------------------------------------------------------

    def arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name."""
        bound = dict(self.signature.bind_partial(module, *args, **kwargs).arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        return bound

    def train_mode(self) -> Mode:
        scheme, _ = self.recipe.schemes(traced=bool(self.outer))
        guiding = self.guiding if self.recipe.guidance != "none" else None
        return Mode(
            scheme=scheme,
            guidance="none" if guiding is None else self.recipe.guidance,  # type: ignore[arg-type]
            guided=None if guiding is None else frozenset(site.region for site in guiding.layout.sites),
            replay=self.options.replay_routing and self.guiding is not None,
            train=True,
            recompute=self.options.recompute,
            unquantized=self.options.unquantized,
            strict=self.options.strict,
            include=self.options.include,
            ignore=self.options.ignore,
        )

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The trainer's forward: guided wherever the guiding trace has a record, own rounding elsewhere."""
        trajectory_ids = kwargs.pop("trajectory_ids", None)
        mode = self.train_mode()
        if self.guiding is None or (mode.guidance == "none" and not mode.replay):
            outputs = self.engine.run(module, mode, Call(), args, kwargs)
        else:
            arguments = self.arguments(module, args, kwargs)
            tokens = self.tracker.begin(arguments, trajectory_ids)
            guidance = self.guiding.lookup(tokens.keys, self.version, self.options.max_staleness, valid=tokens.valid)
            call = Call(valid=tokens.valid, guidance=guidance)
            outputs = self.engine.run(module, mode, call, args, kwargs)
            self.tracker.end(arguments, outputs)
        self._learn_regions(mode)
        return outputs


def _facts(regions: tuple[Region, ...]) -> list[Any]:
    """What tells regions of one model from those of another: geometry and the names of their parameters."""
    return [(r.geometry, [r.weight(which)[0].name for which in r.weights]) for r in regions]
