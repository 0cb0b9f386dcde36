"""Packing in kernels against ``ops.weights.pack_experts``, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trace_compile.errors import NonFiniteWeightError
from trace_compile.kernels import pack as kernel
from trace_compile.kernels import providers
from trace_compile.ops import WeightLayout, pack_experts
from trace_compile.ops.scheme import OperandScheme
from trace_compile.ops.weights import PACKERS, Packed

kernel_test = pytest.mark.kernel
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")
SCHEME = OperandScheme(outer="expert")
assert providers


def weights(dtype: torch.dtype) -> Tensor:
    """Experts of very different size, one all zero, one with blocks of zeros and ties."""
    w = torch.randn(5, 24, 80, generator=torch.Generator().manual_seed(1))
    w *= torch.tensor([1.0, 1e-6, 3e4, 0.0, 1.0])[:, None, None]
    w[4] = (w[4] * 4).round() / 4
    w[4, :, :16] = 0
    return w.to(dtype)


def reference(weight: Tensor, scheme: OperandScheme) -> Packed:
    """On the CPU, without kernels."""
    kernels = PACKERS.copy()
    PACKERS.clear()
    try:
        return pack_experts(weight.cpu().float(), WeightLayout(), scheme)
    finally:
        PACKERS.extend(kernels)


@kernel_test
@pytest.mark.parametrize("outer", ["expert", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "layout", [WeightLayout(), WeightLayout(transposed=True, interleaved=True)], ids=["own", "oss"]
)
def test_bytes(layout: WeightLayout, dtype: torch.dtype, outer: str, device: torch.device) -> None:
    scheme = replace(SCHEME, outer=outer)
    param = weights(dtype).transpose(1, 2).contiguous() if layout.transposed else weights(dtype)
    weight = layout.canonical(param.to(device))
    got = kernel.pack(weight, scheme)
    want = reference(weight, scheme)
    assert got is not None
    for name, value in vars(want).items():
        assert torch.equal(getattr(got, name).cpu(), value), name


@kernel_test
@pytest.mark.parametrize("outer", ["expert", "tensor"])
def test_weights_that_were_packed_before(outer: str, device: torch.device) -> None:
    """The outer scales of the last time are a guess: small and large changes give the reference's bytes."""
    param, scheme = weights(torch.bfloat16).to(device), replace(SCHEME, outer=outer)
    for factor in (1.0, 1.01, 8.0, 2.0**-9):
        param.mul_(torch.tensor([1.0, factor, 1.0, 1.0, factor], device=device)[:, None, None])
        param[3, 2, 4] = factor
        got, want = kernel.pack(param, scheme), reference(param, scheme)
        assert got is not None
        for name, value in vars(want).items():
            assert torch.equal(getattr(got, name).cpu(), value), (name, factor)
    param[1, 1, 1] = torch.nan
    assert kernel.pack(param, scheme) is None


@kernel_test
def test_what_is_not_finite_is_refused_by_name(device: torch.device) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        param = weights(torch.bfloat16).to(device)
        param[3, 7, 5] = value
        with pytest.raises(NonFiniteWeightError, match="w13: expert 3 holds 1"):
            pack_experts(param, WeightLayout(), SCHEME, name="w13")


def test_other_formats_are_left_to_the_reference() -> None:
    param = weights(torch.float32)
    for scheme in (OperandScheme("mxfp4"), OperandScheme(profile="fp32", outer="expert")):
        assert kernel.pack(param, scheme) is None
