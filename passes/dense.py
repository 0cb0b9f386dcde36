"""Blocks that run every expert on every token and mix the results with a gate matrix that is zero where not chosen.

A :class:`DenseGemm` is an ``einsum`` of tokens with a stacked parameter; its result is :class:`DenseRows`;
:class:`DenseGates` is the scattered gate matrix. The rewrite computes the chosen experts only: equal up to the order of
summation, since the others were multiplied by zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Node

from .graph import argument, fake, is_parameter, op_name, same, same_shape, shape
from .region import NoMatch
from .routing import Meaning, PerPair, Value, Weight, rule


@dataclass(frozen=True)
class DenseGemm:
    """``result[t, e] = weight[e] @ rows[t]`` or, behind an activation, ``weight[e] @ rows[t, e]``.

    expert_dim: where the experts stand in the result: ``tokens x E x N`` (-2) or ``E x tokens x N`` (0).
    """

    node: Node
    rows: Node
    param: Node
    transposed: bool
    expert_dim: int
    takes_tokens: bool
    source: Literal["einsum"] = "einsum"


@dataclass(frozen=True)
class DenseRows:
    """All experts' results: plus ``bias``, times ``gates``. stage: ``dense`` or, summed over experts, ``tokens``."""

    gemm: DenseGemm
    stage: Literal["dense", "tokens"] = "dense"
    bias: Node | None = None
    gates: PerPair | None = None
    ids: Node | None = None
    widened: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class DenseGates:
    """``[..., E]``: the token's gate for a chosen expert, else 0. ``layout`` says where the experts stand now."""

    gates: Node
    ids: Node
    expert_dim: int = -1
    column: bool = False
    casts: tuple[torch.dtype, ...] = ()


