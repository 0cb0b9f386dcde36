"""What goes into experts that run on every token: the gate matrix, and the tokens repeated for each expert.

:class:`DenseGates` is ``[tokens, E]`` with the token's gate where the expert was chosen and ``fill`` elsewhere. A
matrix filled with -inf becomes one filled with 0 under a sigmoid or softmax, and the gates pass through the same
function: ``sigmoid(scatter(-inf, ids, top)) == scatter(0, ids, sigmoid(top))``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from .graph import argument, fake, op_name, same, same_shape, shape
from .meaning import Meaning, PerPair, Step, Value, rule


@dataclass(frozen=True)
class DenseGates:
    """``gates`` after ``steps`` where chosen, ``fill`` elsewhere.

    expert_dim: -1 as ``[tokens, E]``, 0 as ``[E, tokens]``. column: a last dimension of one follows. flat: experts and
    tokens are one dimension, expert by expert.
    """

    gates: Node
    ids: Node
    fill: float = 0.0
    steps: tuple[Step, ...] = ()
    expert_dim: int = -1
    column: bool = False
    flat: bool = False

    @property
    def per_pair(self) -> PerPair:
        return PerPair(self.gates, casts=self.steps)


@dataclass(frozen=True)
class AllTokens:
    """``[E, T, H]``, or ``flat`` ``[E*T, H]``: every token for every expert; with ``gates``, times the gate matrix."""

    source: Node
    experts: int
    flat: bool = False
    gates: DenseGates | None = None


ZEROS = ("zeros", "zeros_like", "new_zeros")


@rule("scatter")
def _scattered(of: Meaning, node: Node) -> Value:
    """``full(fill).scatter(-1, ids, gates)``, with ids that cannot repeat within a token."""
    start, dim, rank = node.args[0], argument(node, 1, "dim"), len(shape(node) or ())
    ids, gates = argument(node, 2, "index"), argument(node, 3, "src", argument(node, 3, "value"))
    fill = _fill(start)
    if fill not in (0.0, -math.inf) or dim not in (-1, rank - 1) or "reduce" in node.kwargs or rank < 2:
        return None
    fits = isinstance(ids, Node) and isinstance(gates, Node) and same_shape(shape(ids), shape(gates))
    return DenseGates(gates, ids, float(fill)) if fits and _distinct(ids) else None


def _fill(node: Any) -> float | None:
    if not isinstance(node, Node):
        return None
    if op_name(node) in ZEROS:
        return 0.0
    value = argument(node, 1, "fill_value") if op_name(node) in ("full", "full_like", "new_full") else None
    return float(value) if isinstance(value, int | float) else None


def _distinct(ids: Node) -> bool:
    """Whether ids are the indices of a top-k, so that no expert is chosen twice by one token."""
    while op_name(ids) in ("reshape", "view", "to", "long", "int", "contiguous") and isinstance(ids.args[0], Node):
        ids = ids.args[0]
    top = ids.args[0] if op_name(ids) == "getitem" and ids.args[1] == 1 else None
    return isinstance(top, Node) and op_name(top) == "topk"


@rule("sum")
def _one_hot(of: Meaning, node: Node) -> Value:
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


@rule("to", "float", "double", "bfloat16", "half", "type", "type_as")
def _cast(of: Meaning, node: Node) -> Value:
    value, before, after = of(node.args[0]), fake(node.args[0]).dtype, fake(node).dtype
    if before == after:
        return value if isinstance(value, DenseGates | AllTokens) else None
    return replace(value, steps=(*value.steps, after)) if isinstance(value, DenseGates) else None


@rule("sigmoid")
def _sigmoid(of: Meaning, node: Node) -> Value:
    value = of(node.args[0])
    masked = isinstance(value, DenseGates) and value.fill == -math.inf
    return replace(value, fill=0.0, steps=(*value.steps, "sigmoid")) if masked else None


@rule("softmax")
def _softmax(of: Meaning, node: Node) -> Value:
    """Over the experts; those not chosen have probability 0 and no share in the sum."""
    value, dim, rank = of(node.args[0]), argument(node, 1, "dim"), len(shape(node) or ())
    masked = isinstance(value, DenseGates) and value.fill == -math.inf and value.expert_dim == -1
    if not masked or value.column or dim not in (-1, rank - 1):
        return None
    dtype = argument(node, 3, "dtype")
    widened = (dtype,) if isinstance(dtype, torch.dtype) and dtype != fake(node.args[0]).dtype else ()
    return replace(value, fill=0.0, steps=(*value.steps, *widened, "softmax"))


@rule("unsqueeze", "getitem", "transpose", "t", "permute", "reshape", "view")
def _shape_gates(of: Meaning, node: Node) -> Value:
    value, before, after = of(node.args[0]), shape(node.args[0]), shape(node)
    if not isinstance(value, DenseGates) or before is None or after is None or value.column or value.flat:
        return None
    if same_shape(after, (*before, 1)):
        return replace(value, column=True)
    if op_name(node) in ("transpose", "t", "permute") and len(before) == 2:
        dims = [d % 2 for d in _dims(node)]
        swaps = {"t": True, "transpose": sorted(dims) == [0, 1], "permute": dims == [1, 0]}[op_name(node)]
        return replace(value, expert_dim=-1 - value.expert_dim) if swaps else None
    if op_name(node) in ("reshape", "view") and value.expert_dim == 0 and len(after) == 2 and same(after[1], 1):
        return replace(value, column=True, flat=True)
    return None


def _dims(node: Node) -> list[int]:
    dims = node.args[1:]
    return list(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else list(dims)  # type: ignore[arg-type]


# --- tokens -----------------------------------------------------------------------------------------------------------


@rule("repeat", "expand")
def _repeated(of: Meaning, node: Node) -> Value:
    """``x.repeat(E, 1)``, or ``x[None].expand(E, -1, -1)``."""
    source, before, after = node.args[0], shape(node.args[0]), shape(node)
    if not isinstance(source, Node) or before is None or after is None:
        return None
    if op_name(node) == "repeat" and len(before) == 2:
        times = _dims(node)
        return AllTokens(source, times[0], flat=True) if len(times) == 2 and times[1] == 1 else None
    x = source.args[0] if op_name(source) in ("unsqueeze", "getitem") else None
    stacked = len(before) == 3 and same(before[0], 1) and isinstance(after[0], int) and isinstance(x, Node)
    whole = stacked and len(shape(x) or ()) == 2 and same_shape(after[1:], before[1:])
    return AllTokens(x, after[0]) if whole else None  # type: ignore[arg-type]


@rule("mul")
def _gated(of: Meaning, node: Node) -> Value:
    for a, b in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        tokens, gates = of(a), of(b)
        if isinstance(tokens, AllTokens) and isinstance(gates, DenseGates) and tokens.gates is None:
            fits = gates.fill == 0 and gates.column and gates.expert_dim == 0 and gates.flat == tokens.flat
            return replace(tokens, gates=gates) if fits else None
    return None


@rule("reshape", "view")
def _unflatten(of: Meaning, node: Node) -> Value:
    value, after = of(node.args[0]), shape(node)
    if not isinstance(value, AllTokens) or not value.flat or after is None or len(after) != 3:
        return None
    return replace(value, flat=False) if same(after[0], value.experts) else None
