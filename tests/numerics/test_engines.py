"""Other people's quantizers: equal bytes where they follow one of our profiles, and their known differences where
they do not.
"""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.numerics.cases import element_codes, every_bfloat16
from trace_compile.numerics import PROFILES, decode_e4m3, outer_scale, quantize
from trace_compile.numerics.formats import E2M1

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mx_config = pytest.importorskip("torchao.prototype.mx_formats.config")
    ct = pytest.importorskip("compressed_tensors.quantization")
    ct_scales = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    ct_pack = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")

FLOOR, ONE_EIGHTH = 0x08, 0x20  # E4M3 2^-6 and 0.125


def weights(seed: int = 0) -> Tensor:
    """float32 [64, 128] over six decades, with a zero row, zero blocks, and blocks that underflow E4M3."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-3, 3, 64)[:, None]
    x[5] = 0
    x[7, 16:48] = 0
    x[9] *= 1e-4
    return x


def torchao(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    scales, packed = nvfp4.nvfp4_quantize(x, 16, g)
    return scales.view(torch.uint8).reshape(len(x), -1), packed.view(torch.uint8)


def compressed_tensors(x: Tensor, g_enc: Tensor) -> tuple[Tensor, Tensor]:
    args = ct.preset_name_to_scheme("NVFP4", ["Linear"]).weights
    blocks = x.unflatten(-1, (-1, 16))
    scales, _ = ct_scales.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=g_enc)
    packed = ct_pack.quantize_and_pack_fp4(x, scales.float(), g_enc)
    return scales.to(torch.float8_e4m3fn).view(torch.uint8), packed


@pytest.mark.parametrize("seed", range(3))
def test_torchao_nvfp4_equals_its_profile(seed: int) -> None:
    x = weights(seed)
    g = nvfp4.per_tensor_amax_to_scale(x.abs().max())
    q = quantize(x, outer="tensor", profile="torchao")
    assert torch.equal(q.outer, g.reshape(1))
    scales, packed = torchao(x, g)
    assert torch.equal(q.scales, scales)
    assert torch.equal(q.packed, packed)
    assert scales[5, 0] == FLOOR, "its zero block has our floor"


def test_torchao_equals_pow2_under_a_power_of_two() -> None:
    x = weights()
    q = quantize(x, outer="tensor")
    scales, packed = torchao(x, q.outer[0])
    assert torch.equal(q.scales, scales)
    # its x * (1/s) is not the quotient: codes differ, but seldom, and by one
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    differ = codes != q.codes
    assert differ.float().mean() < 1e-3
    assert torch.all((codes.int() - q.codes.int()).abs()[differ] == 1)


def test_torchaos_reciprocal_misses_ties_that_the_quotient_hits() -> None:
    s = 1.625
    x = torch.zeros(1, 16)
    x[0, 0] = 6 * s
    boundaries = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x[0, 1:8] = s * torch.tensor(boundaries)
    _, packed = torchao(x, torch.ones(()))
    ours = quantize(x, outer=torch.ones(1))
    assert ours.codes[0, :8].tolist() == [7, 0, 2, 2, 4, 4, 6, 6]
    theirs = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[0, :8]
    reciprocal = quantize(x, outer=torch.ones(1), profile="torchao").codes[0, :8]
    assert torch.equal(theirs, reciprocal)


def test_torchao_all_zero_tensor_is_nan_and_ours_is_not() -> None:
    zero = torch.zeros(2, 32)
    scales, _ = torchao(zero, nvfp4.per_tensor_amax_to_scale(zero.abs().max()))
    assert torch.all((scales & 0x7F) == 0x7F)
    q = quantize(zero, outer="tensor", profile="torchao")
    assert torch.all(q.scales == FLOOR) and torch.all(q.dequantize() == 0)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [("mxfp4", torch.float4_e2m1fn_x2), ("mxfp8_e4m3", torch.float8_e4m3fn), ("mxfp8_e5m2", torch.float8_e5m2)],
)
def test_torchao_mx_floor_mode(fmt: str, dtype: torch.dtype) -> None:
    x = weights()
    scales, data = mx.to_mx(x, dtype, 32, mx_config.ScaleCalculationMode.FLOOR)
    q = quantize(x, fmt)
    assert torch.equal(scales.view(torch.uint8).reshape(q.scales.shape), q.scales)
    assert torch.equal(data.view(torch.uint8).reshape(q.packed.shape), q.packed)


@pytest.mark.parametrize("seed", range(3))
def test_compressed_tensors_equals_its_profile(seed: int) -> None:
    x = weights(seed)
    g_enc = ct_scales.generate_gparam(x.min(), x.max())
    g = (1 / g_enc.double()).float()  # the file stores the reciprocal
    scales, packed = compressed_tensors(x, (1 / g.double()).float())
    q = quantize(x, outer=g, profile="compressed_tensors")
    assert torch.equal(q.scales, scales)
    assert torch.equal(q.packed, packed)
    assert scales[5, 0] == ONE_EIGHTH, "its zero block"
    assert scales[9, 0] == ONE_EIGHTH, "and a block that underflows: its values are flattened to zero or to 1/16"
    assert quantize(x, outer="tensor").scales[9, 0] == FLOOR


def test_compressed_tensors_equals_pow2_above_the_floor() -> None:
    x = weights()
    q = quantize(x, outer="tensor")
    scales, packed = compressed_tensors(x, 1 / q.outer)
    same = (q.scales > FLOOR) & (scales >= FLOOR)
    assert same.float().mean() > 0.5
    assert torch.equal(q.scales[same], scales[same])
    assert torch.equal(q.packed.unflatten(-1, (-1, 8))[same], packed.unflatten(-1, (-1, 8))[same])


def test_compressed_tensors_scales_depend_on_the_input_dtype_and_ours_do_not() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    g_enc = ct_scales.generate_gparam(x.float().min(), x.float().max())
    args = ct.preset_name_to_scheme("NVFP4", ["Linear"]).weights
    blocks = x.unflatten(-1, (-1, 16))
    narrow, _ = ct_scales.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=g_enc)
    wide, _ = ct_scales.calculate_qparams(blocks.amin(-1).float(), blocks.amax(-1).float(), args, global_scale=g_enc)
    assert 0.005 < (narrow.float() != wide.float()).float().mean() < 0.05
    g = 1 / g_enc
    for profile in ("compressed_tensors", "pow2"):
        a, b = (quantize(v, outer=g, profile=profile) for v in (x, x.float()))
        assert torch.equal(a.scales, b.scales)


@pytest.mark.parametrize(("profile", "zero", "underflow"), [("modelopt", 0x38, 0x01), ("vllm", 0, 0), ("fp32", 0, 0)])
def test_floors_and_zero_blocks_of_the_other_engines(profile: str, zero: int, underflow: int) -> None:
    """The table of the numerics contract; these engines cannot run here."""
    x = torch.zeros(3, 16)
    x[0, 0], x[1, 0] = 2688.0, 1e-5
    q = quantize(x, outer="tensor", profile=profile)
    assert q.scales[:, 0].tolist() == [0x7E, underflow, zero]
    assert torch.all(q.dequantize()[1:].abs() <= 2.0**-9) and q.dequantize().isfinite().all()
    assert torch.all(quantize(torch.zeros(2, 16), outer="tensor", profile=profile).dequantize() == 0)


def test_ml_dtypes_e2m1_on_every_bfloat16() -> None:
    x = every_bfloat16()
    x = x[x.isfinite()]
    theirs = x.float().numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(element_codes(x, E2M1).numpy(), theirs)


def test_profiles_differ() -> None:
    """Every profile changes some byte, or it would be no option. Orders of operations show only next to ties: put
    values there, below each block's amax.
    """
    x = weights()
    q = quantize(x, outer="tensor", profile="fp32")
    boundary = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5]).repeat(128)[:128]
    near = boundary * decode_e4m3(q.scales).repeat_interleave(16, -1) * q.outer
    head = x.unflatten(-1, (-1, 16)).abs()
    x = torch.where((head == head.amax(-1, keepdim=True)).flatten(-2), x, near)
    seen: dict[bytes, str] = {}
    for profile in PROFILES:
        q = quantize(x, outer="tensor", profile=profile)
        key = q.scales.numpy().tobytes() + q.codes.numpy().tobytes() + q.outer.numpy().tobytes()
        assert key not in seen, f"{profile} equals {seen[key]}"
        seen[key] = profile
    assert outer_scale(torch.tensor([1536.0]), profile="pow2_four_over_six").item() == 1.0
