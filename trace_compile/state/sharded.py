"""Parameters that are sharded over ranks (``DTensor``): their parts, the whole of them, and the whole packed.

Invariants
- An expert's outer scale follows from that expert alone, so shards along dimension 0 pack to the bytes of the whole.
- A rank that cannot pack (NaN, Inf) sends outer scales of NaN, never an exception in front of a collective: all ranks
  find the expert and raise alike.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trace_compile.errors import NonFiniteWeightError
from trace_compile.numerics import FORMATS
from trace_compile.ops.scheme import OperandScheme
from trace_compile.ops.weights import Packed, WeightLayout, pack_experts


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``DTensor``, without importing what defines it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp(module: Any) -> bool:
    """Whether ``fully_shard`` was applied to this module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before ``fully_shard``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return cls.__mro__[2] if fsdp is not None and issubclass(cls, fsdp.FSDPModule) else cls


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This rank's part of a ``DTensor``, the same object at every call; any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a ``DTensor``, gathered from the ranks, which all have to ask; any other tensor itself."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


@torch.no_grad()
def all_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each tensor holds neither NaN nor Inf; of ``DTensor``s the whole, one collective per mesh dimension."""
    if not tensors:
        return []
    fine = torch.stack([torch.isfinite(local(t)).all() for t in tensors]).int()  # read once, when all are under way
    for mesh in dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t)):  # type: ignore[attr-defined]
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(fine, torch.distributed.ReduceOp.MIN, group=mesh.get_group(dim))
    return fine.bool().tolist()


def is_sharded(model: nn.Module) -> bool:
    """Whether some parameter lies in parts on several ranks."""
    return any(is_dtensor(p) for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Free whatever FSDP2 has unsharded: the model's parameters are then its masters."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()  # type: ignore[operator]


def unmark_fsdp(root: nn.Module) -> None:
    """Have Dynamo take the modules of ``root`` for ordinary ones.

    For marked ones it would take their integers (how many experts there are) for sizes that vary. Parameters are the
    same objects at every forward, and guarded as everywhere.
    """
    for module in root.modules():
        if getattr(module, "_is_fsdp_managed_module", False):
            module._is_fsdp_managed_module = False  # type: ignore[assignment]


def forget_fsdp(root: nn.Module) -> None:
    """Take FSDP2's hooks off a module tree that shares a sharded model's attributes."""
    unmark_fsdp(root)
    for module in root.modules():
        for name, hooks in module.__dict__.items():
            if not ("_hooks" in name and isinstance(hooks, dict)):
                continue
            for key in [k for k, hook in hooks.items() if _of_fsdp(hook)]:
                for table in [t for n, t in module.__dict__.items() if n.startswith(name) and isinstance(t, dict)]:
                    table.pop(key, None)


def _of_fsdp(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def pack_whole(param: Tensor, layout: WeightLayout, scheme: OperandScheme, *, name: str) -> Packed:
    """``pack_experts`` of a parameter that may be a ``DTensor``: every rank gets the whole, with one collective.

    Packed bytes travel where experts are sharded along dimension 0 of one mesh dimension, masters otherwise.
    """
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    sharded = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    by_expert = packs_by_expert(layout, scheme) and len(sharded) == 1
    if not by_expert or type(placements[sharded[0]]).__name__ != "Shard" or placements[sharded[0]].dim != 0:
        return pack_experts(whole(param), layout, scheme, name=name)
    group, ranks = mesh.get_group(sharded[0]), mesh.size(sharded[0])
    shard, experts = local(param), param.shape[0]
    packed = padded(_pack_shard(shard, layout, scheme, name), -(-experts // ranks))
    parts = [packed.codes, packed.scales, packed.outer]
    buffer = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
    gathered = [torch.empty_like(buffer) for _ in range(ranks)]
    torch.distributed.all_gather(gathered, buffer, group=group)
    sizes = [part.nbytes for part in parts]
    columns = zip(*(row.split(sizes) for row in gathered), strict=True)
    found = [
        torch.cat(column).view(part.dtype).view(-1, *part.shape[1:])[:experts].clone()
        for part, column in zip(parts, columns, strict=True)
    ]
    check_outers(name, found[2])
    return Packed(*found)


def packs_by_expert(layout: WeightLayout, scheme: OperandScheme) -> bool:
    """Whether a part of the experts packs to its part of the bytes."""
    return layout.experts is None and scheme.outer == "expert"


def check_outers(name: str, outer: Tensor) -> None:
    """Raises ``NonFiniteWeightError`` for the experts whose rank could not pack them."""
    bad = (~outer.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteWeightError(
            f"{name}: the shard with experts {bad[0]} to {bad[-1]} holds NaN or Inf and nothing was packed on any rank."
            " Restore the parameter first"
        )


def _pack_shard(shard: Tensor, layout: WeightLayout, scheme: OperandScheme, name: str) -> Packed:
    """Of this rank's experts; outer scales of NaN where they cannot be packed."""
    try:
        return pack_experts(shard, layout, scheme, name=name)
    except NonFiniteWeightError:
        return unpackable(shard, layout, scheme)


def unpackable(shard: Tensor, layout: WeightLayout, scheme: OperandScheme) -> Packed:
    """What a rank sends in the place of experts that it cannot pack."""
    experts, n, k = layout.canonical(shard).shape
    codes, scales = (shard.new_zeros(experts, n, size, dtype=torch.uint8) for size in _widths(k, scheme))
    return Packed(codes, scales, shard.new_full((experts,), torch.nan, dtype=torch.float32))


def _widths(k: int, scheme: OperandScheme) -> tuple[int, int]:
    """Bytes of codes and of scales per row of ``k`` weights."""
    return k // 2, FORMATS[scheme.fmt].scale_bytes(k)


def padded(packed: Packed, experts: int) -> Packed:
    """With zeros behind the experts, up to ``experts``: ranks exchange equal sizes."""
    missing = experts - packed.outer.shape[0]
    if missing == 0:
        return packed
    pads = ((0, 0, 0, 0, 0, missing), (0, 0, 0, 0, 0, missing), (0, missing))
    return Packed(*(F.pad(part, pad) for part, pad in zip((packed.codes, packed.scales, packed.outer), pads)))
