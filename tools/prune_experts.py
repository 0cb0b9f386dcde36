"""What pruning a rollout's experts costs and saves, on the demo's warm start: gap, reward, memory and decoding time.

    python tools/prune_experts.py --preset cpu --recipe qat --problems 64

Experts are chosen by how often a traced rollout used them, for prompts and decoded tokens apart, so that the kept ones
got a given share of its routes. Every line scores the same tokens, those of the whole rollout, by the same decoding.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from trace_compile import trace_compile
from trace_compile.demo import sft
from trace_compile.demo.presets import Preset, get_preset
from trace_compile.demo.rollouts import Rollouts, sample
from trace_compile.demo.task import Problem
from trace_compile.losses import GapStats, gap_stats
from trace_compile.state.usage import Kept

SHARES = (1.0, 0.99, 0.95, 0.9, 0.8)


@dataclass(frozen=True)
class Line:
    """One pruned rollout.

    share: of the traced routes that its experts got, at least. experts: mean kept per layer, for prompts and decoding.
    gap: of the whole twin's tokens, whole against pruned (``log pi_whole - log pi_pruned``). reward: of tokens that it
    samples itself. packed_bytes: expert weights. seconds: of decoding the scored tokens, the second time.
    """

    share: float
    experts: tuple[float, float]
    gap: GapStats
    reward: float
    packed_bytes: int
    seconds: float


def measure(model: Any, preset: Preset, problems: list[Problem], shares: Sequence[float] = SHARES) -> Iterator[Line]:
    """Lines for a compiled ``model``, one per share."""
    whole = model.rollout()
    torch.manual_seed(0)
    with model.trace(record="ranges") as trace:
        rollouts = sample(whole, preset.task, problems, preset.device)
    for share in shares:
        kept = trace.usage.covering(share, at_least=preset.shape.top_k)
        twin = model.rollout(keep=kept)
        _decode(twin, preset, problems, rollouts)  # compiles
        start = time.perf_counter()
        scored = _decode(twin, preset, problems, rollouts)
        seconds = time.perf_counter() - start
        gap = (rollouts.log_probs - scored.log_probs)[rollouts.sampled]
        torch.manual_seed(0)
        reward = sample(twin, preset.task, problems, preset.device).rewards.mean().item()
        yield Line(share, _experts(kept), gap_stats(gap, preset.rl.truncate), reward, twin.packed_bytes, seconds)


def _decode(twin: Any, preset: Preset, problems: list[Problem], rollouts: Rollouts) -> Rollouts:
    responses = rollouts.ids[:, rollouts.prompt_length :]
    return sample(twin, preset.task, problems, preset.device, forced=responses)


def _experts(kept: Kept) -> tuple[float, float]:
    prefill, decode = (sum(map(len, part.values())) / len(part) for part in (kept.prefill, kept.decode))
    return prefill, decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="cpu")
    parser.add_argument("--warm-start", type=Path, default=sft.WARM_START, help="checkpoint of the preset's shape")
    parser.add_argument("--recipe", default="qat")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    arguments = parser.parse_args()
    preset = get_preset(arguments.preset)
    plain, _ = sft.load(preset, arguments.warm_start)
    model = trace_compile(sft.cast(plain, preset.dtype), recipe=arguments.recipe, compiler=preset.compiler)
    problems = preset.task.problems("eval", 0, 0, arguments.problems)
    table = Table(title=f"{arguments.recipe} on the {preset.name} warm start, {preset.device}")
    for column in ("share of routes", "experts prompt / decode", "mean |gap|", "max", "K3", "reward", "bytes", "s"):
        table.add_column(column)
    for line in measure(model, preset, problems):
        if arguments.json:
            print(json.dumps(asdict(line)))
            continue
        gap = (f"{line.gap.mean:.4f}", f"{line.gap.max:.2f}", f"{line.gap.k3:.4f}")
        experts = "{:.1f} / {:.1f}".format(*line.experts)
        row = (f"{line.share:.2f}", experts, *gap, f"{line.reward:.3f}", str(line.packed_bytes), f"{line.seconds:.2f}")
        table.add_row(*row)
    if not arguments.json:
        Console().print(table)


if __name__ == "__main__":
    main()
