"""Experts that are modules of their own, run one after the other: a Python loop that Dynamo unrolled.

The linear layers of such experts stand side by side in the graph: parameters of one name but for a number, none
reading another's result. What tells experts from layers and from heads is that each reads rows of its own, selected or
split off for it, or that all read the same rows and each result is multiplied by something (its gate). The experts of
one block become one region; selecting rows, gates and the sum stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from ..ops.activation import Activation
from ..ops.weights import WeightLayout
from .activations import Translator, bends
from .graph import Scope, argument, dotted_name, is_parameter, op_name, origin, shape
from .halves import Half, is_pre
from .matching import Match, Pieces, Reject, check_private, interior_of, param
from .meaning import Meaning
from .region import MoERegion, NoMatch

_SELECTS = ("getitem", "index_select", "gather", "take_along_dim", "embedding")
_SPLITS = ("split", "chunk", "tensor_split", "unbind", "split_with_sizes")
_PASSES_ON = ("to", "float", "bfloat16", "type_as", "reshape", "view", "contiguous", "squeeze", "unsqueeze")


@dataclass(frozen=True)
class Layer:
    """One expert's product: ``weight [N, K] @ rows``. ``family``: the weight's name with ``{}`` for the expert."""

    node: Node
    rows: Node
    weight: Node
    bias: Node | None
    family: str
    expert: int


@dataclass(frozen=True)
class LayerRows:
    """A layer's result, bias included."""

    gemm: Layer
    stage: str = "rows"
    gates: None = None
    widened: tuple[()] = ()


@dataclass(frozen=True)
class _Expert:
    ups: tuple[Layer, ...]
    down: Layer
    activation: Activation
    interleaved: bool


def match_loops(scope: Scope) -> tuple[list[Match], dict[Node, NoMatch]]:
    """Every block of sequential experts of one level, and those that are none after all."""
    families = dict(_families(scope))
    matches: list[Match] = []
    refused: dict[Node, NoMatch] = {}
    if not families:
        return matches, refused
    of = Meaning(scope)
    for layers in families.values():
        for layer in layers:
            of.define(layer.node, LayerRows(layer))
    for layers in families.values():
        ups = [_layers_before(of, layer) for layer in layers]
        if not all(map(_one_expert, ups, layers)) or not _routed([before[0].rows for before in ups], layers):
            continue
        try:
            matches.append(_block(scope, [_expert(of, layer) for layer in layers]))
        except Reject as reject:
            refused[layers[0].node] = reject.no_match
    return matches, refused


def _families(scope: Scope) -> Iterator[tuple[str, tuple[Layer, ...]]]:
    """Layers of one name but for the last number that makes them stand side by side, numbered from zero."""
    named: list[tuple[Node, Node, Node | None, list[str]]] = []
    for node in scope.graph.nodes:
        if op_name(node) == "linear" and isinstance(node.args[0], Node):
            weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
            root = origin(scope, weight) if isinstance(weight, Node) else None
            if root is not None and is_parameter(root) and len(shape(root) or ()) == 2:
                named.append((node, weight, bias, dotted_name(root).split(".")))
    deepest = max((sum(part.isdigit() for part in parts) for *_, parts in named), default=0)
    taken: set[Node] = set()
    for back in range(1, deepest + 1):
        groups: dict[str, dict[int, Layer]] = {}
        for node, weight, bias, parts in named:
            numbers = [i for i, part in enumerate(parts) if part.isdigit()]
            if len(numbers) >= back and node not in taken:
                at = numbers[-back]
                family = ".".join((*parts[:at], "{}", *parts[at + 1 :]))
                layer = Layer(node, node.args[0], weight, bias, family, int(parts[at]))  # type: ignore[arg-type]
                groups.setdefault(family, {}).setdefault(layer.expert, layer)
        for family, layers in groups.items():
            ordered = tuple(layers[e] for e in sorted(layers))
            if len(ordered) > 1 and sorted(layers) == list(range(len(ordered))) and _side_by_side(scope.graph, ordered):
                taken.update(layer.node for layer in ordered)
                yield family, ordered


