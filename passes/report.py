"""What a compilation did to the model, in records that can be kept and printed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from .experts import PRODUCTS
from .graph import dotted_name, fake, op_name, origin, scopes, shape
from .lower import Choice
from .mode import Mode
from .region import Emit, Feed, LinearRegion, MoERegion, NoMatch, Region
from .runner import PassTiming


@dataclass(frozen=True)
class CompileReport:
    """One compiled graph. ``untouched``: dotted names of the other matrices that it multiplies by, in model order."""

    mode: Mode
    regions: tuple[Region, ...]
    unmatched: tuple[NoMatch, ...]
    choices: tuple[Choice, ...]
    untouched: tuple[str, ...]
    feeds: tuple[Feed, ...]
    emits: tuple[Emit, ...]
    timings: tuple[PassTiming, ...]
    seconds: float
    """Seconds for the passes and the inner compiler."""

    def __str__(self) -> str:
        lines = [f"scheme {self.mode.scheme.key if self.mode.scheme else 'none (identity)'}"]
        for region in self.regions:
            choice = next((c for c in self.choices if c.region == region.name), None)
            runs = f"{choice.op} by {choice.provider} ({choice.reason})" if choice else "not lowered"
            lines.append(f"{region.name}: {_describe(region)}; {runs}")
        lines += [f"left as it is: {reason}" for reason in self.unmatched]
        lines.append(f"untouched: {', '.join(self.untouched) or 'nothing'}")
        lines.append("passes: " + ", ".join(f"{t.name} {1e3 * t.seconds:.1f} ms" for t in self.timings))
        return "\n".join(lines)


def _describe(region: Region) -> str:
    if isinstance(region, LinearRegion):
        return f"linear, K={region.hidden} N={'+'.join(map(str, region.rows))}{', biased' if region.b else ''}"
    return (
        f"{region.source}, E={region.num_experts} K={region.top_k} H={region.hidden} I={region.width}, "
        f"{_layout(region)}, {formula(region)}"
    )


def formula(region: MoERegion) -> str:
    """The region's activation as an expression, e.g. ``silu(gate) * up``."""
    infix = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
    values: dict[str, tuple[str, str]] = {}  # text and outermost operation of each step
    for i, (name, args) in enumerate(region.activation.steps):
        parts = [values.get(a, (a, "")) if isinstance(a, str) else (str(a), "") for a in args]
        if name in infix:
            loose = (name,) if name in ("add", "mul") else ()
            words = [f"({text})" if op in infix and op not in loose else text for text, op in parts]
            values[f"%{i}"] = (f" {infix[name]} ".join(words), name)
        else:
            values[f"%{i}"] = (f"{name}({', '.join(text for text, _ in parts)})", name)
    return values[f"%{len(region.activation.steps) - 1}"][0]


def _layout(region: MoERegion) -> str:
    words = ["[E, K, N]" if region.w13_layout.transposed else "[E, N, K]"]
    words += ["interleaved"] if region.w13_layout.interleaved else []
    words += ["biased"] if region.b13 or region.b2 else []
    words += ["gates on the input"] if region.weight_input else []
    return ", ".join(words)


def untouched(gm: GraphModule) -> tuple[str, ...]:
    """Dotted names of the parameters that products and embeddings outside of all regions use."""
    names: dict[str, None] = {}
    for scope in scopes(gm):
        for node in scope.graph.nodes:
            if op_name(node) not in (*PRODUCTS, "embedding"):
                continue
            for operand in node.all_input_nodes:
                root = origin(scope, operand) if operand.op == "placeholder" else None
                if root is not None and len(shape(root) or ()) >= 2 and isinstance(fake(root), torch.nn.Parameter):
                    names[dotted_name(root)] = None
    return tuple(names)
