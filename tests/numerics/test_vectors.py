"""Byte equality with the golden vectors, which were made without this package and without torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.numerics.cases import element_codes, from_bfloat16_bits, same_bits, vectors
from trace_compile.numerics import decode_blocks, decode_e4m3, encode_e4m3, guided_round, oracle, quantize
from trace_compile.numerics.formats import E2M1


@pytest.mark.parametrize("outer", ["row", "tensor"])
def test_nvfp4(outer: str) -> None:
    v = vectors(f"nvfp4_pow2_{outer}")
    q = quantize(from_bfloat16_bits(v["x_bf16"]), outer=outer)
    assert np.array_equal(q.outer.numpy(), v["outer"])
    assert np.array_equal(q.scales.numpy(), v["scale"])
    assert np.array_equal(q.codes.numpy(), v["code"])
    assert np.array_equal(q.packed.numpy(), v["packed"])
    assert same_bits(q.dequantize(), torch.from_numpy(v["dequant"]))
    assert same_bits(q.dequantize(torch.bfloat16).float(), torch.from_numpy(v["dequant"])), "exact in bfloat16"


@pytest.mark.parametrize("outer", ["row", "tensor"])
def test_nvfp4_oracle(outer: str) -> None:
    v = vectors(f"nvfp4_pow2_{outer}")
    for i, row in enumerate(from_bfloat16_bits(v["x_bf16"]).float().tolist()):
        r = oracle.quantize_row(row, None if outer == "row" else float(v["outer"][0]))
        assert (r.codes, r.scales) == (v["code"][i].tolist(), v["scale"][i].tolist())
        assert r.outer == v["outer"][i if outer == "row" else 0]


def test_mxfp4() -> None:
    v = vectors("mxfp4")
    q = quantize(from_bfloat16_bits(v["x_bf16"]), "mxfp4")
    assert np.array_equal(q.scales.numpy(), v["scale"])
    assert np.array_equal(q.codes.numpy(), v["code"])
    assert np.array_equal(q.packed.numpy(), v["packed"])


def test_e4m3() -> None:
    v = vectors("e4m3")
    assert np.array_equal(encode_e4m3(torch.from_numpy(v["x"])).numpy(), v["byte"])
    assert same_bits(decode_e4m3(torch.arange(256, dtype=torch.uint8)), torch.from_numpy(v["decode"]))


def test_e2m1() -> None:
    v = vectors("e2m1")
    assert np.array_equal(element_codes(torch.from_numpy(v["x"]), E2M1).numpy(), v["code"])
    one = torch.full((1, 1), 0x38, dtype=torch.uint8)  # E4M3 1.0
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    assert same_bits(decode_blocks(codes, one)[0], torch.from_numpy(v["decode"]).float())


def test_guided() -> None:
    v = vectors("guided")
    z, q_roll, bit = (torch.from_numpy(v[name]) for name in ("z", "q_rollout", "bit"))
    assert np.array_equal(guided_round(z, q_roll=q_roll).numpy(), v["q_full"])
    assert np.array_equal(guided_round(z, bit=bit).numpy(), v["q_bit"])
