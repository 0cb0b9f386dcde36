"""Trains the demo's warm-start checkpoint and writes it, with its recipe and what it measures, into the package.

    python tools/train_demo_checkpoint.py [--preset cpu] [--out trace_compile/demo/warmstart]

About five minutes on one CPU core. `trace-compile demo --from-scratch` runs the same training without writing.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trace_compile.demo import rollouts, sft
from trace_compile.demo.presets import PRESETS, get_preset

LIMIT_BYTES = 4 << 20
"""A committed checkpoint must stay small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cpu", choices=sorted(PRESETS))
    parser.add_argument("--out", type=Path, default=sft.WARM_START)
    arguments = parser.parse_args()
    preset = get_preset(arguments.preset)
    start = time.monotonic()
    with Progress(transient=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("supervised", total=preset.sft.steps)
        model, warm = sft.train(
            preset,
            lambda step, loss: progress.update(bar, completed=step + 1, description=f"supervised, loss {loss:.3f}"),
        )
    seconds = time.monotonic() - start
    sft.save(model, warm, {}, arguments.out)
    model, _ = sft.load(preset, arguments.out)
    torch.manual_seed(preset.sft.seed)
    sampled = rollouts.sample(model, preset.task, preset.task.problems("eval", 0, 0, 512), preset.device)
    measured = {"reward": round(sampled.rewards.mean().item(), 4), "entropy": round(sampled.entropy, 4)}
    sft.save(model, warm, {**measured, "seconds": round(seconds)}, arguments.out)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{warm}\n{measured}, {seconds:.0f} s, {size / 2**20:.2f} MiB in {arguments.out}")
    if size > LIMIT_BYTES:
        raise SystemExit(f"the checkpoint has {size} bytes, more than {LIMIT_BYTES}; shrink the preset's model")


if __name__ == "__main__":
    main()
