"""``trace-compile inspect``: facts, problems and exit codes, for checkpoints, programs and traces."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.export.models import EXPERTS, LAYERS, build, pack_model
from tests.state.records import REGIONS, layout, random_keys, random_rows
from trace_compile.cli import app
from trace_compile.export import export_checkpoint
from trace_compile.export.writer import MARK
from trace_compile.inspecting import Inspection, inspect
from trace_compile.state.ranges import Ranges
from trace_compile.state.trace import Trace

FORMATS = ("compressed-tensors", "modelopt")
CODES = {"compressed-tensors": "weight_packed", "modelopt": "weight"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in every format, and as it was before it was packed."""
    path = tmp_path_factory.mktemp("inspect")
    model = build()
    experts = pack_model(model)
    for fmt in (*FORMATS, "bf16"):
        export_checkpoint(model, experts, path / fmt, format=fmt, activations=fmt != "bf16")
    model.save_pretrained(path / "plain")
    return path


@pytest.fixture(params=FORMATS)
def copied(request: pytest.FixtureRequest, whole: Path, tmp_path: Path) -> tuple[Path, str]:
    return Path(shutil.copytree(whole / request.param, tmp_path / "out")), request.param


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    found = load_file(path / "model.safetensors")
    change(found)
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})


def texts(found: Inspection) -> str:
    return "\n".join(f"{p.severity}: {p.text}" for p in found.problems)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_whole_checkpoint(whole: Path, fmt: str) -> None:
    found = inspect(whole / fmt, reference=whole / "plain")
    assert found.kind == "checkpoint" and not found.problems and not found.failed(strict=True)
    facts = found.facts
    matrices = 3 * EXPERTS * LAYERS
    assert facts["packed_matrices"] == facts["compared_with_reference"] == matrices
    assert 4.5 < facts["bits_per_packed_weight"] < 4.6
    blocks = LAYERS * EXPERTS * 3 * 64 * 32 // 16
    assert sum(facts["block_scales"].values()) == blocks and not {"zero", "NaN"} & facts["block_scales"].keys()
    assert sum(facts["outer_scales_by_exponent"].values()) == matrices
    assert facts["input_scales"]["model.layers.1.mlp.experts.down"] == 2.0**-9
    assert facts["regions"]["model.layers.0.mlp.experts"]["experts"] == EXPERTS


def test_what_a_reference_shows(copied: tuple[Path, str], whole: Path) -> None:
    """Swapped nibbles pass every check of the file alone, and are named against any other form of the weights."""
    path, fmt = copied
    module = "model.layers.1.mlp.experts.7.up_proj"

    def swap(found: dict[str, torch.Tensor]) -> None:
        codes = found[f"{module}.{CODES[fmt]}"]
        found[f"{module}.{CODES[fmt]}"] = (codes << 4) | (codes >> 4)

    edit(path, swap)
    assert not inspect(path).problems
    for reference in ("plain", "bf16", *FORMATS):
        found = inspect(path, reference=whole / reference)
        assert len(found.problems) == 1 and found.failed()
        assert module in texts(found) and "nibbles are swapped" in texts(found)
    edit(path, lambda f: f.update({f"{module}.{CODES[fmt]}": f[f"{module}.{CODES[fmt]}"].flip(0).clone()}))
    found = inspect(path, reference=whole / "plain")
    assert "differs from the reference" in texts(found) and "nibbles" not in texts(found)


def test_problems_fail_and_warnings_fail_when_asked(copied: tuple[Path, str]) -> None:
    path, _ = copied
    name = "model.layers.0.mlp.experts.0.gate_proj.weight_scale"
    config = json.loads((path / "config.json").read_text())
    edit(path, lambda f: f[name].view(torch.uint8)[0, :2].copy_(torch.tensor([0, 3], dtype=torch.uint8)))
    assert inspect(path).failed() and "zero or subnormal" in texts(inspect(path))
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != MARK}))
    foreign = inspect(path)  # another tool's choice: a warning
    assert foreign.facts["made_by"] == "another tool" and "warning" in texts(foreign)
    assert not foreign.failed() and foreign.failed(strict=True)
    assert foreign.facts["block_scales"]["zero"] == foreign.facts["block_scales"]["subnormal"] == 1
    edit(path, lambda f: f.pop(name))
    assert f"error: {name} is missing" in texts(inspect(path))
    (path / "model.safetensors").write_bytes(b"\x00")
    assert inspect(path).kind == "unreadable" and inspect(path).failed()
    assert inspect(path.parent / "nowhere").failed()


def test_the_command(copied: tuple[Path, str], whole: Path) -> None:
    path, fmt = copied
    runner = CliRunner()
    done = runner.invoke(app, ["inspect", str(path)])
    assert done.exit_code == 0 and "no problems found" in done.output and "block_scales" in done.output
    done = runner.invoke(app, ["inspect", str(path), "--json", "--reference", str(whole / "plain")])
    content = json.loads(done.output)
    assert content["format"] == fmt and content["problems"] == [] and content["kind"] == "checkpoint"
    edit(path, lambda f: f.pop("model.layers.0.mlp.experts.0.gate_proj.weight_scale"))
    done = runner.invoke(app, ["inspect", str(path), "--json"])
    assert done.exit_code == 1 and "weight_scale is missing" in json.loads(done.output)["problems"][0]["text"]
    done = runner.invoke(app, ["inspect", str(path / "nothing")])
    assert done.exit_code == 1 and "error:" in done.output


def test_programs(tmp_path: Path) -> None:
    about: dict[str, Any] = {"format": "onnx", "file": "model.onnx", "form": "portable"}
    (tmp_path / "program.json").write_text(json.dumps(about))
    assert "model.onnx is missing" in texts(inspect(tmp_path))
    (tmp_path / "model.onnx").write_bytes(b"x" * 10)
    found = inspect(tmp_path)
    assert found.kind == "program" and not found.problems and found.facts["bytes"] > 10
    (tmp_path / "program.json").write_text(json.dumps(about | {"format": "gguf"}))
    assert "not known" in texts(inspect(tmp_path))
    (tmp_path / "program.json").write_text("[1]")
    assert inspect(tmp_path).failed()


def test_traces(tmp_path: Path) -> None:
    where = layout()
    ranges = Ranges.observed(
        REGIONS[0],
        torch.tensor([[1.0, 0.0], [3.0, 0.0]]),
        torch.tensor([5, 0]),
        torch.ones(2, 64, dtype=torch.int64),
        torch.tensor([0, 7]),
    )
    trace = Trace(where, "a" * 32, {"name": "trace"}, ranges=ranges)
    trace.append(random_keys(10), random_rows(10, where), 3, torch.ones(len(where.sites)))
    trace.save(tmp_path / "trace.safetensors")
    found = inspect(tmp_path / "trace.safetensors")
    assert found.kind == "trace" and found.facts["tokens"] == 10 and found.facts["weights_versions"] == [3]
    assert found.facts["ranges"][f"{REGIONS[0]}.down"]["amax"] == 3.0
    assert found.facts["ranges"][f"{REGIONS[0]}.down"]["outer_scale"] == 2.0**-8  # 2 * 3 <= 2688 * 2^-8
    assert not found.failed() and "warning" in texts(found)  # an expert without tokens, and saturated elements
    assert json.loads(found.to_json())["bytes_per_token"]["routing"] == 8
    file = tmp_path / "trace.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    assert inspect(file).kind == "unreadable" and inspect(file).failed()