def subscripts(node: Node) -> tuple[list[str], str, list[Any]] | None:
    """``(operand subscripts, result subscripts, operands)`` of an explicit einsum without ellipsis."""
    equation, operands = str(node.args[0]).replace(" ", ""), list(node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if "->" not in equation or "." in equation:
        return None
    left, result = equation.split("->")
    return left.split(","), result, operands


def dense_gemm(of: Meaning, node: Node) -> DenseGemm | NoMatch | None:
    """The product of tokens with a whole stacked parameter that ``node`` is; None if it is something else."""
    if op_name(node) != "einsum":
        return None
    parsed = subscripts(node)
    if parsed is None or len(parsed[2]) != 2:
        return None
    (a, b), result, operands = parsed
    if _weight(of, operands[0]) is not None:
        (a, b), operands = (b, a), operands[::-1]
    rows, weight = operands[0], _weight(of, operands[1])
    if weight is None or not isinstance(rows, Node) or _weight(of, rows) is not None:
        return None
    e, p, q = tuple(b)
    if e not in result or result[-1] not in (p, q):
        return (
            None
            if e not in result
            else NoMatch(f"einsum {node.args[0]}: outputs are not the last dimension", node.name)
        )
    n, k = (p, q) if result[-1] == p else (q, p)
    tokens = [letter for letter in result[:-1] if letter != e]
    entering = a == "".join(tokens) + k
    expert_dim = 0 if result[0] == e else -2 if result[-2] == e else None
    if k in result or expert_dim is None or (not entering and a != result[:-1] + k) or n in a:
        return NoMatch(f"einsum {node.args[0]} is not a linear map per expert", node.name)
    transposed = (n == q) != weight.swapped
    return DenseGemm(node, rows, weight.param, transposed, expert_dim, entering)


def _weight(of: Meaning, node: Any) -> Weight | None:
    """Tokens may be three-dimensional too; only a parameter is taken for a weight here."""
    value = of(node)
    return value if isinstance(value, Weight) and is_parameter(value.param) else None


# --- rules ------------------------------------------------------------------------------------------------------------


@rule("scatter")
def _scattered_gates(of: Meaning, node: Node) -> Value:
    """``zeros[..., E].scatter(-1, ids, gates)``, with ids that cannot repeat within a token."""
    start, dim = node.args[0], argument(node, 1, "dim")
    ids, gates = argument(node, 2, "index"), argument(node, 3, "src", argument(node, 3, "value"))
    rank = len(shape(node) or ())
    zeros = isinstance(start, Node) and op_name(start) in ("zeros", "zeros_like", "new_zeros")
    if not zeros or dim not in (-1, rank - 1) or "reduce" in node.kwargs or rank < 2:
        return None
    if not isinstance(ids, Node) or not isinstance(gates, Node) or not same_shape(shape(ids), shape(gates)):
        return None
    return DenseGates(gates, ids) if _distinct(ids) else None


def _distinct(ids: Node) -> bool:
    """Whether ids are the indices of a top-k, so that no expert is chosen twice by one token."""
    while op_name(ids) in ("reshape", "view", "to", "long", "int", "contiguous") and isinstance(ids.args[0], Node):
        ids = ids.args[0]
    top = ids.args[0] if op_name(ids) == "getitem" and ids.args[1] == 1 else None
    return isinstance(top, Node) and op_name(top) == "topk"


@rule("sum")
def _one_hot_gates(of: Meaning, node: Node) -> Value:
    """``(one_hot(ids, E) * gates[..., None]).sum(-2)``."""
    product, dim, rank = node.args[0], argument(node, 1, "dim"), len(shape(node.args[0]) or ())
    if not isinstance(product, Node) or op_name(product) != "mul" or dim not in (-2, rank - 2):
        return None
    for a, b in (product.args[:2], product.args[1::-1]):
        hot, column = _uncast(a), b
        if not isinstance(column, Node) or op_name(hot) != "one_hot" or op_name(column) not in ("unsqueeze", "getitem"):
            continue
        ids, gates = hot.args[0], column.args[0]
        if same_shape(shape(ids), shape(gates)) and same_shape(shape(column), (*(shape(gates) or ()), 1)):
            return DenseGates(gates, ids)  # type: ignore[arg-type]
    return None


def _uncast(node: Any) -> Any:
    while isinstance(node, Node) and op_name(node) in ("to", "float", "bfloat16", "type", "type_as"):
        node = node.args[0]
    return node


@rule("to", "float", "bfloat16", "type", "type_as")
def _cast(of: Meaning, node: Node) -> Value:
    value, before, after = of(node.args[0]), fake(node.args[0]).dtype, fake(node).dtype
    if isinstance(value, DenseRows):
        return value if before == after or value.gates is not None else None
    return replace(value, casts=(*value.casts, after)) if isinstance(value, DenseGates) else None


@rule("unsqueeze", "getitem", "transpose", "t", "permute")
def _shape_gates(of: Meaning, node: Node) -> Value:
    value, before, after = of(node.args[0]), shape(node.args[0]), shape(node)
    if not isinstance(value, DenseGates) or before is None or after is None or value.column:
        return None
    if op_name(node) in ("unsqueeze", "getitem"):
        return replace(value, column=True) if same_shape(after, (*before, 1)) else None
    if len(before) == 2:
        swaps = op_name(node) == "t" or sorted(d % 2 for d in _dims(node)) == [0, 1]
        moved = op_name(node) != "permute" or tuple(d % 2 for d in _dims(node)) == (1, 0)
        return replace(value, expert_dim=0 if value.expert_dim == -1 else -1) if swaps and moved else None
    return None


def _dims(node: Node) -> list[int]:
    dims = node.args[1:]
    return list(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else list(dims)  # type: ignore[arg-type]


@rule("add")
def _add_bias(of: Meaning, node: Node) -> Value:
    for a, b in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        rows = of(a)
        if isinstance(rows, DenseRows) and isinstance(b, Node) and rows.bias is None and rows.gates is None:
            bias = _bias_of(b, rows.gemm.expert_dim)
            if bias is not None and not node.kwargs and same_shape(shape(node), shape(a)):
                return replace(rows, bias=bias)
    return None


def _bias_of(node: Node, expert_dim: int) -> Node | None:
    """The parameter ``[E, N]`` that is added to every expert's result."""
    if expert_dim == -2:
        return node if node.op == "placeholder" and len(shape(node) or ()) == 2 else None
    dims = shape(node)
    wide = op_name(node) in ("unsqueeze", "getitem") and dims is not None and len(dims) == 3 and same(dims[1], 1)
    base = node.args[0] if wide else None
    return base if isinstance(base, Node) and base.op == "placeholder" and len(shape(base) or ()) == 2 else None


@rule("mul")
def _gate(of: Meaning, node: Node) -> Value:
    for a, b in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        rows, gates = of(a), of(b)
        if isinstance(rows, DenseRows) and isinstance(gates, DenseGates) and rows.gates is None and gates.column:
            if gates.expert_dim == (-1 if rows.gemm.expert_dim == -2 else 0):
                return replace(rows, gates=PerPair(gates.gates, casts=gates.casts), ids=gates.ids)
    return None


@rule("sum")
def _sum_experts(of: Meaning, node: Node) -> Value:
    value, dim, rank = of(node.args[0]), argument(node, 1, "dim"), len(shape(node.args[0]) or ())
    if not isinstance(value, DenseRows) or value.gates is None or not isinstance(dim, int):
        return None
    plain = not argument(node, 2, "keepdim", False) and "dtype" not in node.kwargs
    return replace(value, stage="tokens") if plain and dim % rank == value.gemm.expert_dim % rank else None


@rule("einsum")
def _mix(of: Meaning, node: Node) -> Value:
    """``einsum("teh,te->th", rows, gates)`` under any letters and either order of experts and tokens."""
    parsed = subscripts(node)
    if parsed is None or len(parsed[2]) != 2:
        return None
    letters, result, operands = parsed
    for i, j in ((0, 1), (1, 0)):
        rows, gates, s, g = of(operands[i]), of(operands[j]), letters[i], letters[j]
        if (
            not isinstance(rows, DenseRows)
            or not isinstance(gates, DenseGates)
            or rows.gates is not None
            or gates.column
        ):
            continue
        e = s[0] if rows.gemm.expert_dim == 0 else s[-2]
        tokens = "".join(c for c in s[:-1] if c != e)
        expected = e + tokens if gates.expert_dim == 0 else tokens + e
        if g == expected and result == tokens + s[-1]:
            return replace(rows, gates=PerPair(gates.gates, casts=gates.casts), ids=gates.ids, stage="tokens")
    return None
