"""The demo from start to end: warm start, one job per arm, result, report.

Arms are independent, so each is a job; on a CPU jobs run in processes of their own, one thread each, because the demo's
tensors are too small to share between threads.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import platform
import queue
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from trace_compile.demo import report, sft
from trace_compile.demo.loop import SWEEP_SEED, Job, Outcome, Start, problems, run_job
from trace_compile.demo.optimizer import MasterAdamW
from trace_compile.demo.presets import ARMS, Preset, get_preset
from trace_compile.demo.progress import Bars
from trace_compile.demo.result import SCHEMA, DemoResult
from trace_compile.demo.rollouts import sample
from trace_compile.errors import TraceCompileError
from trace_compile.numerics import PROFILES
from trace_compile.recipes import get_recipe

_SETTLE = 8  # supervised steps before the sweep's first weights


def run_demo(
    preset: str | Preset,
    out: str | Path,
    *,
    steps: int | None = None,
    seeds: Sequence[int] = (0,),
    arms: Sequence[str] = ARMS,
    from_scratch: bool = False,
    warm_start: Path | None = None,
    processes: int = 1,
    console: Console | None = None,
) -> DemoResult:
    """Run the comparison and write ``result.json``, plots and exported checkpoints into the folder ``out``.

    Args:
        preset: name or ``Preset``. steps: RL steps per arm and seed, by default the preset's.
        seeds: each arm runs once per seed. arms: recipe names.
        from_scratch: train the warm start here instead of taking the committed one; it is kept in ``out/warmstart``.
        warm_start: a folder like that, from an earlier run, to start from.
        processes: arms that run at a time, each in a process of its own if more than 1 (the caller's main module must
            then be importable without side effects, as ``multiprocessing`` asks).

    Raises ``TraceCompileError`` for an unknown preset or recipe, no arms, no seeds, or fewer than one step, or
    a warm start that does not fit the preset.
    """
    preset = get_preset(preset) if isinstance(preset, str) else preset
    if steps is not None:
        preset = replace(preset, rl=replace(preset.rl, steps=steps))
    if preset.rl.steps < 1 or not seeds or not arms:
        raise TraceCompileError(f"nothing to run: {preset.rl.steps} steps, seeds {list(seeds)}, arms {list(arms)}")
    packing = [name for name in arms if _exportable(name)]
    console, out, begin = console or Console(), Path(out), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    with Bars(console) as bars, tempfile.TemporaryDirectory() as scratch:
        model, warm = _warm_start(preset, from_scratch, warm_start, out / "warmstart", bars)
        path = Path(scratch) / "start.pt"
        torch.save(shared_start(model, preset), path)
        jobs = [Job(name, tuple(seeds), path, out if name in packing[-1:] else None) for name in arms]
        outcomes = _run_jobs(jobs, preset.rl.steps * len(seeds), processes, bars)
    result = DemoResult(
        schema=SCHEMA,
        preset=preset.name,
        task=f"reasoning-gym chain_sum, {_range(preset.task.terms)} terms of {_range(preset.task.digits)} digits",
        model={**asdict(preset.shape), "parameters": sum(p.numel() for p in model.parameters())},
        warm_start=asdict(warm),
        compute_dtype=str(preset.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if preset.device == "cuda" else f"CPU ({platform.machine()})",
        versions=_versions(),
        steps=preset.rl.steps,
        seconds=time.perf_counter() - begin,
        arms=[outcome.result for outcome in outcomes],
        sweep=[point for outcome in outcomes for point in outcome.sweep],
        exports=[check for outcome in outcomes for check in outcome.exports],
    )
    result.write(out / "result.json")
    report.write_plots(result, out)
    report.print_tables(result, console)
    console.print(f"written to {out}: result.json, plots, checkpoints")
    return result


def default_processes(preset: Preset, arms: int) -> int:
    """Arms to run at a time: one per CPU core; on a GPU, whose small kernels wait for Python, half of that."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(arms, cores // 2 if preset.device == "cuda" else cores))


