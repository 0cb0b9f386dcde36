"""Guided rounding: on values, on codes, against the oracle, and the guarantees that make it useful."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.numerics.cases import adversarial, element_codes, same_bits
from trace_compile.errors import OperandError
from trace_compile.numerics import (
    FORMATS,
    decode_blocks,
    decode_e4m3,
    finite_scales,
    guided_blocks,
    guided_round,
    oracle,
    poison_scales,
    quantize,
    quantize_blocks,
)
from trace_compile.numerics.codec import decode
from trace_compile.numerics.formats import E2M1

WORDS = sorted({-v for v in E2M1.codebook} | set(E2M1.codebook))
z_values = st.one_of(st.floats(-8, 8, width=32), st.sampled_from(WORDS), st.sampled_from([0.0, -0.0, 1e-40, -1e-40]))
many = settings(max_examples=150, deadline=None)


def codewords(z: Tensor) -> Tensor:
    return decode(element_codes(z, E2M1), E2M1)


@many
@given(z=z_values, q_roll=st.sampled_from(WORDS))
def test_full_guidance_never_moves_away(z: float, q_roll: float) -> None:
    zt, rt = torch.tensor([z]), torch.tensor([q_roll])
    q, rne = guided_round(zt, q_roll=rt), codewords(zt)
    # a z exactly on a codeword has a bracket that goes up only: it may step away from what RNE would have kept, by one
    if z not in WORDS:
        assert abs(q.item() - q_roll) <= abs(rne.item() - q_roll)
    assert abs(WORDS.index(q.item()) - WORDS.index(rne.item())) <= 1
    low, high = oracle.bracket(Fraction(z))
    assert q.item() in (low, high)


@many
@given(z=z_values, q_roll=st.sampled_from(WORDS))
def test_one_bit_is_exact_when_the_rollouts_codeword_is_in_the_bracket(z: float, q_roll: float) -> None:
    bit = torch.tensor([E2M1.codebook.index(abs(q_roll)) & 1])
    zt, rt = torch.tensor([z]), torch.tensor([q_roll])
    one, full = guided_round(zt, bit=bit), guided_round(zt, q_roll=rt)
    if full.item() == q_roll:
        assert one.item() == q_roll
    assert abs(WORDS.index(one.item()) - WORDS.index(full.item())) <= 1


@many
@given(z=z_values, q_roll=st.sampled_from(WORDS))
def test_sign_symmetric_off_the_codewords(z: float, q_roll: float) -> None:
    if min(max(z, -6.0), 6.0) in WORDS:
        return
    a = guided_round(torch.tensor([z]), q_roll=torch.tensor([q_roll]))
    b = guided_round(torch.tensor([-z]), q_roll=torch.tensor([-q_roll]))
    assert same_bits(a, -b)


def drifted(seed: int, drift: float) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.cat((adversarial(seed), torch.randn(6, 128, generator=g)))
    x = x.nan_to_num(nan=1.0, posinf=2.0, neginf=-3.0)
    y = x * (1 + drift * torch.randn(x.shape, generator=g)).clamp(-2, 2)
    largest = torch.finfo(torch.float32).max
    return x, y.clamp(-largest, largest)


@pytest.mark.parametrize("drift", [0.02, 0.5])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp4_macro", "hif4"])
def test_blocks_equal_the_oracle(fmt: str, drift: float) -> None:
    x, y = drifted(1, drift)
    q = quantize(x, fmt)
    full = guided_blocks(y, q.scales, q.outer, codes=q.codes, fmt=fmt)
    bit = guided_blocks(y, q.scales, q.outer, bits=q.codes & 1, fmt=fmt)
    element = FORMATS[fmt].element
    ones = torch.full(x.shape, element.codebook.index(1.0), dtype=torch.uint8)
    scale = decode_blocks(ones, q.scales, fmt).double() * q.outer.double().unsqueeze(-1)
    for v, s, code, f, b in zip(*(t.flatten().tolist() for t in (y, scale, q.codes, full, bit)), strict=True):
        assert f == oracle.guided_code(v, s, code=code, element=element), (v, s, code)
        assert b == oracle.guided_code(v, s, bit=code & 1, element=element), (v, s, code)


def test_blocks_equal_values() -> None:
    x, y = drifted(2, 0.05)
    q = quantize(x, outer="tensor")
    z = y / (decode_e4m3(q.scales).repeat_interleave(16, -1) * q.outer)
    full = guided_round(z, q_roll=decode(q.codes, E2M1))
    assert same_bits(decode(guided_blocks(y, q.scales, q.outer, codes=q.codes), E2M1), full)
    bit = guided_round(z, bit=q.codes & 1)
    assert same_bits(decode(guided_blocks(y, q.scales, q.outer, bits=q.codes & 1), E2M1), bit)


def test_without_drift_guidance_reproduces_the_rollout() -> None:
    """Except the codeword 6 when z is beyond it in magnitude, which is in the bracket {4, 6} anyway: all are
    reproduced.
    """
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    q = quantize(x)
    assert torch.equal(guided_blocks(x, q.scales, q.outer, codes=q.codes), q.codes)
    assert torch.equal(guided_blocks(x, q.scales, q.outer, bits=q.codes & 1), q.codes)


def test_every_scale_byte_can_guide() -> None:
    """Subnormal and zero E4M3 scales come from engines with other floors; the NaN byte from a poisoned rollout
    block.
    """
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(4))
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    x = x * decode_e4m3(scales).nan_to_num().abs().clamp(min=2.0**-12)
    codes = element_codes(torch.randn(256, 16, generator=torch.Generator().manual_seed(5)) * 3, E2M1)
    out = guided_blocks(x, scales, torch.ones(()), codes=codes)
    for i in [*range(1, 0x7F)]:
        s = decode_e4m3(scales[i]).item()
        assert out[i].tolist() == [
            oracle.guided_code(v, s, code=c) for v, c in zip(x[i].tolist(), codes[i].tolist(), strict=True)
        ]
    assert torch.all(decode_blocks(out, scales)[0] == 0)
    assert decode_blocks(out, scales)[0x7F].isnan().all()


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp4_macro", "hif4"])
def test_poison_in_other_formats(fmt: str) -> None:
    """Exactly the block with NaN or Inf decodes to NaN, and its scale bytes are those that quantizing it gives."""
    block = FORMATS[fmt].block
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(6))
    q = quantize(x, fmt)
    y = x.clone()
    y[1, 200], y[2, 3] = torch.nan, torch.inf
    scales = poison_scales(y, q.scales, fmt)
    expected = torch.zeros(3, 256 // block, dtype=torch.bool)
    expected[1, 200 // block] = expected[2, 0] = True
    decoded = decode_blocks(guided_blocks(y, scales, None, codes=q.codes, fmt=fmt), scales, fmt)
    assert torch.equal(decoded.isnan(), expected.repeat_interleave(block, -1))
    assert torch.equal(finite_scales(scales, fmt), torch.tensor([True, False, False]))
    assert torch.equal(finite_scales(quantize(y, fmt).scales, fmt), torch.tensor([True, False, False]))
    assert torch.equal(scales[0], q.scales[0])


def test_poison_keeps_nan_visible() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(6))
    q = quantize(x)
    y = x.clone()
    y[1, 17], y[2, 63] = torch.nan, -torch.inf
    scales = poison_scales(y, q.scales)
    assert [tuple(i) for i in (scales != q.scales).nonzero().tolist()] == [(1, 1), (2, 3)]
    assert scales[1, 1] == scales[2, 3] == 0x7F
    codes = guided_blocks(y, scales, q.outer, codes=q.codes)
    assert decode_blocks(codes, scales).isnan().sum() == 32
    clean = torch.ones_like(y, dtype=torch.bool)
    clean[1, 16:32] = clean[2, 48:] = False
    assert torch.equal(codes[clean], q.codes[clean])


def test_options_are_checked() -> None:
    x = torch.randn(2, 32)
    codes, scales = quantize_blocks(x, torch.ones(()))
    with pytest.raises(OperandError, match="exactly one"):
        guided_blocks(x, scales, torch.ones(()))
    with pytest.raises(OperandError, match="exactly one"):
        guided_blocks(x, scales, torch.ones(()), codes=codes, bits=codes & 1)
    with pytest.raises(OperandError, match="E2M1 and S1P2"):
        guided_blocks(x, scales, None, codes=codes, fmt="mxfp8_e4m3")
    with pytest.raises(OperandError, match="exactly one"):
        guided_round(x)
