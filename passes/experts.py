"""What a value between the expert GEMMs and behind them means, and where the GEMMs are.

Continues ``meaning``: a :class:`Gemm` is one matrix product with every row's own expert, in whichever spelling; its
result and what the combine part makes of it are :class:`Rows`; the two halves of a gated pre-activation are
:class:`Half`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Node

from .dispatch import is_column, masked_operand
from .graph import argument, fake, op_name, same, same_shape, shape
from .halves import Half
from .meaning import (
    NO_LIMITS,
    TOKEN_MAJOR,
    Inverse,
    Limits,
    Meaning,
    Offsets,
    Order,
    PerPair,
    PerToken,
    Picked,
    TokenIndex,
    Value,
    Weight,
    rule,
)
from .region import NoMatch

GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
PRODUCTS = (*GROUPED, "bmm", "matmul", "einsum", "baddbmm", "mm", "addmm", "linear", "tensordot", "_scaled_grouped_mm")
"""Operations that multiply by a matrix; one that touches a stacked parameter has to end up in a region."""


@dataclass(frozen=True)
class Gemm:
    """``result[r] = weight[expert(r)] @ rows[r]``. The parameter is ``[E, N, K]``; if ``transposed``, ``[E, K, N]``."""

    node: Node
    rows: Node
    param: Node
    transposed: bool
    ids: Node
    order: Order
    experts: Limits
    source: Literal["grouped_mm", "grouped_mm_fallback", "bmm"]
    ends: Node | None = None
    """Where each expert's rows end, if they are sorted by expert."""
    unknown: str = ""
    """Why it is not known which rows these are; ``ids`` is then ``ends``."""


@dataclass(frozen=True)
class Rows:
    """A GEMM's result on its way to the output: plus ``bias`` of the row's expert, times ``gates``.

    stage: ``column`` (still ``[S, N, 1]`` or ``[S, 1, N]``), ``rows [S, N]``, ``pairs [T, K, N]``, ``tokens [T, N]``.
    widened: dtypes the rows were cast to before the gates were applied. base: what the sum is added onto.
    """

    gemm: Gemm
    order: Order
    stage: Literal["column", "rows", "pairs", "tokens"] = "rows"
    bias: Node | None = None
    gates: PerPair | None = None
    experts: Limits = NO_LIMITS
    widened: tuple[torch.dtype, ...] = ()
    base: Node | None = None


# --- the GEMMs --------------------------------------------------------------------------------------------------------


def expert_gemm(of: Meaning, node: Node) -> Gemm | NoMatch | None:
    """The expert GEMM that ``node`` is, the reason why it is none, or None if it is something else entirely."""
    if op_name(node) in GROUPED:
        return _grouped(of, node)
    return _batched(of, node) if op_name(node) in ("bmm", "matmul", "einsum") else None


def result_of(gemm: Gemm) -> Rows:
    """The meaning of an expert GEMM's result."""
    stage: Any = "rows" if len(shape(gemm.node) or ()) == 2 else "column"
    return Rows(gemm, gemm.order, stage, experts=gemm.experts)


def _grouped(of: Meaning, node: Node) -> Gemm | NoMatch:
    names = ("mat_a", "mat_b") if op_name(node) != "grouped_mm_fallback" else ("input", "weight")
    rows, weight, offs = argument(node, 0, names[0]), argument(node, 1, names[1]), argument(node, 2, "offs")
    if len(shape(rows) or ()) != 2 or len(shape(weight) or ()) != 3:
        return NoMatch("grouped GEMM of another kind than rows [S, K] by weights [E, K, N]", node.name)
    if argument(node, 3, "bias") is not None:
        return NoMatch("grouped GEMM with a bias operand", node.name)
    if argument(node, 4, "out_dtype") not in (None, fake(rows).dtype):
        return NoMatch("grouped GEMM with an output dtype of its own", node.name)
    value, ends = of(weight), of(offs)
    if not isinstance(value, Weight):
        return NoMatch(f"weight operand {weight} is computed, not a stacked parameter", node.name)
    source: Any = "grouped_mm_fallback" if op_name(node) == "grouped_mm_fallback" else "grouped_mm"
    plain = (node, rows, value.param, not value.swapped)
    order, unknown = _order_of(of, rows), ""
    if not isinstance(ends, Offsets):
        unknown = f"group ends {offs} do not come from counting the expert ids"
    elif order is None or order.ids is not ends.ids:
        sorted_by = f"sorted by {order.ids}" if order and order.ids else "not known to be sorted by expert"
        unknown = f"rows {rows} are {sorted_by}, group ends {offs} count {ends.ids}"
    if unknown or not isinstance(ends, Offsets) or order is None:
        return Gemm(*plain, offs, Order(offs, offs), NO_LIMITS, source, offs, unknown)
    return Gemm(*plain, ends.ids, order, ends.experts, source, offs)


