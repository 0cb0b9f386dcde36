"""Several processes that work together over gloo, for tests: started, limited in time, and killed as one.

``run_ranks(work, world)`` runs ``work(rank, world)``, a function of a test module, in ``world`` fresh processes and
returns what each returned. No test can hang: at the time limit, or as soon as one rank fails, all are killed, and the
failing ranks' output is the error.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]


class RanksFailed(AssertionError):
    """A rank failed or the time was up; the message holds every failed rank's last output."""


def run_ranks(work: Callable[[int, int], Any], world: int, *, seconds: float = 600) -> list[Any]:
    """The results of ``work(rank, world)`` by rank. ``work`` is a module-level function; results are picklable."""
    import torch

    with TemporaryDirectory() as folder:
        logs = [Path(folder, f"log{rank}") for rank in range(world)]
        command = [sys.executable, "-m", "tests.ranks", work.__module__, work.__qualname__, folder, str(world)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], cwd=ROOT, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT
            )
            for rank, log in enumerate(logs)
        ]
        codes: list[int | None] = [None] * world
        try:
            end = time.monotonic() + seconds
            while None in codes and time.monotonic() < end and not any(codes):
                time.sleep(0.1)
                codes = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(code != 0 for code in codes):
            tails = []
            for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
                state = "killed" if code is None else f"exit code {code}"
                tails.append(f"rank {rank}: {state}\n" + log.read_text()[-4000:])
            raise RanksFailed(f"within {seconds} s not every rank succeeded\n" + "\n".join(tails))
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(world)]


def collectives(work: Callable[[], Any]) -> dict[str, int]:
    """How often ``work()`` called each of gloo's collectives on this rank, those of C++ and of a backward included."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    return {e.key: e.count for e in profiled.key_averages() if e.key.startswith("gloo:")}


def main(module: str, function: str, folder: str, world: int, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    result = getattr(importlib.import_module(module), function)(rank, world)
    torch.save(result, f"{folder}/result{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], *(int(number) for number in sys.argv[4:6]))  # type: ignore[arg-type]
