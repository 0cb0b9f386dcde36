"""The same bytes out of eager mode and of Inductor: the building blocks hold no operation that a compiler may round
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.numerics.cases import adversarial, same_bits
from trace_compile.numerics import (
    FORMATS,
    PROFILES,
    amax,
    decode_blocks,
    decode_e4m3,
    decode_exponent,
    encode_e4m3,
    encode_exponent,
    guided_blocks,
    outer_scale,
    pack_bits,
    pack_nibbles,
    quantize,
    quantize_blocks,
    saturated,
    unpack_bits,
)

OTHERS = [("nvfp4", p) for p in PROFILES if p != "pow2"] + [(f, "pow2") for f in FORMATS if f != "nvfp4"]


def assert_compiles_to_the_same_bits(f: Callable[..., tuple[Tensor, ...]], *args: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=True)
    for expected, got in zip(f(*args), compiled(*args), strict=True):
        assert same_bits(expected, got)


@pytest.mark.slow
def test_quantize_guide_and_decode() -> None:
    """One graph through every building block of the default scheme."""
    x = adversarial()
    drift = 1 + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        g = outer_scale(amax(x, -1))
        codes, scales = quantize_blocks(x, g)
        bits = pack_bits(codes)
        guided = guided_blocks(y, scales, g, bits=unpack_bits(bits))
        full = guided_blocks(y, scales, g, codes=codes)
        byte = encode_exponent(g)
        return (g, codes, scales, bits, guided, full, byte, decode_exponent(byte), pack_nibbles(codes),
                decode_blocks(guided, scales), encode_e4m3(y), decode_e4m3(codes), saturated(y, g))  # fmt: skip

    assert_compiles_to_the_same_bits(f, x, x * drift)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype: torch.dtype) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        q = quantize(x)
        return q.codes, q.scales, q.outer, q.dequantize(dtype)

    assert_compiles_to_the_same_bits(f, adversarial().to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "profile"), OTHERS)
def test_every_format_and_profile(fmt: str, profile: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        q = quantize(x, fmt, profile=profile)
        return q.codes, q.scales, q.outer, q.dequantize()

    assert_compiles_to_the_same_bits(f, adversarial())
