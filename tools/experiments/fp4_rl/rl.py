"""One RL run of one arm and seed: restartable, with its figures in a file of its own.

A run is a folder: ``steps.jsonl`` (a line per step) and ``state.safetensors`` (masters, moments, ranges, step), which
is replaced as a whole every ``CHECKPOINT_EVERY`` steps. There the pipeline of rollouts is drained, so that the state is
all there is: a run that was killed at any moment and started again writes the same lines as one that was not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tools.experiments.fp4_rl.arms import Spec
from trace_compile.demo import sft
from trace_compile.demo.arms import Arm, Generated
from trace_compile.demo.loop import problems
from trace_compile.demo.presets import Preset
from trace_compile.model import session_of
from trace_compile.state.files import atomic_save_safetensors, load_safetensors
from trace_compile.state.ranges import Ranges

CHECKPOINT_EVERY = 20
MEASURE_EVERY = 10
"""Whole codes and inputs are recorded, and compared with the trainer's, at every so many steps."""
EVALUATE_EVERY = 60
STEPS, STATE = "steps.jsonl", "state.safetensors"

Notify = Callable[[int, str], None]


def run(
    spec: Spec,
    seed: int,
    preset: Preset,
    warm_start: Path,
    folder: Path,
    notify: Notify,
    *,
    until: float = float("inf"),
) -> int:
    """Go on with the run in ``folder``, or begin it; returns the number of finished steps.

    ``until``: the ``time.monotonic()`` after which no further part of ``CHECKPOINT_EVERY`` steps is begun.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    arm = spec.build(preset)
    weights = sft.cast(sft.load(preset, warm_start)[0], preset.dtype).state_dict()
    arm.restart(weights)
    evaluator = Arm("bf16", sft.build_model(preset, 0, preset.dtype), preset)
    done = _resume(arm, folder)
    while done < preset.rl.steps and time.monotonic() < until:
        if done == 0:
            _append(folder, [{"step": 0, **_evaluate(arm, evaluator, preset)}])
        count = min(CHECKPOINT_EVERY, preset.rl.steps - done)
        lines = _part(arm, evaluator, seed, done, count, notify)
        done += count
        _append(folder, lines)
        _save(arm, done, folder)
    return done


def _part(arm: Arm, evaluator: Arm, seed: int, first: int, count: int, notify: Notify) -> list[dict[str, Any]]:
    """``count`` steps from a drained pipeline to a drained one."""
    preset, lines = arm.preset, []
    shuffle = torch.Generator().manual_seed((seed << 20) + first)
    following = _generate(arm, seed, first)
    for step in range(first, first + count):
        begin, current, staleness = time.perf_counter(), following, arm.updates - following.version
        if step + 1 < first + count:  # generation runs ahead of training
            following = _generate(arm, seed, step + 1)
        gap, alignment = arm.step(current, shuffle)
        if arm.updates % preset.rl.refit_every == 0 or step + 1 == first + count:
            arm.refit()
        guidance, reward = current.guidance, current.rollouts.rewards.mean().item()
        line: dict[str, Any] = {
            "step": step + 1,
            "reward": reward,
            "entropy": current.rollouts.entropy,
            "gap_mean": gap.mean,
        }
        line |= {"gap_max": gap.max, "k1": gap.k1, "k3": gap.k3, "clip_fraction": gap.clip_fraction}
        line |= {"staleness": staleness, "tokens": int(current.rollouts.sampled.sum())}
        line |= {"hit_rate": None if guidance is None else guidance.counters.hit_rate}
        line |= {"bytes_per_token": None if guidance is None else guidance.layout.guidance_bytes}
        line |= {key: value for key, value in asdict(alignment).items() if value is not None}
        line |= {"rollout_seconds": current.seconds, "seconds": time.perf_counter() - begin}
        if (step + 1) % EVALUATE_EVERY == 0:
            line |= _evaluate(arm, evaluator, preset)
        lines.append(line)
        notify(step + 1, f"reward {reward:.3f}, mean |gap| {gap.mean:.4f}")
    return lines


def _generate(arm: Arm, seed: int, step: int) -> Generated:
    measure = (step + 1) % MEASURE_EVERY == 0
    return arm.generate(problems(arm.preset, seed, step), (seed << 20) + step, measure=measure)


def _evaluate(arm: Arm, evaluator: Arm, preset: Preset) -> dict[str, float]:
    """Held-out reward of the current policy as the rollout computes it, and unquantized."""
    arm.refit()
    evaluator.load(arm.model.state_dict())
    evaluator.refit()
    held_out = preset.task.problems("eval", 0, 0, preset.held_out)
    names = {"held_out": arm, "held_out_bf16": evaluator}
    return {name: a.generate(held_out, 0, measure=False).rollouts.rewards.mean().item() for name, a in names.items()}


def _append(folder: Path, lines: list[dict[str, Any]]) -> None:
    with (folder / STEPS).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _save(arm: Arm, done: int, folder: Path) -> None:
    assert arm.optimizer is not None
    tensors = dict(arm.optimizer.state())
    names: list[list[str]] = []
    ranges = session_of(arm.model).ranges
    if ranges is not None:
        extra, names = ranges.to_tensors()
        tensors |= extra
    atomic_save_safetensors(tensors, folder / STATE, {"step": str(done), "sites": json.dumps(names)})


def _resume(arm: Arm, folder: Path) -> int:
    """Load the state, cut the log to it; the number of finished steps."""
    log, state = folder / STEPS, folder / STATE
    if not state.exists():
        log.unlink(missing_ok=True)
        return 0
    tensors, metadata = load_safetensors(state)
    done = int(metadata["step"])
    assert arm.optimizer is not None
    arm.optimizer.load_state(tensors)
    arm.updates = done
    names = json.loads(metadata["sites"])
    if names:
        session_of(arm.model).pending_ranges = Ranges.from_tensors(tensors, names)
    arm.refit()
    kept = [line for line in log.read_text().splitlines() if line.endswith("}") and json.loads(line)["step"] <= done]
    temporary = log.with_suffix(".part")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    temporary.replace(log)
    return done


def shortened(preset: Preset, steps: int | None) -> Preset:
    """The preset with another number of RL steps, if one is given."""
    return preset if steps is None else replace(preset, rl=replace(preset.rl, steps=steps))
