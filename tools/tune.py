"""Measures launches of the inference kernels on this GPU and writes the table that ``kernels.moe_launch`` reads.

    python -m tools.tune [--shapes Qwen3] [--tokens 1 8] [--write]

For each shape and number of tokens, the gate/up launch is chosen with the down launch as it is, then the down launch.
Every launch has to give the bits that the others give, which the first call of each checks. Without ``--write`` the
result is printed only. Launches are compiled in processes of their own, many at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import torch
import triton

from tools.bench.layers import SHAPES, TOKENS, Call, Layer, Shape, copies_of
from tools.bench.timing import microseconds
from trace_compile.kernels import moe_launch as launches
from trace_compile.kernels.launch import target_of
from trace_compile.kernels.moe_forward import forward
from trace_compile.kernels.moe_launch import GemmLaunch, MoELaunch, moe_launch, segments
from trace_compile.ops import W4A16, Out

FOLDER = Path(launches.__file__).with_name("launches")


def candidates(start: GemmLaunch, columns: int, k: int, gated: bool) -> list[GemmLaunch]:
    """Launches to try around ``start``: its tile, programs of fitting size."""
    found = {start}
    for block_n in (16, 32, 64, 128, 256):
        for warps in (1, 2, 4, 8):
            accumulators = (2 if gated else 1) * start.tile * block_n // (32 * warps)
            if 16 * warps <= block_n and 2 <= accumulators <= 128 and (start.tile <= 16 or warps >= 4):
                found |= {GemmLaunch(start.tile, block_n, stages, warps) for stages in (3, 4)}
    parts = segments(columns, k)
    if parts > 1 and start.tile <= 16:
        found |= {GemmLaunch(start.tile, n, s, parts, side_by_side=True) for n in (16, 32, 64) for s in (3, 4, 6)}
    return sorted(found, key=astuple)


def _run(shape: Shape, tokens: int, launch: MoELaunch) -> str | None:
    """Compiles a launch, by running it on a layer with two experts; the reason where that fails."""
    layer = Layer.random(replace(shape, experts=2, top_k=1), W4A16, 0)
    try:
        forward(Call.random(layer.shape, min(tokens, 16), 0).operands(layer, W4A16), launch)
        torch.cuda.synchronize()
    except (triton.CompilationError, RuntimeError) as failed:
        return str(failed)[:200]
    return None


def best(layers: list[Layer], calls: list[Call], tried: Iterable[MoELaunch]) -> tuple[float, MoELaunch]:
    """The fastest of ``tried`` and its microseconds. Raises ``AssertionError`` where two differ in a bit."""
    operands = [call.operands(layers[i % len(layers)], W4A16) for i, call in enumerate(calls)]
    expected, found = None, []
    for launch in tried:
        try:
            y = forward(operands[0], launch)[Out.Y]
        except triton.runtime.errors.OutOfResources:
            continue
        expected = y if expected is None else expected
        if not torch.equal(y, expected):
            raise AssertionError(f"{launch} gives other bits")
        found.append((microseconds([partial(forward, o, launch) for o in operands], repeats=7), launch))
    return min(found, key=lambda pair: pair[0])


def tune(shape: Shape, layers: list[Layer], tokens: int, pool: ProcessPoolExecutor) -> MoELaunch:
    calls = [Call.random(shape, tokens, seed) for seed in range(len(layers) * (4 if tokens == 1 else 1))]
    columns, target = 2 * shape.width, target_of(torch.device("cuda"))
    chosen = moe_launch(tokens, shape.top_k, shape.experts, shape.hidden, columns, shape.width, target)
    first = [replace(chosen, gate_up=c) for c in candidates(chosen.gate_up, columns, shape.hidden, True)]
    second = [replace(chosen, down=c) for c in candidates(chosen.down, shape.hidden, shape.width, False)]
    failed = dict(zip([*first, *second], pool.map(partial(_run, shape, tokens), [*first, *second]), strict=True))
    _, gate_up = best(layers, calls, [c for c in first if failed[c] is None])
    _, down = best(layers, calls, [c for c in second if failed[c] is None])
    time, result = best(layers, calls, [MoELaunch(gate_up.gate_up, down.down)])
    print(f"{shape.name} {tokens}: {time:.1f} us {result}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[s.name for s in SHAPES], help="beginnings of names")
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--write", action="store_true", help="update the table of this device")
    options = parser.parse_args()
    name = torch.cuda.get_device_name()
    path = FOLDER / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
    table = json.loads(path.read_text()) if path.is_file() else {"launches": {}}
    table |= {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for shape in (s for s in SHAPES if any(s.name.startswith(c) for c in options.shapes)):
            layer = Layer.random(shape, W4A16, seed=0)
            layers = [layer, *(layer.rolled(i) for i in range(1, copies_of(shape)))]
            measured = table["launches"].setdefault(
                f"{shape.experts}x{2 * shape.width}x{shape.hidden}x{shape.width}", {}
            )
            for tokens in options.tokens:
                launch = tune(shape, layers, tokens, pool)
                measured[str(tokens)] = [list(astuple(part)) for part in (launch.gate_up, launch.down)]
    if options.write:
        path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
