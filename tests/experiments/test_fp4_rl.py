"""The experiment's driver: a killed run goes on as if nothing had happened; sweep and report run on real results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tools.experiments.fp4_rl import report, rl
from tools.experiments.fp4_rl.arms import SPECS
from tools.experiments.fp4_rl.sweep import sweep
from trace_compile.demo import sft
from trace_compile.demo.arms import Arm
from trace_compile.demo.presets import PRESETS
from trace_compile.demo.run import shared_start

MICRO = replace(PRESETS["micro"], rl=replace(PRESETS["micro"].rl, steps=4, learning_rate=1e-3))


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm")
    sft.save(*sft.train(MICRO), {}, path)
    return path


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / rl.STEPS).read_text().splitlines()]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


@pytest.mark.slow
def test_a_run_killed_at_any_moment_goes_on_bit_for_bit(
    warm_start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(rl, "MEASURE_EVERY", 2)
    monkeypatch.setattr(rl, "EVALUATE_EVERY", 2)
    straight, broken = tmp_path / "trace-0", tmp_path / "elsewhere" / "broken"
    assert rl.run(SPECS["trace"], 0, MICRO, warm_start, straight, lambda step, note: None) == 4

    def kill(step: int, note: str) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rl.run(SPECS["trace"], 0, MICRO, warm_start, broken, kill)
    with (broken / rl.STEPS).open("a") as file:  # lines that were written when no state was, and one half written
        file.write('{"step": 3, "reward": 9}\n{"step": 4, "rew')
    assert rl.run(SPECS["trace"], 0, MICRO, warm_start, broken, lambda step, note: None) == 4
    assert lines_of(broken) == lines_of(straight)
    report.write(tmp_path, Console(width=200, file=(tmp_path / "text").open("w")))
    assert json.loads((tmp_path / "rl.json").read_text())["trace"]["0"]["reward"][-1][0] == 4
    assert (tmp_path / "rl.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_sweep_measures_gap_drift_and_gradient(
    warm_start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The micro model solves nothing, and equal rewards have no gradient.
    monkeypatch.setattr(
        "tools.experiments.fp4_rl.sweep.group_advantages", lambda rewards, size: torch.arange(-1.0, 3.0)
    )
    start = shared_start(sft.load(MICRO, warm_start)[0], MICRO)
    reference = Arm("bf16", sft.build_model(MICRO, 0), MICRO)
    points = sweep(SPECS["bf16"], start, reference) + sweep(SPECS["trace_all"], start, reference)
    by = {(point["arm"], point["source"], point["steps"]): point for point in points}
    floor = by["bf16", "optimizer steps", 0]
    assert floor["gap_mean"] < 1e-4 and floor["gradient_cosine"] == pytest.approx(1, abs=1e-5)
    ahead = by["trace_all", "optimizer steps", 1]
    assert 0 < ahead["drift"] < 1 and ahead["mismatch_after"] < ahead["mismatch_before"]
    assert 0 < ahead["gradient_cosine"] < 1 and ahead["guided_shift_abs"] > 0
    assert ("trace_all", "eager attention", 1) in by
    (tmp_path / "sweep.json").write_text(json.dumps({"points": points}))
    report.write(tmp_path, Console(width=200, file=(tmp_path / "text").open("w")))
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
