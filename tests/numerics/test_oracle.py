"""The tensor reference equals the scalar oracle, byte for byte, for every format and profile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numerics.cases import adversarial
from trace_compile.numerics import FORMATS, PROFILES, oracle, quantize

EVERYTHING = [("nvfp4", p) for p in PROFILES] + [
    (f, p) for f in FORMATS if f != "nvfp4" for p in (("pow2", "fp32") if FORMATS[f].outer else ("pow2",))
]
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def assert_equal_to_the_oracle(x: torch.Tensor, fmt: str, profile: str) -> None:
    q = quantize(x, fmt, profile=profile)
    for i, row in enumerate(x.tolist()):
        expected = oracle.quantize_row(row, None, fmt, profile)
        assert q.codes[i].tolist() == expected.codes, f"row {i}"
        assert q.scales[i].tolist() == expected.scales, f"row {i}"
        if FORMATS[fmt].outer:
            assert q.outer[i].item() == expected.outer, f"row {i}"


@pytest.mark.parametrize(("fmt", "profile"), EVERYTHING)
def test_adversarial_rows(fmt: str, profile: str) -> None:
    assert_equal_to_the_oracle(adversarial(), fmt, profile)


@pytest.mark.parametrize(("fmt", "profile"), EVERYTHING)
@settings(max_examples=3, deadline=None)
@given(values=st.lists(float32, min_size=32, max_size=32))
def test_any_float32(fmt: str, profile: str, values: list[float]) -> None:
    """32 arbitrary values of any magnitude, tiled to a row."""
    assert_equal_to_the_oracle(torch.tensor([values]).repeat(1, 4), fmt, profile)


@settings(max_examples=40, deadline=None)
@given(values=st.lists(float32, min_size=16, max_size=16), exponent=st.integers(-100, 116))
def test_given_outer_scale(values: list[float], exponent: int) -> None:
    g = 2.0**exponent
    q = quantize(torch.tensor([values]), outer=torch.tensor([g]))
    expected = oracle.quantize_row(values, g)
    assert (q.codes[0].tolist(), q.scales[0].tolist()) == (expected.codes, expected.scales)
