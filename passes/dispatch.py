"""Meanings in the dispatch part: flattening, sorting, counting, gathering, masking. See ``meaning``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .graph import argument, fake, op_name, same, same_shape, shape
from .meaning import (
    TOKEN_MAJOR,
    Counts,
    Dropped,
    Inverse,
    Iota,
    Meaning,
    Offsets,
    OneHot,
    Order,
    PairIndex,
    PerPair,
    PerToken,
    Picked,
    Sorted,
    TokenIndex,
    Value,
    Weight,
    rule,
)

_CASTS = ("to", "float", "int", "long", "half", "bfloat16", "double", "type", "type_as")


def is_column(dims: Any) -> bool:
    """``[S, 1]``: one entry per row, ready to be broadcast over the row."""
    return dims is not None and len(dims) == 2 and same(dims[1], 1)


@rule("reshape", "view", "flatten")
def _pairs_of(of: Meaning, node: Node) -> Value:
    """``[T, K] -> [S]``."""
    source, before = _as_integers(node.args[0]), shape(node.args[0])
    flat = before is not None and len(before) >= 2 and len(shape(node) or ()) == 1
    if flat and isinstance(source, Node) and of(source) is None and isinstance(before[-1], int):  # type: ignore[index]
        return PerPair(source)
    return None


def _as_integers(node: Any) -> Any:
    """Ids as they were before a cast to floating point, which holds them exactly."""
    while op_name(node) in _CASTS and isinstance(node.args[0], Node) and not fake(node.args[0]).is_floating_point():
        node = node.args[0]
    return node


@rule("reshape", "view", "flatten", "unsqueeze", "squeeze", "contiguous", "clone")
def _same_entries(of: Meaning, node: Node) -> Value:
    value, before, after = of(node.args[0]), shape(node.args[0]), shape(node)
    if same_shape(before, after):
        return value
    if isinstance(value, PerPair | PairIndex | TokenIndex | Dropped | Inverse):
        return value if is_column(after) or (after is not None and len(after) == 1) else None
    return None


@rule("reshape", "view", "flatten")
def _repeated(of: Meaning, node: Node) -> Value:
    """``x[:, None].expand(T, K, H).reshape(T*K, H)``: x repeated for every choice."""
    source = node.args[0]
    before, after = shape(source), shape(node)
    if not isinstance(source, Node) or op_name(source) != "expand" or before is None or after is None:
        return None
    inner = source.args[0]
    dims = shape(inner)
    if len(before) != 3 or len(after) != 2 or not isinstance(before[1], int) or not isinstance(inner, Node):
        return None
    if dims is None or not same(dims[1], 1) or op_name(inner) not in ("unsqueeze", "getitem", "view", "reshape"):
        return None
    x = inner.args[0]
    fits = len(shape(x) or ()) == 2 and same(after[1], before[2])
    return PerToken(x, TOKEN_MAJOR, before[1]) if fits and isinstance(x, Node) else None


@rule("expand", "expand_as")
def _broadcast_column(of: Meaning, node: Node) -> Value:
    value = of(node.args[0])
    wide = is_column(shape(node.args[0])) and len(shape(node) or ()) == 2
    return value if wide and isinstance(value, TokenIndex | PerPair) else None


@rule("repeat_interleave")
def _repeat_interleave(of: Meaning, node: Node) -> Value:
    x, times, dim = node.args[0], argument(node, 1, "repeats"), argument(node, 2, "dim")
    rank = len(shape(x) or ())
    if not isinstance(x, Node) or not isinstance(times, int):
        return None
    if isinstance(of(x), Iota) and rank == 1:
        return TokenIndex(TOKEN_MAJOR, times)
    return PerToken(x, TOKEN_MAJOR, times) if of(x) is None and rank == 2 and dim in (0, -2) else None


@rule(*_CASTS)
def _cast(of: Meaning, node: Node) -> Value:
    value, before, after = of(node.args[0]), fake(node.args[0]), fake(node)
    if before.device != after.device:
        return None
    if before.dtype == after.dtype:
        return value
    if before.dtype.is_floating_point and not isinstance(value, Counts | Offsets):
        known = isinstance(value, PerPair | PerToken) and after.dtype.is_floating_point
        return replace(value, casts=(*value.casts, after.dtype)) if known else None
    # Ids, indices and group ends are small integers: every dtype that is used for them holds them exactly.
    return value if isinstance(value, PerPair | PairIndex | TokenIndex | Counts | Offsets | OneHot) else None


@rule("sort", "argsort")
def _sort(of: Meaning, node: Node) -> Value:
    value = of(node.args[0])
    descending = node.kwargs.get("descending", len(node.args) > 2 and node.args[2])
    if descending or len(shape(node.args[0]) or ()) != 1:
        return None
    if isinstance(value, PairIndex):
        return Inverse(value.order) if op_name(node) == "argsort" else None
    if not isinstance(value, PerPair) or value.order != TOKEN_MAJOR or not value.integer:
        return None
    order = Order(node, value.source)
    return Sorted(order, value) if op_name(node) == "sort" else PairIndex(order)


@rule("getitem")
def _of_sorted(of: Meaning, node: Node) -> Value:
    value, index = of(node.args[0]), node.args[1]
    if not isinstance(value, Sorted):
        return None
    return PairIndex(value.order) if index == 1 else replace(value.ids, order=value.order)


@rule("getitem")
def _as_column(of: Meaning, node: Node) -> Value:
    """``x[:, None]`` of one entry per row."""
    value = of(node.args[0])
    keeps = node.args[1] in ((slice(None), None), (Ellipsis, None))
    return value if keeps and isinstance(value, PerPair | PairIndex | TokenIndex | Dropped) else None


@rule("getitem", "index_select")
def gather(of: Meaning, node: Node) -> Value:
    """``source[index]`` along the first dimension."""
    source, index = node.args[0], argument(node, 1, "index")
    if op_name(node) == "index_select":
        if argument(node, 1, "dim") != 0:
            return None
        index = argument(node, 2, "index")
    if isinstance(index, tuple | list) and len(index) == 1:
        index = index[0]
    value, where, dims = of(source), of(index), shape(source) or ()
    if not isinstance(source, Node):
        return None
    if isinstance(value, PerPair | PerToken | TokenIndex | PairIndex) and isinstance(where, PairIndex):
        return replace(value, order=where.order) if value.order == TOKEN_MAJOR else None
    if isinstance(value, PerPair) and isinstance(where, Inverse):
        return replace(value, order=TOKEN_MAJOR) if value.order == where.order else None
    if value is None and isinstance(where, TokenIndex) and len(dims) == 2 and len(shape(index) or ()) == 1:
        return PerToken(source, where.order, where.top_k)
    stacked = source.op in ("placeholder", "get_attr") and len(dims) in (2, 3) and fake(source).is_floating_point()
    if stacked and isinstance(where, PerPair) and where.integer:
        return Picked(source, where.source, where.order, where.experts)
    return None


@rule("gather")
def _gather_rows(of: Meaning, node: Node) -> Value:
    """``x.gather(0, index)`` with a row's index in each of its columns."""
    source, where = node.args[0], of(argument(node, 2, "index"))
    whole = same(shape(node)[-1], (shape(source) or (None,))[-1])  # type: ignore[index]
    along = argument(node, 1, "dim") in (0, -2) and len(shape(source) or ()) == 2
    fits = whole and along and isinstance(where, TokenIndex) and of(source) is None
    return PerToken(source, where.order, where.top_k) if fits and isinstance(source, Node) else None


