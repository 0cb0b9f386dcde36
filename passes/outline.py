"""Each matched region becomes one float op; everything around it stays.

Match, plan, mutate are three steps: :func:`match_moe` only looks, the regions it returns are complete, and the graph is
changed only when it is certain that the mode allows what was left over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import NoMoERegionError
from ..ops.weights import WeightLayout
from .graph import Builder, fake, op_name, same_shape, scopes, shape
from .match_moe import Match, match_moe
from .meaning import Step
from .mode import Mode
from .region import NoMatch

_UNSAFE_TO_DROP = ("rand", "bernoulli", "dropout", "multinomial", "normal")


def outline(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """Replaces every region by ``moe_float``; records ``regions`` and ``unmatched`` in ``gm.meta``.

    Raises ``NoMoERegionError`` when there is no region, or, in a strict mode, when one expert-shaped operation stays.
    """
    matches, unmatched = match_moe(gm)
    if matches or not config.include:  # else linear layers may be all there is
        _check(matches, unmatched, config.strict)
    for match in matches:
        _replace(match)
    for scope in scopes(gm):
        scope.module.recompile()
    gm.meta["regions"] = tuple(m.region for m in matches)
    gm.meta["unmatched"] = tuple(unmatched)
    return gm


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
            f"are (strict=False allows that):{listed}"
        )


def _replace(match: Match) -> None:
    region, output = match.region, match.output
    at = Builder(output)
    x, ids, gates = match.x, match.ids, match.gates
    if len(shape(x) or ()) != 2:
        x = at.method("reshape", x, -1, region.hidden)
    if len(shape(ids) or ()) != 2:
        ids, gates = (at.method("reshape", n, -1, region.top_k) for n in (ids, gates))
    if fake(ids).dtype != torch.int64:
        ids = at.method("to", ids, torch.int64)
    for step in match.gate_steps:
        gates = _gate_step(at, gates, step)
    y = at.function(
        torch.ops.trace_compile.moe_float.default,
        x,
        ids,
        gates,
        canonical_weight(at, match.w13, region.w13_layout),
        canonical_weight(at, match.w2, region.w2_layout),
        _canonical_bias(at, match.b13, region.w13_layout),
        match.b2,
        region.activation.key,
        region.weight_input,
    )
    y.meta["region"] = region
    result = y
    if not same_shape(shape(y), shape(output)):
        result = at.method("view_as", y, match.x)
    if fake(result).dtype != fake(output).dtype:
        result = at.method("to", result, fake(output).dtype)
    result, absorbed = _absorb_cast(output, result)
    absorbed.replace_all_uses_with(result)
    erase_dead(output.graph, [absorbed, *match.interior])


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


def canonical_weight(at: Builder, param: Node, layout: WeightLayout) -> Node:
    """``[E, N, K]`` with gate rows first: ``WeightLayout.canonical``, as nodes."""
    weight = at.method("transpose", param, -2, -1) if layout.transposed else param
    return _halves(at, weight) if layout.interleaved else weight


def _canonical_bias(at: Builder, bias: Node | None, layout: WeightLayout) -> Node | None:
    return _halves(at, bias) if bias is not None and layout.interleaved else bias


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
