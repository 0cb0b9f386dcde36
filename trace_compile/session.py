"""What one trained model and its generation twins share: regions, recipe, scales, trace, weights version.

A ``Session`` hangs on the model outside of its state dict. It decides in which mode a training forward runs and looks
the guidance up; the twin's side is ``rollout.Twin``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trace_compile.engine import Engine
from trace_compile.errors import FingerprintMismatchError, GuidanceError, NoMoERegionError, PassError
from trace_compile.numerics import FORMATS
from trace_compile.ops.rows import outer_bytes
from trace_compile.ops.weights import Master, Packed, joined, pack_experts
from trace_compile.passes.linears import matches
from trace_compile.passes.mode import GuidanceKind, Mode, Unquantized
from trace_compile.passes.mode import RecordKind as GraphRecordKind
from trace_compile.passes.region import MoERegion, Region
from trace_compile.recipes import Recipe
from trace_compile.runtime import Call, Emits, GraphRuntime, OuterScales, SiteKey
from trace_compile.state.fsdp import PackedShards, hollow
from trace_compile.state.inputs import InputLog
from trace_compile.state.layout import RecordLayout, Routing, Site
from trace_compile.state.origins import Origins
from trace_compile.state.packed import PackedWeights, WeightsVersion
from trace_compile.state.ranges import Ranges
from trace_compile.state.sharded import is_fsdp
from trace_compile.state.trace import Trace
from trace_compile.state.usage import Phase, Usage, count_routes
from trace_compile.tokens import Tokens, TokenTracker

logger = logging.getLogger("trace_compile")

RecordKind = Literal["ranges", "bit", "code"]
LayerRule = tuple[str, ...] | Callable[[str], bool]
"""Which regions are recorded: shell patterns of their dotted names, or a function of the name."""


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
    layers: LayerRule | None = None
    down: bool = False


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
        rest = ("counts", "hist", "saturated")
        self._add({r: [amax, *(emits[kind][r] for kind in rest)] for r, amax in emits.get("amax", {}).items()})
        counts = emits.get("counts", {})
        self._use(
            {
                # What the op counted anyway, unless it knows fewer experts (a pruned rollout's).
                (phase, r): counts[r]
                if r in counts and counts[r].shape[0] == self.experts[r]
                else count_routes(ids, valid, self.experts[r])
                for r, ids in emits.get("routing", {}).items()
            }
        )

    def merge(self, other: RangeAccumulator) -> None:
        self._add(other.totals)
        self._use(other.used)

    def reset(self) -> None:
        """Forget, in place: the tensors stay where they are."""
        for total in (*(t for values in self.totals.values() for t in values), *self.used.values()):
            total.zero_()

    def _use(self, found: Mapping[tuple[Phase, str], Tensor]) -> None:
        with torch.inference_mode(False):
            known = [key for key in found if key in self.used]
            if known:
                torch._foreach_add_([self.used[key] for key in known], [found[key] for key in known])
            for key in [key for key in found if key not in known]:
                self.used[key] = found[key].detach().clone()

    def _add(self, found: dict[str, list[Tensor]]) -> None:
        with torch.inference_mode(False):  # totals outlive the call: inference tensors could not be added to
            known = [region for region in found if region in self.totals]
            if known:  # all regions at once: decoding does this in every step, and each operation there is a launch
                torch._foreach_maximum_([self.totals[r][0] for r in known], [found[r][0] for r in known])
                sums = [total for r in known for total in self.totals[r][1:]]
                torch._foreach_add_(sums, [value for r in known for value in found[r][1:]])
            for region in [r for r in found if r not in known]:
                self.totals[region] = [t.detach().clone() for t in found[region]]

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

    @property
    def mode_kind(self) -> GraphRecordKind:
        """What graphs record: statistics alone where the layout has no sites."""
        return self.trace.layout.kind if self.trace.layout.sites else "ranges"  # type: ignore[return-value]


def guidance_kind(payload: str, layout: RecordLayout | None) -> GuidanceKind:
    """What guides under a recipe of ``payload`` where ``layout`` says what was recorded."""
    down = layout is not None and any(site.projection == "down" for site in layout.sites)
    return f"{payload}+down" if down else payload  # type: ignore[return-value]


def record_rows(layout: RecordLayout, tokens: Tokens, emits: Emits) -> Tensor:
    """Record rows uint8 [T, R] of one forward; R is 0 where no region works on tokens."""
    if not layout.row_bytes:
        return tokens.keys.new_empty((len(tokens.keys), 0), dtype=torch.uint8)
    return layout.assemble(
        [emits["record"][region] for region in dict.fromkeys(site.region for site in layout.sites)],
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
        self.diagnosing = False
        self.diagnostics: dict[str, Tensor] = {}
        self.recording: Recording | None = None
        self.origins = Origins()
        self.weights = PackedWeights(self.origins.pack)
        self.shards = PackedShards()
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
        if self.shards.managed and region.name not in {r.name for r in self.need_regions()}:
            raise PassError(f"the graph calls {expert.name} what is none of the model's experts: nothing would pack it")
        if expert.name in self.shards.packed:
            assert isinstance(param, Tensor)
            hollow(param)
            return self.shards.packed[expert.name]
        if any(p.name in self.shards.managed for p in expert.parameters):
            # Gathered anew at every step, by writes that no counter shows.
            return pack_experts(joined(param), layout, scheme.weight, name=expert.name)
        return self.weights.get(expert.name, param, layout, scheme.weight)

    def attend(self, model: nn.Module) -> None:
        """In front of a forward and of its hooks: see that FSDP2 gathers experts as packed bytes."""
        scheme = self.recipe.train
        if is_fsdp(model) and scheme is not None and scheme.weight is not None:
            experts = [r.weight(which) for r in self.regions for which in r.fed]
            wanted = {p.name: (layout, scheme.weight) for param, layout in experts for p in param.parameters}
            # What the graph takes as it is, and nobody else can read.
            alone = {param.name for param, _ in experts if self.options.strict and not param.parts}
            self.shards.attach(model, wanted, hollow=alone)

    # --- regions and sites ------------------------------------------------------------------------------------------

    def discover(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture the training graph once to learn the regions. Raises what capture raises."""
        with torch.no_grad():
            if is_fsdp(module):
                module(*args, **kwargs)  # FSDP2 has to be entered through the root's hooks
            else:
                self.forward(module, args, kwargs)

    def _learn_regions(self, mode: Mode) -> None:
        """Of the latest graphs: adapters that were added since, or taken away, rename parameters."""
        graphs = len(self.engine.reports[mode])
        if graphs > self._learned.get(mode, 0):
            self._learned[mode], latest = graphs, self.engine.regions(mode)
            if self.recording is None and _facts(latest) != _facts(self.regions):
                self._plain(latest)  # raises where the rule does not fit
                self.regions = latest
                self._say_what_is_not_guided()

    def _say_what_is_not_guided(self) -> None:
        for region in self.regions if self.recipe.guidance != "none" else ():
            if region.slots:
                logger.warning("%s is quantized but not recorded or guided: %s", region.name, region.slots)

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
        """Regions whose outcome is recorded and replayed: those that ``options.layers`` chooses, by default the last
        ``options.last`` of the quantized ones in graph order, or one. Of those that work on tokens, by which records
        go. Raises ``GuidanceError`` where a rule chooses none."""
        names, rule = [r.name for r in self.quantized_regions() if not r.slots], self.options.layers
        if rule is None:
            return frozenset(names[-max(1, round(len(names) * self.options.last)) :])
        if callable(rule):
            chosen = [name for name in names if rule(name)]
        else:
            chosen = [name for name in names if any(matches(pattern, name) for pattern in rule)]
        if not chosen:
            raise GuidanceError(f"layers={rule!r} chooses none of the regions {names}")
        return frozenset(chosen)

    def sites(self) -> tuple[SiteKey, ...]:
        return tuple((r.name, p) for r in self.quantized_regions() for p in r.projections)

    def layout(self, kind: RecordKind) -> RecordLayout:
        """Row layout of a trace of this model under the scales now in force."""
        routed = (r for r in self.need_regions() if isinstance(r, MoERegion) and not r.slots)
        routings = tuple(Routing(r.name, r.top_k) for r in routed)
        _, scheme = self.recipe.schemes(traced=bool(self.outer))
        if kind == "ranges" or scheme is None or scheme.act is None:
            return RecordLayout((), routings)
        guided, act = self.guided_regions(), scheme.act
        fmt, own, sites = FORMATS[act.fmt], outer_bytes(act), []
        for r in (r for r in self.regions if r.name in guided):
            sites.append(Site(r.name, r.projections[0], r.hidden, kind, own, fmt.block, fmt.scale.bytes))
            if self.options.down and isinstance(r, MoERegion):
                sites.append(Site(r.name, "down", r.width, kind, own, fmt.block, fmt.scale.bytes, r.top_k))
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

    def over_ranks(self, ranges: Ranges, group: Any) -> Ranges:
        """``ranges`` merged over a process group, ``"world"`` being all ranks that there are and None this one."""
        import torch.distributed as dist

        if group == "world":
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is None or dist.get_world_size(group) < 2:
            return ranges
        experts: dict[tuple[str, str], int] = {
            (r.name, p): r.num_experts for r in self.need_regions() for p in r.projections
        }
        device = "cpu" if "gloo" in dist.get_backend(group) else self.engine.runtime.device
        return ranges.all_reduce(experts, group, device=device)

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

    def state_dict(self) -> dict[str, str]:
        """What a resumed run needs beside weights and optimizer: ranges, scales in force, weights version."""
        state = {
            "format": 1,
            "fingerprint": self.fingerprint,
            "version": self.version,
            "scales": [(*site, float(g)) for site, g in self.outer.as_dict().items()],
            "ranges": None if self.ranges is None else self.ranges.to_json(),
            "pending": None if self.pending_ranges is None else self.pending_ranges.to_json(),
        }
        return {"state": json.dumps(state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, all or nothing. Nothing is calibrated or packed by it.

        Raises ``FingerprintMismatchError`` for the state of another model or recipe, or of an unknown format.
        """
        state = json.loads(state_dict["state"])
        if state.get("format") != 1 or state.get("fingerprint") != self.fingerprint:
            raise FingerprintMismatchError(
                f"this state has format {state.get('format')} and fingerprint {state.get('fingerprint')}; expected 1 "
                f"and {self.fingerprint}: resume with the same model and recipe"
            )
        scales = {(region, site): torch.tensor(g) for region, site, g in state["scales"]}
        ranges, pending = (
            None if state[name] is None else Ranges.from_json(state[name]) for name in ("ranges", "pending")
        )
        self.outer.set(scales)
        self.ranges, self.pending_ranges = ranges, pending
        self.versions.advance(max(state["version"], self.version))

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

    def train_mode(self, compared: Trace | None = None) -> Mode:
        """How the next training forward runs; ``compared`` (default: the guiding trace, where that was asked for) is
        what it counts its distance from, guided by it or not."""
        scheme, _ = self.recipe.schemes(traced=bool(self.outer))
        guiding = self.guiding if self.recipe.guidance != "none" else None
        if compared is None and self.diagnosing:
            compared = self.guiding
        if scheme is None or scheme.act is None or (compared is not None and not compared.layout.sites):
            compared = None
        layout = (compared or guiding).layout if compared or guiding else None  # type: ignore[union-attr]
        return Mode(
            scheme=scheme,
            guidance="none" if guiding is None else guidance_kind(self.recipe.guidance, layout),
            guided=None if layout is None else frozenset(site.region for site in layout.sites),
            diagnose=compared is not None,
            rows="none" if compared is None else compared.layout.kind,  # type: ignore[arg-type]
            replay=self.options.replay_routing and self.guiding is not None,
            train=True,
            recompute=self.options.recompute,
            unquantized=self.options.unquantized,
            strict=self.options.strict,
            include=self.options.include,
            ignore=self.options.ignore,
        )

    def count(self, emits: Emits) -> None:
        """Add up what a forward counted, on the device."""
        for region, counts in emits.get("diag", {}).items():
            if region in self.diagnostics:
                self.diagnostics[region] += counts
            else:
                self.diagnostics[region] = counts.detach().clone()

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The trainer's forward: guided wherever the guiding trace has a record, own rounding elsewhere."""
        trajectory_ids = kwargs.pop("trajectory_ids", None)
        mode = self.train_mode()
        if self.guiding is None or (mode.guide_kind == "none" and not mode.replay):
            outputs = self.engine.run(module, mode, Call(), args, kwargs)
        else:
            arguments = self.arguments(module, args, kwargs)
            tokens = self.tracker.begin(arguments, trajectory_ids)
            guidance = self.guiding.lookup(tokens.keys, self.version, self.options.max_staleness, valid=tokens.valid)
            call = Call(valid=tokens.valid, guidance=guidance)
            outputs = self.engine.run(module, mode, call, args, kwargs)
            self.tracker.end(arguments, outputs)
            self.count(call.emits)
        self._learn_regions(mode)
        return outputs


def _facts(regions: tuple[Region, ...]) -> list[Any]:
    """What tells regions of one model from those of another: geometry and the names of their parameters."""
    return [(r.geometry, [r.weight(which)[0].name for which in r.weights]) for r in regions]