@rule("floor_divide", "div")
def _token_of_pair(of: Meaning, node: Node) -> Value:
    value, by = of(node.args[0]), argument(node, 1, "other")
    if op_name(node) == "div" and node.kwargs.get("rounding_mode") not in ("floor", "trunc"):
        return None
    if isinstance(value, Iota) and isinstance(by, int):
        return TokenIndex(TOKEN_MAJOR, by)
    return TokenIndex(value.order, by) if isinstance(value, PairIndex) and isinstance(by, int) else None


@rule("arange")
def _arange(of: Meaning, node: Node) -> Value:
    from_zero = len(node.args) == 1 or (len(node.args) == 2 and node.args[0] == 0)
    return Iota() if from_zero and "step" not in node.kwargs and not fake(node).dtype.is_floating_point else None


@rule("index_put", "scatter")
def _invert(of: Meaning, node: Node) -> Value:
    """``inv[perm] = arange(S)``. What ``inv`` held before is overwritten everywhere, perm being a permutation."""
    if op_name(node) == "index_put":
        indices, values = argument(node, 1, "indices"), argument(node, 2, "values")
        index = indices[0] if len(indices) == 1 and not argument(node, 3, "accumulate", False) else None
    else:
        index, values = argument(node, 2, "index"), argument(node, 3, "src")
    permutation, written = of(index), of(values)
    whole = same_shape(shape(node), shape(index)) and same_shape(shape(index), shape(values))
    known = whole and isinstance(permutation, PairIndex) and isinstance(written, Iota)
    return Inverse(permutation.order) if known else None