def _order_of(of: Meaning, rows: Node) -> Order | None:
    """The order of a GEMM's rows: gathered tokens have one, and what is made of an earlier GEMM's rows keeps theirs.

    A guess for rows that are no tokens; whether they keep it is for the activation's translation to show.
    """
    todo, seen = [rows], {rows}
    while todo:
        node = todo.pop()
        value = of(node)
        if isinstance(value, PerToken | Rows | Half):
            return value.rows.order if isinstance(value, Half) else value.order
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        todo += new
    return None


def _batched(of: Meaning, node: Node) -> Gemm | NoMatch | None:
    """One matrix per row, gathered by the row's expert id."""
    operands = node.args[1:] if op_name(node) == "einsum" else node.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    if len(operands) != 2:
        return None
    a, b = operands
    picked = next((v for v in (of(a), of(b)) if isinstance(v, Picked) and len(shape(v.param) or ()) == 3), None)
    if picked is None:
        return None
    right = isinstance(of(b), Picked)
    if op_name(node) == "einsum":
        known = _row_equation(str(node.args[0])) if right else None
        rows, swap = (a, known[0]) if known else (None, False)
    else:
        rows, swap = _without_column(a if right else b, 1 if right else 2), right
    if not isinstance(rows, Node):
        return NoMatch(f"{op_name(node)} over gathered weights is not one matrix times one row each", node.name)
    # Seen as [S, N, K] the parameter is [E, N, K] unless it was swapped on the way.
    transposed = picked.swapped != swap
    return Gemm(node, rows, picked.param, transposed, picked.ids, picked.order, picked.experts, "bmm")


def _row_equation(equation: str) -> tuple[bool] | None:
    """For ``sk,snk->sn`` under any letters: whether the matrix is [K, N] instead."""
    found = re.fullmatch(r"(.)(.),\1(.)(.)->\1(.)", equation.replace(" ", ""))
    if found is None:
        return None
    _, k, p, q, n = found.groups()
    return (p == k,) if k != n and {p, q} == {k, n} else None


def _without_column(node: Any, dim: int) -> Node | None:
    """x where ``node`` is ``x [S, K]`` with a dimension of one put in at ``dim``."""
    if not isinstance(node, Node) or op_name(node) not in ("unsqueeze", "view", "reshape", "getitem"):
        return None
    x, dims = node.args[0], shape(node)
    rank = len(shape(x) or ())
    return (
        x if isinstance(x, Node) and rank == 2 and dims is not None and len(dims) == 3 and same(dims[dim], 1) else None
    )


# --- rules ------------------------------------------------------------------------------------------------------------


@rule("reshape", "view", "squeeze", "unflatten", "contiguous", "clone", "getitem", "select")
def _reshape_rows(of: Meaning, node: Node) -> Value:
    value, before, after = of(node.args[0]), shape(node.args[0]), shape(node)
    if not isinstance(value, Rows) or before is None or after is None:
        return None
    if value.stage == "column" and len(after) == 2 and len(before) == 3:
        unit = 2 if same(before[2], 1) else 1
        whole = same(after[0], before[0]) and same(after[1], before[3 - unit])
        return replace(value, stage="rows") if whole else None
    if op_name(node) in ("getitem", "select"):
        return None
    if same_shape(before, after):
        return value
    top_k = (shape(value.gemm.ids) or (None,))[-1]
    if value.stage == "rows" and value.order == TOKEN_MAJOR and len(after) == 3:
        return replace(value, stage="pairs") if same(after[1], top_k) and same(after[2], before[1]) else None
    return None


@rule("add")
def _add_bias(of: Meaning, node: Node) -> Value:
    for a, b in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        rows, bias = of(a), of(b)
        if isinstance(rows, Rows) and isinstance(bias, Picked) and len(shape(bias.param) or ()) == 2:
            fits = rows.stage == "rows" and rows.bias is None and rows.gates is None and not rows.widened
            fits = fits and bias.order == rows.order and bias.ids is rows.gemm.ids and same_shape(shape(a), shape(b))
            if fits and not node.kwargs:
                return replace(rows, bias=bias.param, experts=rows.experts | bias.experts)
    return None


