"""Each matched region becomes one float op; everything around it stays.

Match, plan, mutate are three steps: :func:`match_moe` only looks, the regions it returns are complete, and the graph is
changed only when it is certain that the mode allows what was left over.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import NoMoERegionError
from ..ops.weights import WeightLayout
from .graph import Builder, fake, op_name, same_shape, scopes, shape
from .linears import matches as named_by
from .match_moe import match_moe
from .matching import Chosen, Dispatch, Match, Pieces, Routed, Slots, Sorted
from .meaning import Step
from .mode import Mode
from .region import MoERegion, NoMatch

_UNSAFE_TO_DROP = ("rand", "bernoulli", "dropout", "multinomial", "normal")


def outline(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """Replaces every region by ``moe_float``; records ``regions`` and ``unmatched`` in ``gm.meta``.

    Raises ``NoMoERegionError`` when there is no region, or, in a strict mode, when one expert-shaped operation stays
    that ``config.ignore`` does not name.
    """
    matches, unmatched = match_moe(gm)
    if matches or not config.include:  # else linear layers may be all there is
        _check(matches, [reason for reason in unmatched if not _is_ignored(reason, config)], config.strict)
    for match in matches:
        _replace(match)
    for scope in scopes(gm):
        scope.module.recompile()
    gm.meta["regions"] = tuple(m.region for m in matches)
    gm.meta["unmatched"] = tuple(unmatched)
    return gm


def _is_ignored(reason: NoMatch, config: Mode) -> bool:
    """Whether ``ignore`` names every parameter of the operation, or its module."""
    return bool(reason.weights) and all(
        any(named_by(pattern, name) or named_by(pattern, name.rpartition(".")[0]) for pattern in config.ignore)
        for name in reason.weights
    )


def _check(matches: list[Match], unmatched: list[NoMatch], strict: bool) -> None:
    listed = "".join(f"\n  - {reason}" for reason in unmatched)
    if not matches:
        what = (
            f"these expert-shaped operations are not understood:{listed}"
            if unmatched
            else "no operation is expert-shaped"
        )
        raise NoMoERegionError(
            f"no mixture-of-experts region was found; {what}. Experts must run as grouped or batched GEMMs over "
            "stacked parameters (transformers: experts_implementation='grouped_mm')"
        )
    if unmatched and strict:
        raise NoMoERegionError(
            f"{len(matches)} region(s) found, but {len(unmatched)} expert-shaped operation(s) would be left as they "
            f"are (ignore=[their modules] or strict=False allows that):{listed}"
        )


def _replace(match: Match) -> None:
    region, output, dispatch = match.region, match.output, match.dispatch
    at = Builder(_after(dispatch.xs) if isinstance(dispatch, Pieces) else output)
    x, ids, gates = _operands(at, dispatch, region)
    y = at.function(
        torch.ops.trace_compile.moe_float.default,
        x,
        ids,
        gates,
        *(_canonical_weight(at, match.w13, region.w13_layout), _canonical_weight(at, match.w2, region.w2_layout)),
        *(_canonical_bias(at, match.b13, region.w13_layout), _canonical_bias(at, match.b2, region.w2_layout)),
        region.activation.key,
        region.weight_input,
    )
    y.meta["region"] = region
    if isinstance(dispatch, Pieces):
        _hand_out(at, y, dispatch)
        erase_dead(output.graph, list(match.interior))
        return
    result = y if same_shape(shape(y), shape(output)) else at.method("view_as", y, dispatch.x)
    if fake(result).dtype != fake(output).dtype:
        result = at.method("to", result, fake(output).dtype)
    if match.base is not None:
        result, absorbed = at.function(torch.add, match.base, result), output
    else:
        result, absorbed = _absorb_cast(output, result)
    absorbed.replace_all_uses_with(result)
    erase_dead(output.graph, [absorbed, *match.interior])


def _operands(at: Builder, dispatch: Dispatch, region: MoERegion) -> tuple[Node, Node, Node]:
    """Tokens ``[T, H]``, expert ids int64 ``[T, K]`` and gates ``[T, K]``."""
    if isinstance(dispatch, Pieces):
        xs = [x if len(shape(x) or ()) == 2 else at.method("reshape", x, -1, region.hidden) for x in dispatch.xs]
        columns = [at.method("narrow", x, 1, 0, 1) for x in xs]
        x = at.function(torch.cat, xs)
        numbers = [at.function(torch.full_like, c, e, dtype=torch.int64) for e, c in enumerate(columns)]
        ids = at.function(torch.cat, numbers)
        return x, ids, at.function(torch.ones_like, ids, dtype=fake(x).dtype)
    x = dispatch.x
    if isinstance(dispatch, Sorted):
        ends = dispatch.ends
        counting = at.function(torch.ones_like, at.method("select", x, 1, 0), dtype=fake(ends).dtype)
        place = at.method("cumsum", counting, 0, dtype=fake(ends).dtype)  # row r is the r+1st
        ids = at.method("unsqueeze", at.function(torch.searchsorted, ends, place), 1)
    elif isinstance(dispatch, Slots):
        counting = at.function(torch.ones_like, at.method("select", x, -1, 0), dtype=torch.int64)
        ids = at.method("reshape", at.method("sub", at.method("cumsum", counting, dispatch.dim), 1), -1, 1)
    elif isinstance(dispatch, Chosen):
        ids = at.method("reshape", dispatch.ids, -1, 1)
    else:
        ids = dispatch.ids
    gates = dispatch.gates if isinstance(dispatch, Routed) else at.function(torch.ones_like, ids, dtype=fake(x).dtype)
    if len(shape(x) or ()) != 2:
        x = at.method("reshape", x, -1, region.hidden)
    if len(shape(ids) or ()) != 2:
        ids, gates = (at.method("reshape", n, -1, region.top_k) for n in (ids, gates))
    if fake(ids).dtype != torch.int64:
        ids = at.method("to", ids, torch.int64)
    for step in dispatch.steps if isinstance(dispatch, Routed) else ():
        gates = _gate_step(at, gates, step)
    return x, ids, gates


def _after(nodes: tuple[Node, ...]) -> Node:
    """The first node behind all of ``nodes`` (and behind the placeholders)."""
    left = set(nodes)
    for node in nodes[0].graph.nodes:
        if not left and node.op != "placeholder":
            return node
        left.discard(node)
    raise AssertionError("a graph ends with its output")


def _hand_out(at: Builder, y: Node, dispatch: Pieces) -> None:
    """Each expert's part of ``y`` in the place of its result; what reads one and stands before ``at`` moves behind."""
    sizes = [_rows(at, x) for x in dispatch.xs]
    parts = at.function(torch.split, y, sizes)
    for e, (x, result) in enumerate(zip(dispatch.xs, dispatch.results, strict=True)):
        part = at.function(operator.getitem, parts, e)
        part = part if len(shape(x) or ()) == 2 else at.method("view_as", part, x)
        if fake(part).dtype != fake(result).dtype:
            part = at.method("to", part, fake(result).dtype)
        result.replace_all_uses_with(part)
    waiting, node = {parts}, parts.next
    while node is not at.node:
        waiting.add(node)
        node = node.next
    for node in list(at.graph.nodes):
        if node is parts:
            break
        if any(n in waiting for n in node.all_input_nodes):
            waiting.add(node)
            at.node.prepend(node)


