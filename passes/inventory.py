"""Which operations are expert-shaped, matched or not: what the matcher has to account for."""

from __future__ import annotations

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from .experts import GROUPED, PRODUCTS
from .graph import Scope, dotted_name, fake, is_parameter, op_name, origin, same, shape
from .parameters import parameters_of


def expert_operand(scope: Scope, node: Node) -> str | None:
    """Dotted name of the stacked parameter that a product multiplies by, if it does."""
    if op_name(node) not in PRODUCTS or parameters_of(scope, node):
        return None  # of parameters alone: that makes weights, and what multiplies by them is looked at
    names = (_stacked(scope, operand) for operand in node.all_input_nodes)
    return next((name for name in names if name), None)


def weights_of(scope: Scope, node: Node) -> tuple[str, ...]:
    """Dotted names of the parameters and buffers of those of a product's operands that are made of such alone."""
    return tuple(name for operand in node.all_input_nodes for name in _made_of(scope, operand))


def _made_of(scope: Scope, operand: Node) -> list[str]:
    todo, seen, names = [operand], {operand}, list[str]()
    while todo:
        n = todo.pop()
        root = origin(scope, n) if n.op == "placeholder" else None
        if root is not None and _is_model_state(root):
            names.append(dotted_name(root))
        elif op_name(n) in _KEEPS_WEIGHTS or op_name(n) in ("getitem", "index_select"):
            new = [a for a in n.all_input_nodes if a not in seen and _carries_weight(a)]
            seen.update(new)
            todo += new
        else:
            return []
    return names


_KEEPS_WEIGHTS = frozenset(
    (
        *("reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "expand", "clone", "detach"),
        *("transpose", "permute", "t", "select", "narrow", "chunk", "split", "unbind", "stack", "cat"),
        *("to", "float", "bfloat16", "half", "type", "type_as", "mul", "div", "add", "sub", "neg"),
    )
)


def _stacked(scope: Scope, node: Node) -> str | None:
    """The name of what ``node`` holds if it is expert weights: made of parameters alone, and stacked at some point."""
    todo, seen, found, rooted = [node], {node}, None, False
    while todo:
        n = todo.pop()
        name = op_name(n)
        if n.op in ("placeholder", "get_attr"):
            root = n if n.op == "get_attr" else origin(scope, n)
            if root is None or not _is_model_state(root):
                return None
            label, rooted = dotted_name(root), True
        elif name in ("getitem", "index_select"):
            if len(shape(n.args[0]) or (0, 0, 0)) < 3:
                return None  # rows of a table, picked by ids, are activations
            label = n.name
        elif name in _KEEPS_WEIGHTS or parameters_of(scope, n):
            label = n.name
        else:
            return None
        dims = shape(n)
        if dims is not None and len(dims) >= 3 and not same(dims[0], 1):
            found = label if n.op == "placeholder" or found is None else found
        new = [a for a in n.all_input_nodes if a not in seen and _carries_weight(a)]
        seen.update(new)
        todo += new
    return found if rooted else None  # numbers made of indices alone (positions) are no weights


def _carries_weight(operand: Node) -> bool:
    """Indices select weights without being weights."""
    value = fake(operand)
    return isinstance(value, tuple | list) or (isinstance(value, torch.Tensor) and value.dtype.is_floating_point)


def hidden_product(module: GraphModule, call: Node) -> str | None:
    """An expert-shaped operation inside a higher-order operation that is no checkpoint (a branch, a loop, a map)."""
    for operand in call.all_input_nodes if isinstance(call.target, HigherOrderOperator) else ():
        body = getattr(module, str(operand.target), None) if operand.op == "get_attr" else None
        for node in body.graph.nodes if isinstance(body, GraphModule) else ():
            weights = [n for n in node.all_input_nodes if n.op == "placeholder" and len(shape(n) or ()) == 3]
            if op_name(node) in GROUPED or (op_name(node) in PRODUCTS and any(map(is_parameter, weights))):
                return f"{op_name(node)} {node.name}"
            found = hidden_product(body, node)  # type: ignore[arg-type]
            if found is not None:
                return found
    return None


def _is_model_state(root: Node) -> bool:
    """A parameter, or a buffer of a module."""
    source = getattr(root.meta.get("grapharg"), "source", None)
    name = "" if source is None else source.name if isinstance(source.name, str) else source.name()
    return is_parameter(root) or "._buffers[" in name
