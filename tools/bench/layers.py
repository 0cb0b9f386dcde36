"""Expert layers to measure: shapes, rotated random operands, the floor, the timer, and the correctness gate.

Operands rotate over copies that together exceed the L2 cache, work runs in CUDA graphs, times are medians.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trace_compile.ops import SWIGLU, MoEScheme, Out, Packed, WeightLayout, check_close, pack_experts
from trace_compile.ops.grouped import grouped_mm
from trace_compile.ops.nvfp4_moe import NvFp4MoEOperands, native
from trace_compile.ops.registry import OPS
from trace_compile.ops.routing import Routing, combine, route

L2_BYTES = 64 * 2**20
H200 = {"bytes": 4.27e12, "flops": 720e12}
"""Measured: a large copy, read and written, and a large bfloat16 matmul."""


@dataclass(frozen=True)
class Shape:
    name: str
    experts: int
    hidden: int
    width: int
    top_k: int

    @property
    def weights(self) -> int:
        return 3 * self.hidden * self.width  # per expert

    def floor(self, tokens: int, hit: float, bits: float) -> float:
        """Least microseconds for ``hit`` experts with ``bits`` per weight: bytes or operations, whichever take longer.
        Weights are read once, tokens read and written once."""
        moved = hit * self.weights * bits / 8 + 4 * tokens * self.hidden
        return 1e6 * max(moved / H200["bytes"], 2 * tokens * self.top_k * self.weights / H200["flops"])


SHAPES = (
    Shape("Qwen3-30B-A3B", 128, 2048, 768, 8),
    Shape("gpt-oss-20b", 32, 2880, 2880, 4),
    Shape("Mixtral-8x7B", 8, 4096, 14336, 2),
)
TOKENS = (1, 8, 32, 128, 512, 4096)


@dataclass
class Layer:
    """Weights of one layer: bfloat16 (exactly what the packed ones stand for) and packed in quads."""

    shape: Shape
    w13: Tensor
    w2: Tensor
    p13: Packed
    p2: Packed

    @classmethod
    def random(cls, shape: Shape, scheme: MoEScheme, seed: int) -> Layer:
        assert scheme.weight is not None
        g = torch.Generator("cuda").manual_seed(seed)
        whole, packed = [], []
        for rows, k in ((2 * shape.width, shape.hidden), (shape.hidden, shape.width)):
            w = torch.empty(shape.experts, rows, k, dtype=torch.bfloat16, device="cuda")
            parts = []
            for expert in w:  # one at a time: packing takes several times an expert's memory
                expert.normal_(generator=g).mul_(k**-0.5)
                parts.append(pack_experts(expert[None], WeightLayout(), scheme.weight))
                expert.copy_(parts[-1].dequantize(torch.bfloat16)[0])
            whole.append(w)
            joined = [torch.cat([getattr(p, n) for p in parts]) for n in ("codes", "scales", "outer")]
            packed.append(Packed(*joined).quads)
        return cls(shape, whole[0], whole[1], packed[0], packed[1])

    def rolled(self, by: int) -> Layer:
        """The same weights under other experts, in memory of their own."""
        p13, p2 = (Packed(*(t.roll(by, 0) for t in (p.codes, p.scales, p.outer))) for p in (self.p13, self.p2))
        return Layer(self.shape, self.w13.roll(by, 0), self.w2.roll(by, 0), p13, p2)


@dataclass
class Call:
    """One forward: tokens, distinct experts per token, gates."""

    x: Tensor
    ids: Tensor
    gates: Tensor

    @classmethod
    def random(cls, shape: Shape, tokens: int, seed: int) -> Call:
        g = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(tokens, shape.hidden, generator=g, device="cuda").to(torch.bfloat16)
        ids = torch.rand(tokens, shape.experts, generator=g, device="cuda").topk(shape.top_k).indices
        return cls(x, ids, torch.rand(tokens, shape.top_k, generator=g, device="cuda").softmax(-1))

    def operands(self, layer: Layer, scheme: MoEScheme) -> NvFp4MoEOperands:
        p13, p2 = layer.p13, layer.p2
        given: dict[str, Any] = dict.fromkeys(("w13", "w2", "b13", "b2", "guide", "guide_outer", "hit", "valid"))
        given |= {"x": self.x, "expert_ids": self.ids, "gates": self.gates}
        given |= {
            "c13": p13.codes,
            "s13": p13.scales,
            "g13": p13.outer,
            "c2": p2.codes,
            "s2": p2.scales,
            "g2": p2.outer,
        }
        given |= {"outer_in": torch.full((2,), 2.0**-8, device="cuda"), "scheme": scheme.key}
        given |= {"activation": SWIGLU.key, "guidance": "none", "record": "none"}
        given |= {"diagnose": False, "recompute": False}
        return NvFp4MoEOperands(**given)


def grouped_bf16(layer: Layer, call: Call, routing: Routing) -> Tensor:
    """The baseline: torch's grouped GEMM in bfloat16, with the routing made beforehand."""
    gate, up = grouped_mm(call.x[routing.token], layer.w13, routing).chunk(2, -1)
    out = grouped_mm(F.silu(gate) * up, layer.w2, routing)
    weighted = out * call.gates.view(-1)[routing.order, None].to(out.dtype)
    return combine(weighted, routing, *call.ids.shape)


def gate(
    layer: Layer, call: Call, scheme: MoEScheme, forward: Callable[[NvFp4MoEOperands], tuple[Tensor, ...]]
) -> None:
    """Raises ``AssertionError`` unless ``forward`` agrees with the native op, and a few tokens alone have the bits they
    have together. Native multiplies the bfloat16 weights, which the packed ones stand for exactly; 64 tokens are
    compared with it."""
    y = forward(call.operands(layer, scheme))[Out.Y]
    few = Call(call.x[:64], call.ids[:64], call.gates[:64]).operands(layer, scheme)
    whole = replace(few, w13=layer.w13, w2=layer.w2, scheme=MoEScheme(None, scheme.act).key)
    check_close(y[:64], native(whole)[Out.Y], **OPS["nvfp4_moe"].tolerance(few))
    for rows in (slice(0, 1), slice(0, 7), slice(3, 40)):
        alone = Call(call.x[rows], call.ids[rows], call.gates[rows]).operands(layer, scheme)
        if not torch.equal(forward(alone)[Out.Y], y[rows]):
            raise AssertionError(f"tokens {rows} alone differ from the same tokens among {y.shape[0]}")


def copies_of(shape: Shape) -> int:
    """Layers to rotate over, by what one packed layer takes of the L2 cache."""
    return max(2, math.ceil(2 * L2_BYTES / (shape.experts * shape.weights * 4.5 / 8)))


def experts_hit(calls: Sequence[Call]) -> float:
    return statistics.mean(call.ids.unique().numel() for call in calls)


def routings(calls: Sequence[Call], shape: Shape) -> list[Routing]:
    return [route(call.ids, shape.experts) for call in calls]
