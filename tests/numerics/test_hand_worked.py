"""Formats without golden vectors: tables worked by hand from the formulas of the contract."""

from __future__ import annotations

import pytest
import torch

from trace_compile.numerics import FORMATS, quantize


def test_hif4() -> None:
    """Vmax 7 -> SF = bf16(7 * bf16(1/7) = 1.001..) = 1 -> E6M2 = 1, REC = 1. Groups of 8 reach 4: exponent 1; of 4
    reach 2: 1.
    """
    x = torch.zeros(64)
    x[0] = 7.0  # 8-group 0: 7 >= 4 -> 1; 4-group 0: 3.5 >= 2 -> 1; 7/4 = 1.75 -> m = 7/4, code 7
    x[1] = -1.5  # 1.5/4*4 = 1.5 steps, half up -> 2 (half even would give 2 as well)
    x[2] = 2.5  # 2.5 steps, half up -> 3 (half even would give 2)
    x[4] = 3.0  # same 8-group, 4-group 1: 3/2 = 1.5 < 2 -> 0; 3/2*4 = 6 steps
    x[8] = 2.0  # 8-group 1: 2 < 4 -> 0; 4-group 2: 2 >= 2 -> 1; 2/2*4 = 4 steps
    x[12] = 0.625  # 0.625*4 = 2.5 steps, half up -> 3
    x[63] = -0.1  # 0.4 steps -> 0, sign kept
    q = quantize(x, "hif4")
    expected = torch.zeros(64, dtype=torch.uint8)
    for i, code in {0: 7, 1: 8 | 2, 2: 3, 4: 6, 8: 4, 12: 3, 63: 8}.items():
        expected[i] = code
    assert torch.equal(q.codes, expected)
    assert q.scales.tolist() == [48 << 2, 0b1, 0b101, 0]
    y = q.dequantize()
    values = {i: y[i].item() for i in (0, 1, 2, 4, 8, 12, 63)}
    assert values == {0: 7.0, 1: -2.0, 2: 3.0, 4: 3.0, 8: 2.0, 12: 0.75, 63: -0.0}


def test_mxfp4_macro() -> None:
    """amax 7 -> 7/6 = 1 + 42.67/256 -> m = 43, factor 1.16797; 7/factor = 5.99 -> exponent 0 (in [4, 8)), element 6."""
    x = torch.zeros(128)
    x[0] = 7.0  # 5.993 -> 6
    x[1] = -3.0  # 2.569 -> 3 (2.5 is the tie)
    x[2] = 2.9  # 2.483 -> 2
    x[40] = 0.3  # second block: 0.25686 in [2^-2, 2^-1) -> exponent -4; 4.11 -> 4
    q = quantize(x, "mxfp4_macro")
    assert {i: int(c) for i, c in enumerate(q.codes) if c} == {0: 7, 1: 8 | 5, 2: 4, 40: 6}
    assert q.scales.tolist() == [127, 123, 0, 0, 43]
    factor = 1 + 43 / 256
    assert [q.dequantize()[i].item() for i in (0, 1, 2, 40)] == [6 * factor, -3 * factor, 2 * factor, factor / 4]
    assert FORMATS["mxfp4_macro"].bits_per_value == 4.3125
    assert quantize(torch.full((128,), 6.0), "mxfp4_macro").scales.tolist() == [127] * 4 + [0]
    # 11.99/6 = 1.9983 = 1 + 255.57/256: rounds up to the next power of two, which E8M0 itself has.
    carried = quantize(torch.full((128,), 11.99), "mxfp4_macro")
    assert carried.scales.tolist() == [128] * 4 + [0] and carried.dequantize()[0] == 12.0


