"""What matchers return, and the checks that every match has to pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .graph import Scope, dotted_name, line_of, origin, shape
from .meaning import Step
from .parameters import parameters_of
from .region import ExpertParam, MoERegion, NoMatch


@dataclass(frozen=True)
class Routed:
    """x ``[..., H]``; ids and gates ``[..., K]``, the gates going through ``steps``."""

    x: Node
    ids: Node
    gates: Node
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """x ``[S, H]``, row r for expert ``ids.reshape(S)[r]``, one expert each."""

    x: Node
    ids: Node


@dataclass(frozen=True)
class Sorted:
    """x ``[S, H]`` sorted by expert; ``ends [E]`` is where each expert's rows end."""

    x: Node
    ends: Node


@dataclass(frozen=True)
class Slots:
    """x with the experts as dimension ``dim`` and H last: every expert has as many rows."""

    x: Node
    dim: int


@dataclass(frozen=True)
class Pieces:
    """Expert e's rows are ``xs[e]`` ``[..., H]``, and its results are read from ``results[e]``."""

    xs: tuple[Node, ...]
    results: tuple[Node, ...]


Dispatch = Routed | Chosen | Sorted | Slots | Pieces


@dataclass(frozen=True)
class Match:
    """A region and the nodes of its graph that outlining needs.

    w13, w2, b13, b2: what the weights and biases are made of, as values of the level: one stacked tensor; gate's and
    up's, each stacked; or (``Pieces``) one per expert, gate and up by turns. ``output`` is the node that is replaced
    (plus ``base``, where the block adds onto a value that is there), ``interior`` the nodes that only serve it.
    """

    scope: Scope
    region: MoERegion
    dispatch: Dispatch
    w13: tuple[Node, ...]
    w2: tuple[Node, ...]
    b13: tuple[Node, ...]
    b2: tuple[Node, ...]
    output: Node
    interior: tuple[Node, ...]
    base: Node | None = None


class Reject(Exception):
    """Why no match starts here."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.no_match = NoMatch(reason, node.name, line_of(node))


def param(scope: Scope, nodes: tuple[Node, ...], gemm: Node) -> ExpertParam:
    """The parameter, or the joined parameters, behind the operands ``nodes`` of ``gemm``."""
    roots = [parameters_of(scope, node) for node in nodes]
    for node, found in zip(nodes, roots, strict=True):
        if not found:
            raise Reject(gemm, f"expert parameter {node} is not an input of the graph")
    if all(origin(scope, node) is not None for node in nodes):
        return ExpertParam.joined(tuple(ExpertParam(root.name, dotted_name(root)) for (root,) in roots))
    # The largest is what the others adapt.
    largest = max((root for found in roots for root in found), key=_size)
    return ExpertParam(largest.name, dotted_name(largest), computed=True)


def _size(node: Node) -> int:
    total = 1
    for d in shape(node) or ():
        total *= int(d)
    return total


def interior_of(first: Node, result: Node) -> list[Node]:
    """Nodes on a path from the first GEMM to the result, in graph order."""
    below = {first}
    inside: list[Node] = []
    for node in first.graph.nodes:
        if node is first or any(n in below for n in node.all_input_nodes):
            below.add(node)
            inside.append(node)
        if node is result:
            break
    above = {result}
    for node in reversed(inside):
        if node in above or any(user in above for user in node.users):
            above.add(node)
    return [n for n in inside if n in above]


def check_private(interior: list[Node], results: set[Node]) -> None:
    """Nothing inside is used outside, except the results."""
    inside = set(interior)
    for node in interior:
        for user in node.users if node not in results else ():
            if user not in inside:
                raise Reject(user, f"{user} uses {node}, which is inside the expert block")
