"""One spelling per identity, without changing a bit.

- an in-place operation on a tensor that nothing else holds becomes the ordinary operation, its later readers reading
  the result: after this the meaning of a node no longer depends on where in the graph it is read;
- casts, reshapes and the like that change nothing disappear;
- every checkpointed call gets a subgraph of its own;
- assertions about metadata, which exported graphs carry, disappear.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .graph import argument, evaluate, fake, op_name, own_bodies, same_value, scopes
from .mode import Mode

_FUNCTIONAL = {
    "clamp_": "clamp",
    "clamp_max_": "clamp_max",
    "clamp_min_": "clamp_min",
    "masked_fill_": "masked_fill",
    "add_": "add",
    "sub_": "sub",
    "mul_": "mul",
    "div_": "div",
    "scatter_": "scatter",
    "index_add_": "index_add",
    "scatter_add_": "scatter_add",
}

# Operations whose result is memory of its own. A tensor from elsewhere may be visible under another name.
_FRESH = frozenset(
    (
        *("add", "sub", "mul", "div", "neg", "pow", "rsqrt", "floor_divide", "ge", "gt", "lt", "le", "clamp", "where"),
        *("linear", "mm", "bmm", "matmul", "einsum", "grouped_mm", "_grouped_mm", "grouped_mm_fallback"),
        *("softmax", "sigmoid", "silu", "gelu", "relu", "sort", "topk", "argsort", "cumsum", "histc", "bincount"),
        *(
            "empty",
            "empty_like",
            "zeros",
            "zeros_like",
            "new_zeros",
            "ones",
            "ones_like",
            "full",
            "full_like",
            "arange",
        ),
        *("masked_fill", "index_put", "scatter", "index_add", "scatter_add", "index_select", "repeat_interleave"),
        *("clone", "sum", "mean", "cat", "stack", "one_hot"),
    )
)

_NO_OPS = ("to", "float", "bfloat16", "half", "type", "type_as", "reshape", "view", "contiguous", "expand", "flatten")


def canonicalize(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """See the module docstring."""
    own_bodies(gm)
    for scope in scopes(gm):
        _drop_assertions(scope.graph)
        _functionalize(scope.graph)
        _drop_no_ops(scope.graph)
        scope.module.recompile()
    return gm


def _drop_assertions(graph: Graph) -> None:
    for node in list(graph.nodes):
        if op_name(node) == "_assert_tensor_metadata":
            graph.erase_node(node)


def _drop_no_ops(graph: Graph) -> None:
    for node in list(graph.nodes):
        if op_name(node) not in _NO_OPS or not node.args or not isinstance(node.args[0], Node):
            continue
        source = node.args[0]
        copies = argument(node, 99, "copy", False) or argument(node, 99, "memory_format") is not None
        if copies or not same_value(node, source) or fake(node).stride() != fake(source).stride():
            continue
        if any(op_name(user).endswith("_") for user in (*node.users, *source.users)):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _functionalize(graph: Graph) -> None:
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        base = node.args[0] if node.args else None
        if not isinstance(base, Node) or not (op_name(node) in _FUNCTIONAL or node.target is operator.setitem):
            continue
        if _is_private(base, node, position) and _keeps_dtype(node, base):
            _replace(graph, node, base, position)


def _is_private(base: Node, at: Node, position: dict[Node, int]) -> bool:
    """Whether nothing but ``base`` itself can show the change made ``at``."""
    return _is_fresh(base) and all(
        position.get(user, -1) >= position[at] or user is at or _reads_only(user, base) for user in base.users
    )


def _is_fresh(node: Node) -> bool:
    if op_name(node) == "getitem":
        source = node.args[0]
        pair = isinstance(source, Node) and op_name(source) in ("sort", "topk")
        same_item = [u for u in source.users if u.args[1:] == node.args[1:]] if isinstance(source, Node) else []
        return (pair and len(same_item) == 1) or _is_gather(node)
    if op_name(node) in ("squeeze", "unsqueeze", "view", "reshape", "transpose"):
        source = node.args[0]
        return isinstance(source, Node) and len(source.users) == 1 and _is_fresh(source)
    return op_name(node) in _FRESH


def _is_gather(node: Node) -> bool:
    index = node.args[1]
    return isinstance(index, Node) and isinstance(fake(index), torch.Tensor) and fake(index).dtype != torch.bool


def _reads_only(user: Node, base: Node) -> bool:
    """Whether ``user``'s result shares no memory with ``base``."""
    if op_name(user) == "getitem":
        return _is_gather(user)
    if op_name(user) in ("to", "float", "int", "long", "bfloat16", "half"):
        return fake(user).dtype != fake(base).dtype
    return op_name(user) in _FRESH


def _keeps_dtype(node: Node, base: Node) -> bool:
    """In-place results keep the base's dtype; ordinary ones only do where no operand is wider."""
    if node.kwargs.get("rounding_mode") or not isinstance(fake(base), torch.Tensor):
        return False
    if node.target is operator.setitem:
        index, value = fake(node.args[1]), fake(node.args[2])
        indexed = isinstance(index, torch.Tensor) and index.dtype == torch.int64
        return indexed and isinstance(value, torch.Tensor) and value.dtype == fake(base).dtype
    name = _FUNCTIONAL[op_name(node)]
    result = evaluate(getattr(torch.Tensor, name), node.args, node.kwargs)
    return result.dtype == fake(base).dtype and result.shape == fake(base).shape


def _replace(graph: Graph, node: Node, base: Node, position: dict[Node, int]) -> None:
    with graph.inserting_before(node):
        if node.target is operator.setitem:
            new = graph.call_method("index_put", (base, (node.args[1],), node.args[2]))
        else:
            new = graph.call_method(_FUNCTIONAL[op_name(node)], node.args, dict(node.kwargs))
    new.meta = {**node.meta, "example_value": fake(base)}
    position[new] = position[node]
    node.replace_all_uses_with(new)
    base.replace_all_uses_with(new, delete_user_cb=lambda user: position[user] > position[node])
    graph.erase_node(node)
    if not new.users:  # nobody reads what was written
        graph.erase_node(new)
