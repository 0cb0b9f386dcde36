"""Slow, obvious references for the ops, and the cases they are compared on. Loops over experts, float64, autograd.

Nothing here calls the code under test: quantization comes from ``trace_compile.numerics``, all else is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trace_compile.numerics import quantize
from trace_compile.ops import SWIGLU, Activation, MoEScheme, Out, WeightLayout, check_close, pack_experts

ops = torch.ops.trace_compile
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
TARGETS = [
    pytest.param("cpu", torch.float32, id="cpu-float32"),
    pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=[pytest.mark.gpu, needs_gpu]),
]
GPT_OSS = Activation.build(
    True,
    [
        ("clamp", ("gate", None, 7.0)),
        ("clamp", ("up", -7.0, 7.0)),
        ("mul", ("%0", 1.702)),
        ("sigmoid", ("%2",)),
        ("mul", ("%0", "%3")),
        ("add", ("%1", 1.0)),
        ("mul", ("%5", "%4")),
    ],
)
SQUARED_RELU = Activation.build(False, [("relu", ("x",)), ("square", ("%0",))])


def swiglu(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return F.silu(gate) * up


def gpt_oss(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1.0) * (gate * torch.sigmoid(gate * 1.702))


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    SWIGLU: swiglu,
    GPT_OSS: gpt_oss,
    SQUARED_RELU: lambda pre: F.relu(pre).square(),
}


@dataclass(frozen=True)
class Case:
    """Operands of one call. ``options`` are nvfp4_moe's operands from ``outer_in`` on that differ from the defaults."""

    x: Tensor
    expert_ids: Tensor
    gates: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None
    activation: Activation
    scheme: MoEScheme

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.gates, self.w13, self.w2, self.b13, self.b2) if t is not None]

    @property
    def experts(self) -> int:
        return self.w13.shape[0]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """T, K, H, I."""
        return (*self.expert_ids.shape, self.x.shape[1], self.w2.shape[2])

    def packed(self) -> tuple[Tensor, ...]:
        if self.scheme.weight is None:
            empty = self.x.new_empty(0, dtype=torch.uint8)
            return (empty, empty, self.x.new_empty(0, dtype=torch.float32)) * 2
        packs = [pack_experts(w, WeightLayout(), self.scheme.weight) for w in (self.w13, self.w2)]
        return tuple(t for p in packs for t in (p.codes, p.scales, p.outer))

    def operands(self, **options: Any) -> tuple[Any, ...]:
        """nvfp4_moe's operands in schema order."""
        o: dict[str, Any] = dict.fromkeys(("outer_in", "guide", "guide_outer", "hit", "valid"))
        o |= {"scheme": self.scheme.key, "activation": self.activation.key, "guidance": "none", "record": "none"}
        o |= {"diagnose": False, "recompute": False}
        unknown = set(options) - set(o) - {"w13", "w2"}
        assert not unknown, unknown
        masters = (options.pop("w13", self.w13), options.pop("w2", self.w2))
        o |= options
        return (self.x, self.expert_ids, self.gates, *masters, self.b13, self.b2, *self.packed(), *o.values())

    def run(self, **options: Any) -> tuple[Tensor, ...]:
        return ops.nvfp4_moe(*self.operands(**options))

    def float_operands(self, weight_input: bool = False) -> tuple[Any, ...]:
        masters = (self.w13, self.w2, self.b13, self.b2)
        return (self.x, self.expert_ids, self.gates, *masters, self.activation.key, weight_input)

    def grads(self, y: Tensor, dy: Tensor, *, again: bool = True) -> list[Tensor]:
        """Gradients of the leaves; ``again`` keeps the graph for another call."""
        return list(torch.autograd.grad(y, self.leaves, dy, retain_graph=again))

    def with_leaves(self, **changes: Any) -> Case:
        """A copy whose changed tensors require grad as the originals do."""
        return replace(
            self, **{k: v.detach().requires_grad_() if v.is_floating_point() else v for k, v in changes.items()}
        )


