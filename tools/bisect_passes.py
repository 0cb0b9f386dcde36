"""Names the first pass behind which a model computes something else.

    python -m tools.bisect_passes gpt_oss
    python -m tools.bisect_passes qwen3_moe --scheme "w=nvfp4:pow2:expert|a=nvfp4:pow2:row" --tolerance 0.3
    python -m tools.bisect_passes my_package.my_module:make

Runs the captured graph after every pass and compares results and the gradients of all floating inputs (weights among
them) with those of the captured graph itself: relative root mean square, so quantizing alone differs by some percent.
Prints one line per pass; exits with 1 where one goes beyond the tolerance. Models as for ``dump_graph``.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tools.dump_graph import arguments, call, load
from trace_compile.capture import PackOnUse
from trace_compile.ops import UNQUANTIZED
from trace_compile.passes import PIPELINE, Mode, PassRunner
from trace_compile.passes.graph import clone


def bisect(
    model: Any, mode: Mode, inputs: dict[str, Any], tolerance: float
) -> tuple[str | None, list[tuple[str, float]]]:
    """The first pass beyond ``tolerance`` (or None), and how far the graph is off after each pass up to it."""
    found: list[tuple[str | None, list[tuple[str, float]]]] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        captured = clone(gm)

        def run(*args: Any) -> Any:
            runtime, off = PackOnUse(mode.scheme or UNQUANTIZED), []
            expected = outcome(captured, args, len(args))

            def good(changed: GraphModule) -> bool:
                off.append(distance(outcome(changed, (*args, *feeds(changed, args, runtime)), len(args)), expected))
                return off[-1] <= tolerance

            blamed = PassRunner(PIPELINE).bisect(captured, example_inputs, config=mode, good=good)
            found.append((blamed, list(zip((p.name for p in PIPELINE), off, strict=False))))
            return captured(*args)

        return run

    with torch.no_grad():
        call(model, backend, inputs)
    return found[0]


def outcome(gm: GraphModule, args: tuple[Any, ...], inputs: int) -> list[Tensor]:
    """Floating results, and gradients of the first ``inputs`` arguments under a fixed weighting of the first result."""
    leaves = [a.detach().clone().requires_grad_() if floating(a) else a for a in args[:inputs]]
    with torch.enable_grad():
        results = [r for r in gm(*leaves, *args[inputs:]) if floating(r)]
        weights = torch.linspace(-1, 1, results[0].numel()).view_as(results[0])
        wanted = [a for a in leaves if floating(a)]
        grads = torch.autograd.grad((results[0] * weights).sum(), wanted, allow_unused=True)
    return [r.detach() for r in results] + [torch.zeros_like(a) if g is None else g for a, g in zip(wanted, grads)]


def feeds(gm: GraphModule, args: tuple[Any, ...], runtime: PackOnUse) -> list[Tensor]:
    """The packed weights that a graph between two passes asks for, as the backend would resolve them."""
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    regions = {r.name: r for r in gm.meta.get("regions", ())}
    found = []
    for feed in gm.meta.get("feeds", ()):
        region = regions[feed.region]
        expert, _ = region.weight(feed.weight)
        param = expert.master({p.name: args[names.index(p.placeholder)] for p in expert.parameters})
        found.append(getattr(runtime.packed(region, feed.weight, param), feed.part))
    return found


def floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest relative root mean square; of something that should be zero, its root mean square."""
    pairs = zip(found, expected, strict=False)  # results that passes appended come last
    return max(float((a - b).square().mean().sqrt() / (b.square().mean().sqrt() or 1.0)) for a, b in pairs)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    options = parser.parse_args(words)
    model, inputs, mode = load(options)
    blamed, off = bisect(model, mode, inputs, options.tolerance)
    for name, much in off:
        print(f"{name}: {much:.3g}")
    print(f"first pass beyond {options.tolerance}: {blamed or 'none'}")
    return int(blamed is not None)


if __name__ == "__main__":
    sys.exit(main())
