"""Recorders: the quantizers hand out what they decided, as further results of the op that runs anyway.

Nothing is attached where the mode records nothing, so an observed graph and a plain one differ only in outputs.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..ops.nvfp4_moe import Out
from ..ops.records import KINDS, payload_of
from .feeds import Feeds, emit, operand, region_ops, set_operands
from .graph import Builder, Scope, bring_in, scopes
from .mode import Mode
from .region import EmitKind, Feed, MoERegion, Region
from .runner import IR_OPS

_RANGES: tuple[tuple[EmitKind, Out], ...] = (
    ("amax", Out.AMAX),
    ("counts", Out.COUNTS),
    ("hist", Out.HIST),
    ("saturated", Out.SATURATED),
)
_ROWS: tuple[tuple[EmitKind, Out], ...] = (("record", Out.RECORD), ("record_outer", Out.RECORD_OUTER))


def observe(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """Sets the record flags of every quantized op and emits what they produce, per region in model order."""
    feeds = Feeds(gm)
    for scope, node, region in list(region_ops(gm, "nvfp4_moe", "nvfp4_linear")):
        _observe_quantized(gm, feeds, scope, node, region, config)
    for scope, node, region in list(region_ops(gm, *IR_OPS)):
        behind = Builder(node.next)
        if config.routing and isinstance(region, MoERegion) and not region.slots:
            emit(gm, scope, node.meta.get("routing", operand(node, "expert_ids")), "routing", region)
        if config.inputs and (config.recorded is None or region.name in config.recorded):
            emit(gm, scope, behind.method("detach", operand(node, "x")), "input", region)
    for scope in scopes(gm):
        scope.module.recompile()
    return gm


def _observe_quantized(gm: GraphModule, feeds: Feeds, scope: Scope, node: Node, region: Region, config: Mode) -> None:
    record = config.record_of(region.name)
    if region.slots and record != "none":
        record = "ranges"
    elif not isinstance(region, MoERegion):
        record = payload_of(record)  # type: ignore[assignment]
    diagnose = config.diagnose and config.guides(region.name)
    if record == "none" and not diagnose:
        return
    valid = None
    if not region.slots:
        valid = bring_in(scope, feeds.whole(Feed("valid"), (feeds.tokens(),), torch.bool, operand(node, "x")))
    set_operands(node, record=record, valid=valid)
    wanted = (_ROWS if record in KINDS else ()) + (_RANGES if record != "none" else ())
    for kind, out in (*wanted, *((("diag", Out.DIAG),) if diagnose else ())):
        result = Builder(node.next).function(operator.getitem, node, int(out))
        if kind in ("amax", "counts") and node.meta.get("experts") is not None:
            result = _of_all_experts(result, node.meta["experts"])
        emit(gm, scope, result, kind, region)  # type: ignore[arg-type]


def _of_all_experts(result: Node, index: Node) -> Node:
    """``[..., kept experts]`` as ``[..., E]``, 0 for those that were pruned."""
    behind = Builder(result.next)
    rows = behind.method("index_select", result, -1, behind.method("clamp", index, 0))
    return behind.method("masked_fill", rows, behind.function(torch.lt, index, 0), 0)