def _side_by_side(graph: Graph, layers: tuple[Layer, ...]) -> bool:
    """Whether no layer reads another's result."""
    ours = {layer.node for layer in layers}
    below: set[Node] = set()
    for node in graph.nodes:
        if any(n in below for n in node.all_input_nodes):
            if node in ours:
                return False
            below.add(node)
        elif node in ours:
            below.add(node)
    return True


def _layers_before(of: Meaning, layer: Layer) -> list[Layer]:
    """The layers whose results ``layer`` reads, through whatever is between."""
    found: dict[Layer, None] = {}
    todo, seen = [layer.rows], {layer.rows}
    while todo:
        node = todo.pop()
        value = of(node)
        if isinstance(value, LayerRows | Half):
            found[(value.rows if isinstance(value, Half) else value).gemm] = None
        else:
            new = [a for a in node.all_input_nodes if a not in seen]
            seen.update(new)
            todo += new
    return list(found)


def _one_expert(before: list[Layer], layer: Layer) -> bool:
    """Whether ``layer`` ends what layers of the same number began on the same rows."""
    return {b.expert for b in before} == {layer.expert} and len({b.rows for b in before}) == 1


def _expert(of: Meaning, down: Layer) -> _Expert:
    read: list[Any] = []

    def translate(roles: dict[Node, str]) -> Activation:
        read.clear()

        def leaf(node: Node) -> str | None:
            value = of(node)
            if isinstance(value, Half):
                read.append(value)
                return ("gate", "up")[value.part]
            if is_pre(value) and not any(isinstance(of(user), Half) for user in node.users):
                read.append(value)
                return roles.get(value.gemm.node, "x")
            return None

        gated = bool(roles) or _halved(of, down.rows)
        program = Translator(leaf).program(down.rows, gated=gated)
        if isinstance(program, NoMatch):
            raise Reject(down.node, f"activation of expert {down.expert} not understood: {program}")
        return program

    activation = translate({})
    ups = tuple(dict.fromkeys((v.rows if isinstance(v, Half) else v).gemm for v in read))
    if len(ups) == 2 and not any(isinstance(v, Half) for v in read):
        activation = translate({ups[0].node: "gate", ups[1].node: "up"})
        if bends(activation, "up") and not bends(activation, "gate"):
            ups = ups[::-1]
            activation = translate({ups[0].node: "gate", ups[1].node: "up"})
    elif len(ups) != 1:
        raise Reject(down.node, f"expert {down.expert} has {len(ups)} layers before its last, expected one or two")
    interleaved = {v.interleaved for v in read if isinstance(v, Half)}
    if len(interleaved) > 1:
        raise Reject(down.node, f"expert {down.expert} cuts its layer's result in two ways")
    return _Expert(ups, down, activation, interleaved == {True})


def _halved(of: Meaning, node: Node) -> bool:
    """Whether ``node`` is computed from halves of a layer's result."""
    todo, seen = [node], {node}
    while todo:
        value = of(n := todo.pop())
        if isinstance(value, Half):
            return True
        if value is None:
            new = [a for a in n.all_input_nodes if a not in seen]
            seen.update(new)
            todo += new
    return False


def _routed(rows: list[Node], layers: tuple[Layer, ...]) -> bool:
    """Whether these are experts: rows selected for each, or gates on each result."""
    sources = [_source(node) for node in rows]
    if len(set(sources)) == 1:
        return all(_gated(layer.node) for layer in layers)
    return len(set(sources)) == len(sources) and all(map(_selected, sources))