@rule("clamp", "clamp_max", "clamp_min")
def _limit(of: Meaning, node: Node) -> Value:
    """Ids limited to ``[0, E)`` so that they can index a parameter; only rows outside are changed."""
    value = of(node.args[0])
    if not isinstance(value, PerPair) or not value.integer:
        return None
    first = argument(node, 1, "max" if op_name(node) == "clamp_max" else "min")
    low, high = {
        "clamp": (first, argument(node, 2, "max")),
        "clamp_min": (first, None),
        "clamp_max": (None, first),
    }[op_name(node)]
    if low not in (None, 0) or not isinstance(high, int | None):
        return None
    return value if high is None else replace(value, experts=value.experts | {high + 1})


@rule("ge", "lt", "gt", "le")
def _dropped(of: Meaning, node: Node) -> Value:
    value, bound = of(node.args[0]), node.args[1]
    if not isinstance(value, PerPair) or not value.integer or not isinstance(bound, int):
        return None
    inclusive = op_name(node) in ("gt", "le")
    return Dropped(value.order, bound + inclusive, inverted=op_name(node) in ("lt", "le"))


def masked_operand(of: Meaning, node: Node) -> tuple[Node, Dropped] | None:
    """``(rows, mask)`` of an operation that zeroes dropped rows and does nothing else."""
    if op_name(node) == "masked_fill":
        kept, mask, filled, inverted = node.args[0], argument(node, 1, "mask"), argument(node, 2, "value"), False
    else:
        mask, a, b = (*node.args, None, None)[:3]
        kept, filled, inverted = (a, b, True) if isinstance(a, Node) and not isinstance(b, Node) else (b, a, False)
    dropped = of(mask)
    if filled != 0 or not isinstance(kept, Node) or not isinstance(dropped, Dropped) or dropped.inverted != inverted:
        return None
    return kept, dropped


@rule("masked_fill", "where")
def _mask(of: Meaning, node: Node) -> Value:
    operand = masked_operand(of, node)
    value = of(operand[0]) if operand else None
    if operand is None or not isinstance(value, PerToken | PerPair) or value.order != operand[1].order:
        return None
    return replace(value, experts=value.experts | {operand[1].experts})


@rule("histc", "bincount")
def _counts(of: Meaning, node: Node) -> Value:
    value = of(node.args[0])
    if not isinstance(value, PerPair) or not value.integer:
        return None
    if op_name(node) == "bincount":
        return Counts(value.source, value.experts) if argument(node, 1, "weights") is None else None
    bins, low, high = (argument(node, i, n) for i, n in ((1, "bins"), (2, "min"), (3, "max")))
    counted = low == 0 and (high == bins - 1 or (high == bins and _below(value.source, bins)))
    return Counts(value.source, value.experts | {bins}) if counted else None


