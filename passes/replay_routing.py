"""Recorded expert ids in place of the router's own top-k.

Only the selection is replaced: gate weights stay the model's own function of its own scores, now read at the recorded
ids, so gradients reach the router as before. A token without a record keeps the model's choice, bit for bit.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import GuidanceError
from .feeds import Feeds, operand, region_ops
from .graph import Builder, Scope, argument, line_of, op_name, same_shape, scopes, shape
from .mode import Mode
from .region import Feed


def replay_routing(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """Feeds ``replay`` i64 [T, top_k of all regions]; -1 anywhere in a token's ids means no record.

    Raises ``GuidanceError`` naming the region whose ids do not come from a top-k, or whose rows are no tokens.
    """
    if not config.replay:
        return gm
    feeds, found = Feeds(gm), list(region_ops(gm, "moe_float"))
    columns, replaced = 0, set[Node]()
    total = sum(region.top_k for _, _, region in found)
    for scope, node, region in found:
        if region.slots:
            raise GuidanceError(f"routing of {region.name} cannot be replayed: {region.slots}")
        top = top_k_of(operand(node, "expert_ids"))
        if isinstance(top, str):
            raise GuidanceError(f"routing of {region.name} cannot be replayed: {top}")
        if top not in replaced:  # blocks may share a router
            replay = feeds.whole(Feed("replay"), (feeds.tokens(), total), torch.int64, operand(node, "x"))
            _replace(feeds, scope, top, replay, slice(columns, columns + region.top_k))
            replaced.add(top)
        columns += region.top_k
    for scope in scopes(gm):
        scope.module.recompile()
    return gm


def top_k_of(ids: Any) -> Node | str:
    """The top-k that a region's expert ids come from, or what they come from instead."""
    node = ids
    while op_name(node) in ("reshape", "view", "flatten", "to", "long", "contiguous"):
        node = node.args[0]
    top = node.args[0] if op_name(node) == "getitem" and node.args[1] == 1 else None
    if not isinstance(top, Node) or op_name(top) != "topk":
        return f"its expert ids come from {op_name(node) or node} ({line_of(node)}), not from a top-k"
    return top


def _unmasked(scores: Any) -> Any:
    """The scores before those of groups that were not chosen were masked: a recorded expert may lie in one of them, and
    its gate is the model's own score all the same."""
    while op_name(scores) in ("masked_fill", "where"):
        kept = scores.args[0] if op_name(scores) == "masked_fill" else _kept(scores)
        if kept is None:
            break
        scores = kept
    return scores


def _kept(where: Node) -> Node | None:
    """The scores of ``where(mask, scores, constant)`` or ``where(mask, constant, scores)``."""
    _, a, b = where.args
    tensors = [n for n in (a, b) if isinstance(n, Node) and same_shape(shape(n), shape(where)) and n.all_input_nodes]
    return tensors[0] if len(tensors) == 1 else None


def _replace(feeds: Feeds, scope: Scope, top: Node, replay: Node, columns: slice) -> None:
    items = list(top.users)
    at = Builder(top.next)
    own_ids = at.function(operator.getitem, top, 1)
    recorded = at.method("view_as", feeds.part(replay, (slice(None), columns), scope), own_ids)
    known = at.method("all", at.function(torch.ge, recorded, 0), -1, True)
    ids = at.function(torch.where, known, recorded, own_ids)
    values = None
    for item in items:
        if item.args[1] == 1:
            item.replace_all_uses_with(ids)
        else:
            if values is None:
                scores, dim = _unmasked(top.args[0]), argument(top, 2, "dim", -1)
                values = at.function(torch.gather, scores, dim, ids)
            item.replace_all_uses_with(values)
        scope.graph.erase_node(item)
