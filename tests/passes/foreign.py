"""Mixture-of-experts blocks as other training codes spell them: what is distinctive of each, in a few lines.

T tokens, E = 8 experts, K = 2, H = 64, I = 32, float32. The router is that of ``blocks``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.blocks import E, H, I, K, Router, grouped_mm


class ThreeWeights(nn.Module):
    """Grouped experts with w1, w2, w3, scores before or after, added onto a shared expert (torchtitan's way)."""

    def __init__(self, *, scores_first: bool = False, commuted: bool = False) -> None:
        super().__init__()
        self.router = Router()
        self.w1 = nn.Parameter(torch.randn(E, I, H) * 0.2)
        self.w2 = nn.Parameter(torch.randn(E, H, I) * 0.2)
        self.w3 = nn.Parameter(torch.randn(E, I, H) * 0.2)
        self.shared = nn.Linear(H, H, bias=False)
        self.scores_first, self.commuted = scores_first, commuted

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x)
        counts = torch.histc(ids.float().view(-1), bins=E, min=0, max=E)
        order = torch.argsort(ids.view(-1), stable=True)
        scores = scores.view(-1)[order]
        index = (order // K).reshape(-1, 1).expand(-1, H)
        rows = torch.gather(x, dim=0, index=index)
        if self.scores_first:
            rows = (rows.float() * scores.reshape(-1, 1)).to(x.dtype)
        ends = torch.cumsum(counts, dim=0).to(torch.int32)
        h = F.silu(grouped_mm(rows, self.w1.transpose(-2, -1), ends))
        up = grouped_mm(rows, self.w3.transpose(-2, -1), ends)
        h = up * h if self.commuted else h * up
        out = grouped_mm(h, self.w2.transpose(-2, -1), ends)
        if not self.scores_first:
            out = (out.float() * scores.reshape(-1, 1)).to(x.dtype)
        return self.shared(x).scatter_add(0, index, out)


class Permuted(ThreeWeights):
    """Rows permuted and counted elsewhere, by something that is not understood: only the experts are."""

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x)
        hot = F.one_hot(ids.view(-1), E)
        order = (hot.t().reshape(-1).nonzero_static(size=ids.numel()) % ids.numel()).view(-1)  # type: ignore[attr-defined]
        ends = hot.sum(0).cumsum(0).clamp(min=0).to(torch.int32)
        rows = x[order // K]
        h = F.silu(grouped_mm(rows, self.w1.transpose(-2, -1), ends))
        h = h * grouped_mm(rows, self.w3.transpose(-2, -1), ends)
        out = grouped_mm(h, self.w2.transpose(-2, -1), ends) * scores.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // K, out)


class Capacity(nn.Module):
    """Dispatch and combine by one-hot einsums over ``[token, expert, slot]``; tokens beyond the capacity drop out."""

    def __init__(self, capacity: int = 3, *, split: bool = False) -> None:
        super().__init__()
        self.router = Router()
        self.wi = nn.Parameter(torch.randn(E, H, I) * 0.2)
        self.wg = nn.Parameter(torch.randn(E, H, I) * 0.2) if split else None
        self.wo = nn.Parameter(torch.randn(E, I, H) * 0.2)
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x)
        hot = F.one_hot(ids.t().reshape(-1), E)  # first choices come first
        place = (hot.cumsum(0) * hot).sum(-1) - 1
        kept = (place < self.capacity).to(x.dtype) * gates.t().reshape(-1)
        slot = F.one_hot(place.clamp(max=self.capacity - 1), self.capacity).to(x.dtype)
        combine = torch.einsum("s,se,sc->sec", kept, hot.to(x.dtype), slot).view(K, -1, E, self.capacity).sum(0)
        dispatch = (combine > 0).to(x.dtype)
        rows = torch.einsum("sec,sm->ecm", dispatch, x)
        h = torch.einsum("ecm,emi->eci", rows, self.wi)
        h = F.relu(h) if self.wg is None else F.silu(torch.einsum("ecm,emi->eci", rows, self.wg)) * h
        out = torch.einsum("eci,eim->ecm", h, self.wo)
        return torch.einsum("sec,ecm->sm", combine, out)


class Expert(nn.Module):
    def __init__(self, fused: bool, bias: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.linear_fc1 = nn.Linear(H, 2 * I, bias=bias)
        else:
            self.gate_proj = nn.Linear(H, I, bias=bias)
            self.up_proj = nn.Linear(H, I, bias=bias)
        self.down_proj = nn.Linear(I, H, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x).chunk(2, -1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(F.silu(gate) * up)


class Sequential(nn.Module):
    """Experts in a ModuleList, called one after the other in one of four ways."""

    def __init__(self, how: str, *, fused: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList([Expert(fused, bias) for _ in range(E)])
        for p in self.experts.parameters():
            nn.init.normal_(p, std=0.2)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x)
        return getattr(self, self.how)(x, gates, ids)

    def every_token(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        """All experts on all tokens, times a gate that is zero where not chosen."""
        mix = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, gates)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * mix[:, e : e + 1]
        return out

    def selected(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        """The tokens of each expert, found when it is its turn."""
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * gates[token, choice, None])
        return out

    def split(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        """Tokens permuted once, cut by the number of each expert's, and put together again (Megatron's way)."""
        order = ids.view(-1).argsort(stable=True)
        counts = F.one_hot(ids.view(-1), E).sum(0).tolist()
        parts = torch.split(x[order // K], counts)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(x).index_add(0, order // K, out * gates.view(-1)[order].unsqueeze(-1))


class Adapted(nn.Module):
    """Low-rank adapters merged into stacked experts at every call, as PEFT does for parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.w13 = nn.Parameter(torch.randn(E, 2 * I, H) * 0.2)
        self.w2 = nn.Parameter(torch.randn(E, H, I) * 0.2)
        self.a = nn.Parameter(torch.randn(E, 4, H) * 0.2)
        self.b = nn.Parameter(torch.randn(E, 2 * I, 4) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x)
        flat = ids.flatten()
        order = flat.argsort()
        ends = F.one_hot(flat, E).sum(0).cumsum(0).to(torch.int32)
        w13 = self.w13 + torch.einsum("enr,erk->enk", self.b, self.a) * 0.5
        gate, up = grouped_mm(x[order // K], w13.transpose(-2, -1), ends).chunk(2, -1)
        out = grouped_mm(F.silu(gate) * up, self.w2.transpose(-2, -1), ends) * gates.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // K, out)
