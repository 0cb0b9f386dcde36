"""The generation twin: the same model with packed NVFP4 experts, refitted in place from the trainer.

A twin is an instance of the model's own class over the trainer's tensors (or copies of the non-expert ones), so
``generate()`` and everything else of that class works on it. Its experts exist only as codes and scales, which change
in one place: ``refit()``. Refit is all or nothing and keeps addresses, so compiled graphs and CUDA graphs stay valid.
While a trace records, the twin's quantizers also hand out ranges, outcomes and routing.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from trace_compile.clone import (
    check_copies,
    copy_tensors,
    own_configs,
    own_tensors,
    same_tree,
    share_tensors,
    share_tree,
    subclass,
)
from trace_compile.decode import Decoder, Sample
from trace_compile.errors import ExportError, GuidanceError, PruningError, RefitError, TraceCompileError
from trace_compile.export import ModelStream
from trace_compile.exporting import SessionExperts, export_model, stream_weights
from trace_compile.generation import OwnDecoding, uncompiled
from trace_compile.importing import receive
from trace_compile.noise import NormNoise
from trace_compile.ops.weights import Master, Packed, WeightLayout, joined
from trace_compile.passes.mode import Mode
from trace_compile.passes.region import ExpertParam, MoERegion, Region, keeps_quads
from trace_compile.pieces import put_back
from trace_compile.pruning import Pruned
from trace_compile.runtime import Call, Emits
from trace_compile.session import Recording, Session, record_rows
from trace_compile.state.origins import Packer, Provenance
from trace_compile.state.packed import PackedWeights
from trace_compile.state.sharded import forget_fsdp, is_sharded, reshard
from trace_compile.state.usage import Kept
from trace_compile.tokens import Tokens, TokenTracker, id_tuple

ATTRIBUTE = "_trace_compile_twin"


class Twin:
    """State of one twin.

    Args:
        session: shared with the trainer.
        source: the trained model.
        copies: whether non-expert tensors are the twin's own.
        kept: experts that a pruned twin keeps.
    """

    def __init__(self, session: Session, source: nn.Module, copies: bool, kept: Kept | None = None) -> None:
        self.session = session
        self.source = source
        self.copies = copies
        self.pruned = (
            None if kept is None else Pruned(kept, [r for r in session.need_regions() if isinstance(r, MoERegion)])
        )
        noise = session.recipe.noise
        self.noise = None if noise is None else NormNoise(noise.seed)
        self.packed = PackedWeights(session.origins.pack)
        self.experts: dict[str, Packed] = {}
        self.provenance: dict[str, Provenance] = {}
        self.params: dict[str, ExpertParam] = {}
        self.engine = session.new_engine(self._packed)
        self.engine.runtime.pruned, self.engine.runtime.norm_noise = self.pruned, self.noise
        self.tracker = TokenTracker()
        self.decoder = Decoder(self)
        self.version = -1
        self._pack_anew()

    def _pack_anew(self) -> None:
        """Pack into new tensors, where the masters are."""
        scheme, masters, wanted = self.session.recipe.rollout, self.masters(), self._wanted()
        if scheme is None or scheme.weight is None:
            return
        packed = PackedWeights(self._packer(self.session.quantized_regions()))
        experts = {
            name: packed.get(name, expert.master(masters), layout, scheme.weight)
            for name, (expert, layout) in wanted.items()
        }
        self.packed, self.experts = packed, experts
        self.params = {name: expert for name, (expert, _) in wanted.items()}

    def _packer(self, regions: Iterable[Region]) -> Packer:
        """Packs a parameter in the form that the region's kernels take; of a pruned region only the kept experts, with
        the bytes of a whole twin."""
        pack, pruned, scheme = self.session.origins.pack, self.pruned, self.session.recipe.rollout
        owners = {region.weight(which)[0].name: region for region in regions for which in region.weights}
        assert scheme is not None

        def selected(param: Tensor, *args: Any, name: str = "weight") -> Packed:
            packed, region = pack(param, *args, name=name), owners[name]
            if pruned is not None:
                packed = pruned.select(region.name, packed)
            return packed.quads if keeps_quads(region, scheme, param.device) else packed

        return selected

    def release(self) -> None:
        """Let go of the packed weights; Dynamo's caches outlive the module and hold this."""
        self.packed, self.experts, self.params, self.decoder = PackedWeights(), {}, {}, Decoder(self)

    def masters(self) -> dict[str, nn.Parameter]:
        return dict(self.source.named_parameters(remove_duplicate=False))

    def _wanted(self) -> dict[str, tuple[ExpertParam, WeightLayout]]:
        """What is to be packed, by name: the weights of the trainer's regions as it was last captured.

        Raises ``RefitError`` for parameters that the model does not have any more.
        """
        scheme, masters = self.session.recipe.rollout, self.masters()
        if scheme is None or scheme.weight is None:
            return {}
        regions = self.session.quantized_regions()
        found = [region.weight(which) for region in regions for which in region.fed]
        gone = sorted(p.name for expert, _ in found for p in expert.parameters if p.name not in masters)
        if gone:
            raise RefitError(
                f"the model has no parameter {gone[0]} any more, from which {len(gone)} packed weight(s) come; call "
                "the model once, so that its new parameters are known, then refit"
            )
        return {expert.name: (expert, layout) for expert, layout in found}

    @property
    def replaced(self) -> set[str]:
        """Dotted names of the parameters whose packed form stands in their place."""
        return {p.name for expert in self.params.values() for p in expert.parameters}

    def _packed(self, region: Region, which: str, param: Master) -> Packed:
        return self.experts[region.weight(which)[0].name]

    def refit(self, module: nn.Module, version: int | None = None, progress: float | None = None) -> int:
        """Pack the trainer's current weights into the twin; returns their version.

        Weights that no twin was fitted to before get a new version, one more than the last or the given ``version``
        (an optimizer step count, say, that several processes agree on); all twins fitted to the same weights share it.

        ``progress``: the finished fraction of training in [0, 1], by which a recipe with noise chooses how much; the
        noise is a function of it and of the version. Such recipes need it (``TraceCompileError``), others ignore it.
        Adopts the ranges of the last closed trace, where the recipe traces scales (inside ``model.trace()`` they wait
        for the next refit). Raises ``NonFiniteWeightError`` naming the parameter, ``GuidanceError`` naming unobserved
        sites, or ``RefitError`` for a parameter whose shape changed or a version older than the last; the twin's
        weights and scales are then what they were. A twin follows its trainer's modules too, where adapters were added
        or taken away.
        """
        session = self.session
        sigma = self._sigma(progress)
        ranges = session.ranges_to_adopt()
        if ranges is not None:
            session.scales_from(ranges)
        reshard(self.source)
        masters, wanted, regrown = self.masters(), self._wanted(), not same_tree(self.source, module)
        if self.copies:
            skip = {p.name for expert, _ in wanted.values() for p in expert.parameters}
            check_copies(self.source, None if regrown else module, skip=skip)
        session.versions.check(version)
        live = {name: expert.master(masters) for name, (expert, _) in wanted.items()}
        where = {name: masters[expert.parameters[0].name].device for name, (expert, _) in wanted.items()}
        if wanted.keys() != self.experts.keys() or any(
            packed.codes.device != where[name] for name, packed in self.experts.items()
        ):
            self._pack_anew()  # the model has other parameters, or was moved
        elif self.experts:
            # Forced: writes through ``param.data`` change no version counter, and a twin must not stay behind.
            self.packed.update_all(live, force=True)
        self.provenance = {name: session.origins.provenance(name, joined(master)) for name, master in live.items()}
        if ranges is not None:
            session.adopt_ranges(ranges)
        if regrown:
            _grow(self, module)
        if self.copies and not regrown:
            copy_tensors(self.source, module, skip=self.replaced)
        elif self.copies:
            own_tensors(module, skip=self.replaced)
        else:
            share_tensors(self.source, module)
        self.version = session.versions.observe(masters, version)
        if self.noise is not None:
            self.noise.draw(sigma, self.version)
        return self.version

    def load(
        self, module: nn.Module, weights: Iterable[tuple[str, Tensor]], format: str, version: int | None = None
    ) -> int:
        """See ``RolloutModule.load_weights``."""
        self._need_all_experts("take a stream of all experts")
        self.session.versions.check(version)
        received = receive(self.session, module, weights, format)
        if received.others and not self.copies:
            raise RefitError(
                "this twin shares all but its experts with the trainer: stream with others=False, or make the twin "
                "with model.rollout(copy=True)"
            )
        self.packed.adopt(received.packed)
        self.provenance = received.provenance
        with torch.inference_mode(False), torch.no_grad():
            for target, tensor in received.others:
                target.copy_(tensor)
        if self.session.recipe.outer == "traced" and received.scales:
            self.session.outer.set({site: torch.tensor(scale) for site, scale in received.scales.items()})
        self.version = self.session.versions.advance(version)
        if self.noise is not None:
            self.noise.draw(self.noise.sigma, self.version)
        return self.version

    def _sigma(self, progress: float | None) -> float:
        noise = self.session.recipe.noise
        if noise is None:
            return 0.0
        if progress is None or not 0.0 <= progress <= 1.0:
            raise TraceCompileError(
                f"recipe {self.session.recipe.name!r} adds noise that falls while training: pass the finished fraction "
                f"of it, refit(progress=step / steps), 0 to 1, got {progress}"
            )
        return noise.sigma(progress)

    def packed_experts(self) -> SessionExperts:
        """What this twin generates with, for export. ``PruningError`` of a pruned twin: checkpoints have all."""
        self._need_all_experts("be exported")
        return SessionExperts.of_twin(self.session, self.experts, self.provenance)

    def _need_all_experts(self, what: str) -> None:
        if self.pruned is not None:
            raise PruningError(f"a pruned twin has only some experts and cannot {what}; use a twin without keep=")

    def mode(self, recording: Recording | None) -> Mode:
        _, scheme = self.session.recipe.schemes(traced=bool(self.session.outer))
        options = self.session.options
        plain = Mode(
            scheme=scheme,
            unquantized=options.unquantized,
            kept=() if self.pruned is None else self.pruned.counts,
            noise=self.noise is not None,
            quads=True,
            strict=options.strict,
            include=options.include,
            ignore=options.ignore,
        )
        if recording is None:
            return plain
        return replace(
            plain,
            record="none" if scheme is None else recording.mode_kind,
            recorded=frozenset(site.region for site in recording.trace.layout.sites),
            routing=True,
            inputs=recording.inputs is not None,
        )

    @torch.no_grad()
    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trajectory_ids = kwargs.pop("trajectory_ids", None)
        recording = self.session.recording
        mode = self.mode(recording)
        arguments = self.session.arguments(module, args, kwargs)
        decoding = _decodes(arguments.get("input_ids"))
        if recording is None:
            return self.engine.run(module, mode, Call(decoding=decoding), args, kwargs)
        tokens = self.tracker.begin(arguments, trajectory_ids)
        call = Call(valid=tokens.valid, decoding=decoding)
        outputs = self.engine.run(module, mode, call, args, kwargs)
        self.tracker.end(arguments, outputs)
        self.store(recording, tokens, call.emits, decoding=decoding)
        return outputs

    def store(self, recording: Recording, tokens: Tokens, emits: Emits, *, decoding: bool) -> None:
        """Hand one call's records and statistics to the recording."""
        self.append(recording, tokens, record_rows(recording.trace.layout, tokens, emits))
        recording.accumulator.add(emits, tokens.valid, "decode" if decoding else "prefill")
        if recording.inputs is not None:
            recording.inputs.append(tokens.keys, tokens.valid, emits["input"])

    def append(self, recording: Recording, tokens: Tokens, rows: Tensor) -> None:
        """Record rows uint8 [T, R] of this twin's weights under the scales in force."""
        sites, table = recording.trace.layout.sites, None
        if sites and not all(site.outer_bytes for site in sites):
            table = torch.ones(len(sites))  # what formats without outer scales have
            if self.session.outer:
                table = torch.stack([self.session.outer[site.region, site.projection] for site in sites])
        recording.trace.append(tokens.keys, rows, self.version, table, valid=tokens.valid)


