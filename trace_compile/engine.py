"""Runs one module through the pass pipeline: one compiled entry per mode, each with a code object of its own.

Dynamo keeps its cache on the code object of the function it compiles. Two models of one class, or a trainer and its
twin, would share that cache, its recompilation limit and each other's misses. So every (module, mode) gets a fresh copy
of a small entry function: nothing is shared, and the number of compilations per mode can be counted and bounded.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from trace_compile.adapters import capturable_adapters
from trace_compile.capture import Backend, CompileReport, capturing
from trace_compile.errors import GraphCaptureError
from trace_compile.passes.mode import Mode, Unquantized
from trace_compile.passes.region import MoERegion, Region
from trace_compile.pieces import PARALLEL, Piece, Running, Scene, find_pieces, tied
from trace_compile.runtime import Call, GraphRuntime

RECOMPILE_LIMIT = 16
"""Graphs one mode may have: train and inference, with and without cache, lengths 0 and 1 apart; more is a bug."""


class Engine:
    """Compiled forwards of one module.

    Args:
        forward: the original class's forward function, taking the module first.
        runtime: resolves feeds and receives emits.
        compiler: what compiles the rewritten graph: ``"inductor"``, ``"aot_eager"`` or ``"eager"``; None: by the device
            where the module is when a graph is first needed, for models are moved.
        prefix: dotted path of the module, with a dot behind it, where it is a piece of a model.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        runtime: GraphRuntime,
        *,
        compiler: str | None,
        disabled_passes: Iterable[str] = (),
        dump_dir: str | None = None,
        prefix: str = "",
    ) -> None:
        self._forward = forward
        self.runtime = runtime
        self._compiler = compiler
        self._prefix = prefix
        self._options: dict[str, Any] = {"disabled_passes": tuple(disabled_passes), "dump_dir": dump_dir}
        self._scene = Scene()
        self._pieces: dict[str, Engine] = {}
        self.experts: int | None = None
        """All experts of a piece that holds this rank's part of them."""
        self._entries: dict[tuple[Mode, str], tuple[Callable[..., Any], Backend]] = {}

    def run(self, module: nn.Module, mode: Mode, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``module`` in ``mode``; what the graphs emit is left in ``call.emits``.

        As one graph, or, where other ranks have to be heard on the way, piece by piece: see ``pieces``.
        """
        _install_output_hooks(module, kwargs)
        self.runtime.device = next((p.device for p in module.parameters()), self.runtime.device)
        pieces = {} if self._prefix else find_pieces(module)
        if pieces:
            return self._run_pieces(pieces, module, Running(mode, call), args, kwargs)
        entry, _ = self._entry(mode)
        limit = torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT)
        with self.runtime.calling(call), capturing(), capturable_adapters(), limit:
            return entry(module, *args, **kwargs)

    def _run_pieces(
        self, pieces: dict[str, nn.Module], module: nn.Module, running: Running, args: Any, kwargs: Any
    ) -> Any:
        mode = running.mode
        if mode.include or mode.unquantized != Unquantized():
            raise GraphCaptureError(
                "quantized linear layers (include=) and unquantized= count modules of the whole model, and this one is "
                "sharded over ranks and compiled in pieces; leave both out"
            )
        for name, piece in pieces.items():
            stands_in = piece.__dict__.get("forward")
            if not isinstance(stands_in, Piece) or stands_in.scene is not self._scene:
                piece.__dict__["forward"] = self._new_piece(name, piece)
        self._scene.enter(running)
        try:
            return self._forward(module, *args, **kwargs)
        finally:
            self._scene.leave()

    def _new_piece(self, name: str, module: nn.Module) -> Piece:
        stands_in = Piece(name, module, self._scene)
        forward = tied(type(module).forward) if stands_in.bare else type(module).forward
        engine = self._pieces[name] = Engine(
            forward, self.runtime, compiler=self._compiler, prefix=f"{name}.", **self._options
        )
        exchange = module.__dict__.get(PARALLEL)
        engine.experts = None if exchange is None else exchange.experts
        stands_in.engine = engine
        return stands_in

    def _entry(self, mode: Mode) -> tuple[Callable[..., Any], Backend]:
        compiler = self._compiler or ("eager" if self.runtime.device.type == "cpu" else "inductor")
        key = (mode, compiler)
        if key not in self._entries:
            backend = Backend(mode, self.runtime, compiler=compiler, prefix=self._prefix, **self._options)
            compiled = torch.compile(own_code(self._forward), backend=backend, fullgraph=True, dynamic=True)
            self._entries[key] = (compiled, backend)
        return self._entries[key]

    @property
    def reports(self) -> dict[Mode, list[CompileReport]]:
        found: dict[Mode, list[CompileReport]] = {}
        for (mode, _), (_, backend) in self._entries.items():
            found.setdefault(mode, []).extend(backend.reports)
        for piece in self._pieces.values():
            for mode, reports in piece.reports.items():
                found.setdefault(mode, []).extend(reports)
        return found

    def regions(self, mode: Mode) -> tuple[Region, ...]:
        """Of the latest graph of ``mode``, or of the latest of each piece, in model order."""
        found = [region for piece in self._pieces.values() if mode in piece.reports for region in piece.regions(mode)]
        return tuple(self._whole(region) for region in found or self.reports[mode][-1].regions)

    def _whole(self, region: Region) -> Region:
        """A graph of spread experts shows this rank's alone."""
        if self.experts is None or not isinstance(region, MoERegion):
            return region
        return replace(region, num_experts=self.experts)

    @property
    def compile_counts(self) -> dict[Mode, int]:
        return {mode: len(reports) for mode, reports in self.reports.items()}


def own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` behind a function whose code object nobody else has."""

    def entry(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    own = types.FunctionType(
        entry.__code__.replace(), entry.__globals__, entry.__name__, entry.__defaults__, entry.__closure__
    )
    return own


_OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")
_INSTALLED = "_output_capturing_hooks_installed"


def _install_output_hooks(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """What transformers does at the first call that wants more outputs, under a lock that no compiler captures.

    Not before, for models with these hooks cannot be pickled. Outer models install the hooks of the models inside.
    """
    config = getattr(module, "config", None)
    if not any(kwargs.get(name) or getattr(config, name, False) for name in _OUTPUTS):
        return
    if any(getattr(part, _INSTALLED, False) for part in module.modules()):
        return
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            maybe_install_capturing_hooks(part)
