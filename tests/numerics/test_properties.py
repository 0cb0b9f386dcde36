"""What must hold for every input: idempotence, monotonicity, sign symmetry, equivariance by powers of two, packing
inverses.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.numerics.cases import same_bits
from trace_compile.numerics import (
    FORMATS,
    decode_e4m3,
    encode_e4m3,
    pack_bits,
    pack_nibbles,
    quantize,
    quantize_blocks,
    saturated,
    unpack_bits,
    unpack_nibbles,
)

moderate = st.floats(-(2.0**40), 2.0**40, width=32).filter(lambda v: v == 0 or abs(v) > 2.0**-40)
blocks = st.lists(moderate, min_size=16, max_size=16).map(lambda v: torch.tensor([v]))
many = settings(max_examples=50, deadline=None)


@many
@given(x=blocks)
def test_idempotent(x: Tensor) -> None:
    """Quantizing the represented values gives them back (the codes may differ: a block may pick a smaller scale)."""
    once = quantize(x, outer="tensor")
    again = quantize(once.dequantize(), outer=once.outer)
    assert same_bits(again.dequantize(), once.dequantize())


@many
@given(x=blocks, k=st.integers(-20, 20))
def test_equivariant_by_powers_of_two(x: Tensor, k: int) -> None:
    a, b = quantize(x), quantize(x * 2.0**k)
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)
    expected = torch.where((x == 0).all(-1), 1.0, a.outer * 2.0**k)
    assert torch.equal(b.outer, expected)


@many
@given(x=blocks, k=st.integers(0, 4))
def test_a_larger_power_of_two_outer_scale_changes_no_value(x: Tensor, k: int) -> None:
    """Shifting g only shifts the E4M3 exponents, for blocks that stay above the floor."""
    a = quantize(x)
    b = quantize(x, outer=a.outer * 2.0**k)
    above = decode_e4m3(a.scales) >= 2.0 ** (k - 6)
    assert torch.all(~above | (a.dequantize() == b.dequantize()).all(-1, keepdim=True))


@many
@given(x=blocks)
def test_sign_symmetric(x: Tensor) -> None:
    a, b = quantize(x), quantize(-x)
    assert torch.equal(a.codes ^ 8, b.codes)
    assert torch.equal(a.scales, b.scales)
    assert torch.equal(a.outer, b.outer)


@many
@given(x=blocks)
def test_monotone_within_a_block(x: Tensor) -> None:
    values = quantize(x.sort(-1).values).dequantize()
    assert torch.all(values.diff(dim=-1) >= 0)


@many
@given(x=blocks, scale=st.floats(0, 1, width=32))
def test_scale_is_monotone_in_amax(x: Tensor, scale: float) -> None:
    g = torch.ones(1)
    smaller, larger = (quantize_blocks(v, g)[1] for v in (x * scale, x))
    assert torch.all(smaller <= larger)


@many
@given(x=blocks)
def test_error_is_at_most_half_a_step(x: Tensor) -> None:
    """|x - q| <= half the widest step (1 scale) + what saturates when the scale was rounded down (1/16 of 6 scales)."""
    q = quantize(x)
    scale = decode_e4m3(q.scales) * q.outer.unsqueeze(-1)
    assert torch.all((x - q.dequantize()).abs() <= scale * (1 + 2.0**-20))
    assert not saturated(x, q.outer).any()


@pytest.mark.parametrize("fmt", list(FORMATS))
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_format_keeps_signs_and_decodes_finite(fmt: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(moderate, min_size=32, max_size=32))
    x = torch.tensor([values]).repeat(1, 4)
    q = quantize(x, fmt)
    y = q.dequantize()
    assert y.isfinite().all()
    assert torch.all((y == 0) | (y.sign() == x.sign()))
    assert torch.equal(quantize(-x, fmt).dequantize(), -y)


@many
@given(st.binary(min_size=16, max_size=16))
def test_packing_inverts(raw: bytes) -> None:
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(2, 8)
    assert torch.equal(pack_nibbles(unpack_nibbles(data)), data)
    assert torch.equal(pack_bits(unpack_bits(data)), data)
    assert torch.equal(unpack_bits(pack_bits(data)), data & 1)
    assert torch.equal(unpack_nibbles(pack_nibbles(data & 15)), data & 15)


def test_packed_bit_order() -> None:
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0], codes[0, 3], codes[0, 9] = 1, 7, 5
    assert pack_bits(codes).tolist() == [[0b1001, 0b10]]


@many
@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_e4m3_is_monotone_and_idempotent(a: float, b: float) -> None:
    low, high = decode_e4m3(encode_e4m3(torch.tensor([min(a, b), max(a, b)]))).tolist()
    assert low <= high
    assert decode_e4m3(encode_e4m3(torch.tensor([low]))).item() == low
