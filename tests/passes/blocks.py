"""Small mixture-of-experts blocks in every spelling, and a capture that keeps Dynamo's graph and its inputs.

T tokens, E = 8 experts, K = 2, H = 64, I = 32, float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers the grouped GEMM that Dynamo can trace in float32)
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from trace_compile.passes.graph import clone, op_name

E, K, H, I = 8, 2, 64, 32


class Router(nn.Module):
    """softmax, top-k, renormalise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, ids = torch.topk(F.linear(x, self.weight).softmax(-1), K, dim=-1)
        return gates / gates.sum(-1, keepdim=True), ids


class Stacked(nn.Module):
    """Router and stacked parameters; ``act`` is the activation between the GEMMs."""

    def __init__(
        self, act: Callable[[Tensor], Tensor] | None = None, *, gated: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        self.router = Router()
        rows = 2 * I if gated else I
        self.w13 = nn.Parameter(torch.randn(E, rows, H) * 0.2)
        self.w2 = nn.Parameter(torch.randn(E, H, I) * 0.2)
        self.b13 = nn.Parameter(torch.randn(E, rows) * 0.2) if bias else None
        self.b2 = nn.Parameter(torch.randn(E, H) * 0.2) if bias else None
        self.act = act or swiglu


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``torch._grouped_mm`` where a compiler can trace it, else the form that transformers uses there."""
    if rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, weight, offs=ends)
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)


def swiglu(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return F.silu(gate) * up


class Grouped(Stacked):
    """Grouped GEMMs over rows sorted by expert, summed with ``index_add``."""

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x)
        flat = ids.flatten()
        order = flat.argsort()
        ends = torch.zeros(E, dtype=torch.int32).scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ends = ends.cumsum(0, dtype=torch.int32)
        token = order // K
        pre = grouped_mm(x[token], self.w13.transpose(-2, -1), ends)
        if self.b13 is not None:
            pre = pre + self.b13[flat[order]]
        out = grouped_mm(self.act(pre), self.w2.transpose(-2, -1), ends)
        if self.b2 is not None:
            out = out + self.b2[flat[order]]
        out = out * gates.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token, out)


class Dense(Stacked):
    """All experts on all tokens, mixed with a scattered gate matrix."""

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x)
        mix = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, ids, gates)
        pre = torch.einsum("th,enh->ten", x, self.w13)
        if self.b13 is not None:
            pre = pre + self.b13
        out = torch.einsum("tei,ehi->teh", self.act(pre), self.w2)
        if self.b2 is not None:
            out = out + self.b2
        return torch.einsum("teh,te->th", out, mix)


class DenseMasked(Stacked):
    """Experts first, gates from a one-hot, mixed by multiplying and summing; batch and length kept apart."""

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x)
        mix = (F.one_hot(ids, E).to(x.dtype) * gates.unsqueeze(-1)).sum(-2)
        pre = torch.einsum("blh,enh->blen", x, self.w13)
        out = torch.einsum("blei,ehi->bleh", self.act(pre), self.w2)
        return (out * mix.unsqueeze(-1)).sum(-2)


class Gathered(Stacked):
    """One gathered weight per row, multiplied by ``matmul``, mixed by an einsum."""

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x)
        flat = ids.reshape(-1)
        rows = x[:, None].expand(-1, K, -1).reshape(-1, H)
        pre = torch.einsum("sk,snk->sn", rows, self.w13[flat])
        out = (self.w2[flat] @ self.act(pre).unsqueeze(-1)).squeeze(-1)
        return torch.einsum("tkh,tk->th", out.view(-1, K, H), gates)


class GatedInput(Stacked):
    """Gates scale the tokens before the experts."""

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x)
        order = ids.flatten().argsort()
        ends = F.one_hot(ids.flatten(), E).sum(0).cumsum(0).to(torch.int32)
        rows = x[order // K] * gates.flatten()[order][:, None]
        out = grouped_mm(self.act(grouped_mm(rows, self.w13.mT, ends)), self.w2.mT, ends)
        return torch.zeros_like(x).index_add(0, order // K, out)


class Broadcast(Stacked):
    """All experts on all tokens by ``bmm``, expert by expert, biases broadcast; the softmax runs over all experts."""

    def forward(self, x: Tensor) -> Tensor:
        top, ids = torch.topk(F.linear(x, self.router.weight), K, dim=-1)
        mix = torch.full((x.shape[0], E), float("-inf"), dtype=x.dtype).scatter_(1, ids, top).softmax(-1)
        pre = torch.bmm(x.repeat(E, 1).view(E, -1, H), self.w13.mT)
        if self.b13 is not None:
            pre = pre + self.b13[:, None, :]
        out = torch.bmm(self.act(pre), self.w2.mT)
        if self.b2 is not None:
            out = out + self.b2.unsqueeze(1)
        return (out * mix.transpose(0, 1)[..., None]).sum(dim=0)


@dataclass(frozen=True)
class Captured:
    """Dynamo's graph, the example inputs the backend got, and the real arguments of the call."""

    gm: GraphModule
    inputs: list[Any]
    args: tuple[Any, ...]

    def graph(self) -> GraphModule:
        """A graph to edit."""
        return clone(self.gm)


def capture(module: nn.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    """What a backend is called with for this module and these arguments."""
    grabbed: list[Any] = []

    def grab(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        copy = clone(gm)

        def run(*real: Any) -> Any:
            grabbed.append(Captured(copy, inputs, real))
            return gm.forward(*real)

        return run

    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        torch.compile(module, backend=grab, dynamic=True, fullgraph=True)(*args, **kwargs)
    assert len(grabbed) == 1
    return grabbed[0]


@cache
def captured_grouped() -> Captured:
    """The hand-written grouped block: the graph that mutation tests start from."""
    torch.manual_seed(0)
    return capture(Grouped(bias=True), torch.randn(10, H))


def run_with_gradients(gm: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """Results and the gradients of all floating arguments under a fixed weighting of the first result."""
    leaves = [a.detach().clone().requires_grad_() if _differentiable(a) else a for a in args]
    results = gm(*leaves)
    results = list(results) if isinstance(results, tuple | list) else [results]
    weights = torch.linspace(-1, 1, results[0].numel()).view_as(results[0])
    wanted = [a for a in leaves if _differentiable(a)]
    grads = torch.autograd.grad((results[0] * weights).sum(), wanted, allow_unused=True)
    return [r.detach() for r in results] + [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, grads)]


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def find(gm: GraphModule, name: str, index: int = 0) -> Node:
    """The index-th call of an operation."""
    return [node for node in gm.graph.nodes if op_name(node) == name][index]


def insert_after(node: Node, op: str, target: Any, *args: Any, **kwargs: Any) -> Node:
    """``node``'s readers read ``target(node, *args)`` instead."""
    with node.graph.inserting_after(node):
        new = node.graph.create_node(op, target, (node, *args), kwargs)  # type: ignore[arg-type]
    run = target if op == "call_function" else getattr(Tensor, target)
    new.meta["example_value"] = run(node.meta["example_value"], *args, **kwargs)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new
