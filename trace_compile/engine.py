"""Runs one module through the pass pipeline: one compiled entry per mode, each with a code object of its own.

Dynamo keeps its cache on the code object of the function it compiles. Two models of one class, or a trainer and its
twin, would share that cache, its recompilation limit and each other's misses. So every (module, mode) gets a fresh copy
of a small entry function: nothing is shared, and the number of compilations per mode can be counted and bounded.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from trace_compile.adapters import capturable_adapters
from trace_compile.capture import Backend, CompileReport, capturing
from trace_compile.passes.mode import Mode
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
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        runtime: GraphRuntime,
        *,
        compiler: str | None,
        disabled_passes: Iterable[str] = (),
        dump_dir: str | None = None,
    ) -> None:
        self._forward = forward
        self.runtime = runtime
        self._compiler = compiler
        self._options: dict[str, Any] = {"disabled_passes": tuple(disabled_passes), "dump_dir": dump_dir}
        self._entries: dict[tuple[Mode, str], tuple[Callable[..., Any], Backend]] = {}

    def run(self, module: nn.Module, mode: Mode, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``module`` in ``mode``; what the graph emits is left in ``call.emits``."""
        _install_output_hooks(module, kwargs)
        self.runtime.device = next((p.device for p in module.parameters()), self.runtime.device)
        entry, _ = self._entry(mode)
        limit = torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT)
        with self.runtime.calling(call), capturing(), capturable_adapters(), limit:
            return entry(module, *args, **kwargs)

    def _entry(self, mode: Mode) -> tuple[Callable[..., Any], Backend]:
        compiler = self._compiler or ("eager" if self.runtime.device.type == "cpu" else "inductor")
        key = (mode, compiler)
        if key not in self._entries:
            backend = Backend(mode, self.runtime, compiler=compiler, **self._options)
            compiled = torch.compile(own_code(self._forward), backend=backend, fullgraph=True, dynamic=True)
            self._entries[key] = (compiled, backend)
        return self._entries[key]

    @property
    def reports(self) -> dict[Mode, list[CompileReport]]:
        found: dict[Mode, list[CompileReport]] = {}
        for (mode, _), (_, backend) in self._entries.items():
            found.setdefault(mode, []).extend(backend.reports)
        return found

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
