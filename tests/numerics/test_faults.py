"""Faults that other quantizers shipped, by their ids: N01-N04, N06, N08. Each test would fail on the faulty
behaviour.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.numerics.cases import TIES
from trace_compile.numerics import PROFILES, amax, decode_e4m3, encode_e4m3, outer_scale, quantize, quantize_blocks

NAN_BYTES = (0x7F, 0xFF)


@pytest.mark.parametrize("profile", list(PROFILES))
@pytest.mark.parametrize("top", [1e-8, 0.01, 1.0, 1e4])
@pytest.mark.parametrize("zeros", ["block", "row", "expert"])
def test_n01_zero_blocks_store_no_nan_byte(zeros: str, top: float, profile: str) -> None:
    w = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    w = (w.clamp(-3, 3) / 3 * top).bfloat16()
    hole = torch.zeros_like(w, dtype=torch.bool)
    hole[{"block": (1, 3, slice(16, 32)), "row": (1, 3), "expert": (1,)}[zeros]] = True
    holed = torch.where(hole, 0.0, w)
    g = outer_scale(amax(w, (1, 2)), profile=profile)
    before, after = (quantize(v, outer=g, profile=profile) for v in (w, holed))
    own = quantize(holed, outer="expert", profile=profile)
    for q in (after, own):
        assert not any((q.scales == byte).any() for byte in NAN_BYTES)
        assert torch.all(q.dequantize()[hole] == 0)
        assert q.dequantize().isfinite().all()
    assert torch.equal(after.dequantize()[~hole], before.dequantize()[~hole])


@pytest.mark.parametrize("profile", list(PROFILES))
def test_n01_zero_token(profile: str) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    y = x.clone()
    y[2] = 0
    a, b = quantize(x, profile=profile), quantize(y, profile=profile)
    assert torch.all(b.dequantize()[2] == 0) and b.outer[2] == 1
    assert torch.equal(a.dequantize()[[0, 1, 3]], b.dequantize()[[0, 1, 3]])


OVERFLOWS = [448.0, 464.0, 465.0, 480.0, 1e5, torch.inf]


def eager(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return f


def inductor(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True)


@pytest.mark.parametrize("path", [eager, inductor])
def test_n02_overflow_saturates_on_every_path(path: Callable) -> None:
    x = torch.tensor(OVERFLOWS + [-v for v in OVERFLOWS] + [torch.nan])
    assert path(encode_e4m3)(x).tolist() == [0x7E] * len(OVERFLOWS) + [0xFE] * len(OVERFLOWS) + [0x7F]


def test_n02_amax_beyond_a_static_outer_scale_saturates() -> None:
    g = torch.ones(1)
    for top in (2688.0, 2700.0, 2784.0, 2790.0, 1e6, 3.4e38):
        x = torch.zeros(1, 16)
        x[0, 3], x[0, 4] = top, -1344.0
        q = quantize(x, outer=g)
        assert q.scales.item() == 0x7E
        assert q.dequantize()[0, 3:5].tolist() == [2688.0, -1344.0]


EXTREMES = {
    "zeros": torch.zeros(2, 32),
    "1e-40": torch.full((2, 32), 1e-40),
    "1e-37 in bfloat16": torch.full((2, 32), 1e-37, dtype=torch.bfloat16),
    "negative": -torch.randn(2, 32, generator=torch.Generator().manual_seed(2)).abs(),
    "3e38": torch.full((2, 32), 3e38),
}


@pytest.mark.parametrize("profile", list(PROFILES))
@pytest.mark.parametrize("name", EXTREMES)
def test_n03_scales_are_finite_positive_and_blind_to_sign(name: str, profile: str) -> None:
    x = EXTREMES[name]
    for outer in ("row", "tensor"):
        q, minus = quantize(x, outer=outer, profile=profile), quantize(-x, outer=outer, profile=profile)
        assert torch.all(q.outer > 0) and q.outer.isfinite().all() and (1 / q.outer).isfinite().all()
        s = decode_e4m3(q.scales)
        assert s.isfinite().all()
        assert PROFILES[profile].floor == 0 or torch.all(s > 0)
        assert q.dequantize().isfinite().all()
        assert torch.equal(q.scales, minus.scales) and torch.equal(q.outer, minus.outer)


def test_n04_the_ladder_of_underflowing_block_scales() -> None:
    """One rule: a block scale is at least 2^-6, so a block is flattened to zero exactly when amax <= 2^-6 * g / 4."""
    amaxes = torch.tensor([1.0, 1 / 40_000, 1 / 229_376, 1 / 458_751, 1 / 458_752, 1 / 524_287, 1 / 524_288, 0.0])
    x = torch.zeros(1, len(amaxes), 16)
    x[0, :, 2] = amaxes
    q = quantize(x.flatten(1))
    assert q.outer.item() == 2.0**-11
    assert q.scales[0].tolist() == [encode_e4m3(torch.tensor(2048 / 6)).item()] + [0x08] * 7
    unit = 2.0**-6 * 2.0**-11
    values = q.dequantize().view(-1, 16)
    assert (values[1:, 2] / unit).tolist() == [3, 0.5, 0.5, 0.5, 0.5, 0, 0]
    flattened = (values == 0).all(-1) & (amaxes > 0)
    assert flattened.tolist() == [bool(0 < a <= unit / 4) for a in amaxes.tolist()]


@pytest.mark.parametrize("profile", list(PROFILES))
def test_n04_no_profile_makes_nan_of_an_underflow(profile: str) -> None:
    x = torch.zeros(6, 16)
    x[:, 0] = torch.tensor([1.0, 1 / 40_000, 1 / 229_376, 1 / 458_751, 1 / 458_752, 0.0])
    q = quantize(x, outer="tensor", profile=profile)
    assert q.dequantize().isfinite().all()
    assert torch.all((q.dequantize() - x).abs() <= x.abs().amax() / 8)


def test_n06_ties_go_to_the_even_code() -> None:
    x = torch.tensor([[*TIES, *(-t for t in TIES)]]) * 448
    q = quantize(x)
    assert (q.outer.item(), q.scales.item()) == (1.0, 0x7E)
    even = [0, 2, 2, 4, 4, 6, 6, 7]
    assert q.codes[0].tolist() == even + [8 | c for c in even]


def test_n06_scale_ties_go_to_the_even_code() -> None:
    x = torch.zeros(2, 16)
    x[:, 0] = torch.tensor([6 * 17 / 16, 6 * 19 / 16])  # between 1 (0x38) and 1.125, and between 1.125 and 1.25 (0x3A)
    assert quantize(x, outer=torch.ones(1)).scales[:, 0].tolist() == [0x38, 0x3A]


@pytest.mark.parametrize(
    "emulate", [pytest.param(False, id="fast"), pytest.param(True, id="emulate", marks=pytest.mark.slow)]
)
def test_n08_the_compiler_does_not_change_bits(emulate: bool) -> None:
    """The quantizer takes stored bfloat16; what it makes of equal bits is equal in eager mode, aot_eager and
    Inductor.
    """
    generator = torch.Generator().manual_seed(3)
    gate, up = (torch.randn(16, 16, 64, generator=generator).bfloat16() for _ in range(2))

    def quantizer(h: Tensor) -> tuple[Tensor, ...]:
        a = amax(h, -1)
        return (a, *quantize_blocks(h, outer_scale(a)))

    def chain(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    with torch._inductor.config.patch(emulate_precision_casts=emulate):
        torch._dynamo.reset()
        stored = torch.compile(chain)(
            gate, up
        )  # may differ from eager by a rounding: the quantizer must not add to that
        expected = quantizer(stored)
        for backend in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            got = torch.compile(quantizer, backend=backend, fullgraph=True)(stored)
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), backend
