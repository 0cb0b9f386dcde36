"""Linear layers that a user named are marked for quantization: by name patterns, and grouped by what they read.

Rules, as ignore lists of checkpoints have them: a layer is taken if an ``include`` pattern matches its module's dotted
name and no ``ignore`` pattern does. A pattern is a name, a shell wildcard (``*.q_proj``), or ``re:`` and an expression
matched from the start of the name. What decides rather than computes (routers, gates), output heads and layers tied to
an embedding are taken only where a pattern is their very name.

Layers of one module that read the same value (query, key and value; gate and up) form one region: the value is
quantized once, and their weights share an outer scale. Nothing is changed here; ``quantize`` replaces what is marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch.fx import GraphModule, Node

from ..errors import BlockSizeError, NoMoERegionError
from ..numerics import FORMATS
from .graph import Scope, argument, dotted_name, fake, is_parameter, op_name, origin, scopes, shape
from .mode import Mode
from .region import ExpertParam, LinearRegion

_DECIDING = ("gate", "router", "shared_expert_gate", "lm_head", "classifier", "score", "embed_out")
_KEEPS_RESULT = frozenset(
    (
        *("to", "float", "bfloat16", "type", "type_as", "view", "reshape", "squeeze", "unsqueeze", "contiguous"),
        *("getitem", "softmax", "sigmoid", "tanh", "softplus", "sqrt", "log_softmax", "masked_fill", "clamp"),
    )
)
_BY_CONSTANT = ("mul", "div", "add", "sub")


def linears(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """Marks the chosen layers (``node.meta["region"]``) and adds their regions to ``gm.meta["regions"]``.

    Raises ``NoMoERegionError`` where a strict mode's pattern names no layer, or nothing at all was found;
    ``BlockSizeError`` for a chosen layer whose input features are not whole blocks.
    """
    if not config.include:
        return gm
    nodes = [(scope, node) for scope in scopes(gm) for node in scope.graph.nodes]
    layers = [(scope, node, name) for scope, node in nodes if (name := _layer(scope, node)) is not None]
    taking = [
        (scope, node, name)
        for scope, node, name in layers
        if chosen(config.include, config.ignore, name, _decides(scope, node))
    ]
    if config.strict:
        _check_patterns(config.include, [name for _, _, name in layers])
    groups: dict[Any, list[tuple[Scope, Node, str]]] = {}
    for scope, node, name in taking:
        key = (scope.module, node.args[0], name.rpartition(".")[0], _bias(node) is None, fake(node).dtype)
        groups.setdefault(key, []).append((scope, node, name))
    taken: set[str] = set()
    for group in groups.values():
        region = _region(group, taken)
        taken.add(region.name)
        _check_width(region, config)
        for _, node, _ in group:
            node.meta["region"] = region
    gm.meta["regions"] = tuple(dict.fromkeys(node.meta["region"] for _, node in nodes if "region" in node.meta))
    if not gm.meta["regions"]:
        raise NoMoERegionError(f"nothing to compile: no expert region, and {list(config.include)} name no linear layer")
    return gm


def matches(pattern: str, name: str) -> bool:
    """Whether a module's dotted name is meant by ``pattern``."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return fnmatchcase(name, pattern)


def chosen(include: Iterable[str], ignore: Iterable[str], name: str, decides: bool = False) -> bool:
    """Whether the rules choose the layer called ``name``; ``decides``: it is known to be a router, gate or head."""
    if any(matches(pattern, name) for pattern in ignore):
        return False
    if name in include:
        return True
    decides = decides or name.rpartition(".")[2] in _DECIDING
    return not decides and any(matches(pattern, name) for pattern in include)


def _layer(scope: Scope, node: Node) -> str | None:
    """The dotted name of the module whose ``weight`` the product ``node`` applies as it is."""
    if op_name(node) != "linear":
        return None
    weight, bias = argument(node, 1, "weight"), _bias(node)
    for parameter in (weight, bias):
        root = origin(scope, parameter) if isinstance(parameter, Node) else None
        if parameter is not None and (root is None or not is_parameter(root)):
            return None
    root = origin(scope, weight)
    assert root is not None
    module, _, leaf = dotted_name(root).rpartition(".")
    return module if leaf == "weight" and len(shape(weight) or ()) == 2 else None


def _bias(node: Node) -> Node | None:
    return argument(node, 2, "bias")


def _decides(scope: Scope, node: Node) -> bool:
    """A router, a gate, a head, or tied to an embedding."""
    weight = argument(node, 1, "weight")
    if shape(weight)[0] == 1:  # type: ignore[index]
        return True
    root = origin(scope, weight)
    if root is not None and any(op_name(user) == "embedding" for user in root.users):
        return True
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user.op == "output" and scope.parent is None:
                return True
            if op_name(user) in ("topk", "argmax", "sort"):
                return True
            if user not in seen and _passes_on(scope, user):
                seen.add(user)
                todo.append(user)
    return False


def _passes_on(scope: Scope, node: Node) -> bool:
    """Whether ``node`` is the same scores in another form."""
    if op_name(node) in _BY_CONSTANT:
        return all(n.op != "placeholder" or origin(scope, n) is not None for n in node.all_input_nodes[1:]) and (
            len(node.all_input_nodes) == 1 or any(n.op == "placeholder" for n in node.all_input_nodes)
        )
    return op_name(node) in _KEEPS_RESULT


def _check_patterns(patterns: Iterable[str], names: list[str]) -> None:
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
            raise NoMoERegionError(
                f"include={pattern!r} names no linear layer of the graph; there are: {known or 'none'}"
            )


def _region(group: list[tuple[Scope, Node, str]], taken: set[str]) -> LinearRegion:
    modules = tuple(name for _, _, name in group)
    parent, leaves = modules[0].rpartition(".")[0], [m.rpartition(".")[2] for m in modules]
    stem = modules[0] if len(modules) == 1 else f"{parent}.{{{','.join(leaves)}}}".lstrip(".")
    name, number = stem, 1
    while name in taken:  # a layer that the model runs twice
        number += 1
        name = f"{stem}#{number}"
    weights = [_param(scope, argument(node, 1, "weight")) for scope, node, _ in group]
    biases = [_param(scope, bias) for scope, node, _ in group if (bias := _bias(node)) is not None]
    return LinearRegion(
        name=name,
        modules=modules,
        rows=tuple(int(shape(argument(node, 1, "weight"))[0]) for _, node, _ in group),  # type: ignore[index]
        hidden=int(shape(argument(group[0][1], 1, "weight"))[1]),  # type: ignore[index]
        w=ExpertParam.joined(tuple(weights)),
        b=ExpertParam.joined(tuple(biases)) if biases else None,
    )


def _param(scope: Scope, node: Node) -> ExpertParam:
    root = origin(scope, node)
    assert root is not None
    return ExpertParam(root.name, dotted_name(root))


def _check_width(region: LinearRegion, config: Mode) -> None:
    for scheme in (config.scheme.weight, config.scheme.act) if config.scheme else ():
        block = FORMATS[scheme.fmt].block if scheme else 1
        if region.hidden % block:
            raise BlockSizeError(
                f"{region.name} has {region.hidden} input features, not a multiple of the format's block of {block}; "
                "add it to ignore"
            )