@rule("masked_fill", "where")
def _mask_rows(of: Meaning, node: Node) -> Value:
    operand = masked_operand(of, node)
    value = of(operand[0]) if operand else None
    if operand is None or not isinstance(value, Rows) or value.order != operand[1].order or value.stage != "rows":
        return None
    return replace(value, experts=value.experts | {operand[1].experts})


@rule("to", "float", "double", "bfloat16", "half", "type", "type_as")
def _cast_rows(of: Meaning, node: Node) -> Value:
    value, before, after = of(node.args[0]), fake(node.args[0]).dtype, fake(node).dtype
    if not isinstance(value, Rows):
        return None
    if before == after or value.gates is not None:
        return value  # rounding of weighted rows before their sum: the region's op sums in the wider dtype
    wider = torch.promote_types(before, after) == after
    return replace(value, widened=(*value.widened, after)) if wider else None


@rule("mul")
def _gate_rows(of: Meaning, node: Node) -> Value:
    for a, b in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        rows = of(a)
        if not isinstance(rows, Rows) or rows.gates is not None:
            continue
        gates = of(b)
        if rows.stage == "rows" and isinstance(gates, PerPair) and gates.order == rows.order and is_column(shape(b)):
            return None if gates.integer else replace(rows, gates=gates)
        if rows.stage == "pairs" and (pairs := _pair_column(b)) is not None:
            return replace(rows, gates=PerPair(pairs))
    return None


def _pair_column(node: Any) -> Node | None:
    """g where ``node`` is ``g [T, K]`` as ``[T, K, 1]``."""
    if not isinstance(node, Node) or op_name(node) not in ("unsqueeze", "view", "reshape", "getitem"):
        return None
    dims, g = shape(node), node.args[0]
    column = dims is not None and len(dims) == 3 and same(dims[2], 1)
    return g if column and isinstance(g, Node) and same_shape(shape(g), dims[:2]) else None  # type: ignore[index]


@rule("getitem", "index_select")
def _restore_order(of: Meaning, node: Node) -> Value:
    index = argument(node, 2, "index") if op_name(node) == "index_select" else node.args[1]
    if isinstance(index, tuple | list) and len(index) == 1:
        index = index[0]
    value, inverse = of(node.args[0]), of(index)
    if isinstance(value, Rows) and isinstance(inverse, Inverse) and value.stage == "rows":
        return replace(value, order=TOKEN_MAJOR) if inverse.order == value.order else None
    return None


@rule("sum")
def _sum_choices(of: Meaning, node: Node) -> Value:
    value, dim = of(node.args[0]), argument(node, 1, "dim")
    over_choices = isinstance(value, Rows) and value.stage == "pairs" and dim in (1, -2, (1,), [1], (-2,), [-2])
    plain = not argument(node, 2, "keepdim", False) and node.kwargs.get("dtype") in (None, fake(node.args[0]).dtype)
    return replace(value, stage="tokens") if over_choices and plain else None


@rule("index_add", "scatter_add")
def _add_to_tokens(of: Meaning, node: Node) -> Value:
    """``base[T, H].index_add(0, token, rows)``; zeros are no base."""
    start, dim, index = node.args[0], argument(node, 1, "dim"), argument(node, 2, "index")
    rows, tokens = of(argument(node, 3, "source" if op_name(node) == "index_add" else "src")), of(index)
    if not isinstance(rows, Rows) or rows.stage != "rows" or not isinstance(tokens, TokenIndex) or dim not in (0, -2):
        return None
    zeros = isinstance(start, Node) and op_name(start) in ("zeros", "zeros_like", "new_zeros")
    top_k = (shape(rows.gemm.ids) or (None,))[-1]
    fits = tokens.order == rows.order and tokens.top_k == top_k and argument(node, 4, "alpha", 1) == 1
    if not fits or not isinstance(start, Node) or of(start) is not None:
        return None
    return replace(rows, stage="tokens", base=None if zeros else start)


@rule("einsum")
def _weighted_sum(of: Meaning, node: Node) -> Value:
    """``einsum("tkh,tk->th", pairs, gates)`` under any letters."""
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1:]
    if len(operands) != 2 or equation.count(",") != 1:
        return None
    left, result = equation.split("->") if "->" in equation else (equation, "")
    subscripts = left.split(",")
    for i, j in ((0, 1), (1, 0)):
        rows, gates, s = of(operands[i]), operands[j], subscripts[i]
        if (
            isinstance(rows, Rows)
            and rows.stage == "pairs"
            and rows.gates is None
            and len(s) == 3
            and isinstance(gates, Node)
        ):
            if subscripts[j] == s[:2] and result == s[0] + s[2]:
                return replace(rows, gates=PerPair(gates), stage="tokens")
    return None