def _below(ids: Node, experts: int) -> bool:
    """Whether ids are a top-k's over ``experts`` scores, so that none is ``experts``, which ``histc`` counts last."""
    while op_name(ids) in ("reshape", "view", "to", "float", "long", "int", "contiguous"):
        ids = ids.args[0]  # type: ignore[assignment]
    top = ids.args[0] if op_name(ids) == "getitem" and ids.args[1] == 1 else None
    chosen = isinstance(top, Node) and op_name(top) == "topk"
    return chosen and (shape(top.args[0]) or (None,))[-1] == experts  # type: ignore[union-attr]


@rule("scatter_add")
def _counts_by_adding(of: Meaning, node: Node) -> Value:
    """``zeros[E].scatter_add(0, ids, ones[S])``; an id outside would have been an error."""
    start, index, ones = node.args[0], argument(node, 2, "index"), argument(node, 3, "src")
    value, counters = of(index), shape(node)
    zeros = isinstance(start, Node) and op_name(start) in ("zeros", "new_zeros")
    by_one = isinstance(ones, Node) and op_name(ones) in ("ones", "ones_like", "new_ones")
    if not isinstance(value, PerPair) or not value.integer or not zeros or not by_one or len(counters or ()) != 1:
        return None
    whole = same_shape(shape(ones), shape(index)) and counters is not None and isinstance(counters[0], int)
    return Counts(value.source, value.experts | {counters[0]}) if whole else None  # type: ignore[index, arg-type]


@rule("searchsorted")
def _ends_by_searching(of: Meaning, node: Node) -> Value:
    """``searchsorted(sorted ids, arange(E), right=True)``."""
    ids, bounds = of(node.args[0]), of(argument(node, 1, "input"))
    right = node.kwargs.get("right", False) is True or node.kwargs.get("side") == "right"
    experts = shape(node)
    known = isinstance(ids, PerPair) and ids.integer and ids.order != TOKEN_MAJOR and isinstance(bounds, Iota)
    if not right or not known or experts is None or not isinstance(experts[0], int):
        return None
    return Offsets(ids.source, ids.experts | {experts[0]})


@rule("one_hot")
def _one_hot(of: Meaning, node: Node) -> Value:
    value = of(node.args[0])
    return OneHot(value) if isinstance(value, PerPair) and value.order == TOKEN_MAJOR and value.integer else None


@rule("sum")
def _count_one_hot(of: Meaning, node: Node) -> Value:
    value = of(node.args[0])
    counts = isinstance(value, OneHot) and argument(node, 1, "dim") in (0, (0,), [0])
    return Counts(value.ids.source, value.ids.experts) if counts else None


@rule("cumsum")
def _ends(of: Meaning, node: Node) -> Value:
    value = of(node.args[0])
    along = argument(node, 1, "dim") in (0, -1)
    return Offsets(value.ids, value.experts) if isinstance(value, Counts) and along else None


@rule("transpose", "permute", "mT")
def _transpose(of: Meaning, node: Node) -> Value:
    value, dims = of(node.args[0]), node.args[1:]
    if not isinstance(value, Weight | Picked) or len(shape(node) or ()) != 3:
        return None
    if len(dims) == 1 and isinstance(dims[0], tuple | list):
        dims = tuple(dims[0])
    order = [d % 3 for d in dims if isinstance(d, int)]
    swaps = {"transpose": sorted(order) == [1, 2], "permute": order == [0, 2, 1], "mT": True}[op_name(node)]
    return replace(value, swapped=not value.swapped) if swaps else None


@rule("mul")
def _gated_input(of: Meaning, node: Node) -> Value:
    """Tokens times their gate, before the first GEMM."""
    for a, b in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        rows, gates = of(a), of(b)
        if isinstance(rows, PerToken) and isinstance(gates, PerPair) and is_column(shape(b)):
            own = fake(rows.source).dtype
            given = gates.casts[-1] if gates.casts else fake(gates.source).dtype
            product = torch.promote_types(own, given) if isinstance(given, torch.dtype) else own
            widened = all(torch.promote_types(product, dtype) == product for dtype in (own, *rows.casts))
            plain = rows.gates is None and rows.order == gates.order and widened and not gates.integer
            return replace(rows, gates=gates, casts=()) if plain else None
    return None
