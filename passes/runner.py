"""Runs passes in order: named, timed, checked after each, dumped, skipped, bisected.

A pass is ``run(gm, example_inputs, *, config) -> gm``. It works on any graph of the level it is written for and keeps
what later passes need on the graph itself (``gm.meta``, ``node.meta``), so a pass can be run, or left out, alone.

Invariants, checked after every pass by :func:`verify`:

- the graph lints, and so does every checkpointed subgraph;
- the model's own inputs and results stand first, in their order; feeds and emits follow, in the order of ``gm.meta``;
- a checkpoint call passes as many operands as its subgraph has inputs;
- every op of the intermediate representation carries its region.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch.fx import GraphModule

from ..errors import PassError
from .graph import clone, op_name, output_of, placeholders, scopes

IR_OPS = ("moe_float", "nvfp4_moe", "nvfp4_linear")


class Run(Protocol):
    def __call__(self, gm: GraphModule, example_inputs: list[Any], *, config: Any) -> GraphModule: ...


@dataclass(frozen=True)
class Pass:
    """One pass. ``changes_numerics`` False promises bitwise equal results and gradients; tests hold it to that."""

    name: str
    changes_numerics: bool
    run: Run


@dataclass(frozen=True)
class PassTiming:
    name: str
    seconds: float
    nodes: int


@dataclass
class PassRunner:
    """Runs ``passes`` except ``disabled``; ``dump_dir`` gets the graph before the first and after each pass."""

    passes: Sequence[Pass]
    disabled: Iterable[str] = ()
    dump_dir: Path | None = None
    timings: list[PassTiming] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = [p.name for p in self.passes]
        unknown = sorted(set(self.disabled) - set(known))
        if unknown:
            raise PassError(f"no pass is called {unknown[0]!r}; passes: {', '.join(known)}")

    def run(self, gm: GraphModule, example_inputs: list[Any], *, config: Any) -> GraphModule:
        """All passes in order, on ``gm`` itself. Raises ``PassError`` naming the pass that broke an invariant."""
        self.timings = []
        text = self._dump(gm, 0, "captured", "")
        for number, step in enumerate(self.passes, 1):
            if step.name in self.disabled:
                continue
            start = time.perf_counter()
            gm = step.run(gm, example_inputs, config=config)
            seconds = time.perf_counter() - start
            verify(gm, step.name, len(example_inputs))
            self.timings.append(PassTiming(step.name, seconds, sum(len(s.graph.nodes) for s in scopes(gm))))
            text = self._dump(gm, number, step.name, text)
        return gm

    def bisect(
        self, gm: GraphModule, example_inputs: list[Any], *, config: Any, good: Callable[[GraphModule], bool]
    ) -> str | None:
        """The first pass after which ``good(graph)`` is False, or None if it never is. ``gm`` is not changed."""
        gm = clone(gm)
        for step in self.passes:
            if step.name not in self.disabled:
                gm = step.run(gm, example_inputs, config=config)
                if not good(clone(gm)):
                    return step.name
        return None

    def _dump(self, gm: GraphModule, number: int, name: str, before: str) -> str:
        if self.dump_dir is None:
            return ""
        self.dump_dir.mkdir(parents=True, exist_ok=True)
        text = readable(gm)
        stem = f"{number:02d}_{name}"
        (self.dump_dir / f"{stem}.txt").write_text(text)
        if before:
            changes = difflib.unified_diff(before.splitlines(True), text.splitlines(True), "before", "after", n=2)
            (self.dump_dir / f"{stem}.diff").write_text("".join(changes))
        return text


def readable(gm: GraphModule) -> str:
    """The graph and its checkpointed subgraphs, one node a line."""
    parts = []
    for scope in scopes(gm):
        title = "root" if scope.call is None else f"{scope.call.args[0]} of {scope.call}"
        parts.append(f"# {title}\n" + "\n".join(n.format_node() or f"return {n.args[0]}" for n in scope.graph.nodes))
    return "\n\n".join(parts) + "\n"


def verify(gm: GraphModule, after: str, inputs: int) -> None:
    """Raises ``PassError`` naming the pass ``after`` which an invariant does not hold."""

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise PassError(f"after pass {after!r}: {what}")

    feeds, emits = gm.meta.get("feeds", ()), gm.meta.get("emits", ())
    ours = placeholders(gm.graph)
    check(len(ours) == inputs + len(feeds), f"{len(ours)} inputs, expected {inputs} and {len(feeds)} feeds")
    check([n.meta.get("feed") for n in ours] == [None] * inputs + list(feeds), "feeds are out of order")
    results = output_of(gm.graph).args[0]
    original = gm.meta.get("results", len(results) - len(emits))  # type: ignore[arg-type]
    check(len(results) == original + len(emits), f"{len(results)} results, expected {original} and {len(emits)} emits")  # type: ignore[arg-type]
    for scope in scopes(gm):
        try:
            scope.graph.lint()
        except (RuntimeError, AssertionError) as error:
            raise PassError(f"after pass {after!r}: {error}") from error
        if scope.call is not None:
            given, taken = len(scope.call.args) - 1, len(placeholders(scope.graph))
            check(given == taken, f"{scope.call} passes {given} operands to a subgraph with {taken} inputs")
        for node in scope.graph.nodes:
            check(op_name(node) not in IR_OPS or "region" in node.meta, f"{node} carries no region")
