"""Extra inputs and outputs of a graph: what each region reads from and hands to the runtime.

Feeds are placeholders behind the model's own inputs, emits are results behind the model's own results, both in the
order of ``gm.meta["feeds"]`` and ``gm.meta["emits"]``. Regions inside checkpointed subgraphs are reached through the
operands and results of the calls in between, so a checkpoint's recomputation emits nothing a second time.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import GuidanceError
from ..ops.registry import OPS
from .graph import Builder, Scope, add_input, add_output, bring_in, bring_out, fake, op_name, output_of, same, scopes
from .region import Emit, EmitKind, Feed, Region
from .runner import IR_OPS


def region_ops(gm: GraphModule, *names: str) -> Iterator[tuple[Scope, Node, Any]]:
    """Every op called ``names`` that belongs to a region, in model order, with the region."""
    for scope in scopes(gm):
        for node in list(scope.graph.nodes):
            if op_name(node) in names and "region" in node.meta:
                yield scope, node, node.meta["region"]


def operand(node: Node, name: str) -> Any:
    """An operand of an op of the intermediate representation, by its name in the op's schema."""
    return node.args[_position(node, name)]


def set_operands(node: Node, **changes: Any) -> None:
    """Changes operands of such an op and its fake result with them."""
    args = list(node.args)
    for name, value in changes.items():
        args[_position(node, name)] = value
    node.args = tuple(args)
    fakes = torch.fx.node.map_arg(node.args, fake)
    with torch.no_grad():
        node.meta["example_value"] = node.target(*fakes)  # type: ignore[operator]


def _position(node: Node, name: str) -> int:
    return [f.name for f in fields(OPS[op_name(node)].operands)].index(name)


class Feeds:
    """Adds feeds to ``gm``; one that is asked for twice is the same placeholder."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm

    def whole(self, feed: Feed, shape: tuple[Any, ...], dtype: torch.dtype, like: Node) -> Node:
        """The root placeholder of ``feed``, on the device of ``like``."""
        feeds: tuple[Feed, ...] = self.gm.meta.get("feeds", ())
        for node in self.gm.graph.nodes:
            if node.op == "placeholder" and node.meta.get("feed") == feed:
                return node
        parts = ("feed", feed.kind, feed.region, feed.weight, feed.part)
        name = re.sub(r"\W", "_", "_".join(p for p in parts if p))  # regions are called "layers.0.experts" or "block#2"
        node = add_input(self.gm, name, fake(like).new_empty(shape, dtype=dtype))
        node.meta["feed"] = feed
        self.gm.meta["feeds"] = (*feeds, feed)
        return node

    def part(self, node: Node, index: Any, scope: Scope) -> Node:
        """``node[index]`` of a root placeholder, readable in ``scope``."""
        first = next(n for n in self.gm.graph.nodes if n.op != "placeholder")
        return bring_in(scope, Builder(first).function(operator.getitem, node, index))

    def tokens(self) -> Any:
        """T, the same in every region that works on tokens. Raises ``GuidanceError`` if they see different ones."""
        by_token = [(node, region) for _, node, region in region_ops(self.gm, *IR_OPS) if not region.slots]
        found = [(region.name, fake(operand(node, "x")).shape[0]) for node, region in by_token]
        for name, size in found[1:]:
            if not same(size, found[0][1]):
                raise GuidanceError(
                    f"{found[0][0]} runs on {found[0][1]} tokens and {name} on {size}; records need one row per token"
                )
        return found[0][1]


def emit(gm: GraphModule, scope: Scope, node: Node, kind: EmitKind, region: Region) -> None:
    """Hands ``node`` of ``scope`` out of the root graph."""
    if "results" not in gm.meta:
        gm.meta["results"] = len(output_of(gm.graph).args[0])  # type: ignore[arg-type]
    add_output(gm, bring_out(scope, node))
    gm.meta["emits"] = (*gm.meta.get("emits", ()), Emit(kind, region.name))
