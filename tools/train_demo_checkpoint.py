"""Trains the demo's warm-start checkpoint and writes it, with its recipe and what it measures, into the package.

    python tools/train_demo_checkpoint.py [--preset cpu] [--out trace_compile/demo/warmstart]
    python tools/train_demo_checkpoint.py --preset h200 --out tools/experiments/fp4_rl/warmstart

About five minutes on one CPU core. `trace-compile demo --from-scratch` runs the same training without writing.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trace_compile.demo import rollouts, sft
from trace_compile.demo.presets import PRESETS, get_preset
from trace_compile.demo.progress import Bars

LIMIT_BYTES = {"cpu": 4 << 20, "h200": 48 << 20}
"""A committed checkpoint must stay small; the larger one is no part of the package."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cpu", choices=sorted(PRESETS))
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    preset = get_preset(arguments.preset)
    out = arguments.out
    if out is None:
        if not preset.warm_start:
            raise SystemExit(f"preset {preset.name!r} has no place in the package: name one with --out")
        out = sft.WARM_START
    start = time.monotonic()
    with Bars(Console()) as bars:
        bars.add("supervised", preset.sft.steps)
        model, warm = sft.train(preset, lambda step, loss: bars.update("supervised", step + 1, f"loss {loss:.3f}"))
    seconds = time.monotonic() - start
    sft.save(model, warm, {}, out)
    model, _ = sft.load(preset, out)
    torch.manual_seed(preset.sft.seed)
    held_out = preset.task.problems("eval", 0, 0, 512)
    sampled = rollouts.sample(sft.cast(model, preset.dtype), preset.task, held_out, preset.device)
    measured = {"reward": round(sampled.rewards.mean().item(), 4), "entropy": round(sampled.entropy, 4)}
    sft.save(model, warm, {**measured, "seconds": round(seconds)}, out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{warm}\n{measured}, {seconds:.0f} s, {size / 2**20:.2f} MiB in {out}")
    limit = LIMIT_BYTES.get(preset.name, size)
    if size > limit:
        raise SystemExit(f"the checkpoint has {size} bytes, more than {limit}; shrink the preset's model")


if __name__ == "__main__":
    main()
