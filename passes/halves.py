"""The two halves of a gated pre-activation, in the ways there are to cut a tensor in two."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .graph import argument, op_name, shape
from .meaning import Meaning, Value, rule


@dataclass(frozen=True)
class Half:
    """Columns of a pre-activation: ``part`` 0 or 1, halves side by side or (``interleaved``) every second column."""

    rows: Value
    part: int
    interleaved: bool


@dataclass(frozen=True)
class Pieces:
    """A pre-activation cut in two along its last dimension, or (``interleaved``, ``split``) reshaped for that."""

    rows: Value
    interleaved: bool = False


def is_pre(value: Value) -> bool:
    """Whether a value is a GEMM's result with nothing but its bias added."""
    return getattr(value, "stage", None) in ("rows", "dense") and value.gates is None and not value.widened


@rule("chunk", "split", "tensor_split")
def _cut(of: Meaning, node: Node) -> Value:
    value, dims = of(node.args[0]), shape(node.args[0])
    if dims is None or not is_pre(value):
        return None
    dim = argument(node, 2, "dim", 0)
    half = dims[-1] // 2
    name, halves = {
        "chunk": ("chunks", (2,)),
        "split": ("split_size", (half, [half, half], (half, half))),
        "tensor_split": ("indices_or_sections", (2, [half], (half,))),
    }[op_name(node)]
    even = isinstance(dims[-1], int) and dims[-1] % 2 == 0 and argument(node, 1, name) in halves
    return Pieces(value) if even and dim in (-1, len(dims) - 1) else None


@rule("getitem")
def _piece(of: Meaning, node: Node) -> Value:
    value, index = of(node.args[0]), node.args[1]
    if not isinstance(value, Pieces) or not isinstance(index, int):
        return None
    return Half(value.rows, index % 2, value.interleaved)


@rule("getitem", "narrow")
def _slice(of: Meaning, node: Node) -> Value:
    value, dims = of(node.args[0]), shape(node.args[0])
    if dims is None or not is_pre(value) or not isinstance(dims[-1], int) or dims[-1] % 2:
        return None
    if op_name(node) == "narrow":
        start, length = argument(node, 2, "start"), argument(node, 3, "length")
        fixed = isinstance(start, int) and isinstance(length, int)
        if argument(node, 1, "dim") not in (-1, len(dims) - 1) or not fixed:
            return None
        cut = slice(start, start + length)
    else:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        whole = all(i in (Ellipsis, slice(None)) for i in index[:-1])
        last_dim = Ellipsis in index[:-1] or len(index) == len(dims)
        if not whole or not last_dim or not isinstance(index[-1], slice):
            return None
        cut = index[-1]
    if any(not isinstance(v, int | None) for v in (cut.start, cut.stop, cut.step)):
        return None
    n, taken = dims[-1], range(dims[-1])[cut]
    for part in (0, 1):
        if taken == range(part * n // 2, (part + 1) * n // 2):
            return Half(value, part, interleaved=False)
        if taken == range(part, n, 2):
            return Half(value, part, interleaved=True)
    return None
