"""What a graph needs at run time and cannot hold: packed weights, outer scales, guidance, and where records go.

A graph compiled by ``capture.Backend`` has inputs beyond the model's own (feeds) and outputs beyond the model's own
(emits). ``GraphRuntime`` resolves the first and receives the second. There is one per module (the trainer, each twin);
what concerns a single forward call travels in a ``Call``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trace_compile.errors import GuidanceError
from trace_compile.noise import NormNoise
from trace_compile.ops.weights import Master, Packed
from trace_compile.passes.region import Region
from trace_compile.pruning import Pruned
from trace_compile.state.guidance import Guidance

Emits = dict[str, dict[str, Tensor]]
SiteKey = tuple[str, str]


class OuterScales:
    """Float32 outer scales of the activations, one per (region, projection), set from traced ranges.

    Graphs hold views of tensors that are updated in place, so a refresh costs no recompilation.
    """

    def __init__(self) -> None:
        self._values: dict[SiteKey, Tensor] = {}
        self._stacked: dict[tuple[tuple[SiteKey, ...], torch.device], Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def __getitem__(self, site: SiteKey) -> Tensor:
        return self._values[site]

    def as_dict(self) -> dict[SiteKey, Tensor]:
        return dict(self._values)

    def set(self, values: dict[SiteKey, Tensor]) -> None:
        """Adopt new scales (float32 scalars, powers of two) for every site at once."""
        self._values = {site: torch.as_tensor(g, dtype=torch.float32).reshape(()) for site, g in values.items()}
        with torch.inference_mode(False):
            for (sites, _), tensor in self._stacked.items():
                tensor.copy_(torch.stack([self._values[s] for s in sites]))

    def stacked(self, sites: tuple[SiteKey, ...], device: torch.device) -> Tensor:
        """Float32 [len(sites)] on ``device``, at a stable address."""
        key = (sites, device)
        if key not in self._stacked:
            unknown = [".".join(site) for site in sites if site not in self._values]
            if unknown:
                raise GuidanceError(
                    f"no scale was traced for {', '.join(unknown)}, which the model did not have then; trace a rollout "
                    "of a new twin, and refit"
                )
            with torch.inference_mode(False):  # a rollout may ask first, and the trainer saves it for its backward
                self._stacked[key] = torch.stack([self._values[s] for s in sites]).to(device)
        return self._stacked[key]


@dataclass(frozen=True)
class GuideRows:
    """Guidance as graphs take it: see ``ops.records`` for the bytes of a region; those of all follow one another.

    rows uint8 [T, R]; outer float32 [T, C], one per row; hit bool [T].
    """

    rows: Tensor
    outer: Tensor
    hit: Tensor

    @classmethod
    def of(cls, guidance: Guidance, regions: tuple[str, ...]) -> GuideRows:
        """Of the named regions, which stand in model order."""
        layout = guidance.layout
        chosen = [i for i, site in enumerate(layout.sites) if site.region in regions]
        sites = [layout.sites[i] for i in chosen]
        whole = len(chosen) == len(layout.sites)
        if whole and not any(site.outer_bytes or site.projection == "down" for site in sites):
            return cls(guidance.rows[:, : layout.guidance_bytes], guidance.outer, guidance.hit)
        pieces = []
        for index, site in zip(chosen, sites, strict=True):
            pieces.append(guidance.site(index))
            if site.projection == "down":
                pieces.append(guidance.routing_bytes(layout.routing_index(site.region)))
        return cls(torch.cat(pieces, dim=1), guidance.outer if whole else guidance.outer[:, chosen], guidance.hit)


@dataclass
class Call:
    """One forward call: which tokens count, what guides them, what came out.

    Attributes:
        valid: bool [T], real (not padding) tokens; ``None`` counts every token.
        decoding: one new token per sequence, whose experts may be others than those of a prompt.
        guidance: looked-up records for the T tokens, rows of the one region that runs, or ``None``.
        emits: filled by the graphs: kind -> region name -> tensor.
    """

    valid: Tensor | None = None
    decoding: bool = False
    guidance: Guidance | GuideRows | None = None
    emits: Emits = field(default_factory=dict)


class GraphRuntime:
    """Resolves feeds and receives emits for the graphs of one module.

    Args:
        pack: returns the packed form of an expert parameter; the trainer's refreshes it when the parameter changed, a
            twin's returns what the last refit stored.
        outer: the shared outer scales.
        device: where the module is; the engine sets it anew at every call, since models are moved.
    """

    def __init__(self, pack: Callable[[Region, str, Master], Packed], outer: OuterScales, device: torch.device) -> None:
        self._pack = pack
        self._outer = outer
        self.device = device
        self.pruned: Pruned | None = None
        """Of a pruned twin: its experts."""
        self.norm_noise: NormNoise | None = None
        """Of a twin whose recipe adds noise."""
        self._call: Call | None = None

    @contextmanager
    def calling(self, call: Call) -> Iterator[Call]:
        """Make ``call`` the current one while the graph runs."""
        outside, self._call = self._call, call
        try:
            yield call
        finally:
            self._call = outside

    @property
    def call(self) -> Call:
        if self._call is None:
            raise GuidanceError("a compiled graph ran outside of its model's forward; call the model itself")
        return self._call

    def packed(self, region: Region, which: str, param: Master) -> Packed:
        return self._pack(region, which, param)

    def outer(self, sites: tuple[SiteKey, ...]) -> Tensor:
        return self._outer.stacked(sites, self.device)

    def valid(self, tokens: int) -> Tensor:
        valid = self.call.valid
        if valid is None:
            return torch.ones(tokens, dtype=torch.bool, device=self.device)
        return valid

    def guidance(self, regions: tuple[str, ...]) -> GuideRows:
        guidance = self.call.guidance
        if guidance is None:
            raise GuidanceError("a guided graph ran without guidance; call model.guide(trace) first")
        return guidance if isinstance(guidance, GuideRows) else GuideRows.of(guidance, regions)

    def routing(self, regions: tuple[str, ...]) -> Tensor:
        guidance = self.call.guidance
        if not isinstance(guidance, Guidance):
            raise GuidanceError("a graph that replays routing ran without a trace; call model.guide(trace) first")
        index = {routing.region: i for i, routing in enumerate(guidance.layout.routings)}
        return torch.cat([guidance.routing(index[region]) for region in regions], dim=1)

    def experts(self, region: str, part: str) -> Tensor:
        if self.pruned is None:
            raise GuidanceError("a pruned graph ran outside of its twin; call the twin itself")
        return self.pruned.tensor(region, part, self.call.decoding, self.device)

    def noise(self, norms: tuple[str, ...], width: int) -> Tensor:
        if self.norm_noise is None:
            raise GuidanceError("a graph with noise ran outside of its twin; call the twin itself")
        return self.norm_noise.stacked(norms, width, self.device)

    def emit(self, emits: Emits) -> None:
        for kind, found in emits.items():
            self.call.emits.setdefault(kind, {}).update(found)
