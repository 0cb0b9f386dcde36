"""Expert pruning of a rollout: routers choose among the experts that were kept, and packed weights hold only those.

The scores of the other experts become -inf before the softmax or sigmoid, and again where the top-k is taken (biases
may have been added in between). So the gates of the kept experts come out by the model's own rule, as if the others did
not exist: their probability mass is renormalised wherever that rule normalises. Which experts are allowed is a feed: it
may differ between prompts and decoding while the packed weights hold the union.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import PruningError
from .feeds import Feeds, operand, region_ops
from .graph import Builder, Scope, bring_in, op_name, same, scopes, shape
from .mode import Mode
from .region import Feed, MoERegion
from .replay_routing import top_k_of

_BETWEEN = ("softmax", "sigmoid", "to", "float", "add", "mul", "masked_fill", "reshape", "view", "contiguous")
"""What models put between the router's GEMM and the top-k."""
_GEMMS = ("linear", "matmul", "mm", "einsum")


def prune(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """Restricts the routers of the regions in ``config.kept``.

    Raises ``PruningError`` where a region's router is not a GEMM, a normalisation and a top-k.
    """
    kept = dict(config.kept)
    if not kept:
        return gm
    feeds, done = Feeds(gm), set[Node]()
    for scope, node, region in list(region_ops(gm, "moe_float")):
        if region.name not in kept:
            continue
        top = region.slots or top_k_of(operand(node, "expert_ids"))
        if isinstance(top, str):
            raise PruningError(f"experts of {region.name} cannot be pruned: {top}")
        if top not in done:  # blocks may share a router
            _restrict(feeds, scope, top, region, node)
            done.add(top)
    for scope in scopes(gm):
        scope.module.recompile()
    return gm


def _restrict(feeds: Feeds, scope: Scope, top: Node, region: MoERegion, like: Node) -> None:
    root = feeds.whole(
        Feed("experts", region.name, part="allowed"), (region.num_experts,), torch.bool, operand(like, "x")
    )
    allowed, logits = bring_in(scope, root), _logits(top, region)
    masked = _masked(logits, allowed)
    for reader in [user for user in logits.users if user is not masked]:
        reader.replace_input_with(logits, masked)
    scores = top.args[0]
    if isinstance(scores, Node) and scores is not masked:
        top.replace_input_with(scores, _masked(scores, allowed))


def _masked(scores: Node, allowed: Node) -> Node:
    behind = Builder(scores.next)
    return behind.method("masked_fill", scores, behind.function(torch.logical_not, allowed), float("-inf"))


def _logits(top: Node, region: MoERegion) -> Node:
    """The router's GEMM behind a top-k: the first value of one score per expert on the way back."""
    node, seen = top.args[0], 0
    while isinstance(node, Node) and seen < 32:
        sizes = shape(node)
        if op_name(node) in _GEMMS and sizes is not None and same(sizes[-1], region.num_experts):
            return node
        if op_name(node) not in _BETWEEN:
            break
        tensors = [a for a in node.args if isinstance(a, Node) and _scores(a, region)]
        node, seen = (tensors[0] if tensors else None), seen + 1
    found = op_name(node) if isinstance(node, Node) else node
    raise PruningError(
        f"experts of {region.name} cannot be pruned: between its router's GEMM and its top-k stands {found!r}, whose "
        "effect on the others' share of the probability is not known"
    )


def _scores(node: Node, region: MoERegion) -> bool:
    """One score per token and expert (a bias has none per token)."""
    sizes = shape(node)
    return sizes is not None and len(sizes) >= 2 and same(sizes[-1], region.num_experts)


def compact(
    feeds: Feeds, scope: Scope, at: Builder, region: MoERegion, count: int, ids: Any, b13: Any, b2: Any
) -> tuple[Node, Any, Any, Node]:
    """Expert ids as rows of the packed weights (-1: pruned), the biases of those rows, and the map from ids to rows."""

    def feed(part: str, size: int) -> Node:
        return bring_in(scope, feeds.whole(Feed("experts", region.name, part=part), (size,), torch.int64, ids))

    index = feed("index", region.num_experts)
    rows = at.function(operator.getitem, index, ids)
    if b13 is not None or b2 is not None:
        kept = feed("kept", count)
        b13, b2 = (None if b is None else at.function(torch.index_select, b, 0, kept) for b in (b13, b2))
    return rows, b13, b2, index
