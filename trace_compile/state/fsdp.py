"""Experts under FSDP2: packed where they lie, gathered as packed bytes.

FSDP2 (``torch.distributed.fsdp.fully_shard``) keeps a shard of each parameter per rank and gathers the whole before a
layer runs. The masters of quantized experts need not travel: their shape and their gradient are all that a training
graph takes of them. So each rank packs its own experts, through FSDP2's all-gather extension codes and scales travel in
the layer's one collective (4.5 bits per weight instead of 16 or 32), and the unsharded parameter is *hollow*: it has
the shape and receives the gradient, and there is no memory behind it.

Invariants
- What FSDP2 frees after a layer, it frees here too: gathered codes lie in its own buffers, at addresses that stay.
- A rank that cannot pack its shard sends outer scales of NaN; all ranks see them and raise alike, after the forward.

Where that is not possible (shards along another dimension, gate and up interleaved, scales over all experts, offloaded
masters) FSDP2 gathers the masters as ever and each rank packs the whole parameter, with the same result.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trace_compile.errors import NonFiniteWeightError
from trace_compile.ops.scheme import OperandScheme
from trace_compile.ops.weights import Packed, WeightLayout
from trace_compile.state.packed import PackedWeights
from trace_compile.state.sharded import is_fsdp, packs_by_expert, padded, unmark_fsdp, unpackable

Wanted = Mapping[str, tuple[WeightLayout, OperandScheme]]
"""Expert parameters by dotted name, and how they are to be packed."""


class PackedShards:
    """The packed expert weights of a model under FSDP2, as its all-gathers leave them."""

    def __init__(self) -> None:
        self.weights = PackedWeights()
        """The packed shards; each is packed once per optimizer step."""
        self._root: type | None = None
        self._params: dict[str, Any] = {}
        self._fine: dict[str, Tensor] = {}
        self.packed: dict[str, Packed] = {}
        self.managed: frozenset[str] = frozenset()
        """Expert parameters that FSDP2 shards."""

    def attach(self, model: nn.Module, wanted: Wanted, *, hollow: Container[str]) -> None:
        """Learn which of the ``wanted`` parameters FSDP2 manages, and have it gather packed bytes of those in
        ``hollow`` from now on: of parameters that only quantized regions read. Cheap where nothing changed.
        """
        if not is_fsdp(model) or not wanted:
            return
        if self._root is not type(model):
            self._params = {name: param for name, param in fsdp_params(model) if name in wanted}
            self._root, self.managed = type(model), frozenset(self._params)
            unmark_fsdp(model)
        for name, param in self._params.items():
            if (
                name in hollow
                and not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
                and _can_travel_packed(param, *wanted[name])
            ):
                self._extend(name, param, *wanted[name])

    def check(self) -> None:
        """Raises ``NonFiniteWeightError`` on every rank if one could not pack its shard. One look at the device."""
        fine, self._fine = self._fine, {}
        if fine:
            bad = [n for n, ok in zip(fine, torch.stack(list(fine.values())).tolist(), strict=True) if not ok]
            if bad:
                raise NonFiniteWeightError(
                    f"{', '.join(bad)}: a rank's shard holds NaN or Inf and was not packed. Restore the weights first"
                )

    def _extend(self, name: str, param: Any, layout: WeightLayout, scheme: OperandScheme) -> None:
        shard, experts = param._sharded_local_tensor, param._orig_size[0]
        rows = -(-experts // param.mesh_info.shard_mesh_size)

        def fsdp_pre_all_gather(mesh: Any) -> tuple[tuple[Tensor, ...], None]:
            try:
                packed = self.weights.get(name, shard, layout, scheme)
            except NonFiniteWeightError:
                packed = unpackable(shard, layout, scheme)
            packed = padded(packed, rows)
            return (packed.codes, packed.scales, packed.outer), None

        def fsdp_post_all_gather(
            gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
        ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
            packed = self.packed[name] = Packed(*(part[:experts] for part in gathered))
            self._fine[name] = packed.outer.isfinite().all()
            if out is not None:
                return None
            # Whole only until the layer's forward comes: FSDP2 lays a strided view over it, which needs memory.
            return torch.empty(param._orig_size, dtype=dtype, device=gathered[0].device), ()

        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = fsdp_pre_all_gather, fsdp_post_all_gather
        if hasattr(param, "_unsharded_param"):  # gathered whole before now
            del param._unsharded_param
        param.all_gather_outputs = []
        param._init_extensions()


def _can_travel_packed(param: Any, layout: WeightLayout, scheme: OperandScheme) -> bool:
    group_reshards = param.post_forward_mesh_info
    part_way = group_reshards is not None and group_reshards.mesh != param.mesh_info.mesh  # reshard_after_forward=int
    return (
        param.mesh_info.shard_mesh_size > 1  # else there is nothing to gather, and FSDP2 does not ask
        and param.fsdp_placement.dim == 0
        and packs_by_expert(layout, scheme)
        and not layout.interleaved  # the graph rearranges the master's rows, so it reads them
        and not param.offload_to_cpu
        and not part_way
        and param.sharded_state.name == "SHARDED"
    )


def hollow(param: Tensor) -> None:
    """Free the memory behind a parameter of which only the shape and the gradient are used."""
    storage = param.untyped_storage()
    if storage.nbytes():
        storage.resize_(0)


def fsdp_params(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's own records of the parameters that it shards, by dotted name."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        if not is_fsdp(module):
            continue
        state = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for param in (p for group in groups if group is not None for p in group.fsdp_params):
            prefix = names[id(param._module_info.module)]
            yield f"{prefix}.{param._module_info.param_name}".lstrip("."), param
