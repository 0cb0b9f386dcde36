"""The experiment: what FP4 rollouts do to reinforcement learning, arm by arm.

    python -m tools.experiments.fp4_rl sweep --out DIR                        # same tokens, drift source by source
    python -m tools.experiments.fp4_rl rl --out DIR --seeds 0,1,2 --minutes 9    # goes on where it stopped
    python -m tools.experiments.fp4_rl report --results DIR                   # tables and plots

Arms and seeds are jobs, spread over the GPUs that there are, as many at a time on each as ``--per-device`` says.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tools.experiments.fp4_rl import report as reporting
from tools.experiments.fp4_rl.arms import MAIN, SPECS, WARM_START
from tools.experiments.fp4_rl.rl import run, shortened
from tools.experiments.fp4_rl.sweep import sweep as sweep_arm
from trace_compile.demo import sft
from trace_compile.demo.arms import Arm
from trace_compile.demo.presets import Preset, get_preset
from trace_compile.demo.progress import Bars
from trace_compile.demo.run import shared_start
from trace_compile.errors import TraceCompileError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def rl(
    out: Annotated[Path, typer.Option(help="Folder of the runs; those in it are continued.")],
    preset: Annotated[str, typer.Option()] = "h200",
    arms: Annotated[str, typer.Option(help="Comma-separated arms.")] = ",".join(MAIN),
    seeds: Annotated[str, typer.Option()] = "0,1,2",
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    minutes: Annotated[float, typer.Option(help="Begin no further part after this time.")] = float("inf"),
    per_device: Annotated[int, typer.Option(min=1, help="Runs at a time per GPU.")] = 4,
    warm_start: Annotated[Path, typer.Option(exists=True)] = WARM_START,
) -> None:
    """Run or continue GRPO for every arm and seed."""
    chosen = shortened(get_preset(preset), steps)
    until = time.monotonic() + 60 * minutes
    jobs = [(_spec(arm), int(seed)) for seed in seeds.split(",") for arm in arms.split(",")]
    work = [
        (
            f"{spec.name}-{seed}",
            partial(_rl_job, spec.name, seed, chosen, warm_start, out / f"{spec.name}-{seed}", until),
        )
        for spec, seed in jobs
    ]
    _spread(work, chosen.rl.steps, per_device)


@app.command()
def sweep(
    out: Annotated[Path, typer.Option(help="Folder for sweep.json.")],
    preset: Annotated[str, typer.Option()] = "h200",
    arms: Annotated[str, typer.Option(help="Comma-separated arms, default: all.")] = ",".join(SPECS),
    per_device: Annotated[int, typer.Option(min=1)] = 4,
    warm_start: Annotated[Path, typer.Option(exists=True)] = WARM_START,
) -> None:
    """Score the same tokens with every arm under drift from one source at a time."""
    chosen = get_preset(preset)
    out.mkdir(parents=True, exist_ok=True)
    model = sft.load(chosen, warm_start)[0]
    path = out / "start.pt"
    torch.save(shared_start(model, chosen), path)
    names = [_spec(name).name for name in arms.split(",")]
    found = _spread([(name, partial(_sweep_job, name, path)) for name in names], 1, per_device)
    path.unlink()
    document = {
        "preset": chosen.name,
        "device": _device_name(),
        "torch": torch.__version__,
        "points": list(chain(*found)),
    }
    (out / "sweep.json").write_text(json.dumps(document, indent=1) + "\n")


@app.command()
def report(results: Annotated[Path, typer.Option(exists=True)]) -> None:
    """Print the tables of what is in ``results`` and draw the plots into it."""
    reporting.write(results, Console())


def _spec(name: str) -> Any:
    if name not in SPECS:
        raise TraceCompileError(f"unknown arm {name!r}; choose from {', '.join(SPECS)}")
    return SPECS[name]


def _rl_job(name: str, seed: int, preset: Preset, warm_start: Path, folder: Path, until: float, notify: Any) -> int:
    return run(SPECS[name], seed, preset, warm_start, folder, notify, until=until)


def _sweep_job(name: str, start: Path, notify: Any) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    loaded = torch.load(start, weights_only=False)
    reference = Arm("bf16", sft.build_model(loaded.preset, 0, loaded.preset.dtype), loaded.preset)
    points = sweep_arm(SPECS[name], loaded, reference)
    notify(1, f"{len(points)} points")
    return points


def _spread(work: list[tuple[str, Any]], steps: int, per_device: int) -> list[Any]:
    """Run the jobs in processes, each seeing one GPU; results in order. One that fails leaves the others running."""
    devices = max(1, torch.cuda.device_count())
    context = multiprocessing.get_context("spawn")
    with Bars(Console()) as bars, context.Manager() as manager:
        messages, slots = manager.Queue(), manager.Queue()
        for slot in range(devices * per_device):
            slots.put(slot % devices)
        for name, _ in work:
            bars.add(name, steps, "waiting")
        with ProcessPoolExecutor(devices * per_device, mp_context=context, initializer=_pin, initargs=(slots,)) as pool:
            futures = [pool.submit(job, _Report(messages, name)) for name, job in work]
            _follow(futures, messages, bars)
        failed = {name: future.exception() for (name, _), future in zip(work, futures) if future.exception()}
    for name, error in failed.items():
        Console().print(f"{name} failed: {type(error).__name__}: {error}", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)
    return [future.result() for future in futures]


def _pin(slots: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(slots.get())


def _follow(futures: list[Future[Any]], messages: Any, bars: Bars) -> None:
    while wait(futures, timeout=0).not_done or not messages.empty():
        try:
            bars.update(*messages.get(timeout=0.5))
        except queue.Empty:
            continue


class _Report:
    """``Notify`` from another process."""

    def __init__(self, messages: Any, name: str) -> None:
        self._messages, self._name = messages, name

    def __call__(self, steps: int, note: str) -> None:
        self._messages.put((self._name, steps, note))


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    app()
