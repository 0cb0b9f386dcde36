"""What the benchmark of several GPUs runs, and how it lays a model out over ranks: FSDP2, expert parallelism with the
rest replicated, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from trace_compile.parallel import ExpertParallel
from trace_compile.state.sharded import is_dtensor

PLAN: dict[str, ParallelStyle] = {"model.layers.*.mlp.experts": ExpertParallel()}


@dataclass(frozen=True)
class Preset:
    """Shape of the model, and batch per rank."""

    hidden: int
    width: int
    experts: int
    top_k: int
    heads: int
    layers: int
    vocab: int
    rows: int
    length: int
    steps: int
    new_tokens: int
    dtype: torch.dtype
    killed_within: float


PRESETS = {
    "smoke": Preset(64, 32, 8, 2, 4, 2, 128, 2, 16, 2, 3, torch.float32, 60.0),
    # Qwen3-30B-A3B with 2 of 48 layers and a part of the vocabulary
    "qwen3": Preset(2048, 768, 128, 8, 32, 2, 32768, 4, 1024, 5, 16, torch.bfloat16, 90.0),
}


def shard(model: Any, layout: str, device: str) -> Any:
    """Shard ``model`` in place.

    fsdp: every layer over all ranks. ep: experts over all ranks, everything else replicated (``reduce_gradients``).
    both: experts over pairs of ranks and, within their half, by FSDP2 over the pairs; the rest by FSDP2 over all.
    """
    ranks = dist.get_world_size()
    if layout == "ep":
        return parallelize_module(model, init_device_mesh(device, (ranks,), mesh_dim_names=("ep",)), PLAN)
    every = init_device_mesh(device, (ranks,), mesh_dim_names=("all",))
    if layout == "both":
        mesh = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("dp", "ep"))
        parallelize_module(model, mesh["ep"], PLAN)
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh=mesh["dp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=every)
    return fully_shard(model, mesh=every)


@torch.no_grad()
def reduce_gradients(model: Any, layout: str) -> None:
    """The means over all ranks of the replicated parameters' gradients, in one collective."""
    if layout != "ep":
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None and not is_dtensor(p)]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))