def shared_start(model: nn.Module, preset: Preset) -> Start:
    """What all arms have in common.

    The sweep's weights come from unquantized supervised steps at the RL learning rate. Its first ones lie a few steps
    after the warm start: by then the optimizer has its pace, and weights have left the bfloat16 grid of the checkpoint,
    on which exact ties of FP4 rounding are frequent and all flip at the first step.
    """
    model = sft.cast(copy.deepcopy(model), preset.dtype)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    optimizer = MasterAdamW(list(model.parameters()), preset.rl.learning_rate)
    order, ahead = random.Random(SWEEP_SEED), {}
    for step in range(_SETTLE + max(preset.sweep) + 1):
        if step - _SETTLE in preset.sweep:
            ahead[step - _SETTLE] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        ids, target = sft.supervised_batch(preset.task, SWEEP_SEED, step, preset.sft.batch, order)
        sft.supervised_loss(model, ids.to(preset.device), target.to(preset.device)).backward()
        optimizer.step()
    model.load_state_dict(ahead[0])
    torch.manual_seed(SWEEP_SEED)
    sampled = sample(model, preset.task, problems(preset, SWEEP_SEED, 0), preset.device)
    return Start(preset, weights, ahead, sampled.ids[:, preset.task.prompt_length :])


def _run_jobs(jobs: list[Job], steps: int, processes: int, bars: Bars) -> list[Outcome]:
    """Run the jobs, ``processes`` at a time; results in the order of the jobs. The first error ends the others."""
    for job in jobs:
        bars.add(job.name, steps, "waiting")
    if processes == 1:
        return [run_job(job, partial(bars.update, job.name)) for job in jobs]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(processes, mp_context=context) as pool:
        messages = manager.Queue()
        # The last arms are the longest ones: they go first.
        futures = {job.name: pool.submit(run_job, job, _Message(messages, job.name)) for job in reversed(jobs)}
        try:
            _follow(list(futures.values()), messages, bars)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [futures[job.name].result() for job in jobs]


def _follow(futures: list[Future[Outcome]], messages: Any, bars: Bars) -> None:
    while not all(future.done() for future in futures) or not messages.empty():
        failed = [future for future in futures if future.done() and future.exception() is not None]
        if failed:
            failed[0].result()
        try:
            name, steps, note = messages.get(timeout=0.2)
        except queue.Empty:
            continue
        bars.update(name, steps, note)


class _Message:
    """``Notify`` from another process, through a queue."""

    def __init__(self, messages: Any, name: str) -> None:
        self._messages, self._name = messages, name

    def __call__(self, steps: int, note: str) -> None:
        self._messages.put((self._name, steps, note))


def _warm_start(
    preset: Preset, from_scratch: bool, given: Path | None, kept: Path, bars: Bars
) -> tuple[nn.Module, sft.WarmStart]:
    if given is not None:
        return sft.load(preset, given)
    if preset.warm_start and not from_scratch:
        return sft.load(preset)
    bars.add("supervised", preset.sft.steps)
    model, warm = sft.train(preset, lambda step, loss: bars.update("supervised", step + 1, f"loss {loss:.3f}"))
    sft.save(copy.deepcopy(model), warm, {}, kept)
    return model, warm


def _exportable(name: str) -> bool:
    """Whether engines can serve the rollout of this recipe: NVFP4 weights with floored scales, no residual."""
    rollout = get_recipe(name).rollout
    if rollout is None or rollout.weight is None or (rollout.act is not None and rollout.act.residual is not None):
        return False
    return rollout.weight.fmt == "nvfp4" and PROFILES[rollout.weight.profile].power_of_two


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]} to {bounds[1]}" if bounds[0] < bounds[1] else str(bounds[0])


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("trace-compile", "torch", "transformers", "compressed-tensors", "reasoning-gym", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
