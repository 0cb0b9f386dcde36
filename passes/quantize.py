"""The float op becomes the quantized one: packed weights, traced outer scales and guidance come in as feeds."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import LoweringError
from ..numerics import FORMATS
from ..ops.nvfp4_moe import Out
from ..ops.rows import guide_bytes
from ..ops.scheme import MoEScheme, OperandScheme
from .feeds import Feeds, region_ops
from .graph import Builder, Scope, bring_in, fake, scopes
from .mode import Mode
from .outline import erase_dead
from .region import Feed, MoERegion


def quantize(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """Replaces every ``moe_float`` by ``nvfp4_moe`` under ``config.scheme``; nothing to do where that is None.

    Masters stay operands only where gradients are wanted (``config.train``) or the scheme leaves weights unquantized.
    Raises what the op raises for widths that are not whole blocks, ``GuidanceError`` where regions see different
    numbers of tokens, ``LoweringError`` for gates on the input with several experts per token.
    """
    if config.scheme is None:
        return gm
    feeds, found = Feeds(gm), list(region_ops(gm, "moe_float"))
    guided = [region for _, _, region in found if config.guides(region.name)]
    for index, (scope, node, region) in enumerate(found):
        at = Builder(node)
        x, ids, gates, w13, w2, b13, b2, activation, weight_input = node.args
        if weight_input:
            x, gates = _scale_tokens(at, x, gates, region)
        masters = config.train or config.scheme.weight is None
        result = at.function(
            torch.ops.trace_compile.nvfp4_moe.default,
            x,
            ids,
            gates,
            *((w13, w2) if masters else (None, None)),
            b13,
            b2,
            *_packed(feeds, at, scope, node, region, config.scheme),
            _outer(feeds, scope, node, index, len(found), config.scheme),
            *_guidance(feeds, scope, node, region, guided, config),
            None,
            config.scheme.key,
            activation,
            config.guidance if region in guided else "none",
            "none",
            False,
            config.recompute,
        )
        result.meta["region"] = region
        node.replace_all_uses_with(at.function(operator.getitem, result, int(Out.Y)))
        erase_dead(scope.graph, [node])
    for scope in scopes(gm):
        scope.module.recompile()
    return gm


def _scale_tokens(at: Builder, x: Any, gates: Any, region: MoERegion) -> tuple[Node, Node]:
    """Gates on the input: with one expert per token the quantizer's input is simply the scaled token."""
    if region.top_k != 1:
        raise LoweringError(
            f"{region.name} scales its input by the gates of {region.top_k} experts per token: the quantized op takes "
            "one row per token; use a scheme of None for this model"
        )
    scaled = at.method("to", at.function(operator.mul, x, gates), fake(x).dtype)
    return scaled, at.function(torch.ones_like, gates)


def _packed(
    feeds: Feeds, at: Builder, scope: Scope, node: Node, region: MoERegion, scheme: MoEScheme
) -> tuple[Node, ...]:
    """codes, scales, outer of w13, then of w2; tensors without elements where weights are not quantized."""
    x, w13, w2 = (node.args[i] for i in (0, 3, 4))
    assert isinstance(x, Node) and isinstance(w13, Node) and isinstance(w2, Node)
    if scheme.weight is None:
        dtypes = (torch.uint8, torch.uint8, torch.float32) * 2
        return tuple(at.method("new_empty", x, (0,), dtype=dtype) for dtype in dtypes)
    fmt, found = FORMATS[scheme.weight.fmt], []
    for which, weight in (("w13", w13), ("w2", w2)):
        experts, n, k = fake(weight).shape
        parts = {
            "codes": ((experts, n, k // 2), torch.uint8),
            "scales": ((experts, n, fmt.scale_bytes(k)), torch.uint8),
            "outer": ((experts,), torch.float32),
        }
        for part, (dims, dtype) in parts.items():
            root = feeds.whole(Feed("packed", region.name, which, part), dims, dtype, x)
            found.append(bring_in(scope, root))
    return tuple(found)


def _outer(feeds: Feeds, scope: Scope, node: Node, index: int, regions: int, scheme: MoEScheme) -> Node | None:
    """The region's two entries (gate_up, down) of the traced outer scales."""
    if scheme.act is None or scheme.act.outer != "traced":
        return None
    root = feeds.whole(Feed("outer"), (2 * regions,), torch.float32, node)
    return feeds.part(root, slice(2 * index, 2 * index + 2), scope)


def _guidance(
    feeds: Feeds, scope: Scope, node: Node, region: MoERegion, guided: list[MoERegion], config: Mode
) -> tuple[Node | None, Node | None, Node | None]:
    """The region's guide bytes, outer scales and hits: its columns of the rows that a trace hands out."""
    if region not in guided:
        return None, None, None
    act = config.scheme.act if config.scheme else None
    assert act is not None
    tokens, index = feeds.tokens(), guided.index(region)
    start = sum(guide_bytes(r.hidden, config.guidance, act.fmt) for r in guided[:index])
    stop = start + guide_bytes(region.hidden, config.guidance, act.fmt)
    guide = feeds.whole(Feed("guide"), (tokens, guide_row_bytes(guided, config.guidance, act)), torch.uint8, node)
    outer = feeds.whole(Feed("guide_outer"), (tokens, len(guided)), torch.float32, node)
    hit = feeds.whole(Feed("hit"), (tokens,), torch.bool, node)
    every = slice(None)
    return (
        feeds.part(guide, (every, slice(start, stop)), scope),
        feeds.part(outer, (every, index), scope),
        bring_in(scope, hit),
    )


def guide_row_bytes(guided: list[MoERegion], kind: str, act: OperandScheme) -> int:
    """Bytes of the guide rows of ``guided`` regions, in model order. Outer scales come apart: rows recorded with scales
    of their own serve a graph with traced ones."""
    return sum(guide_bytes(region.hidden, kind, act.fmt) for region in guided)