def test_hif4_ends_of_the_range() -> None:
    zero, tiny, huge = (quantize(torch.full((64,), v), "hif4") for v in (0.0, 1e-30, 3e38))
    assert zero.scales.tolist() == tiny.scales.tolist() == [0, 0, 0, 0]
    assert not zero.codes.any() and not tiny.codes.any()
    assert huge.scales.tolist() == [0xFE, 0xFF, 0xFF, 0xFF]
    assert set(huge.codes.tolist()) == {7}
    assert huge.dequantize()[0].item() == 1.5 * 2**15 * 4 * 1.75
    assert FORMATS["hif4"].bits_per_value == 4.5


def test_int4() -> None:
    """amax 7 -> s = 1: round half to even, two's complement nibbles; -8 is never used."""
    x = torch.zeros(32)
    x[:8] = torch.tensor([7.0, -7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -6.6])
    q = quantize(x, "int4_g32")
    assert q.codes[:8].tolist() == [7, 9, 0, 2, 2, 0, 14, 9]
    assert q.scales.view(torch.float32).tolist() == [1.0]
    assert q.dequantize()[:8].tolist() == [7, -7, 0, 2, 2, 0, -2, -7]
    assert q.packed[:2].tolist() == [0x97, 0x20]


def test_int4_floor_and_groups() -> None:
    x = torch.cat((torch.zeros(32), torch.full((32,), 3e-5), torch.full((64,), -14.0)))
    q = quantize(x, "int4_g32")
    floor = torch.tensor(1e-5).item()
    assert q.scales.view(torch.float32).tolist() == [floor, floor, 2.0, 2.0]
    assert q.codes[[0, 32, 64]].tolist() == [0, 3, 9]
    assert quantize(x, "int4_g128").scales.view(torch.float32).tolist() == [2.0]


@pytest.mark.parametrize(("fmt", "top"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_rows_and_tensor(fmt: str, top: float) -> None:
    x = torch.tensor([[top, -top / 2, top / 4, 0.0], [2.0, 1.0, -0.5, 0.25]])
    q = quantize(x, fmt, profile="fp32")
    assert q.outer.tolist() == [1.0, torch.tensor(2 / top, dtype=torch.float32).item()]
    assert torch.allclose(q.dequantize(), x, rtol=1e-6)
    assert quantize(x, fmt, outer="tensor", profile="fp32").outer.tolist() == [1.0]
    assert q.scales.shape == (2, 0)
    assert torch.equal(q.packed, q.codes)


def test_four_over_six_takes_the_better_target_and_six_on_a_tie() -> None:
    """A block of 4s and 3s is exact with max -> 4 (s = 1), and not with max -> 6 (s = 4/6)."""
    x = torch.tensor([[4.0, 3.0] * 8 + [6.0, 3.0] * 8 + [0.0] * 16])
    g = torch.ones(1)
    for profile in ("four_over_six", "four_over_six_mae", "pow2_four_over_six"):
        q = quantize(x, outer=g, profile=profile)
        assert q.scales[0, :2].tolist() == [0x38, 0x38], "s = 1 in both blocks"
        assert q.codes[0, :2].tolist() == [6, 5] and q.codes[0, 16:18].tolist() == [7, 5]
        assert torch.equal(q.dequantize(), x)
    assert quantize(x, outer=g).scales[0, 0] == 0x33  # e4m3(4/6) = 0.6875: the plain profile maps to 6
    zero_block = quantize(x, outer=g, profile="pow2_four_over_six").scales[0, 2]
    assert zero_block == 0x08, "a tie keeps max -> 6, whose scale is the floor"


def test_the_error_measure_of_four_over_six_changes_something() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    mse, mae = (quantize(x, profile=p) for p in ("four_over_six", "four_over_six_mae"))
    plain = quantize(x, profile="fp32")
    assert 0 < (mse.scales != mae.scales).float().mean() < 0.3

    def squared(q) -> float:  # type: ignore[no-untyped-def]
        return (q.dequantize() - x).square().mean().item()

    assert squared(mse) < squared(mae) < squared(plain)
    assert torch.all(mse.outer <= plain.outer * 448 / 256 * (1 + 2.0**-22))