def make_case(
    scheme: MoEScheme,
    *,
    tokens: int = 13,
    top_k: int = 2,
    experts: int = 3,
    hidden: int = 48,
    width: int = 32,
    bias: bool = True,
    activation: Activation = SWIGLU,
    ids: Tensor | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    master: torch.dtype | None = None,
    grad: bool = True,
) -> Case:
    """Random operands with outputs of order 1. Gate rows ~ N(0, 1) / sqrt(H), up rows shifted, so a swap shows;
    experts differ in scale by up to 4 and routes go to distinct experts, with a tenth of them out of range."""
    g = torch.Generator().manual_seed(seed)
    n1 = 2 * width if activation.gated else width

    def leaf(*shape: int, dtype: torch.dtype | None = dtype) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(device, dtype)

    scale = 2.0 ** torch.linspace(-1, 1, experts, dtype=torch.float64)[:, None, None]
    w13 = torch.randn(experts, n1, hidden, generator=g, dtype=torch.float64) * scale / hidden**0.5
    if activation.gated:
        w13[:, width:] += 3 / hidden
    w2 = torch.randn(experts, hidden, width, generator=g, dtype=torch.float64) * scale.flip(0) / width**0.5
    if ids is None:
        ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k]
        ids = torch.where(torch.rand(ids.shape, generator=g) < 0.1, torch.tensor([-1, experts])[ids % 2], ids)
    leaves: dict[str, Tensor | None] = {
        "x": leaf(tokens, hidden),
        "gates": torch.rand(tokens, ids.shape[1], generator=g).to(device, dtype) + 0.1,
        "w13": w13.to(device, master or dtype),
        "w2": w2.to(device, master or dtype),
        "b13": leaf(experts, n1, dtype=master or dtype) / 2 if bias else None,
        "b2": leaf(experts, hidden, dtype=master or dtype) / 2 if bias else None,
    }
    leaves = {k: None if t is None else t.detach().requires_grad_(grad) for k, t in leaves.items()}
    return Case(expert_ids=ids.to(device), activation=activation, scheme=scheme, **leaves)  # type: ignore[arg-type]


def dequantized_weights(case: Case) -> list[Tensor]:
    """float64 [E, N, K] of both weights: ``numerics.quantize`` with one outer scale per expert."""
    weight = case.scheme.weight
    if weight is None:
        return [case.w13.detach().double(), case.w2.detach().double()]
    return [
        quantize(w.detach(), weight.fmt, outer=weight.outer, profile=weight.profile).dequantize().double()
        for w in (case.w13, case.w2)
    ]


@dataclass(frozen=True)
class Reference:
    y: Tensor  # float64 [T, H]
    pre: Tensor  # float64 [T, K, N1], zero for routes out of range
    grads: list[Tensor]  # of case.leaves, for dy


def reference(
    case: Case, dy: Tensor, xq: Tensor | None, hq: Tensor | None, weights: list[Tensor] | None = None
) -> Reference:
    """The formula of the region in float64, differentiated by autograd.

    ``xq [T, H]`` and ``hq [T, K, I]`` are the values the quantizers gave (None: not quantized), ``weights`` those of
    w13 and w2 (None: as ``numerics.quantize`` gives them). Gradients pass each quantizer as
    ``q = v + stopgrad(q - v)``.
    """
    x, gates, w13, w2, *biases = (t.detach().double().requires_grad_() for t in case.leaves)
    b13, b2 = biases if biases else (None, None)
    w13q, w2q = (w + (q - w).detach() for w, q in zip((w13, w2), weights or dequantized_weights(case), strict=True))
    xs = x if xq is None else x + (xq.double() - x).detach()
    tokens, top_k, hidden, _ = case.sizes
    y = torch.zeros(tokens, hidden, dtype=torch.float64, device=x.device)
    pres = torch.zeros(tokens, top_k, w13.shape[1], dtype=torch.float64, device=x.device)
    for e in range(case.experts):
        for k in range(top_k):
            t = (case.expert_ids[:, k] == e).nonzero()[:, 0]
            pre = xs[t] @ w13q[e].T + (0 if b13 is None else b13[e])
            h = ACTIVATIONS[case.activation](pre)
            if hq is not None:
                h = h + (hq[t, k].double() - h).detach()
            o = h @ w2q[e].T + (0 if b2 is None else b2[e])
            y = y.index_add(0, t, o * gates[t, k, None])
            pres = pres.index_put((t, torch.full_like(t, k)), pre)
    leaves = [x, gates, w13, w2, *biases]
    grads = torch.autograd.grad(y, leaves, dy.double(), allow_unused=True)
    found = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]
    return Reference(y.detach(), pres.detach(), found)