def _rows(at: Builder, x: Node) -> Any:
    """The number of rows of x ``[..., H]``, as a number or a node."""
    total: Any = 1
    for i, d in enumerate((shape(x) or ())[:-1]):
        size = d if isinstance(d, int) else at.method("size", x, i)
        total = size if isinstance(total, int) and total == 1 else at.function(operator.mul, total, size)
    return total


def _gate_step(at: Builder, gates: Node, step: Step) -> Node:
    if isinstance(step, torch.dtype):
        return at.method("to", gates, step)
    return at.method(step, gates, -1) if step == "softmax" else at.method(step, gates)


def _absorb_cast(output: Node, result: Node) -> tuple[Node, Node]:
    """The cast back to the tokens' dtype that often follows is the op's own last step."""
    users = list(output.users)
    if op_name(result) == "to" and len(users) == 1 and op_name(users[0]) in ("to", "type_as", "bfloat16", "float"):
        y = result.args[0]
        if fake(users[0]).dtype == fake(y).dtype and isinstance(y, Node):
            return y, users[0]
    return result, output


def _canonical_weight(at: Builder, params: tuple[Node, ...], layout: WeightLayout) -> Node:
    """``[E, N, K]`` with gate rows first: ``WeightLayout.canonical`` of the joined parameters, as nodes."""
    if layout.experts is not None:
        weight = at.method("unflatten", at.function(torch.cat, list(params)), 0, (layout.experts, -1))
    else:
        turned = [at.method("transpose", p, -2, -1) if layout.transposed else p for p in params]
        weight = turned[0] if len(turned) == 1 else at.function(torch.cat, turned, 1)
    return _halves(at, weight) if layout.interleaved else weight


def _canonical_bias(at: Builder, params: tuple[Node, ...], layout: WeightLayout) -> Node | None:
    if not params:
        return None
    if layout.experts is not None:
        bias = at.method("unflatten", at.function(torch.cat, list(params)), 0, (layout.experts, -1))
    else:
        bias = params[0] if len(params) == 1 else at.function(torch.cat, list(params), 1)
    return _halves(at, bias) if layout.interleaved else bias


def _halves(at: Builder, node: Node) -> Node:
    pairs = at.method("unflatten", node, 1, (-1, 2))
    return at.function(torch.cat, [at.method("select", pairs, 2, i) for i in (0, 1)], 1)


def erase_dead(graph: Graph, seeds: list[Node]) -> None:
    """Erases the seeds and what only served them, unless it is used, has effects or draws random numbers."""
    todo = list(seeds)
    while todo:
        node = todo.pop()
        name = op_name(node)
        if node._erased or node.users or not name or name.endswith("_") or name == "setitem" or node.is_impure():
            continue
        if any(word in name for word in _UNSAFE_TO_DROP):
            continue
        operands = node.all_input_nodes
        graph.erase_node(node)
        todo += operands
