"""Reading and editing the graphs that Dynamo hands to a backend.

A Dynamo graph is a ``torch.fx.GraphModule`` whose parameters are placeholders and whose nodes carry their fake value.
One operation has many spellings there (``a * b``, ``torch.mul``, ``Tensor.mul``); :func:`op_name` gives them one name.
Activation checkpointing moves nodes into the subgraph of a higher-order operation: a :class:`Scope` is one such level,
and values travel between a level and the root only by the two functions :func:`bring_in` and :func:`bring_out`.

Invariant: shapes are compared without adding guards, so that looking at a graph never specialises it.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..errors import PassError

Size = int | torch.SymInt

_PYTHON_NAMES = {
    "truediv": "div",
    "itruediv": "div_",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "floordiv": "floor_divide",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "negative": "neg",
    "clip": "clamp",
    "swapaxes": "transpose",
    "T": "t",
    "swapdims": "transpose",
    "float_power": "pow",
}

CHECKPOINTS = ("tag_activation_checkpoint", "wrap")
"""Higher-order operations whose body is rewritten: called as ``op(body, *operands, **flags)``."""

_CARRIED = ("_param_name_to_source", "_source_to_user_stacks", "torchversion")


def op_name(node: Node) -> str:
    """The operation's one name: ``"mul"`` for ``a * b``, ``torch.mul(a, b)`` and ``a.mul(b)``; ``""`` for no call."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.target is getattr:
        name = str(node.args[1])
    elif node.op == "call_function":
        target: Any = node.target
        if isinstance(target, torch._ops.OpOverload):
            target = target.overloadpacket
        name = getattr(target, "__name__", str(target))
    else:
        return ""
    return _PYTHON_NAMES.get(name, name)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """The call's argument ``name``, given by position or by keyword."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def fake(value: Any) -> Any:
    """The fake tensor (or symbolic number) that a node stands for; other values are returned as they are."""
    if isinstance(value, Node):
        return value.meta.get("example_value", value.meta.get("val"))
    return value


def shape(node: Any) -> tuple[Size, ...] | None:
    """Shape of a node's value, or None where it is not a tensor."""
    value = fake(node)
    return tuple(value.shape) if isinstance(value, Tensor) else None


def same(a: Any, b: Any) -> bool:
    """Whether two sizes (ints, symbols, nodes) are known to be equal, without guarding on it."""
    a, b = fake(a), fake(b)
    return a is not None and b is not None and bool(statically_known_true(a == b))


def is_parameter(node: Node) -> bool:
    """Whether a graph input is an ``nn.Parameter`` (of the model, or handed in as one)."""
    return isinstance(fake(node), torch.nn.Parameter)


def same_shape(a: Sequence[Size] | None, b: Sequence[Size] | None) -> bool:
    return a is not None and b is not None and len(a) == len(b) and all(map(same, a, b))


def same_value(a: Node, b: Node) -> bool:
    return same_shape(shape(a), shape(b)) and fake(a).dtype == fake(b).dtype and fake(a).device == fake(b).device


def line_of(node: Node) -> str:
    """``file:line, in function`` of the innermost frame that made the node, or an empty string."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.stack_trace or "")
    return "{}:{}, in {}".format(*frames[-1]) if frames else ""


def dotted_name(placeholder: Node) -> str:
    """The parameter's dotted name below the module that was compiled, e.g. ``layers.0.mlp.experts.down_proj``."""
    grapharg = placeholder.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    if source is None:
        return str(placeholder.target)
    name = source.name if isinstance(source.name, str) else source.name()
    name = re.sub(r"^[LG]\['[^']*'\]", "", name)
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", name)
    name = re.sub(r"\['?([^'\]]*)'?\]", r".\1", name)
    return name.strip(".") or str(placeholder.target)


def placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_of(graph: Graph) -> Node:
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def clone(gm: GraphModule) -> GraphModule:
    """A copy whose graphs can be edited; tensors, metadata and everything that is not a graph stay shared."""
    new = GraphModule(gm, copy.deepcopy(gm.graph))
    for old, node in zip(gm.graph.nodes, new.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            node._dynamo_source = old._dynamo_source
    for name in _CARRIED:
        if hasattr(gm, name):
            setattr(new, name, getattr(gm, name))
    new.meta = dict(gm.meta)
    for name, child in gm.named_children():
        if isinstance(child, GraphModule):
            setattr(new, name, clone(child))
    new.train(gm.training)
    return new


# --- levels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scope:
    """One graph and the call that runs it (None at the root). Invariant: ``call`` is the only call of ``module``."""

    module: GraphModule
    parent: Scope | None = None
    call: Node | None = None

    @property
    def graph(self) -> Graph:
        return self.module.graph


def body_of(gm: GraphModule, node: Node) -> GraphModule | None:
    """The subgraph that a higher-order call runs, when it is one whose body may be rewritten."""
    if op_name(node) in CHECKPOINTS and node.args and isinstance(node.args[0], Node):
        body = getattr(gm, str(node.args[0].target), None) if node.args[0].op == "get_attr" else None
        return body if isinstance(body, GraphModule) else None
    return None


def scopes(gm: GraphModule) -> Iterator[Scope]:
    """The root and every rewritable subgraph, outer ones first, in the order in which the model runs them."""

    def visit(scope: Scope) -> Iterator[Scope]:
        yield scope
        for node in list(scope.graph.nodes):
            body = body_of(scope.module, node)
            if body is not None:
                yield from visit(Scope(body, scope, node))

    return visit(Scope(gm))


def own_bodies(gm: GraphModule) -> None:
    """Gives every checkpoint call a subgraph of its own, where Dynamo let several calls share one."""
    seen: set[int] = set()
    for scope in scopes(gm):
        if scope.call is None or scope.parent is None:
            continue
        if id(scope.module) in seen:
            attribute = _fresh_attribute(scope.parent.module, str(scope.call.args[0].target))  # type: ignore[union-attr]
            setattr(scope.parent.module, attribute, clone(scope.module))
            with scope.parent.graph.inserting_before(scope.call):
                body = scope.parent.graph.get_attr(attribute)
            scope.call.args = (body, *scope.call.args[1:])
        seen.add(id(scope.module))


def _fresh_attribute(module: GraphModule, stem: str) -> str:
    n = 1
    while hasattr(module, f"{stem}_{n}"):
        n += 1
    return f"{stem}_{n}"


def origin(scope: Scope, node: Node) -> Node | None:
    """The root placeholder that ``node`` of ``scope`` stands for, or None if it is something computed."""
    while node.op == "placeholder" and scope.parent is not None and scope.call is not None:
        operand = scope.call.args[1 + placeholders(scope.graph).index(node)]
        if not isinstance(operand, Node):
            return None
        node, scope = operand, scope.parent
    return node if node.op == "placeholder" and scope.parent is None else None


def bring_in(scope: Scope, node: Node) -> Node:
    """Makes ``node``, a value of the root graph, readable in ``scope``: the placeholder that stands for it there."""
    if scope.parent is None or scope.call is None:
        return node
    outer = bring_in(scope.parent, node)
    inputs = placeholders(scope.graph)
    for inner, operand in zip(inputs, scope.call.args[1:], strict=True):
        if operand is outer:
            return inner
    with _after_placeholders(scope.graph):
        inner = scope.graph.placeholder(node.name)
    inner.meta["example_value"] = fake(node)
    scope.call.args = (*scope.call.args, outer)
    return inner


def bring_out(scope: Scope, node: Node) -> Node:
    """Makes ``node``, a value of ``scope``, readable in the root graph: one more result of each call on the way."""
    if scope.parent is None or scope.call is None:
        return node
    output = output_of(scope.graph)
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        raise PassError(f"subgraph {scope.call.args[0]} returns {results}, expected a tuple of results")
    output.args = ((*results, node),)
    scope.call.meta["example_value"] = (*fake(scope.call), fake(node))
    with scope.parent.graph.inserting_after(scope.call):
        outer = scope.parent.graph.call_function(operator.getitem, (scope.call, len(results)))
    outer.meta["example_value"] = fake(node)
    return bring_out(scope.parent, outer)


def add_input(gm: GraphModule, name: str, value: Any) -> Node:
    """Appends a placeholder to the root graph. ``value`` is its fake value. Dynamo knows no source for it."""
    with _after_placeholders(gm.graph):
        node = gm.graph.placeholder(name)
    node.meta["example_value"] = value
    node._dynamo_source = None  # type: ignore[attr-defined]
    return node


def add_output(gm: GraphModule, node: Node) -> None:
    """Appends a result to the root graph."""
    output = output_of(gm.graph)
    output.args = ((*output.args[0], node),)  # type: ignore[misc]


@contextlib.contextmanager
def _after_placeholders(graph: Graph) -> Iterator[None]:
    inputs = placeholders(graph)
    where = graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes)))
    with where:
        yield


# --- new nodes --------------------------------------------------------------------------------------------------------


class Builder:
    """Adds calls before ``node``; each gets its fake value by running on its arguments' fake values."""

    def __init__(self, node: Node) -> None:
        self.graph = node.graph
        self.node = node

    def function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self._add("call_function", target, args, kwargs, target)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        return self._add("call_method", name, args, kwargs, getattr(Tensor, name))

    def _add(self, op: str, target: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Node:
        with self.graph.inserting_before(self.node):
            new = self.graph.create_node(op, target, args, kwargs)
        new.meta["example_value"] = evaluate(run, args, kwargs)
        for key in ("stack_trace", "nn_module_stack"):
            if key in self.node.meta:
                new.meta[key] = self.node.meta[key]
        return new


def evaluate(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``run`` on the fake values of nodes. At least one has to be a tensor: it brings the fake mode."""
    args, kwargs = torch.fx.node.map_arg((args, kwargs), fake)
    with torch.no_grad():
        return run(*args, **kwargs)
