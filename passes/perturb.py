"""Noise on the weights of the norms in front of expert and attention projections (QeRL's adaptive quantization noise).

A norm is found by what it does: a vector of the hidden size multiplies what then enters a region or, before the last
region, a linear layer (queries, keys, values, dense gate and up). The noise is a feed added to that vector in this
graph alone, so parameters stay as they are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import LoweringError
from .feeds import Feeds, operand, region_ops
from .graph import Builder, Scope, dotted_name, fake, is_parameter, op_name, origin, scopes
from .mode import Mode
from .region import Feed

_THROUGH = ("reshape", "view", "flatten", "to", "float", "bfloat16", "contiguous", "type_as", "squeeze", "unsqueeze")


def perturb(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """Adds a row of the feed ``noise`` to each norm's weight; records their names in ``gm.meta["noisy"]``.

    Raises ``LoweringError`` where a region's input comes from no norm.
    """
    if not config.noise:
        return gm
    norms = _norms(gm)
    names = list(dict.fromkeys(dotted_name(root) for _, _, root in norms))
    feeds, width = Feeds(gm), fake(norms[0][1]).shape[0]
    root = feeds.whole(Feed("noise"), (len(names), width), torch.float32, norms[0][2])
    for scope, weight, parameter in norms:
        row = feeds.part(root, names.index(dotted_name(parameter)), scope)
        readers = list(weight.users)
        at = Builder(next(node for node in scope.graph.nodes if node in readers))
        noisy = at.function(operator.add, weight, at.method("to", row, fake(weight).dtype))
        for reader in readers:
            reader.replace_input_with(weight, noisy)
    for scope in scopes(gm):
        scope.module.recompile()
    gm.meta["noisy"] = tuple(names)
    return gm


def _norms(gm: GraphModule) -> list[tuple[Scope, Node, Node]]:
    """Scope, the weight there, and its root placeholder, of every norm, each once."""
    found: dict[tuple[int, Node], tuple[Scope, Node, Node]] = {}
    regions = list(region_ops(gm, "moe_float"))
    last, stops = regions[-1][0], {regions[-1][1]}
    while last.parent is not None and last.call is not None:
        stops.add(last.call)
        last = last.parent
    for scope, node, region in regions:
        norm = _norm_of(scope, operand(node, "x"), region.hidden)
        if norm is None:
            raise LoweringError(f"the input of {region.name} comes from no norm whose weight could take noise")
        found[id(scope.module), norm[1]] = norm
    hidden = regions[0][2].hidden
    for scope in scopes(gm):
        for node in scope.graph.nodes:
            if node in stops:
                break
            if op_name(node) == "linear":
                norm = _norm_of(scope, node.args[0], hidden)
                if norm is not None:
                    found[id(scope.module), norm[1]] = norm
    return list(found.values())


def _norm_of(scope: Scope, value: Any, hidden: int) -> tuple[Scope, Node, Node] | None:
    node = _plain(value)
    if node is None or op_name(node) not in ("mul", "rms_norm"):
        return None
    for argument in node.all_input_nodes:
        weight = _plain(argument)
        if weight is not None and op_name(weight) == "add":  # weights that are stored as their distance from 1
            weight = next((w for w in map(_plain, weight.all_input_nodes) if w is not None), None)
        root = origin(scope, weight) if weight is not None and weight.op == "placeholder" else None
        if weight is not None and root is not None and is_parameter(root) and tuple(fake(root).shape) == (hidden,):
            return scope, weight, root
    return None


def _plain(value: Any) -> Node | None:
    """Behind casts and changes of shape."""
    while isinstance(value, Node) and op_name(value) in _THROUGH:
        value = value.args[0]
    return value if isinstance(value, Node) else None