class RolloutModule(OwnDecoding):
    """Mixed into the model's class for a twin: forward through packed experts, ``refit()``, ``generate()``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        twin: Twin = self.__dict__[ATTRIBUTE]
        return twin.forward(self, args, kwargs)

    def refit(self, version: int | None = None, *, progress: float | None = None) -> int:
        """See ``Twin.refit``."""
        twin: Twin = self.__dict__[ATTRIBUTE]
        return twin.refit(self, version, progress)

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed experts."""
        twin: Twin = self.__dict__[ATTRIBUTE]
        return twin.packed.nbytes

    def load_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        *,
        format: str = "compressed-tensors",
        version: int | None = None,
    ) -> int:
        """Take packed weights as an engine does: ``(name, tensor)`` pairs of ``stream_weights`` in any order, from
        another process maybe. Returns the new weights version: the given one, or one more than the last.

        All or nothing, and the same stream again changes nothing. Addresses stay. The stream is read to its end first,
        so it takes a second copy of the packed weights. Raises ``RefitError`` or ``ExportError`` naming the tensor that
        is missing, unknown, doubled or does not fit; nothing has changed then. The next ``refit()`` packs the trainer's
        weights again.
        """
        twin: Twin = self.__dict__[ATTRIBUTE]
        return twin.load(self, weights, format, version)

    def stream_weights(self, **options: Any) -> ModelStream:
        """What this twin generates with, for a live engine; see ``exporting.stream_weights``."""
        twin: Twin = self.__dict__[ATTRIBUTE]
        return stream_weights(twin.packed_experts(), self, **options)

    def export(self, path: str | os.PathLike[str], *, format: str = "compressed-tensors", **options: Any) -> Any:
        """Write what this twin generates with, be it behind the trainer or not; see ``exporting.export_model``."""
        twin: Twin = self.__dict__[ATTRIBUTE]
        return export_model(twin.packed_experts(), self, path, format=format, **options)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a twin's experts exist as codes alone, the dense ones in its tree are the trainer's of today."""
        twin: Twin = self.__dict__[ATTRIBUTE]
        if twin.experts:
            raise ExportError(
                "save_pretrained() of a twin would mix its tensors with the trainer's experts; use its export() for "
                "what it generates with, or the trainer's save_pretrained()"
            )
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    @property
    def weights_version(self) -> int:
        """Version of the packed weights; see ``Twin.refit``."""
        twin: Twin = self.__dict__[ATTRIBUTE]
        return twin.version

    def sample(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Sample:
        """Decode a batch fast, with CUDA graphs where there is a GPU; see ``decode.Decoder.sample`` for the options."""
        twin: Twin = self.__dict__[ATTRIBUTE]
        return twin.decoder.sample(self, input_ids, attention_mask, **options)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The class's own ``generate()``; its compilation of decoding is off, this forward is compiled already.

        ``trajectory_ids``, int64 [B] or one per returned sequence, join the keys of what is recorded, as they do in
        the forwards.
        """
        twin: Twin = self.__dict__[ATTRIBUTE]
        own = getattr(super(), "generate", None)
        if own is None:
            raise GuidanceError(f"{twin.session.cls.__name__} has no generate(); call the twin's forward instead")
        args, kwargs, config = uncompiled(args, kwargs)

        def chosen(name: str) -> Any:
            """A setting as generate() resolves it: the call's own, its configuration's, the model's."""
            found = kwargs.get(name, getattr(config, name, None))
            return getattr(getattr(self, "generation_config", None), name, None) if found is None else found

        if twin.session.recording is not None and (chosen("num_beams") or 1) > 1:
            raise GuidanceError("beam search reorders caches, so its tokens cannot be named; record with sampling")
        with _watched(self, twin.tracker, kwargs.pop("trajectory_ids", None), id_tuple(chosen("eos_token_id"))):
            return own(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TraceCompileError(
            "a twin is not copied or pickled: model.rollout(copy=True) makes another, and a deep copy of the model has "
            "twins of its own"
        )


def _decodes(ids: Any) -> bool:
    """Whether a call carries one token per sequence."""
    return isinstance(ids, Tensor) and ids.dim() > 0 and ids.shape[-1] == 1


def make_twin(session: Session, source: nn.Module, *, copies: bool, keep: Kept | None = None) -> nn.Module:
    """Build a twin of ``source`` and fit it."""
    cls = subclass(session.cls, RolloutModule)
    module = cls.__new__(cls)
    reshard(source)
    copies = copies or is_sharded(source)
    twin = Twin(session, source, copies, keep)
    _grow(twin, module)
    if copies:
        own_tensors(module, skip=twin.replaced)
    twin.tracker.eos_token_ids = _eos_ids(module)
    twin.refit(module, progress=0.0)
    session.add_twin(module, twin.engine)
    weakref.finalize(module, twin.release)
    return module


def _grow(twin: Twin, module: nn.Module) -> None:
    """Make ``module`` the root of a tree like the trainer's, over the same tensors. Settings that it has stay."""
    settings = {n: v for n, v in module.__dict__.items() if n in ("config", "generation_config")}
    share_tree(twin.source, into=module)
    own_configs(module, settings)
    forget_fsdp(module)
    put_back(module)
    for name in [n for n in module.__dict__ if n.startswith("_trace_compile")]:
        del module.__dict__[name]
    object.__setattr__(module, ATTRIBUTE, twin)
    module.eval()


@contextlib.contextmanager
def _watched(
    module: Any, tracker: TokenTracker, trajectory_ids: Tensor | None, eos_token_ids: tuple[int, ...]
) -> Iterator[None]:
    """Let ``tracker`` know what one ``generate()`` does not tell the forward: which ids end a sequence, trajectories,
    and the 2-D mask, inferred and expanded, before it becomes a 4-D one."""
    prepare = module.prepare_inputs_for_generation

    @wraps(prepare)
    def watched(*args: Any, **kwargs: Any) -> Any:
        tracker.generation_mask = kwargs.get("attention_mask")
        return prepare(*args, **kwargs)

    before, tracker.eos_token_ids, tracker.trajectory_ids = tracker.eos_token_ids, eos_token_ids, trajectory_ids
    module.__dict__["prepare_inputs_for_generation"] = watched
    try:
        yield
    finally:
        del module.__dict__["prepare_inputs_for_generation"]
        tracker.generation_mask = tracker.trajectory_ids = None
        tracker.eos_token_ids = before


def _eos_ids(module: nn.Module) -> tuple[int, ...]:
    config = getattr(module, "generation_config", None) or getattr(module, "config", None)
    return id_tuple(getattr(config, "eos_token_id", None))
