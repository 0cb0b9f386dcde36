"""Where a model's forward is cut: at modules whose hooks talk to other ranks, which no graph may swallow.

FSDP2 gathers a layer's parameters in a hook in front of it and frees them behind it; expert parallelism exchanges
tokens around the experts. One graph of the whole model has no room for either. Such a model's forward runs as it is
written, and each *piece*, the largest module around some experts that has none of those hooks inside of it, is compiled
by itself, with its own hooks around the compiled forward.

A piece answers to the forward that runs around it (mode and call), also when activation checkpointing runs it again in
the backward. Called by itself it is the plain module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.conv import _ConvNd

from trace_compile.errors import GuidanceError
from trace_compile.passes.mode import Mode
from trace_compile.runtime import Call, GuideRows
from trace_compile.state.guidance import Guidance
from trace_compile.state.sharded import is_fsdp, unmark_fsdp

if TYPE_CHECKING:
    from trace_compile.engine import Engine

PARALLEL = "_trace_compile_parallel"
"""Attribute of modules whose forward exchanges tokens with other ranks; see ``expert_parallel``."""


def find_pieces(root: nn.Module) -> dict[str, nn.Module]:
    """Pieces by dotted name; none where the whole of ``root`` can be captured."""
    if not ("torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()):
        return {}
    modules = dict(root.named_modules())
    edges = [n for n, m in modules.items() if n and (is_fsdp(m) or PARALLEL in m.__dict__)]
    if not edges:
        return {}
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if isinstance(module, _ConvNd) or not any(p is not None and p.dim() == 3 for p in module._parameters.values()):
            continue
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            if not any(edge.startswith(f"{prefix}.") for edge in edges):
                found[prefix] = modules[prefix]
                break
    return found


@dataclass(frozen=True)
class Running:
    """The forward that is under way."""

    mode: Mode
    call: Call


@dataclass
class Scene:
    """What the pieces of one engine share: the forward that runs, and those that a backward may run again."""

    now: Running | None = None
    _last: Running | None = None
    _seen: dict[tuple[str, int], tuple[StorageWeakRef, Running]] = field(default_factory=dict)

    def enter(self, running: Running) -> None:
        self.now = self._last = running
        self._seen = {key: value for key, value in self._seen.items() if not value[0].expired()}

    def leave(self) -> None:
        self.now = None

    def of(self, piece: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Running | None:
        """The forward that a call of ``piece`` belongs to; None for a call from outside."""
        x = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        key = (piece, -1 if x is None else x.untyped_storage()._cdata)
        if self.now is not None:
            if x is not None and self.now.mode.train:
                self._seen[key] = (StorageWeakRef(x.untyped_storage()), self.now)
            return self.now
        if torch._C._current_graph_task_id() == -1:
            return None
        storage, running = self._seen.get(key, (None, None))
        if storage is not None and not storage.expired():
            return running
        if self._last is not None and self._last.call.guidance is not None:
            raise GuidanceError(
                f"{piece} is recomputed in a backward on inputs that no forward was seen with, so its guidance is not "
                "known; use checkpointing that keeps a layer's inputs, or model.guide(None)"
            )
        return self._last


class Piece:
    """Stands in the place of a module's ``forward``, and runs it compiled while its model runs.

    Args:
        name: dotted name of the module.
        module: the module.
        scene: tells which forward is running.
    """

    engine: Engine

    def __init__(self, name: str, module: nn.Module, scene: Scene) -> None:
        self.name = name
        self.module = module
        self.scene = scene
        self.replaced = module.__dict__.get("forward")
        """The module's own forward, if it had one beside its class's."""
        self.bare = any(p is not None and p.dim() == 3 for p in module._parameters.values())
        """Whether these are the experts themselves, called with tokens, ids and gates."""
        unmark_fsdp(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = self.scene.of(self.name, args, kwargs)
        if running is None:
            return self.plain(*args, **kwargs)
        mode, call = running.mode, running.call
        exchange = self.module.__dict__.get(PARALLEL)
        if exchange is None:
            return self._compiled(mode, call, args, kwargs)
        if mode.record != "none" or mode.inputs or mode.diagnose or mode.replay:
            raise GuidanceError(
                f"{self.name} is spread over ranks: recording, diagnosing and replay of routing are for twins, which "
                "are whole on their rank"
            )

        def compute(x: Tensor, ids: Tensor, gates: Tensor, guide: GuideRows | None) -> Tensor:
            return self._compiled(mode, Call(guidance=guide), (x, ids, gates), {})

        guided = mode.guides(self.name) and isinstance(call.guidance, Guidance)
        if guided and any(s.region == self.name and s.projection == "down" for s in call.guidance.layout.sites):  # type: ignore[union-attr]
            raise GuidanceError(
                f"{self.name} is spread over ranks, which know its experts by other numbers than the trace: its down "
                "projections are not guided; record sites=('gate_up',)"
            )
        guide = GuideRows.of(call.guidance, (self.name,)) if guided else None  # type: ignore[arg-type]
        return exchange.run(self.module, args, kwargs, guide, compute)

    def _compiled(self, mode: Mode, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.bare:  # only the number of tokens varies
            args = tuple(inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs).args[1:])
            for t in args:
                torch._dynamo.mark_static(t, 1)
            kwargs = {}
        return self.engine.run(self.module, mode, call, args, kwargs)

    @property
    def plain(self) -> Callable[..., Any]:
        """The module's own forward."""
        return self.replaced or type(self.module).forward.__get__(self.module)


def tied(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of experts by themselves, with what Dynamo cannot know: one row of ids and gates per token."""

    def tied_forward(module: nn.Module, *args: Any) -> Any:
        for t in args[1:]:
            torch._check(t.shape[0] == args[0].shape[0])
        return forward(module, *args)

    return tied_forward


def put_back(root: nn.Module) -> None:
    """Give the modules of a tree that shares attributes with a cut model their own forwards again, and all experts."""
    for module in root.modules():
        stands_in = module.__dict__.get("forward")
        if isinstance(stands_in, Piece):
            if stands_in.replaced is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = stands_in.replaced
        exchange = module.__dict__.pop(PARALLEL, None)
        if exchange is not None:
            del module.__dict__["forward"]
            if getattr(module, "num_experts", None) == exchange.mine:
                module.num_experts = exchange.experts
