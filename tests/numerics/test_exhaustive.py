"""Every code, every scale, every bfloat16: nothing here is sampled."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.numerics.cases import element_codes, every_bfloat16, same_bits
from trace_compile.numerics import (
    FORMATS,
    decode_blocks,
    decode_e4m3,
    decode_exponent,
    encode_e4m3,
    encode_exponent,
    oracle,
    outer_scale,
    pack_nibbles,
    quantize_blocks,
    unpack_nibbles,
)
from trace_compile.numerics.codec import decode
from trace_compile.numerics.formats import E2M1, E4M3, E5M2, INT4, S1P2, Element

ALL_BYTES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize(
    ("element", "dtype"),
    [(E2M1, ml_dtypes.float4_e2m1fn), (E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)],
)
def test_decode_equals_ml_dtypes(element: Element, dtype: type) -> None:
    codes = ALL_BYTES[: 1 << element.bits]
    expected = codes.view(dtype).astype(np.float32)
    assert same_bits(decode(torch.from_numpy(codes), element), torch.from_numpy(expected))


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2, S1P2, INT4], ids=lambda e: e.name)
def test_decode_equals_the_oracle_and_encode_inverts_it(element: Element) -> None:
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    values = decode(codes, element)
    expected = torch.tensor([oracle.decode(int(c), element) for c in codes])
    assert same_bits(values, expected)
    inside = values.abs() <= element.max  # not NaN, not Inf, not INT4's unused -8
    assert torch.equal(element_codes(values, element)[inside], codes[inside])


def test_16_codes_times_256_scales() -> None:
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    s = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)[:, None]
    expected = s * ALL_BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert same_bits(decode_blocks(codes, scales, dtype=dtype).double(), torch.from_numpy(expected)), dtype


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2, S1P2, INT4], ids=lambda e: e.name)
def test_every_bfloat16_is_rounded_as_the_oracle_does(element: Element) -> None:
    x = every_bfloat16()
    x = x[x.isfinite()]
    expected = [oracle.signed(oracle.encode(abs(Fraction(v)), element), v, element) for v in x.float().tolist()]
    assert element_codes(x, element).tolist() == expected


def test_every_bfloat16_to_e4m3_equals_ml_dtypes_below_saturation() -> None:
    x = every_bfloat16()
    with np.errstate(invalid="ignore"):
        expected = x.float().numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)  # overflows to NaN: not compared
    inside = (x.abs() <= E4M3.max).numpy()
    ours = encode_e4m3(x.float()).numpy()
    assert np.array_equal(ours[inside], expected[inside])
    above = (x.abs() > E4M3.max).numpy()
    assert set(ours[above].tolist()) == {0x7E, 0xFE}
    assert np.all(ours[x.isnan().numpy()] == 0x7F)


def test_ties_and_their_neighbours_under_every_normal_scale() -> None:
    """A block headed by 6s has scale s; the others sit on, just below and just above every rounding boundary of s."""
    s = decode_e4m3(torch.arange(0x08, 0x7F, dtype=torch.uint8))
    book = torch.tensor(E2M1.codebook)
    boundary = (book[1:] + book[:-1]) / 2 * s[:, None]
    points = torch.cat(
        (torch.nextafter(boundary, torch.tensor(0.0)), boundary, torch.nextafter(boundary, 9 * boundary)), 1
    )
    points = torch.cat((points, -boundary, torch.zeros(len(s), 2)), 1)  # [119, 30]
    x = torch.stack((points[:, :15], points[:, 15:]), 1)
    x = torch.cat((6 * s[:, None, None].expand(-1, 2, 1), x), 2)  # [119, 2, 16]
    codes, scales = quantize_blocks(x, torch.ones(()))
    assert same_bits(decode_e4m3(scales), s[:, None, None].expand(-1, 2, 1).contiguous())
    for block, scale, got in zip(
        x.flatten(0, 1).tolist(), s.repeat_interleave(2).tolist(), codes.flatten(0, 1).tolist()
    ):
        expected = [oracle.signed(oracle.encode(abs(Fraction(v)) / Fraction(scale), E2M1), v, E2M1) for v in block]
        assert got == expected


def test_block_scale_ties_under_every_code() -> None:
    """amax/6 exactly between two E4M3 values, and one float32 to either side, is rounded to even."""
    book = torch.tensor(E4M3.codebook[0x08:])
    between = (book[1:] + book[:-1]) / 2 * E2M1.max
    amax = torch.cat((torch.nextafter(between, torch.tensor(0.0)), between, torch.nextafter(between, 2 * between)))
    x = torch.zeros(len(amax), 16)
    x[:, 3] = -amax
    _, scales = quantize_blocks(x, torch.ones(()))
    expected = [oracle.encode(Fraction(a) / 6, E4M3) for a in amax.tolist()]
    assert scales[:, 0].tolist() == expected


def test_outer_scale_of_every_bfloat16_and_of_the_bounds() -> None:
    x = every_bfloat16()
    x = x[x.isfinite() & (x >= 0)].float()
    bound = torch.tensor([21 * 2.0**k for k in range(-110, 120)])
    x = torch.cat((x, bound, torch.nextafter(bound, 2 * bound)))
    g = outer_scale(x)
    assert torch.equal(g.frexp().mantissa, torch.full_like(g, 0.5)), "powers of two"
    wide = x.double()
    assert torch.all((wide <= 2688 * g.double()) | (g == 2.0**116))
    assert torch.all((wide > 2688 * g.double() / 2) | (g == 2.0**-100) | (x == 0))
    assert torch.all(g[x == 0] == 1)
    some = x[::97]
    assert outer_scale(some).tolist() == [oracle.outer_scale(a) for a in some.tolist()]


def test_exponent_bytes() -> None:
    g = torch.tensor([2.0**k for k in range(-100, 117)])
    byte = encode_exponent(g)
    assert byte.tolist() == list(range(27, 244))
    assert same_bits(decode_exponent(byte), g)


def test_every_byte_is_two_nibbles() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = unpack_nibbles(packed)
    assert torch.equal(pack_nibbles(codes), packed)
    assert codes[7, 2:4].tolist() == [0x1, 0x7], "low nibble first: 0x71 holds 1, 7"


def test_mx_scales_of_every_bfloat16() -> None:
    x = every_bfloat16()
    x = x[x.isfinite()].float()
    blocks = torch.zeros(len(x), 32)
    blocks[:, 9] = x
    for fmt in ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"):
        _, scales = quantize_blocks(blocks, None, fmt)
        top = int(np.floor(np.log2(FORMATS[fmt].element.max)))
        exponent = np.where(x == 0, -1000, np.frexp(x.abs().double().numpy())[1] - 1)
        assert np.array_equal(scales[:, 0].numpy(), np.maximum(exponent - top + 127, 0))
