"""Weights that are computed from parameters alone: casts of masters, adapters added to them, stacks of matrices."""

from __future__ import annotations

from torch.fx import Node

from .graph import Scope, is_parameter, op_name, origin

_OF_PARAMETERS = frozenset(
    (
        *("reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "expand", "clone", "detach"),
        *("transpose", "permute", "t", "mT", "getitem", "select", "narrow", "chunk", "split", "unbind", "stack", "cat"),
        *("to", "float", "bfloat16", "half", "type", "type_as", "mul", "div", "add", "sub", "neg"),
        *("matmul", "mm", "bmm", "einsum", "baddbmm", "linear"),
    )
)
"""Deterministic operations that weights are computed with: casts, shapes, adapters' low-rank products."""


def parameters_of(scope: Scope, node: Node) -> tuple[Node, ...]:
    """The root placeholders of the parameters that ``node`` is computed from, if from nothing else; else none."""
    found: dict[Node, None] = {}
    todo, seen = [node], {node}
    while todo:
        n = todo.pop()
        if n.op == "placeholder":
            root = origin(scope, n)
            if root is None or not is_parameter(root):
                return ()
            found[root] = None
        elif n.op not in ("call_function", "call_method") or op_name(n) not in _OF_PARAMETERS:
            return ()
        new = [a for a in reversed(n.all_input_nodes) if a not in seen]
        seen.update(new)
        todo += new
    return tuple(found)
