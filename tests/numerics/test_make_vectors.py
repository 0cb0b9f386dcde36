"""tools/make_vectors.py: the committed vectors follow from their inputs, and vectors of a fresh seed also agree."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.numerics import cases, test_vectors

TOOL = Path(__file__).parents[2] / "tools" / "make_vectors.py"
spec = importlib.util.spec_from_file_location("make_vectors", TOOL)
assert spec is not None and spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_committed_vectors_follow_from_their_inputs() -> None:
    for name in ("row", "tensor"):
        v = cases.vectors(f"nvfp4_pow2_{name}")
        for key, made in tool.nvfp4(v["x_bf16"].view(ml_dtypes.bfloat16), by_row=name == "row").items():
            assert np.array_equal(made, v[key]), (name, key)
    v = cases.vectors("mxfp4")
    for key, made in tool.mxfp4(v["x_bf16"].view(ml_dtypes.bfloat16)).items():
        assert np.array_equal(made, v[key]), key
    v = cases.vectors("guided")
    for key, made in tool.guided(v["z"].astype(np.float64), v["q_rollout"]).items():
        assert np.array_equal(made, v[key]), key
    v = cases.vectors("e2m1")
    assert np.array_equal(tool.fp4(v["x"]), v["code"])
    v = cases.vectors("e4m3")
    assert np.array_equal(tool.nearest(v["x"].astype(np.float64), tool.FP8), v["byte"])


def test_another_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool.main(tmp_path, seed=1)
    monkeypatch.setattr(cases, "VECTORS", tmp_path)
    for outer in ("row", "tensor"):
        test_vectors.test_nvfp4(outer)
    test_vectors.test_mxfp4()
    test_vectors.test_e4m3()
    test_vectors.test_e2m1()
    test_vectors.test_guided()