def quantized_operands(
    case: Case, out: tuple[Tensor, ...], outer_in: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """``xq [T, H]`` and ``hq [T, K, I]`` for :func:`reference`, after checking the op's bytes against the quantizer's.

    Hidden rows are quantized from the op's own saved pre-activation: from float64 ones, values on the edge between two
    codes would differ.
    """
    act = case.scheme.act
    if act is None:
        return None, None
    h = ACTIVATIONS[case.activation](out[Out.PRE])
    routed = in_range(case).reshape(-1)[out[Out.ORDER]]
    dequantized = []
    for i, (rows, first, counted) in enumerate(((case.x.detach(), Out.X_CODES, None), (h, Out.H_CODES, routed))):
        outer = act.outer if outer_in is None else outer_in[i].expand(rows.shape[0])
        q = quantize(rows, act.fmt, outer=outer, profile=act.profile)
        for name, actual, expected in zip(
            ("codes", "scales", "outer"),
            out[first : first + 3],
            (q.packed, q.scales, q.outer.expand(rows.shape[0])),
            strict=True,
        ):
            assert (
                torch.equal(actual, expected) if counted is None else torch.equal(actual[counted], expected[counted])
            ), (name, i)
        dequantized.append(q.dequantize())
    return dequantized[0], slots(case, dequantized[1], out)


def check_against_reference(
    case: Case, dy: Tensor, *, outer_in: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """Runs the op and compares the pre-activation, the output and every gradient. Returns the op's results."""
    out = case.run(outer_in=outer_in, **options)
    _, top_k, hidden, width = case.sizes
    ref = reference(case, dy, *quantized_operands(case, out, outer_in))
    dtype = case.x.dtype
    check_close(slots(case, out[Out.PRE], out), ref.pre, k=hidden, dtype=dtype, stages=2, name="pre")
    check_close(out[Out.Y], ref.y, k=width + top_k, dtype=dtype, stages=4, name="y")
    compare_gradients(case, case.grads(out[Out.Y], dy), ref.grads)
    return out


def compare_gradients(case: Case, actual: list[Tensor], expected: list[Tensor]) -> None:
    names = ["x", "gates", "w13", "w2"] + (["b13", "b2"] if case.b13 is not None else [])
    tokens, top_k, hidden, width = case.sizes
    k = max(tokens * top_k, hidden, 2 * width)
    for name, leaf, a, e in zip(names, case.leaves, actual, expected, strict=True):
        assert a.dtype == leaf.dtype and a.shape == leaf.shape, (name, a.dtype, a.shape)
        check_close(a, e, k=k, dtype=case.x.dtype, stages=8, name=f"gradient of {name}")


def slots(case: Case, rows: Tensor, out: tuple[Tensor, ...]) -> Tensor:
    """Rows in expert order ``[S, ...]`` back to ``[T, K, ...]``, with the op's saved order."""
    tokens, top_k, *_ = case.sizes
    result = torch.empty_like(rows)
    result[out[Out.ORDER]] = rows
    return result.view(tokens, top_k, *rows.shape[1:])


def in_range(case: Case) -> Tensor:
    """bool [T, K]: routes that go to an expert of this rank."""
    return (case.expert_ids >= 0) & (case.expert_ids < case.experts)


def poison() -> None:
    """Leaves freed buffers full of NaN for the next allocations to find."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for elements in (16, 64, 256, 1024, 4096, 16384, 65536):
        held = [torch.full((elements,), torch.nan, device=device) for _ in range(8)]
        held += [torch.full((elements,), torch.nan) for _ in range(8)]
        del held
