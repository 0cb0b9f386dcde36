"""Times whole expert layers in NVFP4 on a GPU, behind a check of results, beside torch's bfloat16 in the same run.

    python -m tools.bench [--shapes Qwen3 gpt-oss] [--tokens 1 8 32] [--out result.json]

One line for each shape and number of tokens: microseconds of torch's grouped bfloat16 GEMMs (routing made beforehand)
and of this package from token rows and expert ids to the result, for packed weights alone (w4a16) and with 4-bit
activations (own row scales, traced scales); the ratio to torch; the share of the floor, which is the time to read the
packed weights of the experts that are hit, or to do the arithmetic. The JSON has the same with device and versions.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from tools.bench.layers import (
    SHAPES,
    TOKENS,
    Call,
    Layer,
    Shape,
    copies_of,
    experts_hit,
    gate,
    grouped_bf16,
    routings,
)
from tools.bench.timing import microseconds
from trace_compile.kernels.moe_forward import forward
from trace_compile.ops import W4A4_ROW, W4A4_TRACED, W4A16

SCHEMES = {"w4a16": W4A16, "w4a4_row": W4A4_ROW, "w4a4_traced": W4A4_TRACED}


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


def environment() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def measure(shape: Shape, layers: list[Layer], tokens: int) -> dict[str, Any]:
    """One row of the table. Raises what ``gate`` raises."""
    calls = [Call.random(shape, tokens, seed) for seed in range(len(layers) * (4 if tokens == 1 else 1))]
    owner = [layers[i % len(layers)] for i in range(len(calls))]
    for scheme in SCHEMES.values():
        gate(owner[0], calls[0], scheme, forward)
    hit = experts_hit(calls)
    floors = {bits: shape.floor(tokens, hit, bits) for bits in (4.5, 16.0)}
    routed = routings(calls, shape)
    times = {
        "grouped_mm": microseconds([partial(grouped_bf16, *given) for given in zip(owner, calls, routed, strict=True)])
    }
    for name, scheme in SCHEMES.items():
        operands = [call.operands(layer, scheme) for layer, call in zip(owner, calls, strict=True)]
        times[name] = microseconds([partial(forward, o) for o in operands])
    return {
        "shape": asdict(shape),
        "tokens": tokens,
        "experts_hit": hit,
        "floor_us": floors[4.5],
        "floor_bf16_us": floors[16.0],
        "us": times,
        "speedup": {name: times["grouped_mm"] / times[name] for name in SCHEMES},
        "of_floor": {name: floors[4.5] / times[name] for name in SCHEMES},
    }


def line(row: dict[str, Any]) -> str:
    us, ratio, share = row["us"], row["speedup"], row["of_floor"]
    ours = "".join(f"{us[n]:9.1f} {ratio[n]:5.2f}x {share[n]:4.0%}" for n in SCHEMES)
    return f"{row['shape']['name']:14s} {row['tokens']:5d} {row['floor_us']:8.1f} {us['grouped_mm']:9.1f} {ours}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[s.name for s in SHAPES], help="beginnings of names")
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--commit", default=commit(), help="of the code, where it runs outside of its repository")
    chosen = parser.parse_args()
    found = environment() | {"commit": chosen.commit}
    print(" ".join(f"{k} {v}" for k, v in found.items()))
    heads = "".join(f"{n:>9s} {'':5s}  {'':4s}" for n in SCHEMES)
    print(
        f"{'shape':14s} {'T':>5s} {'floor':>8s} {'torch':>9s} {heads}   (us, times torch, share of floor)", flush=True
    )
    rows, failed = [], []
    for shape in (s for s in SHAPES if any(s.name.startswith(c) for c in chosen.shapes)):
        first = Layer.random(shape, W4A16, seed=0)
        layers = [first, *(first.rolled(i) for i in range(1, copies_of(shape)))]
        for tokens in chosen.tokens:
            try:
                rows.append(measure(shape, layers, tokens))
                print(line(rows[-1]), flush=True)
            except AssertionError as wrong:
                failed.append(f"{shape.name} {tokens}: {wrong}")
                print(f"{shape.name:14s} {tokens:5d} WRONG: {wrong}", flush=True)
            if chosen.out is not None:  # after every row: a run that is cut short leaves what it has
                chosen.out.write_text(
                    json.dumps({"environment": found, "rows": rows, "wrong": failed}, indent=1) + "\n"
                )
        del first, layers
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
