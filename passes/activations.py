"""From the nodes between the two expert GEMMs to the small program that our op takes.

Purely by table: each elementwise operation of the graph becomes the step of the same name, constants become literals.
What the table does not know is refused with the operation's name; nothing is recognised by trying numbers out, which
would mistake a clamped activation for a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..ops.activation import Activation
from .graph import argument, fake, line_of, op_name, same_shape, shape
from .region import NoMatch

_UNARY = ("silu", "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "neg", "square")
_BINARY = ("add", "sub", "mul", "div", "minimum", "maximum")
_COMMUTATIVE = ("add", "mul", "minimum", "maximum")
_CASTS = ("to", "float", "double", "half", "bfloat16", "type", "type_as")
_CAST_STEPS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_PLAIN_FLAGS = {"inplace": False, "alpha": 1, "rounding_mode": None, "beta": 1, "threshold": 20}

ELEMENTWISE = frozenset(
    (*_UNARY, *_BINARY, *_CASTS, "gelu", "softplus", "pow", "clamp", "clamp_min", "clamp_max", "rsub", "contiguous")
)

Leaf = Callable[[Node], str | None]


class Translator:
    """Collects the steps of one activation. ``leaf`` names the nodes that are the program's inputs."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._known: dict[Node, str] = {}
        self._steps: list[tuple[str, tuple[Any, ...]]] = []
        self.nodes: list[Node] = []

    def program(self, result: Node, *, gated: bool) -> Activation | NoMatch:
        """The program that computes ``result``."""
        try:
            last = self._value(result)
        except _Refused as refused:
            return refused.reason
        if not last.startswith("%"):
            return NoMatch("no activation stands between the two expert GEMMs", result.name, line_of(result))
        return Activation.build(gated, self._steps)

    def _value(self, node: Node) -> str:
        if node in self._known:
            return self._known[node]
        name = self._leaf(node)
        if name is None:
            step, args = self._step(node)
            if step == "contiguous":
                name = args[0]
            else:
                self._steps.append((step, args))
                name = f"%{len(self._steps) - 1}"
            self.nodes.append(node)
        self._known[node] = name
        return name

    def _step(self, node: Node) -> tuple[str, tuple[Any, ...]]:
        name = op_name(node)
        if name not in ELEMENTWISE:
            raise _Refused(node, f"{name or node.op} is no elementwise operation that an activation may use")
        for flag, plain in _PLAIN_FLAGS.items():
            if node.kwargs.get(flag, plain) != plain:
                raise _Refused(node, f"{name} with {flag}={node.kwargs[flag]}")
        if name in _UNARY or name == "contiguous":
            if len(node.args) > 1 and name != "contiguous":
                raise _Refused(node, f"{name} with {node.args[1:]}")
            return name, (self._value(_tensor(node, 0)),)
        if name == "gelu":
            kind = argument(node, 1, "approximate", "none")
            return ("gelu_tanh" if kind == "tanh" else "gelu"), (self._value(_tensor(node, 0)),)
        if name == "softplus":
            if len(node.args) > 1:
                raise _Refused(node, "softplus with a beta or threshold of its own")
            return name, (self._value(_tensor(node, 0)),)
        if name in _CASTS:
            dtype = fake(node).dtype
            if dtype not in _CAST_STEPS:
                raise _Refused(node, f"cast to {dtype} inside the activation")
            return _CAST_STEPS[dtype], (self._value(_tensor(node, 0)),)
        if name == "pow":
            return name, (self._value(_tensor(node, 0)), _literal(node, argument(node, 1, "exponent")))
        if name.startswith("clamp"):
            return "clamp", self._clamp(node)
        operands = (node.args[0], argument(node, 1, "other"))
        if name == "rsub":
            name, operands = "sub", operands[::-1]
        return name, self._operands(node, name, operands)

    def _clamp(self, node: Node) -> tuple[Any, ...]:
        first = argument(node, 1, "max" if op_name(node) == "clamp_max" else "min")
        second = argument(node, 2, "max") if op_name(node) == "clamp" else None
        low, high = (None, first) if op_name(node) == "clamp_max" else (first, second)
        bounds = (None if bound is None else _literal(node, bound) for bound in (low, high))
        return (self._value(_tensor(node, 0)), *bounds)

    def _operands(self, node: Node, name: str, operands: tuple[Any, Any]) -> tuple[Any, ...]:
        args = [self._value(a) if isinstance(a, Node) and _is_tensor(a) else _literal(node, a) for a in operands]
        for a in operands:
            if isinstance(a, Node) and not same_shape(shape(a), shape(node)):
                raise _Refused(node, f"operand {a} of {name} is broadcast")
        # One spelling of operations whose operands may be exchanged: steps, then inputs, then numbers.
        return tuple(sorted(args, key=_rank)) if name in _COMMUTATIVE else tuple(args)


def _rank(arg: Any) -> tuple[int, Any]:
    if not isinstance(arg, str):
        return (2, 0)
    return (0, int(arg[1:])) if arg.startswith("%") else (1, arg)


def _is_tensor(node: Node) -> bool:
    return isinstance(fake(node), torch.Tensor)


def _tensor(node: Node, position: int) -> Node:
    operand = node.args[position] if position < len(node.args) else None
    if not isinstance(operand, Node) or not _is_tensor(operand):
        raise _Refused(node, f"operand {operand} is not a tensor")
    return operand


def _literal(node: Node, value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = "; a float that is a graph input: compile with specialize_float" if isinstance(value, Node) else ""
        raise _Refused(node, f"{op_name(node)} with {value}, which is no constant{hint}")
    return value


_NONLINEAR = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "exp", "softplus", "square")


def bends(activation: Activation, operand: str) -> bool:
    """Whether a nonlinear function is applied to ``operand`` itself, as to a gate."""
    return any(name in _NONLINEAR and operand in args for name, args in activation.steps)


class _Refused(Exception):
    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.reason = NoMatch(reason, node.name, line_of(node))
