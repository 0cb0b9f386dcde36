"""The graph tools: dumps, reports, and the first pass that changes a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from tests.passes.blocks import H
from tests.passes.foreign import ThreeWeights
from tools import bisect_passes, dump_graph

W4A4 = "w=nvfp4:pow2:expert|a=nvfp4:pow2:row"


def make() -> tuple[Any, dict[str, Any]]:
    """What people hand to the tools."""
    torch.manual_seed(0)
    return ThreeWeights(), {"x": torch.randn(5, H)}


OURS = f"{__name__}:make"


def test_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump_graph.main(["qwen3_moe", "--layers", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "model.layers.0.mlp.experts: grouped_mm_fallback, E=8 K=2 H=64 I=32" in printed
    assert "grouped_mm_fallback" in (tmp_path / "graph0" / "01_canonicalize.txt").read_text()
    assert "moe_float" in (tmp_path / "graph0" / "02_outline.txt").read_text()
    assert "+%moe_float" in (tmp_path / "graph0" / "02_outline.diff").read_text()


def test_bisect_blames_quantization_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert bisect_passes.main([OURS]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(": none")
    assert bisect_passes.main([OURS, "--scheme", W4A4]) == 1
    *passes, last = capsys.readouterr().out.splitlines()
    assert last.endswith(": quantize") and passes[0] == "canonicalize: 0" and passes[-1].startswith("quantize: 0.")
    assert bisect_passes.main([OURS, "--scheme", W4A4, "--tolerance", "9"]) == 0


def test_bisect_names_a_pass_that_breaks_only_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gm: Any, example_inputs: list[Any], *, config: Any) -> Any:
        weight = next(n for n in gm.graph.nodes if n.op == "placeholder" and "w2" in n.name)
        with gm.graph.inserting_after(weight):
            cut = gm.graph.call_method("detach", (weight,))
        cut.meta["example_value"] = weight.meta["example_value"]
        weight.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)
        gm.recompile()
        return gm

    pipeline = list(bisect_passes.PIPELINE)
    pipeline.insert(1, type(pipeline[0])("cut", changes_numerics=False, run=broken))
    monkeypatch.setattr(bisect_passes, "PIPELINE", pipeline)
    model, inputs = make()
    blamed, _ = bisect_passes.bisect(model, bisect_passes.Mode(scheme=None, train=True), inputs, 1e-4)
    assert blamed == "cut"