def _source(node: Node) -> Node:
    while op_name(node) in _PASSES_ON and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _selected(node: Node) -> bool:
    source = node.args[0] if node.args else None
    piece = op_name(node) == "getitem" and isinstance(source, Node) and op_name(source) in _SPLITS
    return piece or op_name(node) in _SELECTS


def _gated(node: Node) -> bool:
    todo = list(node.users)
    while todo:
        user = todo.pop()
        if op_name(user) == "mul":
            return True
        if op_name(user) in _PASSES_ON:
            todo += user.users
    return False


def _block(scope: Scope, experts: list[_Expert]) -> Match:
    first = experts[0]
    name, _, _ = first.down.family.partition(".{}")
    for expert in experts[1:]:
        if expert.activation != first.activation or expert.interleaved != first.interleaved:
            raise Reject(expert.down.node, f"{name}: expert {expert.down.expert} has another activation than expert 0")
        for layer, like in zip((*expert.ups, expert.down), (*first.ups, first.down), strict=False):
            other = layer.family != like.family or (layer.bias is None) != (like.bias is None)
            if len(expert.ups) != len(first.ups) or other or shape(layer.weight) != shape(like.weight):
                raise Reject(layer.node, f"{name}: expert {layer.expert} is built otherwise than expert 0")
    (out, width), hidden = _sizes(first.down), _sizes(first.ups[0])[1]
    columns = sum(_sizes(up)[0] for up in first.ups)
    if out != hidden or first.activation.width(columns) != width:
        raise Reject(first.down.node, f"{name}: layers {hidden} -> {columns}, {width} -> {out} form no expert network")
    results = tuple(expert.down.node for expert in experts)
    inside: dict[Node, None] = {}
    for expert in experts:
        for up in expert.ups:
            inside |= dict.fromkeys(interior_of(up.node, expert.down.node))
    interior = [n for n in scope.graph.nodes if n in inside]
    check_private(interior, set(results))
    xs = tuple(expert.ups[0].rows for expert in experts)
    _check_movable(scope.graph, xs, results)
    w13 = tuple(up.weight for expert in experts for up in expert.ups)
    w2 = tuple(expert.down.weight for expert in experts)
    b13 = tuple(up.bias for expert in experts for up in expert.ups if up.bias is not None)
    b2 = tuple(expert.down.bias for expert in experts if expert.down.bias is not None)
    same_biases = len(b13) in (0, len(w13)) and len(b2) in (0, len(w2))
    if not same_biases:
        raise Reject(first.down.node, f"{name}: some of gate and up have biases, others have none")
    layout = WeightLayout(interleaved=first.interleaved, experts=len(experts))
    region = MoERegion(
        name=name,
        w13=param(scope, w13, first.ups[0].node),
        w2=param(scope, w2, first.down.node),
        b13=param(scope, b13, first.ups[0].node) if b13 else None,
        b2=param(scope, b2, first.down.node) if b2 else None,
        w13_layout=layout,
        w2_layout=WeightLayout(experts=len(experts)),
        activation=first.activation,
        top_k=1,
        num_experts=len(experts),
        hidden=hidden,
        width=width,
        source="loop",
        slots="experts run one after the other, each on rows that the model selects for it",
    )
    return Match(scope, region, Pieces(xs, results), w13, w2, b13, b2, results[-1], tuple(interior))


def _sizes(layer: Layer) -> tuple[int, int]:
    rows, columns = shape(layer.weight)  # type: ignore[misc]
    return int(rows), int(columns)


def _check_movable(graph: Graph, xs: tuple[Node, ...], results: tuple[Node, ...]) -> None:
    """All rows are selected before any expert runs, so what reads a result has to wait; nothing there may write."""
    started, open_rows = False, set(xs)
    for node in graph.nodes:
        started = started or node in results
        open_rows.discard(node)
        if started and not open_rows:
            return
        name = op_name(node)
        if started and (name == "setitem" or (name.endswith("_") and not name.startswith("_"))):
            raise Reject(node, f"{name} writes in place between two experts")
