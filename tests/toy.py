"""A small language model of two mixture-of-experts layers that Dynamo captures in a moment, and what it computes.

``Toy`` is embedding, per layer RMSNorm -> router -> experts -> residual, and a head; ``reference`` is the same with the
experts of ``tests.quantizers``: every token and every expert in turn, float64, no code of the package.

T tokens, E experts, K per token; hidden size and expert width are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.blocks import grouped_mm, swiglu
from tests.quantizers import compensated, quantize_experts, quantize_rows
from trace_compile.ops import MoEScheme, OperandScheme

E, K, VOCAB = 4, 2, 32


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Router(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, hidden) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, ids = torch.topk(F.linear(x, self.weight).softmax(-1), K, dim=-1)
        return gates / gates.sum(-1, keepdim=True), ids


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.router = RMSNorm(hidden), Router(hidden)
        self.w13 = nn.Parameter(torch.randn(E, 2 * hidden, hidden) * 0.1)
        self.w2 = nn.Parameter(torch.randn(E, hidden, hidden) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gates, ids = self.router(h)
        order = ids.flatten().argsort()
        ends = F.one_hot(ids.flatten(), E).sum(0).cumsum(0).to(torch.int32)
        pre = grouped_mm(h[order // K], self.w13.transpose(-2, -1), ends)
        out = grouped_mm(swiglu(pre), self.w2.transpose(-2, -1), ends) * gates.flatten()[order][:, None]
        return x + torch.zeros_like(x).index_add(0, order // K, out)


class Toy(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = 64, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, hidden)
        self.layers: Any = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [B, L] -> logits [B, L, V]."""
        x = self.embed(input_ids.reshape(-1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x).view(*input_ids.shape, VOCAB)


def batch(rows: int = 3, length: int = 7, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference(
    model: Toy,
    input_ids: Tensor,
    schemes: list[MoEScheme | None],
    ids: list[Tensor] | None = None,
    norms: list[Tensor] | None = None,
    kept: list[list[int]] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the expert ids [T, K] of each layer. One scheme per layer; None computes unquantized.

    ``ids`` are taken instead of the routers' own; ``norms`` instead of the norms' weights; routers see only the experts
    ``kept``.
    """
    x = model.embed(input_ids.reshape(-1))
    chosen = []
    for number, (layer, scheme) in enumerate(zip(model.layers, schemes, strict=True)):
        h = layer.norm(x) if norms is None else layer.norm(x) / layer.norm.weight * norms[number]
        logits = F.linear(h, layer.router.weight)
        if kept is not None:
            pruned = [e for e in range(E) if e not in kept[number]]
            logits[:, pruned] = -torch.inf
        scores = logits.softmax(-1)
        picked = scores.topk(K, -1).indices if ids is None else ids[number]
        gates = scores.gather(-1, picked)
        gates = gates / gates.sum(-1, keepdim=True)
        chosen.append(picked)
        x = x + torch.from_numpy(_experts(layer, scheme, h.numpy(), picked.numpy(), gates.numpy())).float()
    return model.head(x).view(*input_ids.shape, VOCAB), chosen


def _experts(layer: Any, scheme: MoEScheme | None, x: np.ndarray, ids: np.ndarray, gates: np.ndarray) -> np.ndarray:
    w13, w2 = layer.w13.detach().numpy(), layer.w2.detach().numpy()
    if scheme is not None and scheme.weight is not None:
        w13, w2 = (quantize_experts(w, scheme.weight.fmt, scheme.weight.profile) for w in (w13, w2))
    w13, w2 = w13.astype(np.float64), w2.astype(np.float64)
    act = None if scheme is None else scheme.act
    xq = _rows(x, act)
    slots = [(e, t, k) for e in range(E) for t in range(len(x)) for k in range(K) if ids[t, k] == e]
    pre = np.stack([w13[e] @ xq[t] for e, t, _ in slots])
    gate, up = np.split(pre, 2, axis=1)
    hq = _rows((gate / (1 + np.exp(-gate)) * up).astype(np.float32), act)
    y = np.zeros(x.shape)
    for row, (e, t, k) in zip(hq, slots, strict=True):
        y[t] += gates[t, k] * (w2[e] @ row)
    return y


def _rows(x: np.ndarray, act: OperandScheme | None) -> np.ndarray:
    if act is None:
        return x.astype(np.float64)
    kept = act.residual
    if kept is None:
        return quantize_rows(x, act.fmt, act.profile)[0]
    return compensated(x, act.fmt, act.profile, kept.select, kept.keep, kept.gain, np.ones(len(x), dtype=bool))
