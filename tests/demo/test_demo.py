"""The demo from start to end, as small as it goes, and its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trace_compile import cli
from trace_compile.demo.presets import PRESETS
from trace_compile.demo.run import run_demo
from trace_compile.demo.task import ChainSums
from trace_compile.errors import TraceCompileError, UnknownRecipeError


@pytest.mark.slow
def test_two_arms_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The micro model solves nothing, and equal rewards move no weight: these depend on the text alone.
    monkeypatch.setattr(ChainSums, "reward", lambda self, problem, text: sum(map(ord, text)) % 8 / 7)
    result = run_demo("micro", tmp_path, steps=2, arms=["qat", "trace"])
    qat, trace = result.arms
    data = json.loads((tmp_path / "result.json").read_text())
    assert [arm["name"] for arm in data["arms"]] == ["qat", "trace"] and data["compute_dtype"] == "float32"
    assert qat.seeds == trace.seeds == [0]
    # The first batch is fresh: both arms quantize alike, so the trainer sees the very operands of the rollout.
    for arm in (qat, trace):
        assert len(arm.reward) == 2
        assert arm.gap_max[0] is not None and arm.gap_max[0] < 1e-4
        assert arm.mismatch_before[0] == pytest.approx(0.0, abs=1e-4)
        assert arm.runs[0]["staleness"] == [0, 1]
    # The second is one version stale: guidance removes most of the mismatch that the trainer's own rounding has.
    assert qat.mismatch_before[1] == qat.mismatch_after[1]
    assert trace.mismatch_before[1] is not None and trace.mismatch_after[1] is not None
    assert trace.mismatch_after[1] < 0.5 * trace.mismatch_before[1]
    assert trace.guidance_hit_rate == 1.0 and qat.guidance_hit_rate is None
    assert trace.guidance_bytes_per_token == 32 * (1 + 8 / 16) / 8  # one of two layers
    assert [point.steps for point in result.sweep] == [0, 1, 0, 1]
    # Reloaded weights are the rollout's own; the bf16 and the packed checkpoint hold the same numbers.
    weights_only = [check for check in result.exports if check.against == "quantized weights"]
    assert {check.format for check in weights_only} == {"compressed-tensors", "bf16"}
    assert all(check.logits_relative_error < 1e-5 and check.top1_agreement == 1.0 for check in weights_only)
    for name in ("reward.png", "gap.png", "mismatch.png", "drift.png"):
        assert (tmp_path / name).stat().st_size > 0
    assert (tmp_path / "compressed-tensors" / "config.json").exists()


def test_nothing_to_run_is_refused(tmp_path: Path) -> None:
    nothing: list[dict[str, Any]] = [{"steps": 0}, {"seeds": []}, {"arms": []}]
    for arguments in nothing:
        with pytest.raises(TraceCompileError, match="nothing to run"):
            run_demo("micro", tmp_path / "out", **arguments)
    with pytest.raises(UnknownRecipeError, match="fp2"):
        run_demo("micro", tmp_path / "out", arms=["fp2"])
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_line_and_exit_code_1(tmp_path: Path) -> None:
    script = "import sys; sys.argv[0] = 'trace-compile'; from trace_compile.cli import main; main()"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, *arguments, "demo", "--preset", "huge", "--out", str(tmp_path / "out")]
        root = Path(cli.__file__).parents[1]
        return subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)

    done = run()
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("error: unknown preset 'huge'") and not any("Traceback" in line for line in lines)
    debugged = run("--debug")
    assert debugged.returncode == 1 and "Traceback" in debugged.stderr


def test_command_line_passes_everything_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def record(preset: object, out: Path, **options: object) -> None:
        seen.update(options, preset=preset, out=out)

    monkeypatch.setattr("trace_compile.demo.run.run_demo", record)
    arguments = ["demo", "--preset", "cpu", "--out", str(tmp_path), "--steps", "3", "--seeds", "1,2"]
    done = CliRunner().invoke(cli.app, [*arguments, "--arms", "qat, trace", "--from-scratch"])
    assert done.exit_code == 0, done.output
    assert seen["preset"] is PRESETS["cpu"] and seen["out"] == tmp_path
    assert (seen["steps"], seen["seeds"], seen["arms"]) == (3, [1, 2], ["qat", "trace"])
    assert seen["from_scratch"] is True
    assert CliRunner().invoke(cli.app, ["demo", "--smoke"]).exit_code == 0
    assert seen["preset"] is PRESETS["micro"]


def test_version_and_bad_seeds() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).output.startswith("trace-compile")
    done = CliRunner().invoke(cli.app, ["demo", "--seeds", "1,x"])
    assert isinstance(done.exception, TraceCompileError) and "1,x" in str(done.exception)
