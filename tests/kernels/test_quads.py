"""The assembly that unpacks words, executed instruction by instruction on integers: no GPU is needed to check its bits.

Triton's interpreter cannot run it; what it runs instead is compared with the native op in ``test_moe_forward``.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from trace_compile.kernels.quads import RESIDUAL, _assembly
from trace_compile.numerics import decode_blocks
from trace_compile.ops.quads import CHUNK, PLANES, to_quads

_MASK = 2**32 - 1


def _bfloat16_pair(bits: Tensor) -> Tensor:
    """[2, n] float64 values of the halves of 32-bit words, low first."""
    halves = torch.stack([bits & 0xFFFF, bits >> 16])
    return (halves << 16).to(torch.int32).view(torch.float32).double()


def execute(text: str, registers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Runs straight-line PTX on int64 tensors that hold 32-bit values. ``mul.bf16x2`` leaves float64 values."""

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for line in re.sub(r"\.reg[^;]*;", "", text.strip("{} ")).split(";"):
        if not line.strip():
            continue
        op, arguments = line.strip().split(" ", 1)
        target, *sources = (a.strip() for a in arguments.split(","))
        given = [value(s) for s in sources]
        match op:
            case "shl.b32":
                result = (given[0] << given[1]) & _MASK
            case "shr.b32":
                result = given[0] >> given[1]
            case "and.b32":
                result = given[0] & given[1]
            case "lop3.b32":
                assert int(sources[3], 0) == 0xF8  # a | (b & c)
                result = given[0] | (given[1] & given[2])
            case "prmt.b32":
                both, selector = given[0] | (given[1] << 32), int(sources[2], 0)
                picked = [(both >> 8 * ((selector >> 4 * i) & 7)) & 0xFF for i in range(4)]
                assert not selector & 0x8888
                result = sum((p << 8 * i for i, p in enumerate(picked)), torch.tensor(0))
            case "mad.lo.u32":
                result = (given[0] * given[1] + given[2]) & _MASK
            case "mul.bf16x2":
                result = _bfloat16_pair(given[0]) * _bfloat16_pair(given[1])
            case _:
                raise AssertionError(f"unknown instruction {op}")
        registers[target] = result
    return registers


def test_the_assembly_is_exact_for_every_word_and_scale() -> None:
    """Every 16-bit word in each half, beside random ones, under every scale byte in each plane."""
    generator = torch.Generator().manual_seed(0)
    scale_bytes = torch.arange(8, 0x7F, dtype=torch.uint8)
    words = torch.arange(2**16)
    others = torch.randint(0, 2**16, (2**16,), generator=generator)
    scales = torch.stack([scale_bytes[torch.randint(0, 119, (2**16,), generator=generator)] for _ in range(PLANES)], -1)
    scales[: 119 * PLANES] = 0x38
    for p in range(PLANES):
        scales[119 * p : 119 * (p + 1), p] = scale_bytes
    packed_scales = torch.stack([scales[:, p].long() << 8 * p for p in range(PLANES)]).sum(0)
    for low, high in ((words, others), (others, words)):
        start = {"$4": low | (high << 16), "$5": packed_scales}
        planes = torch.stack([execute(_assembly(), dict(start))[f"${p}"] for p in range(PLANES)])  # [plane, half, n]
        for half, word in enumerate((low, high)):
            # The same words as columns m = 0 of chunks, taken apart by the reference.
            codes = _codes_of(word)
            expected = decode_blocks(codes, scales, "nvfp4", torch.float32)[:, :: CHUNK // PLANES].double()
            assert torch.equal(planes[:, half].T * 2.0**RESIDUAL, expected)


def _codes_of(words: Tensor) -> Tensor:
    """u8 [n, 64]: the four codes of each word at columns 0, 16, 32, 48, by looking every word up in ``to_quads``."""
    codes = torch.stack([(torch.arange(2**16) >> 4 * p) & 15 for p in range(PLANES)], -1).to(torch.uint8)
    linear = torch.zeros(1, 2**16, CHUNK, dtype=torch.uint8)
    linear[0, :, :: CHUNK // PLANES] = codes
    packed = linear[..., ::2] | (linear[..., 1::2] << 4)
    quads, _ = to_quads(packed, torch.zeros(1, 2**16, PLANES, dtype=torch.uint8))
    index = torch.empty(2**16, dtype=torch.long)
    index[quads[0, 0, :, 0].long() & 0xFFFF] = torch.arange(2**16)
    return linear[0, index[words]]
