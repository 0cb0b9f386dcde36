"""The demo from start to end: warm start, arms, sweep, export, report.

Every arm starts from the same weights and sees the same problems in the same order with the same random numbers; only
the recipe differs. Each batch is generated one step ahead of the training that uses it and the rollout twin is refitted
every few steps, so that rollouts are 1 to ``refit_every`` versions stale, as in asynchronous training.
"""

from __future__ import annotations

import copy
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from trace_compile.demo import report, sft
from trace_compile.demo.arms import Arm, MasterAdamW
from trace_compile.demo.checkpoints import check_exports
from trace_compile.demo.presets import ARMS, Preset, get_preset
from trace_compile.demo.result import SCHEMA, ArmResult, DemoResult, ExportCheck, StepRecord, SweepPoint, combine
from trace_compile.demo.task import Problem
from trace_compile.errors import TraceCompileError
from trace_compile.recipes import get_recipe

_SWEEP_SEED = 1 << 16  # a stream of problems of its own


def run_demo(
    preset: str | Preset,
    out: str | Path,
    *,
    steps: int | None = None,
    seeds: Sequence[int] = (0,),
    arms: Sequence[str] = ARMS,
    from_scratch: bool = False,
    console: Console | None = None,
) -> DemoResult:
    """Run the comparison and write ``result.json``, plots and exported checkpoints into the folder ``out``.

    Args:
        preset: name or ``Preset``. steps: RL steps per arm and seed, by default the preset's.
        seeds: each arm runs once per seed. arms: recipe names.
        from_scratch: train the warm start here instead of taking the committed one.

    Raises ``TraceCompileError`` for an unknown preset, no arms, no seeds, or fewer than one step.
    """
    preset = get_preset(preset) if isinstance(preset, str) else preset
    if steps is not None:
        preset = replace(preset, rl=replace(preset.rl, steps=steps))
    if preset.rl.steps < 1 or not seeds or not arms:
        raise TraceCompileError(f"nothing to run: {preset.rl.steps} steps, seeds {list(seeds)}, arms {list(arms)}")
    console, out = console or Console(), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with _progress(console) as progress:
        model, warm = _warm_start(preset, from_scratch, progress)
        weights = {name: tensor.detach().clone() for name, tensor in model.to(preset.dtype).state_dict().items()}
        ahead = _train_ahead(copy.deepcopy(model), preset)
        results: list[ArmResult] = []
        sweep: list[SweepPoint] = []
        forced: Tensor | None = None
        exports: list[ExportCheck] = []
        packing = [name for name in arms if _packs(name)]
        for name in arms:
            bar = progress.add_task(name, total=preset.rl.steps * len(seeds), note="compiling")
            arm = Arm(name, copy.deepcopy(model), preset)
            results.append(_run_arm(arm, weights, seeds, partial(progress.update, bar)))
            if packing and name == packing[-1]:
                progress.update(bar, note="exporting")
                exports = check_exports(arm, _problems(preset, 0, 0), out)
            progress.update(bar, note="sweep")
            points, forced = _sweep_arm(arm, weights, ahead, forced)
            sweep += points
            progress.update(bar, note=f"{results[-1].seconds:.0f} s")
    result = DemoResult(
        schema=SCHEMA,
        preset=preset.name,
        task=f"reasoning-gym chain_sum, {preset.task.terms} terms of {preset.task.digits} digits",
        model={**asdict(preset.shape), "parameters": sum(p.numel() for p in model.parameters())},
        warm_start=asdict(warm),
        compute_dtype=str(preset.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if preset.device == "cuda" else platform.processor() or platform.machine(),
        versions=_versions(),
        steps=preset.rl.steps,
        seconds=time.perf_counter() - start,
        arms=results,
        sweep=sweep,
        exports=exports,
    )
    result.write(out / "result.json")
    report.write_plots(result, out)
    report.print_tables(result, console)
    return result


def _run_arm(arm: Arm, weights: dict[str, Tensor], seeds: Sequence[int], on_step: Callable[..., None]) -> ArmResult:
    start = time.perf_counter()
    runs = {seed: _run_seed(arm, weights, seed, on_step) for seed in seeds}
    return combine(arm.name, runs, time.perf_counter() - start)


def _run_seed(arm: Arm, weights: dict[str, Tensor], seed: int, on_step: Callable[..., None]) -> list[StepRecord]:
    rl = arm.preset.rl
    arm.restart(weights)
    shuffle = torch.Generator().manual_seed(seed)
    records = []
    following = arm.generate(_problems(arm.preset, seed, 0), _draw(seed, 0))
    for step in range(rl.steps):
        begin, current, staleness = time.perf_counter(), following, arm.updates - following.version
        if step + 1 < rl.steps:  # generation runs ahead of training
            following = arm.generate(_problems(arm.preset, seed, step + 1), _draw(seed, step + 1))
        gap, alignment = arm.step(current, shuffle)
        if arm.updates % rl.refit_every == 0:
            arm.refit()
        guidance = current.guidance
        records.append(
            StepRecord(
                reward=current.rollouts.rewards.mean().item(),
                gap_max=gap.max,
                gap_mean=gap.mean,
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
        on_step(advance=1, note=f"reward {records[-1].reward:.2f}, mean |gap| {gap.mean:.4f}")
    return records


def _sweep_arm(
    arm: Arm, weights: dict[str, Tensor], ahead: dict[int, dict[str, Tensor]], forced: Tensor | None
) -> tuple[list[SweepPoint], Tensor]:
    """Score one set of tokens with the trainer at each of the weights ``ahead``, the rollout staying at ``weights``."""
    arm.restart(weights)
    generated = arm.generate(_problems(arm.preset, _SWEEP_SEED, 0), _draw(_SWEEP_SEED, 0), forced)
    shuffle = torch.Generator().manual_seed(0)
    points = []
    for steps, later in ahead.items():
        arm.load(later)
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
    return points, generated.rollouts.ids[:, arm.preset.task.prompt_length :]


def _train_ahead(model: nn.Module, preset: Preset) -> dict[int, dict[str, Tensor]]:
    """Weights after each number of optimizer steps in ``preset.sweep``: unquantized, supervised, at the RL rate."""
    optimizer = MasterAdamW(list(model.parameters()), preset.rl.learning_rate)
    order = random.Random(_SWEEP_SEED)
    ahead = {}
    for step in range(max(preset.sweep) + 1):
        if step in preset.sweep:
            ahead[step] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        ids, target = sft.supervised_batch(preset.task, _SWEEP_SEED, step, preset.sft.batch, order)
        sft.supervised_loss(model, ids.to(preset.device), target.to(preset.device)).backward()
        optimizer.step()
    return ahead


def _problems(preset: Preset, seed: int, step: int) -> list[Problem]:
    """The batch of RL step ``step``: each problem ``group_size`` times in a row."""
    rl = preset.rl
    distinct = preset.task.problems("rl", seed, step * rl.groups, rl.groups)
    return [problem for problem in distinct for _ in range(rl.group_size)]


def _draw(seed: int, step: int) -> int:
    """The random seed of the samples of one step."""
    return (seed << 20) + step


def _warm_start(preset: Preset, from_scratch: bool, progress: Progress) -> tuple[nn.Module, sft.WarmStart]:
    if preset.warm_start and not from_scratch:
        return sft.load(preset)
    bar = progress.add_task("supervised", total=preset.sft.steps, note="")
    return sft.train(preset, lambda step, loss: progress.update(bar, completed=step + 1, note=f"loss {loss:.3f}"))


def _packs(name: str) -> bool:
    """Whether the rollout of this recipe has packed weights to export."""
    rollout = get_recipe(name).rollout
    return rollout is not None and rollout.weight is not None


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("trace-compile", "torch", "transformers", "compressed-tensors", "reasoning-gym", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
