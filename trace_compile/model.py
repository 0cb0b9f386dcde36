"""The object users hold: their own model with a compiled forward and the methods of the train/rollout loop.

``trace_compile(model)`` gives the model a subclass of its own class. Parameters, names, state dict, hooks,
``isinstance`` and the optimizer's references stay what they were; only ``forward`` now runs the rewritten graph, and
the methods below are there. A deep copy is compiled anew with the same options and scales; a pickle holds
the plain model.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from trace_compile.clone import rebind, subclass
from trace_compile.diagnose import SiteReport, diagnose, running
from trace_compile.errors import ExportError, FingerprintMismatchError, GuidanceError
from trace_compile.explain import Explanation
from trace_compile.generation import OwnDecoding, uncompiled
from trace_compile.recipes import Recipe
from trace_compile.rollout import RolloutModule, make_twin
from trace_compile.session import Options, RangeAccumulator, Recording, RecordKind, Session
from trace_compile.state.inputs import InputLog
from trace_compile.state.ranges import Ranges, RangeWarning
from trace_compile.state.sharded import is_sharded, plain_class
from trace_compile.state.trace import DEFAULT_MAX_BYTES, Trace
from trace_compile.state.usage import Kept

ATTRIBUTE = "_trace_compile"


def session_of(model: nn.Module) -> Session:
    """The session of a model that ``trace_compile`` returned."""
    return model.__dict__[ATTRIBUTE]


class TraceCompiledModule(nn.Module):
    """Mixed into the model's class by ``trace_compile``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = session_of(self)
        session.attend(self)
        outputs = super().__call__(*args, **kwargs)
        session.shards.check()  # behind FSDP2's hooks, which an exception would leave in the middle of a forward
        return outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return session_of(self).forward(self, args, kwargs)

    def explain(self) -> Explanation:
        """What was rewritten, how each op is run and why, and what was left alone. Prints as a table.

        Raises ``NoMoERegionError`` if the model has not been captured yet.
        """
        return Explanation.of(session_of(self))

    def rollout(self, *, copy: bool = False, keep: Kept | None = None) -> RolloutModule:
        """A generation twin with packed experts, fitted to the current weights.

        Args:
            copy: ``False`` shares all non-expert tensors with the trainer, so those follow each optimizer step at once.
                ``True`` gives the twin its own, so that the whole policy stays what the last ``refit()`` made it. Twins
                of sharded trainers always have their own, gathered by ``refit()``, which all ranks have to call: each
                rank's twin is whole and generates without the others.
            keep: prune the experts to these, chosen from a trace (``trace.usage.top(m)``, ``.covering(share)``): its
                routers choose among them alone, its packed weights hold them alone. ``PruningError`` for experts that
                there are not, or fewer than a router takes per token.
        """
        return make_twin(session_of(self), self, copies=copy, keep=keep)  # type: ignore[return-value]

    @contextmanager
    def trace(
        self,
        *,
        record: RecordKind | None = None,
        inputs: bool = False,
        max_bytes: int = DEFAULT_MAX_BYTES,
        folder: str | os.PathLike[str] | None = None,
        worker: str = "0",
        group: Any = "world",
    ) -> Iterator[Trace]:
        """Record what the twins do inside the ``with``: ranges, quantization outcomes of the guided layers, routing.

        Args:
            record: ``"bit"`` or ``"code"`` per element, or ``"ranges"`` alone. Default: what the recipe replays.
            inputs: also keep the raw inputs of the recorded sites, for ``diagnose`` (large; not for training).
            max_bytes: bound on the memory of the records.
            folder, worker: also write the records there while they come, as this worker; ``Trace.load(folder)`` reads
                what all workers wrote, in any process, at any time (see ``state.shards``).
            group: with ``torch.distributed``, the ranks over which ranges are merged when the block ends, in one
                collective that all of them have to reach: ``"world"``, a process group, or ``None`` for this rank alone
                (ranks then choose scales of their own). Records stay on the rank that made them.

        Yields the ``Trace``. When the block ends without an error its ranges become the ones that the next ``refit()``
        adopts. Nothing quantizes with ranges that are still being observed.
        """
        session = session_of(self)
        if session.recording is not None:
            raise GuidanceError("a trace is being recorded already; close it before opening another")
        replayed = session.recipe.guidance
        if record in ("bit", "code") and (session.recipe.rollout is None or session.recipe.rollout.act is None):
            raise GuidanceError(
                f"record={record!r}: the rollout of recipe {session.recipe.name!r} quantizes no activations and has no "
                "outcomes to record; use record='ranges'"
            )
        kind: RecordKind = record or ("ranges" if replayed == "none" else replayed)  # type: ignore[assignment]
        about = {"name": session.recipe.name, "record": kind}
        trace = Trace(session.layout(kind), session.fingerprint, about, max_bytes=max_bytes)
        if folder is not None:
            trace.record_into(folder, worker)
        recording = Recording(trace, kind, RangeAccumulator(session.experts), inputs=InputLog() if inputs else None)
        session.recording = recording
        try:
            yield trace
        finally:
            session.recording = None
        trace.ranges = session.over_ranks(recording.accumulator.ranges(), group)
        trace.usage = recording.accumulator.usage()
        trace.inputs = recording.inputs
        trace.close()
        if trace.ranges.sites:
            session.pending_ranges = trace.ranges
            for problem in trace.ranges.stale():
                warnings.warn(problem, RangeWarning, stacklevel=3)

    def guide(self, trace: Trace | None, *, diagnose: bool = False) -> TraceCompiledModule:
        """Let the following training forwards replay ``trace`` wherever it has a record; ``None`` ends that.

        diagnose: they also count how far their operands are from the rollout's; ``diagnostics()`` says so. That takes
            a few more passes over the recorded sites. A trace of whole codes then serves recipes that replay bits, or
            nothing, and tells more.

        Raises ``FingerprintMismatchError`` for a trace of another model or rollout recipe, ``GuidanceError`` for one
        that recorded no outcomes.
        """
        session = session_of(self)
        if trace is not None:
            if trace.fingerprint != session.fingerprint:
                raise FingerprintMismatchError(
                    f"the trace has fingerprint {trace.fingerprint}, this model with recipe {session.recipe.name!r} "
                    f"has {session.fingerprint}; use a trace recorded with this model's twin"
                )
            kinds = {site.kind for site in trace.layout.sites}
            usable = {"none", *kinds} | ({"bit"} if diagnose and "code" in kinds else set())
            if session.recipe.guidance not in usable:
                raise GuidanceError(
                    f"recipe {session.recipe.name!r} replays {session.recipe.guidance!r} records, the trace has "
                    f"{', '.join(sorted(kinds)) or 'ranges only'}; record with model.trace(record="
                    f"{session.recipe.guidance!r}) or use trace.compact()"
                )
            if diagnose and session.recipe.guidance == "none" and kinds != {"code"}:
                raise GuidanceError(
                    f"recipe {session.recipe.name!r} replays nothing, so only whole codes say how far it is from the "
                    "rollout; record with model.trace(record='code')"
                )
        session.guiding, session.diagnosing, session.diagnostics = trace, diagnose, {}
        return self

    def diagnostics(self) -> tuple[SiteReport, ...]:
        """What the forwards since ``guide(trace, diagnose=True)`` counted, site by site; waits for the device."""
        return running(session_of(self))

    def use_ranges(self, ranges: Ranges) -> None:
        """Set the scales of both graphs from ``ranges`` (of ``trace.ranges``), as the ``refit()`` after that trace did:
        for a run that continues with ``Trace.load(...).ranges``. Raises ``GuidanceError`` naming unobserved sites."""
        session_of(self).adopt_ranges(ranges)

    def diagnose(self, trace: Trace, *args: Any, **kwargs: Any) -> tuple[SiteReport, ...]:
        """Run one forward on these inputs and compare each recorded site with ``trace``; see ``diagnose.diagnose``."""
        return diagnose(session_of(self), self, trace, args, kwargs)

    def export(self, path: str | os.PathLike[str], *, format: str = "compressed-tensors", **options: Any) -> Any:
        """Write a checkpoint of the current weights as the rollout sees them; see ``exporting.export_model``."""
        from trace_compile.exporting import SessionExperts, export_model

        if is_sharded(self):
            raise ExportError("each rank has a part of this model only: export a twin, which is whole")
        return export_model(SessionExperts.of_model(session_of(self), self), self, path, format=format, **options)

    def stream_weights(self, **options: Any) -> Any:
        """The same tensors one at a time, for a live engine; see ``exporting.stream_weights`` and ``engines``."""
        from trace_compile.exporting import SessionExperts, stream_weights

        return stream_weights(SessionExperts.of_model(session_of(self), self), self, **options)

    def import_checkpoint(self, path: str | os.PathLike[str]) -> Any:
        """Fill this model from a packed or dense checkpoint; see ``importing.import_checkpoint``. Refit twins then."""
        from trace_compile.importing import import_checkpoint

        return import_checkpoint(session_of(self), self, path)

    @property
    def trace_state(self) -> Session:
        """What a checkpoint keeps beside weights and optimizer (ranges, scales, weights version): ``state_dict()`` and
        ``load_state_dict()``, as ``torch.distributed.checkpoint`` and others take it. Equal on all ranks."""
        return session_of(self)

    def refresh(self) -> None:
        """Pack again at the next forward, for writes that autograd's version counter does not see (``param.data``).

        Not needed after the step of a ``torch.optim`` optimizer. ``refit()`` packs always, but without this it does
        not know that such weights are new ones and gives them no version of their own.
        """
        session = session_of(self)
        session.weights.refresh()
        session.shards.weights.refresh()
        session.versions.refresh()

    def _plain(self) -> nn.Module:
        """This model without the compiled part, over the same tensors and submodules."""
        session = session_of(self)
        plain = session.cls.__new__(session.cls)
        plain.__dict__.update({k: v for k, v in self.__dict__.items() if k != ATTRIBUTE})
        rebind(plain, {id(self): plain})
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        session = session_of(self)
        clone = attach(copy.deepcopy(self._plain(), memo), session.recipe, session.options)
        session_of(clone).inherit(session)
        return clone

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_it_is, (self._plain(),)


class GeneratingModule(OwnDecoding, TraceCompiledModule):
    """Mixed in instead where the model's class has ``generate()``."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The class's own ``generate()`` in the trainer's arithmetic, never guided.

        A guide replays what a rollout rounded its own tokens to, for training on them; samples are drawn from the
        policy as it is. Forwards of a guided model are guided as before.
        """
        session = session_of(self)
        args, kwargs, _ = uncompiled(args, kwargs)
        guiding, session.guiding = session.guiding, None
        try:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            session.guiding = guiding


def attach(model: nn.Module, recipe: Recipe, options: Options) -> nn.Module:
    """Give ``model`` the compiled class and a session of its own."""
    cls = type(model)
    object.__setattr__(model, ATTRIBUTE, Session(model, plain_class(cls), recipe, options))
    model.__class__ = subclass(cls, GeneratingModule if hasattr(cls, "generate") else TraceCompiledModule)
    return model


def _as_it_is(model: nn.Module) -> nn.Module:
    """What unpickling calls: the pickle holds a plain model."""
    return model
