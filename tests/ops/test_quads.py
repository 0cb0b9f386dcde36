"""The kernels' form of packed weights: a permutation of bits with an exact inverse, taken only where it is right."""

from __future__ import annotations

import pytest
import torch

from trace_compile.numerics import pack_nibbles
from trace_compile.ops import W4A4_ROW, W4A16, MoEScheme, OperandScheme, WeightLayout, pack_experts
from trace_compile.ops.quads import (
    CHUNK,
    MOVES,
    PLANES,
    from_quads,
    packed_shape,
    prefers_quads,
    refuses_quads,
    to_quads,
)


def test_every_word_is_four_codes_and_back() -> None:
    words = torch.arange(2**16)
    codes = torch.stack([(words >> 4 * p) & 15 for p in range(PLANES)], -1)  # [2^16, 4]
    linear = codes.view(-1, 16, PLANES).transpose(1, 2).reshape(1, -1, CHUNK).to(torch.uint8)
    scales = torch.randint(8, 127, (1, linear.shape[1], PLANES), dtype=torch.uint8)
    packed = pack_nibbles(linear)
    quads = to_quads(packed, scales)
    assert quads[0].unique().numel() == 2**16
    assert all(torch.equal(a, b) for a, b in zip(from_quads(*quads), (packed, scales)))


def test_planes_are_bfloat16_elements() -> None:
    """What the moves give is the element times 2^-126, as the module says."""
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(PLANES)[None, None]
    words, _ = to_quads(pack_nibbles(codes), torch.zeros(1, 1, PLANES, dtype=torch.uint8))
    book = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = torch.cat([book, -book])[codes.long()].view(PLANES, 16)
    for plane, moves in enumerate(MOVES):
        bits = torch.zeros(16, dtype=torch.int32)
        for move in moves:
            word = words.flatten().int()
            bits |= (word << move.left if move.left >= 0 else word >> -move.left) & move.mask
        value = (bits << 16).view(torch.float32)
        assert torch.equal(value.double() * 2.0**126, expected[plane].double())


@pytest.mark.parametrize(("experts", "n", "k"), [(1, 16, 64), (3, 5, 192), (2, 48, 2880)])
def test_packed_weights_are_the_same_weights(experts: int, n: int, k: int) -> None:
    scheme = W4A16.weight
    assert scheme is not None
    packed = pack_experts(torch.randn(experts, n, k), WeightLayout(), scheme)
    quads = packed.quads
    assert quads.shape == packed.shape == packed_shape(quads.codes) == (experts, n, k)
    assert quads.nbytes == packed.nbytes and quads.bits_per_value == packed.bits_per_value == 4.5
    assert torch.equal(quads.dequantize(), packed.dequantize()) and quads.quads is quads and packed.linear is packed
    assert torch.equal(quads.linear.codes, packed.codes) and torch.equal(quads.linear.scales, packed.scales)


def test_where_it_is_not_taken() -> None:
    assert refuses_quads(OperandScheme(outer="expert"), 64, 2880) is None
    for scheme, widths, reason in (
        (None, (64,), "not quantized"),
        (OperandScheme(outer="expert"), (64, 80), "80"),
        (OperandScheme("mxfp4", outer="expert"), (64,), "mxfp4"),
        (OperandScheme(profile="modelopt", outer="expert"), (64,), "modelopt"),
    ):
        found = refuses_quads(scheme, *widths)
        assert found is not None and reason in found
    cpu = torch.device("cpu")
    assert not prefers_quads(W4A4_ROW, (64, 64), cpu)
    assert not prefers_quads(MoEScheme(None, None), (64, 64), torch.device("cuda"))
