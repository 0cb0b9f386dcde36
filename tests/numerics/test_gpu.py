"""On an NVIDIA GPU: the bytes of the CPU reference, eager and through Inductor, and no host synchronisation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.numerics.cases import adversarial, same_bits
from trace_compile.numerics import (
    FORMATS,
    PROFILES,
    amax,
    decode_blocks,
    guided_blocks,
    outer_scale,
    pack_bits,
    quantize,
    quantize_blocks,
    unpack_bits,
)

pytestmark = pytest.mark.gpu
EVERYTHING = [("nvfp4", p) for p in PROFILES] + [(f, "pow2") for f in FORMATS if f != "nvfp4"]


def inputs() -> Tensor:
    """The adversarial rows and 64k values next to rounding boundaries, where an approximate division shows."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(512, 128, generator=generator)
    ties = torch.randint(-48, 49, (512, 128), generator=generator) / 4 * 1.625
    return torch.cat((adversarial(), dense, torch.nextafter(ties, dense), ties))


def tensors(x: Tensor, fmt: str, profile: str) -> tuple[Tensor, ...]:
    q = quantize(x, fmt, profile=profile)
    return q.codes, q.scales, q.outer, q.dequantize(), q.packed


def train(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    g = outer_scale(amax(x, -1))
    codes, scales = quantize_blocks(x, g)
    bits = guided_blocks(y, scales, g, bits=unpack_bits(pack_bits(codes)))
    return g, codes, scales, bits, guided_blocks(y, scales, g, codes=codes), decode_blocks(bits, scales, dtype=x.dtype)


def assert_same(expected: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> None:
    for a, b in zip(expected, got, strict=True):
        assert same_bits(a, b.cpu())


@pytest.mark.parametrize(("fmt", "profile"), EVERYTHING)
def test_eager(fmt: str, profile: str) -> None:
    x = inputs()
    assert_same(tensors(x, fmt, profile), tensors(x.cuda(), fmt, profile))


@pytest.mark.parametrize("profile", ["pow2", "fp32", "torchao"])
def test_inductor(profile: str) -> None:
    x = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: tensors(x, "nvfp4", profile), fullgraph=True, dynamic=True)
    assert_same(tensors(x, "nvfp4", profile), compiled(x.cuda()))


@pytest.mark.parametrize("compiled", [False, True])
def test_guidance(compiled: bool) -> None:
    x = inputs()
    y = x * (1 + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    torch._dynamo.reset()
    f = torch.compile(train, fullgraph=True, dynamic=True) if compiled else train
    assert_same(train(x, y), f(x.cuda(), y.cuda()))


def test_nothing_waits_for_the_device() -> None:
    """A captured CUDA graph replays on new inputs: no host copy, no synchronisation, no data-dependent shape."""
    x = torch.randn(64, 128, device="cuda")
    y = x * 1.01
    train(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = train(x, y)
    x.normal_()
    y.copy_(x * 1.02)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(train(x.cpu(), y.cpu()), out)
