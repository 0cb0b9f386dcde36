"""The graph tool: dumps, reports, and names the first pass that changes a model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tools.dump_graph import main

W4A4 = "w=nvfp4:pow2:expert|a=nvfp4:pow2:row"


def test_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["qwen3_moe", "--layers", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "model.layers.0.mlp.experts: grouped_mm_fallback, E=8 K=2 H=64 I=32" in printed
    assert "grouped_mm_fallback" in (tmp_path / "graph0" / "01_canonicalize.txt").read_text()
    assert "moe_float" in (tmp_path / "graph0" / "02_outline.txt").read_text()


@pytest.mark.parametrize(
    ("options", "blamed"), [(["--scheme", W4A4], "quantize"), (["--scheme", W4A4, "--tolerance", "9"], "none")]
)
def test_bisect(options: list[str], blamed: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["qwen3_moe", "--layers", "1", "--bisect", *options])
    assert capsys.readouterr().out.strip().endswith(blamed)
