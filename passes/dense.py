"""Blocks that run every expert on every token and mix the results with a gate matrix that is zero where not chosen.

A :class:`DenseGemm` is an ``einsum``, ``bmm`` or ``matmul`` of tokens with a whole stacked parameter; its result is
:class:`DenseRows`. The rewrite computes the chosen experts only: equal up to the order of summation, since the others
were multiplied by zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Node

from .dense_gates import AllTokens, DenseGates
from .graph import argument, fake, is_parameter, op_name, same, same_shape, shape
from .meaning import Meaning, Value, Weight, rule
from .region import NoMatch


@dataclass(frozen=True)
class DenseGemm:
    """``result[t, e] = weight[e] @ rows[t]`` or, behind an activation, ``weight[e] @ rows[t, e]``.

    expert_dim: where the experts stand in the result: ``tokens x E x N`` (-2) or ``E x tokens x N`` (0). tokens: what
    goes in, where it is the block's tokens. gates: where they scale the tokens.
    """

    node: Node
    rows: Node
    param: Node
    transposed: bool
    expert_dim: int
    tokens: Node | None
    gates: DenseGates | None = None
    source: Literal["einsum", "bmm"] = "einsum"


@dataclass(frozen=True)
class DenseRows:
    """All experts' results: plus ``bias``, times ``gates``.

    stage: ``dense``, ``flat`` (experts and tokens as one dimension) or, summed over experts, ``tokens``.
    """

    gemm: DenseGemm
    stage: Literal["dense", "flat", "tokens"] = "dense"
    bias: Node | None = None
    gates: DenseGates | None = None
    widened: tuple[torch.dtype, ...] = ()


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
    if op_name(node) == "einsum":
        return _einsum(of, node)
    return _product(of, node) if op_name(node) in ("bmm", "matmul") else None


def _product(of: Meaning, node: Node) -> DenseGemm | NoMatch | None:
    """``[E, T, K] @ [E, K, N]``, the tokens repeated for each expert or broadcast to them."""
    rows, weight = node.args[0], _weight(of, argument(node, 1, "mat2", argument(node, 1, "other")))
    if weight is None or not isinstance(rows, Node):
        return None
    value, dims = of(rows), shape(rows) or ()
    if not same(dims[0], shape(weight.param)[0]) and len(dims) == 3:  # type: ignore[index]
        return NoMatch(f"{op_name(node)} of {tuple(dims)} with a stacked parameter", node.name)
    broadcast = len(dims) == 2
    tokens = rows if broadcast else value.source if isinstance(value, AllTokens) else None
    gates = value.gates if isinstance(value, AllTokens) else None
    return DenseGemm(node, rows, weight.param, not weight.swapped, 0, tokens, gates, "bmm")


def _einsum(of: Meaning, node: Node) -> DenseGemm | NoMatch | None:
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
    return DenseGemm(node, rows, weight.param, transposed, expert_dim, rows if entering else None)


def _weight(of: Meaning, node: Any) -> Weight | None:
    """Tokens may be three-dimensional too; only parameters, or what they make up, are taken for a weight here."""
    value = of(node)
    computed = isinstance(value, Weight) and value.param.op != "placeholder"
    return value if computed or (isinstance(value, Weight) and is_parameter(value.param)) else None


# --- rules ------------------------------------------------------------------------------------------------------------


@rule("to", "float", "double", "bfloat16", "half", "type", "type_as")
def _cast(of: Meaning, node: Node) -> Value:
    """Rounding of weighted results before their sum: the region's op sums in the wider dtype."""
    value, before, after = of(node.args[0]), fake(node.args[0]).dtype, fake(node).dtype
    known = isinstance(value, DenseRows) and (before == after or value.gates is not None)
    return value if known else None


@rule("reshape", "view")
def _flatten(of: Meaning, node: Node) -> Value:
    """``[E, T, H] -> [E*T, H]`` and back."""
    value, after = of(node.args[0]), shape(node)
    if not isinstance(value, DenseRows) or value.gemm.expert_dim != 0 or after is None:
        return None
    whole = shape(value.gemm.node) or ()
    if value.stage == "dense" and len(after) == 2 and len(whole) == 3 and same(after[1], whole[2]):
        return replace(value, stage="flat")
    return replace(value, stage="dense") if value.stage in ("flat", "dense") and same_shape(after, whole) else None


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
            if gates.fill == 0 and not gates.flat and gates.expert_dim == (-1 if rows.gemm.expert_dim == -2 else 0):
                return replace(rows, gates=gates)
    return None


@rule("sum")
def _sum_experts(of: Meaning, node: Node) -> Value:
    value, dim, rank = of(node.args[0]), argument(node, 1, "dim"), len(shape(node.args[0]) or ())
    if not isinstance(value, DenseRows) or value.stage != "dense" or not isinstance(dim, int):
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
        if gates.fill == 0 and g == expected and result == tokens + s[-1]:
            return replace(rows, gates=gates, stage="tokens")
    return None
