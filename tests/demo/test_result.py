"""The schema of result.json: aggregation over seeds, null for what does not apply, strict and atomic."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trace_compile.demo import report
from trace_compile.demo.result import SCHEMA, ArmResult, DemoResult, ExportCheck, StepRecord, SweepPoint, combine

STEP = StepRecord(
    reward=0.5,
    gap_max=1.0,
    gap_mean=0.1,
    k1=0.0,
    k3=0.01,
    entropy=0.4,
    staleness=1,
    clip_fraction=0.0,
    seconds=1.0,
    rollout_seconds=0.5,
)


def _arm(name: str = "trace", **fields: Any) -> ArmResult:
    return combine(name, {0: [replace(STEP, **fields)] * 2}, [(0.3, 0.4)], 2.0)


def _result(*arms: ArmResult) -> DemoResult:
    return DemoResult(
        schema=SCHEMA,
        preset="micro",
        task="sums",
        model={"layers": 2},
        warm_start={"source": "here", "loss": 0.4},
        compute_dtype="float32",
        device="CPU",
        versions={"torch": "2"},
        steps=2,
        seconds=3.0,
        arms=list(arms),
        sweep=[SweepPoint("trace", steps, 0.01 * steps, 0.02 * steps, 0.1, 0.0, 0.1, 0.0) for steps in (0, 1)],
        exports=[ExportCheck("bf16", "quantized weights", 1024, 0.0, 0.0, 1.0)],
    )


def test_combine_averages_seeds_and_takes_the_largest_maximum() -> None:
    first = [replace(STEP, reward=0.0, gap_max=1.0, drift=0.1), replace(STEP, reward=1.0, gap_max=2.0)]
    second = [replace(STEP, reward=0.5, gap_max=3.0, drift=0.3), replace(STEP, reward=0.5, gap_max=math.nan)]
    arm = combine("qat", {3: first, 5: second}, [(0.1, 0.3), (0.3, 0.5)], 9.0)
    assert arm.seeds == [3, 5]
    assert arm.reward == [0.25, 0.75]
    assert arm.gap_max == [3.0, 2.0]
    assert arm.drift == pytest.approx(0.2)
    assert arm.held_out_reward == pytest.approx([0.2, 0.4])
    assert arm.mismatch_before == [None, None] and arm.guidance_bytes_per_token is None
    assert [run["seed"] for run in arm.runs] == [[3], [5]]
    assert arm.runs[1]["gap_max"][0] == 3.0


def test_the_file_is_strict_json_with_the_promised_fields(tmp_path: Path) -> None:
    result = _result(_arm("bf16"), _arm("trace", hit_rate=1.0, guidance_bytes_per_token=54.0, k3=math.inf))
    result.write(tmp_path / "new" / "result.json")
    text = (tmp_path / "new" / "result.json").read_text()
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {"arms", "compute_dtype", "versions", "device"} <= data.keys()
    plain, traced = data["arms"]
    for arm in (plain, traced):
        assert {"name", "seeds"} <= arm.keys()
        for field in ("reward", "gap_max", "gap_mean", "mismatch_before", "mismatch_after"):
            assert len(arm[field]) == data["steps"]
    assert plain["guidance_hit_rate"] is None and plain["mismatch_after"] == [None, None]
    assert traced["guidance_hit_rate"] == 1.0 and traced["guidance_bytes_per_token"] == 54.0
    assert traced["runs"][0]["k3"] == [None, None]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["result.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        replace(_result(_arm()), model={"layers": object()}).write(path)
    assert path.read_text() == "old"


def test_plots_and_tables_cope_with_what_does_not_apply(tmp_path: Path) -> None:
    import io

    from rich.console import Console

    result = _result(_arm("bf16"), _arm("trace", mismatch_before=0.1, mismatch_after=0.01, drift=0.02))
    for path in report.write_plots(result, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")
    text = io.StringIO()
    report.print_tables(result, Console(file=text, width=80))
    assert max(len(line.rstrip()) for line in text.getvalue().splitlines()) <= 80
    assert "…" not in text.getvalue()
    assert "10.0%" in text.getvalue() and "-" in text.getvalue()
