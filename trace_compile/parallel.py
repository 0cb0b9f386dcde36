"""Expert parallelism: each rank of a mesh holds some of the experts, and tokens travel to them and back.

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("ep",))
    model = trace_compile(model, recipe="trace")
    parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})

Expert parameters become ``DTensor``s sharded along dimension 0 (uneven counts are fine); each rank's experts are packed
where they are. A token is sent once to every rank that holds one of its experts, with its ids, gates and guidance, and
the ranks' partial sums return to it. What surrounds the experts stays as it is: replicated, or sharded by FSDP2.

Invariants
- A token's operands are quantized (guided) from the same bits wherever it travels to; only the order differs in which
  its experts' outputs are summed: within each rank in slot order, then rank by rank. No atomics.
- Ids outside of all experts (-1) travel nowhere and contribute nothing, as everywhere.
- Five exchanges forward and three backward per block, however many experts there are.
- Gradients of experts are means over the ranks' losses, as those of replicated parameters are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from trace_compile.errors import TraceCompileError
from trace_compile.pieces import PARALLEL
from trace_compile.runtime import GuideRows
from trace_compile.state.sharded import is_dtensor

Compute = Callable[[Tensor, Tensor, Tensor, GuideRows | None], Tensor]
"""This rank's experts: x [T, H], ids [T, K] (their number for others), gates [T, K], guidance -> [T, H]."""


class ExpertParallel(ParallelStyle):
    """The style for modules that own stacked expert parameters and are called with (tokens, expert ids, gates)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        stacked = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
        if not stacked or len({p.shape[0] for p in stacked}) != 1:
            raise TraceCompileError(
                f"{type(module).__name__} owns no stacked expert parameters [E, ., .]; the plan has to name experts"
            )
        exchange = Exchange.over(device_mesh, stacked[0].shape[0])
        for name, p in list(module._parameters.items()):
            if p is not None and p.shape[0] == exchange.experts:
                part = distribute_tensor(p.detach(), device_mesh, [Shard(0)], src_data_rank=None)
                module._parameters[name] = nn.Parameter(part, p.requires_grad)
        if getattr(module, "num_experts", exchange.experts) == exchange.experts:
            module.num_experts = exchange.mine  # type: ignore[assignment]
        module.__dict__[PARALLEL] = exchange
        module.__dict__["forward"] = _Plain(module)
        return module


@dataclass(frozen=True)
class Exchange:
    """Who holds which experts: rank r of the group those from ``starts[r]`` to ``starts[r + 1]``."""

    group: Any
    starts: tuple[int, ...]
    rank: int

    @classmethod
    def over(cls, mesh: DeviceMesh, experts: int) -> Exchange:
        if mesh.ndim != 1:
            raise TraceCompileError(f"experts are spread over one mesh dimension, got {mesh}; pass a slice of it")
        each = -(-experts // mesh.size())
        starts = tuple(min(r * each, experts) for r in range(mesh.size() + 1))
        if starts[-2] == experts:
            raise TraceCompileError(
                f"{experts} experts over {mesh.size()} ranks leave one without any; use at most {-(-experts // each)}"
            )
        return cls(mesh.get_group(), starts, mesh.get_local_rank())

    @property
    def experts(self) -> int:
        return self.starts[-1]

    @property
    def mine(self) -> int:
        return self.starts[self.rank + 1] - self.starts[self.rank]

    def run(self, module: nn.Module, args: Any, kwargs: Any, guide: GuideRows | None, compute: Compute) -> Tensor:
        """Tokens to their experts and back: ``module``'s forward with ``compute`` in the place of its experts."""
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        found = list(bound.values())[1:]
        if len(found) != 3 or not all(isinstance(t, Tensor) for t in found):
            raise TraceCompileError(
                f"{type(module).__name__} is called with {list(bound)[1:]}; expert parallelism needs tokens, ids, gates"
            )
        x, ids, gates = found
        shape, top_k = x.shape, ids.shape[-1]
        x, ids, gates = x.reshape(-1, shape[-1]), ids.reshape(-1, top_k), gates.reshape(-1, top_k)
        ranks = len(self.starts) - 1
        ends = torch.tensor(self.starts[1:], device=ids.device)
        owner = torch.where(ids < 0, ranks, torch.bucketize(ids, ends, right=True))  # ``ranks``: nobody
        wanted = (owner == torch.arange(ranks, device=ids.device)[:, None, None]).any(-1)
        send = wanted.sum(1)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        there, here = send.tolist(), receive.tolist()  # the only time the host waits
        token = wanted.nonzero()[:, 1]

        def travel(t: Tensor) -> Tensor:
            return _AllToAll.apply(t[token], here, there, self.group)

        x, gates = travel(x), travel(gates)
        about = [ids.contiguous().view(torch.uint8)]
        if guide is not None:
            about += [guide.rows, guide.outer.contiguous().view(torch.uint8), guide.hit[:, None].to(torch.uint8)]
        widths = [t.shape[1] for t in about]
        ids_bytes, *rest = travel(torch.cat(about, 1)).split(widths, 1)
        ids = ids_bytes.contiguous().view(torch.int64) - self.starts[self.rank]
        ids = torch.where((ids < 0) | (ids >= self.mine), self.mine, ids)
        if guide is not None:
            rows, outer, hit = rest
            guide = GuideRows(rows.contiguous(), outer.contiguous().view(torch.float32), hit[:, 0].bool())
        with self._own_experts(module):
            y = compute(x, ids, gates, guide)
        back = _AllToAll.apply(y, there, here, self.group)
        result = back.new_zeros(shape[:-1].numel(), shape[-1])
        for part, index in zip(back.split(there), token.split(there), strict=True):  # each token once per rank
            result = result.index_add(0, index, part)
        return result.view(shape)

    @contextmanager
    def _own_experts(self, module: nn.Module) -> Iterator[None]:
        """The module with this rank's experts for parameters."""
        kept, ranks = dict(module._parameters), len(self.starts) - 1
        for name, p in kept.items():
            if is_dtensor(p):
                part = p.to_local()  # type: ignore[union-attr]
                if part.requires_grad:
                    part.register_hook(lambda grad: grad / ranks)
                module._parameters[name] = part
        try:
            yield
        finally:
            module._parameters.update(kept)


class _Plain:
    """Forward of a parallel module that no compiled model runs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        module = self.module

        def compute(x: Tensor, ids: Tensor, gates: Tensor, guide: GuideRows | None) -> Tensor:
            return type(module).forward(module, x, ids, gates)

        return module.__dict__[PARALLEL].run(module, args, kwargs, None, compute)


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks, ``there[r]`` of them to rank r, for ``here[r]`` from each; gradients return the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, here: list[int], there: list[int], group: Any) -> Tensor:
        ctx.splits = (there, here, group)
        found = rows.new_empty(sum(here), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), here, there, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        here, there, group = ctx.splits
        found = grads[0].new_empty(sum(here), *grads[0].shape[1:])
        dist.all_to_all_single(found, grads[0].contiguous(), here, there, group=group)
        return found, None, None, None
