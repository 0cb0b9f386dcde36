"""One arm from start to end: RL runs, held-out reward, export, controlled sweep; a job for a process of its own.

Every arm starts from the same weights and sees the same problems in the same order with the same random numbers; only
the recipe differs. Each batch is generated one step ahead of the training that uses it and the rollout twin is refitted
every few steps, so that rollouts are 1 to ``refit_every`` versions stale, as in asynchronous training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trace_compile.demo import sft
from trace_compile.demo.arms import Arm
from trace_compile.demo.checkpoints import check_exports
from trace_compile.demo.presets import Preset
from trace_compile.demo.result import ArmResult, ExportCheck, StepRecord, SweepPoint, combine
from trace_compile.demo.task import Problem

Notify = Callable[[int, str], None]
"""Called with the number of finished steps and a few words."""

SWEEP_SEED = 1 << 16
"""Problems and draws of the sweep, away from those of any run."""


@dataclass(frozen=True)
class Start:
    """What all arms have in common: the preset, the first weights, and what the sweep needs.

    ``ahead``: the sweep's weights by number of optimizer steps after its first ones, which are under 0. ``responses``:
    i64 ``[B, R]`` to the sweep's problems.
    """

    preset: Preset
    weights: dict[str, Tensor]
    ahead: dict[int, dict[str, Tensor]]
    responses: Tensor


@dataclass(frozen=True)
class Job:
    """One arm's work. ``start``: a file that holds a ``Start``. ``export``: the folder for checkpoints, or None."""

    name: str
    seeds: tuple[int, ...]
    start: Path
    export: Path | None


@dataclass(frozen=True)
class Outcome:
    """What a job measured."""

    result: ArmResult
    sweep: list[SweepPoint]
    exports: list[ExportCheck]


def run_job(job: Job, notify: Notify) -> Outcome:
    """Run one arm. Deterministic: the same job gives the same numbers, except for times, on the same machine."""
    torch.set_num_threads(1)  # small tensors; and the result does not depend on the number of cores
    begin = time.perf_counter()
    start: Start = torch.load(job.start, weights_only=False)
    preset = start.preset
    arm = Arm(job.name, sft.build_model(preset, 0, preset.dtype), preset)
    runs: dict[int, list[StepRecord]] = {}
    held_out: list[tuple[float, float]] = []
    for index, seed in enumerate(job.seeds):
        arm.restart(start.weights)
        before = _held_out(arm)
        runs[seed] = _run_seed(arm, seed, partial(_shifted, notify, index * preset.rl.steps))
        arm.refit()
        held_out.append((before, _held_out(arm)))
    done = preset.rl.steps * len(job.seeds)
    exports: list[ExportCheck] = []
    if job.export is not None:
        notify(done, "exporting")
        exports = check_exports(arm, problems(preset, 0, 0), job.export)
    notify(done, "sweep")
    sweep = _sweep(arm, start)
    seconds = time.perf_counter() - begin
    notify(done, f"{seconds:.0f} s")
    return Outcome(combine(job.name, runs, held_out, seconds), sweep, exports)


def problems(preset: Preset, seed: int, step: int) -> list[Problem]:
    """The batch of RL step ``step``: each problem ``group_size`` times in a row."""
    rl = preset.rl
    distinct = preset.task.problems("rl", seed, step * rl.groups, rl.groups)
    return [problem for problem in distinct for _ in range(rl.group_size)]


def _run_seed(arm: Arm, seed: int, notify: Notify) -> list[StepRecord]:
    rl = arm.preset.rl
    shuffle = torch.Generator().manual_seed(seed)
    records: list[StepRecord] = []
    following = arm.generate(problems(arm.preset, seed, 0), _draw(seed, 0))
    for step in range(rl.steps):
        begin, current, staleness = time.perf_counter(), following, arm.updates - following.version
        if step + 1 < rl.steps:  # generation runs ahead of training
            following = arm.generate(problems(arm.preset, seed, step + 1), _draw(seed, step + 1))
        gap, alignment = arm.step(current, shuffle)
        if arm.updates % rl.refit_every == 0:
            arm.refit()
        guidance, reward = current.guidance, current.rollouts.rewards.mean().item()
        records.append(
            StepRecord(
                reward=reward,
                gap_max=gap.max,
                gap_mean=gap.mean,
                k1=gap.k1,
                k3=gap.k3,
                entropy=current.rollouts.entropy,
                staleness=staleness,
                clip_fraction=gap.clip_fraction,
                seconds=time.perf_counter() - begin,
                rollout_seconds=current.seconds,
                **asdict(alignment),
                hit_rate=None if guidance is None else guidance.counters.hit_rate,
                guidance_bytes_per_token=None if guidance is None else guidance.layout.guidance_bytes,
            )
        )
        notify(step + 1, f"reward {reward:.2f}, mean |gap| {gap.mean:.4f}")
    return records


def _held_out(arm: Arm) -> float:
    """Mean reward of the rollout, as it stands, on problems that no run trains on."""
    preset = arm.preset
    return arm.generate(preset.task.problems("eval", 0, 0, preset.held_out), 0).rollouts.rewards.mean().item()


def _sweep(arm: Arm, start: Start) -> list[SweepPoint]:
    """Score the same tokens with the trainer at each of the weights ahead, while the rollout stays at the first."""
    arm.restart(start.ahead[0])
    generated = arm.generate(problems(arm.preset, SWEEP_SEED, 0), _draw(SWEEP_SEED, 0), start.responses)
    shuffle = torch.Generator().manual_seed(0)
    points = []
    for steps, weights in start.ahead.items():
        arm.load(weights)
        batches = arm.batches(generated, torch.zeros(len(generated.rollouts.ids)), shuffle)
        gap, alignment = arm.gap(batches, arm.score(generated, batches)), arm.align(generated, batches)
        points.append(
            SweepPoint(
                arm=arm.name,
                steps=steps,
                drift=alignment.drift,
                gap_mean=gap.mean,
                gap_max=gap.max,
                k3=gap.k3,
                mismatch_before=alignment.mismatch_before,
                mismatch_after=alignment.mismatch_after,
            )
        )
    return points


def _draw(seed: int, step: int) -> int:
    """The random seed of the samples of one step."""
    return (seed << 20) + step


def _shifted(notify: Notify, before: int, steps: int, note: str) -> None:
    notify(before + steps, note)
