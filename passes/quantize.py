"""The float op becomes the quantized one, and so do linear layers that were marked: packed weights, traced outer scales
and guidance come in as feeds."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import PruningError
from ..numerics import FORMATS
from ..ops.nvfp4_moe import Out
from ..ops.quads import part_shapes
from ..ops.records import RegionRow, payload_of
from ..ops.scheme import MoEScheme, OperandScheme
from .feeds import Feeds, region_ops
from .graph import Builder, Scope, argument, bring_in, fake, scopes, shape
from .mode import Mode
from .outline import erase_dead
from .prune import compact
from .region import Feed, LinearRegion, MoERegion, Region, keeps_quads


def quantize(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """Replaces every ``moe_float`` by ``nvfp4_moe`` under ``config.scheme``, and marked linear layers by
    ``nvfp4_linear``; nothing to do where that is None.

    Masters stay operands only where gradients are wanted (``config.train``) or the scheme leaves weights unquantized.
    Raises what the op raises for widths that are not whole blocks, ``GuidanceError`` where regions see different
    numbers of tokens.
    """
    if config.scheme is None:
        return gm
    feeds = Feeds(gm)
    found: dict[Region, tuple[Scope, list[Node]]] = {}
    for scope, node, region in region_ops(gm, "moe_float", "linear"):
        found.setdefault(region, (scope, []))[1].append(node)
    plain = config.unquantized.of([r.name for r in found if isinstance(r, MoERegion)])
    found = {region: where for region, where in found.items() if region.name not in plain}
    gm.meta["quantized"] = tuple(region.name for region in found)
    plan = _Plan(feeds, config, config.scheme, tuple(found), tuple(r for r in found if config.guides(r.name)))
    for region, (scope, nodes) in found.items():
        if isinstance(region, MoERegion):
            _quantize_experts(plan, scope, nodes[0], region)
        else:
            _quantize_layers(plan, scope, nodes, region)
    for scope in scopes(gm):
        scope.module.recompile()
    return gm


@dataclass(frozen=True)
class _Plan:
    """What all regions of one graph share. ``regions`` in model order, as feeds have them."""

    feeds: Feeds
    config: Mode
    scheme: MoEScheme
    regions: tuple[Region, ...]
    guided: tuple[Region, ...]

    @property
    def masters(self) -> bool:
        return self.config.train or self.scheme.weight is None

    def guidance(self, region: Region) -> str:
        if region not in self.guided:
            return "none"
        kind = self.config.guidance
        return kind if isinstance(region, MoERegion) else payload_of(kind)


def _quantize_experts(plan: _Plan, scope: Scope, node: Node, region: MoERegion) -> None:
    at = Builder(node)
    x, ids, gates, w13, w2, b13, b2, activation, weight_input = node.args
    top_k = region.top_k
    if weight_input:
        x, ids, gates = _scale_tokens(at, x, ids, gates, region)
    weights: dict[str, Any] = {"w13": w13, "w2": w2}
    routing, rows, kept = ids, None, dict(plan.config.kept).get(region.name)
    if kept is not None and not plan.masters:
        if region.fed != region.weights:
            raise PruningError(
                f"{region.name} computes its weights while it runs, so none of its experts can be left out"
            )
        ids, b13, b2, rows = compact(plan.feeds, scope, at, region, kept, ids, b13, b2)
        weights = {which: (kept, *fake(weight).shape[1:]) for which, weight in weights.items()}
    result = at.function(
        torch.ops.trace_compile.nvfp4_moe.default,
        x,
        ids,
        gates,
        *((w13, w2) if plan.masters else (None, None)),
        b13,
        b2,
        *_packed(plan, at, scope, region, weights),
        _outer(plan, scope, node, region),
        *_guidance(plan, scope, node, region),
        None,
        plan.scheme.key,
        activation,
        plan.guidance(region),
        "none",
        plan.config.diagnose and region in plan.guided,
        plan.config.recompute,
    )
    result.meta |= {"region": region, "routing": routing, "experts": rows}
    y = at.function(operator.getitem, result, int(Out.Y))
    if weight_input and top_k > 1:
        y = at.method("sum", at.method("unflatten", y, 0, (-1, top_k)), 1)
    node.replace_all_uses_with(y)
    erase_dead(scope.graph, [node])


def _quantize_layers(plan: _Plan, scope: Scope, nodes: list[Node], region: LinearRegion) -> None:
    """One op in the place of the first layer; the columns of its result are the layers' results."""
    at, x, dtype = Builder(nodes[0]), nodes[0].args[0], fake(nodes[0]).dtype
    assert isinstance(x, Node)
    dims = shape(x)
    assert dims is not None
    tokens = x if len(dims) == 2 else at.method("reshape", x, -1, region.hidden)
    if fake(x).dtype != dtype:  # autocast
        tokens = at.method("to", tokens, dtype)
    weights, biases = ([argument(n, i, name) for n in nodes] for i, name in ((1, "weight"), (2, "bias")))
    result = at.function(
        torch.ops.trace_compile.nvfp4_linear.default,
        tokens,
        _joined(at, weights) if plan.masters else None,
        _joined(at, biases) if region.b is not None else None,
        *_packed(plan, at, scope, region, {"w": (1, sum(region.rows), region.hidden)}),
        _outer(plan, scope, nodes[0], region),
        *_guidance(plan, scope, nodes[0], region),
        None,
        plan.scheme.key,
        plan.guidance(region),
        "none",
        plan.config.diagnose and region in plan.guided,
    )
    result.meta["region"] = region
    y = at.function(operator.getitem, result, int(Out.Y))
    parts = at.function(torch.split, y, list(region.rows), 1) if len(nodes) > 1 else None
    sizes = [at.method("size", x, i) for i in range(len(dims) - 1)] if len(dims) != 2 else []
    for i, (node, rows) in enumerate(zip(nodes, region.rows, strict=True)):
        part = y if parts is None else at.function(operator.getitem, parts, i)
        node.replace_all_uses_with(at.method("reshape", part, *sizes, rows) if sizes else part)
    erase_dead(scope.graph, nodes)


