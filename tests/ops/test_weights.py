"""Expert weights: layouts, packing with one outer scale per expert, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trace_compile.errors import BlockSizeError, NonFiniteWeightError, UnknownFormatError
from trace_compile.numerics import quantize
from trace_compile.ops import OperandScheme, WeightLayout, pack_experts

EXPERT = OperandScheme(outer="expert")
LAYOUTS = [WeightLayout(t, i) for t in (False, True) for i in (False, True)]


def weights(experts: int = 3, n: int = 64, k: int = 48, dtype: torch.dtype = torch.float32) -> Tensor:
    w = torch.randn(experts, n, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (w * 10.0 ** torch.arange(-1, experts - 1)[:, None, None]).to(dtype)


def stored(w: Tensor, layout: WeightLayout) -> Tensor:
    """The parameter whose canonical form is ``w``, built row by row."""
    n = w.shape[1]
    if layout.interleaved:
        rows = [w[:, r // 2 + (n // 2) * (r % 2)] for r in range(n)]
        w = torch.stack(rows, 1)
    return w.transpose(1, 2).contiguous() if layout.transposed else w.contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_one_canonical_form(layout: WeightLayout) -> None:
    w, bias = weights(), torch.randn(3, 64)
    param = stored(w, layout).requires_grad_()
    canonical = layout.canonical(param)
    assert torch.equal(canonical, w)
    grad = torch.randn(w.shape)
    canonical.backward(grad)
    assert param.grad is not None and torch.equal(param.grad, stored(grad, layout))
    flat = bias if not layout.interleaved else torch.stack(bias.chunk(2, 1), 2).flatten(1)
    assert torch.equal(layout.canonical_bias(flat), bias)
    if not layout.interleaved:
        assert canonical.data_ptr() == param.data_ptr()


@pytest.mark.parametrize("profile", ["pow2", "fp32", "modelopt"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_is_the_quantizer(dtype: torch.dtype, layout: WeightLayout, profile: str) -> None:
    w = weights(dtype=dtype)
    packed = pack_experts(stored(w, layout), layout, OperandScheme(profile=profile, outer="expert"))
    q = quantize(w, outer="expert", profile=profile)
    assert torch.equal(packed.codes, q.packed) and torch.equal(packed.scales, q.scales)
    assert torch.equal(packed.outer, q.outer)
    assert torch.equal(packed.dequantize(), q.dequantize())
    assert all(t.is_contiguous() for t in (packed.codes, packed.scales, packed.outer))


def test_four_and_a_half_bits() -> None:
    packed = pack_experts(weights(8, 256, 128), WeightLayout(), EXPERT)
    assert packed.bits_per_value == 4.5
    assert packed.nbytes == 8 * 256 * 128 * 9 // 16 + 4 * 8
    assert packed.codes.shape == (8, 256, 64) and packed.scales.shape == (8, 256, 8) and packed.outer.shape == (8,)


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_gate_and_up_share_the_outer_scale_of_their_expert(factor: float) -> None:
    w = weights()
    w[1, 32:] *= factor
    packed = pack_experts(w, WeightLayout(), EXPERT)
    largest = w.abs().flatten(1).amax(1)
    assert torch.equal(packed.outer, 2.0 ** (largest / (6 * 448)).log2().ceil())
    for e in range(3):  # each half by itself, with the pair's scale: the same bytes
        for half in (slice(0, 32), slice(32, 64)):
            q = quantize(w[e, half], outer=packed.outer[e : e + 1])
            assert torch.equal(packed.codes[e, half], q.packed) and torch.equal(packed.scales[e, half], q.scales)


def test_one_scale_for_all_experts_on_request() -> None:
    packed = pack_experts(weights(), WeightLayout(), OperandScheme(outer="tensor"))
    assert packed.outer.shape == (3,) and packed.outer.unique().numel() == 1
    assert torch.equal(packed.codes, quantize(weights(), outer="tensor").packed)


def test_an_all_zero_expert_and_a_zero_block_stay_zero() -> None:
    w = weights()
    w[1], w[2, 5, 16:32] = 0, 0
    packed = pack_experts(w, WeightLayout(), EXPERT)
    assert (packed.dequantize()[1] == 0).all() and (packed.dequantize()[2, 5, 16:32] == 0).all()
    assert packed.outer[1] == 1 and (packed.scales != 0x7F).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_weights_are_refused_by_name(bad: float) -> None:
    w = weights()
    w[1, 3, 7] = w[1, 60, 0] = w[2, 0, 0] = bad
    with pytest.raises(NonFiniteWeightError, match=r"layers\.3\.experts\.gate_up_proj: expert 1 holds 2 .* 2 expert"):
        pack_experts(w, WeightLayout(), EXPERT, name="layers.3.experts.gate_up_proj")


def test_other_refusals() -> None:
    with pytest.raises(BlockSizeError, match=r"down_proj.*40"):
        pack_experts(weights(k=40), WeightLayout(), EXPERT, name="down_proj")
    for fmt in ("fp8_e4m3", "mxfp8_e4m3", "nvfp5"):
        with pytest.raises(UnknownFormatError, match=fmt):
            pack_experts(weights(k=128), WeightLayout(), OperandScheme(fmt, outer="expert"))


def test_dequantized_in_bfloat16_loses_nothing() -> None:
    packed = pack_experts(weights(), WeightLayout(), EXPERT)
    assert torch.equal(packed.dequantize(torch.bfloat16).float(), packed.dequantize())
    assert torch.equal(packed.values(torch.bfloat16).float() * packed.outer[:, None, None], packed.dequantize())