def _joined(at: Builder, parameters: list[Any]) -> Node:
    return parameters[0] if len(parameters) == 1 else at.function(torch.cat, parameters)


def _scale_tokens(at: Builder, x: Any, ids: Any, gates: Any, region: MoERegion) -> tuple[Node, Node, Node]:
    """Gates on the input: what is quantized is the scaled token, one row for each of its experts."""
    if region.top_k > 1:
        x = at.function(torch.repeat_interleave, x, region.top_k, dim=0)
        ids, gates = (at.method("reshape", n, -1, 1) for n in (ids, gates))
    scaled = at.method("to", at.function(operator.mul, x, gates), fake(x).dtype)
    return scaled, ids, at.function(torch.ones_like, gates)


def _packed(plan: _Plan, at: Builder, scope: Scope, region: Region, weights: dict[str, Any]) -> tuple[Node, ...]:
    """codes, scales, outer of each weight, a node or a shape ``[E, N, K]``; tensors without elements where weights are
    not quantized. What is computed in the graph is packed there."""
    like = at.node
    if plan.scheme.weight is None:
        x = next(n for n in like.all_input_nodes if isinstance(fake(n), torch.Tensor))
        dtypes = (torch.uint8, torch.uint8, torch.float32) * len(weights)
        return tuple(at.method("new_empty", x, (0,), dtype=dtype) for dtype in dtypes)
    fmt, found = FORMATS[plan.scheme.weight.fmt], []
    quads = plan.config.quads and keeps_quads(region, plan.scheme, fake(like).device)
    for which, weight in weights.items():
        if which not in region.fed:
            detached = at.method("detach", weight)
            packed = at.function(torch.ops.trace_compile.pack_weight.default, detached, plan.scheme.weight.key)
            found += [at.function(operator.getitem, packed, i) for i in range(3)]
            continue
        experts, n, k = fake(weight).shape if isinstance(weight, Node) else weight
        for part, (dims, dtype) in part_shapes((experts, n, k), quads, fmt).items():
            root = plan.feeds.whole(Feed("packed", region.name, which, part), dims, dtype, like)
            found.append(bring_in(scope, root))
    return tuple(found)


def _outer(plan: _Plan, scope: Scope, node: Node, region: Region) -> Node | None:
    """The region's entries, one per projection, of the traced outer scales."""
    if plan.scheme.act is None or plan.scheme.act.outer != "traced":
        return None
    sites = [r for r in plan.regions for _ in r.projections]
    start = sites.index(region)
    root = plan.feeds.whole(Feed("outer"), (len(sites),), torch.float32, node)
    return plan.feeds.part(root, slice(start, start + len(region.projections)), scope)


def _guidance(plan: _Plan, scope: Scope, node: Node, region: Region) -> tuple[Node | None, Node | None, Node | None]:
    """The region's guide bytes, outer scales and hits: its columns of the rows that a trace hands out."""
    if region not in plan.guided:
        return None, None, None
    act, feeds = plan.scheme.act, plan.feeds
    assert act is not None
    tokens, index = feeds.tokens(), plan.guided.index(region)
    rows = [guide_row(r, plan.config.guide_kind, act) for r in plan.guided]
    ends = tuple(accumulate((row.guide_bytes for row in rows), initial=0))
    columns = tuple(accumulate((sum(row.outer_shape) or 1 for row in rows), initial=0))
    guide = feeds.whole(Feed("guide"), (tokens, ends[-1]), torch.uint8, node)
    outer = feeds.whole(Feed("guide_outer"), (tokens, columns[-1]), torch.float32, node)
    hit = feeds.whole(Feed("hit"), (tokens,), torch.bool, node)
    every = slice(None)
    own = slice(columns[index], columns[index + 1]) if rows[index].outer_shape else columns[index]
    return (
        feeds.part(guide, (every, slice(ends[index], ends[index + 1])), scope),
        feeds.part(outer, (every, own), scope),
        bring_in(scope, hit),
    )


def guide_row(region: Region, kind: str, act: OperandScheme) -> RegionRow:
    """The region's part of a guide row; those of all regions follow one another in model order. Outer scales come
    apart: rows recorded with scales of their own serve a graph with traced ones."""
    if isinstance(region, MoERegion):
        return RegionRow(region.hidden, region.width, region.top_k, kind, act)
    return RegionRow(region.hidden, 0, 0, payload_of(kind), act)
