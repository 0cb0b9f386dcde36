"""Finding mixture-of-experts regions: pure, structural, and never silent.

Anchored on the two expert GEMMs (grouped, batched over gathered weights, or dense over all experts). Around them the
matcher collects the tokens, expert ids and gates, the activation between the GEMMs, biases, the parameters' layout and
the node that holds the weighted sum. Nothing in between may be used by anything outside: such a user would go on
reading unquantized values. Every product with a stacked expert parameter that ends up in no region is returned as a
:class:`NoMatch` with the reason, the node and the line of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from ..ops.weights import WeightLayout
from .activations import Translator
from .dense import DenseGemm, DenseRows, dense_gemm
from .experts import GROUPED, PRODUCTS, Gemm, Half, Rows, expert_gemm, is_pre, result_of
from .graph import (
    Scope,
    body_of,
    dotted_name,
    fake,
    is_parameter,
    line_of,
    op_name,
    origin,
    same,
    same_shape,
    scopes,
    shape,
)
from .region import ExpertParam, MoERegion, NoMatch
from .routing import Meaning, PerPair, PerToken

AnyGemm = Gemm | DenseGemm


@dataclass(frozen=True)
class Match:
    """A region and the nodes of its graph that outlining needs.

    x ``[..., H]``, ids and gates ``[..., K]`` (gates cast to each of ``gate_casts``), weights as placeholders of the
    level; ``output`` is the node that is replaced, ``interior`` the nodes that only serve it.
    """

    scope: Scope
    region: MoERegion
    x: Node
    ids: Node
    gates: Node
    gate_casts: tuple[torch.dtype, ...]
    w13: Node
    w2: Node
    b13: Node | None
    b2: Node | None
    output: Node
    interior: tuple[Node, ...]


class _Reject(Exception):
    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.no_match = NoMatch(reason, node.name, line_of(node))


def match_moe(gm: GraphModule) -> tuple[list[Match], list[NoMatch]]:
    """All regions of the graph and its checkpointed subgraphs, in model order, and everything expert-shaped besides."""
    matches: list[Match] = []
    unmatched: list[NoMatch] = []
    for scope in scopes(gm):
        found, rest = _match_level(scope)
        matches += found
        unmatched += rest
    return _with_unique_names(matches), unmatched


def _match_level(scope: Scope) -> tuple[list[Match], list[NoMatch]]:
    of = Meaning()
    pending: dict[Node, AnyGemm] = {}
    refused: dict[Node, NoMatch] = {}
    for node in scope.graph.nodes:  # in order: what a later GEMM means depends on earlier ones
        found = expert_gemm(of, node) or dense_gemm(of, node)
        if isinstance(found, NoMatch):
            refused[node] = found
        elif found is not None:
            pending[node] = found
            of.define(node, result_of(found) if isinstance(found, Gemm) else DenseRows(found))
    matches: list[Match] = []
    for node in [n for n in scope.graph.nodes if n in pending]:
        gemm = pending.get(node)
        if gemm is None or _enters(of, gemm):
            continue
        try:
            match, first = _match_from(scope, of, gemm)
        except _Reject as reject:
            refused[node] = reject.no_match
            continue
        matches.append(match)
        del pending[node], pending[first.node]
    for node in pending:
        if node not in refused:
            refused[node] = NoMatch("no down projection was matched with this expert GEMM", node.name)
    taken = {n for m in matches for n in m.interior}
    for node in scope.graph.nodes:
        operand = _expert_operand(scope, node) if node not in taken and node not in refused else None
        if operand is not None:
            refused[node] = NoMatch(f"{op_name(node)} with the stacked parameter {operand} is no known form", node.name)
        if body_of(scope.module, node) is None and (inner := _hidden_product(scope.module, node)) is not None:
            refused[node] = NoMatch(f"{inner} runs inside {op_name(node)}, whose body is not rewritten", node.name)
    order = {n: i for i, n in enumerate(scope.graph.nodes)}
    return matches, [
        replace(refused[n], where=refused[n].where or line_of(n)) for n in sorted(refused, key=order.__getitem__)
    ]


def _enters(of: Meaning, gemm: AnyGemm) -> bool:
    """Whether a GEMM takes the tokens (rather than what an activation made of another GEMM's result)."""
    return gemm.takes_tokens if isinstance(gemm, DenseGemm) else isinstance(of(gemm.rows), PerToken)


def _match_from(scope: Scope, of: Meaning, down: AnyGemm) -> tuple[Match, AnyGemm]:
    """The region around a down projection."""
    value = of(down.rows)
    if isinstance(value, Half) or is_pre(value):
        raise _Reject(down.node, "no activation stands between the two expert GEMMs")
    pre: list[Half | Any] = []

    def leaf(node: Node) -> str | None:
        meaning = of(node)
        if isinstance(meaning, Half):
            pre.append(meaning)
            return ("gate", "up")[meaning.part]
        if is_pre(meaning) and not any(isinstance(of(user), Half) for user in node.users):
            pre.append(meaning)
            return "x"
        return None

    gated = _is_gated(of, down.rows)
    translator = Translator(leaf)
    activation = translator.program(down.rows, gated=gated)
    if isinstance(activation, NoMatch):
        raise _Reject(down.node, f"activation not understood: {activation}")
    first_rows = {p.rows if isinstance(p, Half) else p for p in pre}
    interleaved = {p.interleaved for p in pre if isinstance(p, Half)}
    if len(first_rows) != 1 or len(interleaved) > 1 or {isinstance(p, Half) for p in pre} != {gated}:
        raise _Reject(down.node, "the activation's inputs are not the two halves of one expert GEMM's result")
    (rows,) = first_rows
    up: AnyGemm = rows.gemm
    result, end = _combined(of, down)
    x, gates, weight_input = _operands(of, up, down, rows, end)
    region = _region(scope, up, down, rows, end, activation, bool(interleaved and interleaved.pop()), weight_input)
    interior = _interior(up.node, result)
    _check_private(interior, result)
    match = Match(
        scope=scope,
        region=region,
        x=x,
        ids=down.ids if isinstance(down, Gemm) else end.ids,
        gates=gates.source,
        gate_casts=(*gates.casts, *getattr(end, "widened", ())),
        w13=up.param,
        w2=down.param,
        b13=rows.bias,
        b2=end.bias,
        output=result,
        interior=tuple(interior),
    )
    _check_shapes(match, end)
    return match, up


def _is_gated(of: Meaning, node: Node) -> bool:
    todo, seen = [node], {node}
    while todo:
        n = todo.pop()
        value = of(n)
        if isinstance(value, Half):
            return True
        if value is None:
            new = [a for a in n.all_input_nodes if a not in seen]
            seen.update(new)
            todo += new
        elif is_pre(value):
            return False
    return False


def _combined(of: Meaning, down: AnyGemm) -> tuple[Node, Any]:
    """Follows the down projection's result to the weighted sum over each token's experts."""
    node = down.node
    while True:
        value = of(node)
        if value.stage == "tokens":
            break
        users = list(node.users)
        if len(users) != 1:
            names = ", ".join(u.name for u in users) or "nothing"
            raise _Reject(node, f"{node} is used by {names}; one step of the weighted sum was expected")
        following = of(users[0])
        if getattr(following, "gemm", None) != down:
            raise _Reject(
                users[0], f"{op_name(users[0]) or users[0].op} is no known step from expert results to tokens"
            )
        node = users[0]
    return node, value


def _operands(of: Meaning, up: AnyGemm, down: AnyGemm, rows: Any, end: Any) -> tuple[Node, PerPair, bool]:
    """Tokens, gates, and whether the gates scale the input. Checks that both GEMMs serve the same routing."""
    if isinstance(up, DenseGemm) or isinstance(down, DenseGemm):
        if not (isinstance(up, DenseGemm) and isinstance(down, DenseGemm)):
            raise _Reject(down.node, "one expert GEMM runs over all experts, the other over chosen ones")
        if end.gates is None:
            raise _Reject(down.node, "no gate weights are applied")
        return up.rows, end.gates, False
    tokens = of(up.rows)
    assert isinstance(tokens, PerToken) and isinstance(end, Rows)
    if up.ids is not down.ids or up.order != down.order or tokens.order != up.order:
        raise _Reject(
            down.node, f"the expert GEMMs are routed differently: {up.node} by {up.ids}, this one by {down.ids}"
        )
    experts = shape(up.param)[0]  # type: ignore[index]
    limits = tokens.experts | rows.experts | end.experts | up.experts | down.experts
    if limits - {experts}:
        raise _Reject(down.node, f"ids are limited to {sorted(limits)}, but there are {experts} experts")
    if any(dtype != fake(up.param).dtype for dtype in tokens.casts):
        raise _Reject(up.node, f"tokens are cast to {tokens.casts[0]} before a GEMM in {fake(up.param).dtype}")
    top_k = (shape(up.ids) or (None,))[-1]
    if not same(tokens.top_k, top_k):
        raise _Reject(up.node, f"rows repeat each token {tokens.top_k} times, but {top_k} experts are chosen")
    if (tokens.gates is None) == (end.gates is None):
        raise _Reject(
            down.node, "no gate weights are applied" if end.gates is None else "gate weights are applied twice"
        )
    gates = tokens.gates or end.gates
    assert gates is not None
    return tokens.source, gates, tokens.gates is not None


def _region(
    scope: Scope,
    up: AnyGemm,
    down: AnyGemm,
    rows: Any,
    end: Any,
    activation: Any,
    interleaved: bool,
    weight_input: bool,
) -> MoERegion:
    params = [
        _param(scope, node, up.node) if node is not None else None
        for node in (up.param, down.param, rows.bias, end.bias)
    ]
    w13, w2, b13, b2 = params
    assert w13 is not None and w2 is not None
    e1, a1, c1 = shape(up.param)  # type: ignore[misc]
    e2, a2, c2 = shape(down.param)  # type: ignore[misc]
    n1, hidden = (c1, a1) if up.transposed else (a1, c1)
    out, width = (c2, a2) if down.transposed else (a2, c2)
    if e1 != e2 or out != hidden or activation.width(n1) != width:
        raise _Reject(down.node, f"parameter shapes {(e1, a1, c1)} and {(e2, a2, c2)} do not form one expert network")
    ids = down.ids if isinstance(down, Gemm) else end.ids
    return MoERegion(
        name=w13.name.rpartition(".")[0] or w13.name,
        w13=w13,
        w2=w2,
        b13=b13,
        b2=b2,
        w13_layout=WeightLayout(transposed=up.transposed, interleaved=interleaved),
        w2_layout=WeightLayout(transposed=down.transposed),
        activation=activation,
        top_k=int(shape(ids)[-1]),  # type: ignore[index]
        num_experts=int(e1),
        hidden=int(hidden),
        width=int(width),
        source=up.source,
        weight_input=weight_input,
    )


def _param(scope: Scope, node: Node, gemm: Node) -> ExpertParam:
    root = origin(scope, node)
    if root is None:
        raise _Reject(gemm, f"expert parameter {node} is not an input of the graph")
    return ExpertParam(root.name, dotted_name(root))


def _interior(first: Node, result: Node) -> list[Node]:
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


def _check_private(interior: list[Node], result: Node) -> None:
    inside = set(interior)
    for node in interior:
        for user in node.users if node is not result else ():
            if user not in inside:
                raise _Reject(user, f"{user} uses {node}, which is inside the expert block")


def _check_shapes(match: Match, end: Any) -> None:
    """One row of ids and gates per token."""
    x, ids, gates = shape(match.x), shape(match.ids), shape(match.gates)
    assert x is not None and ids is not None and gates is not None
    if fake(match.ids).dtype.is_floating_point:
        raise _Reject(match.ids, f"expert ids {match.ids} are {fake(match.ids).dtype}")
    if not same_shape(ids, gates):
        raise _Reject(match.gates, f"gates {tuple(gates)} and expert ids {tuple(ids)} differ in shape")
    if not same(_count(x), _count(ids)):
        raise _Reject(match.ids, f"expert ids {tuple(ids)} are not one row per token of {tuple(x)}")


def _count(dims: tuple[Any, ...]) -> Any:
    total: Any = 1
    for d in dims[:-1]:
        total = total * d
    return total


def _expert_operand(scope: Scope, node: Node) -> str | None:
    """Dotted name of the stacked parameter that a product multiplies by, if it does."""
    if op_name(node) not in PRODUCTS:
        return None
    names = (_stacked(scope, operand) for operand in node.all_input_nodes)
    return next((name for name in names if name), None)


_KEEPS_WEIGHTS = frozenset(
    (
        *("reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "expand", "clone", "detach"),
        *("transpose", "permute", "t", "select", "narrow", "chunk", "split", "unbind", "stack", "cat"),
        *("to", "float", "bfloat16", "half", "type", "type_as", "mul", "div", "add", "sub", "neg"),
    )
)


def _stacked(scope: Scope, node: Node) -> str | None:
    """The name of what ``node`` holds if it is expert weights: made of parameters alone, and stacked at some point."""
    todo, seen, found, rooted = [node], {node}, None, False
    while todo:
        n = todo.pop()
        name = op_name(n)
        if n.op in ("placeholder", "get_attr"):
            root = n if n.op == "get_attr" else origin(scope, n)
            if root is None or not _is_model_state(root):
                return None
            label, rooted = dotted_name(root), True
        elif name in ("getitem", "index_select"):
            if len(shape(n.args[0]) or (0, 0, 0)) < 3:
                return None  # rows of a table, picked by ids, are activations
            label = n.name
        elif name in _KEEPS_WEIGHTS:
            label = n.name
        else:
            return None
        dims = shape(n)
        if dims is not None and len(dims) >= 3 and not same(dims[0], 1):
            found = label if n.op == "placeholder" or found is None else found
        new = [a for a in n.all_input_nodes if a not in seen and _carries_weight(a)]
        seen.update(new)
        todo += new
    return found if rooted else None  # numbers made of indices alone (positions) are no weights


def _carries_weight(operand: Node) -> bool:
    """Indices select weights without being weights."""
    value = fake(operand)
    return isinstance(value, tuple | list) or (isinstance(value, torch.Tensor) and value.dtype.is_floating_point)


def _hidden_product(module: GraphModule, call: Node) -> str | None:
    """An expert-shaped operation inside a higher-order operation that is no checkpoint (a branch, a loop, a map)."""
    for operand in call.all_input_nodes if isinstance(call.target, HigherOrderOperator) else ():
        body = getattr(module, str(operand.target), None) if operand.op == "get_attr" else None
        for node in body.graph.nodes if isinstance(body, GraphModule) else ():
            weights = [n for n in node.all_input_nodes if n.op == "placeholder" and len(shape(n) or ()) == 3]
            if op_name(node) in GROUPED or (op_name(node) in PRODUCTS and any(map(is_parameter, weights))):
                return f"{op_name(node)} {node.name}"
            found = _hidden_product(body, node)  # type: ignore[arg-type]
            if found is not None:
                return found
    return None


def _is_model_state(root: Node) -> bool:
    """A parameter, or a buffer of a module."""
    source = getattr(root.meta.get("grapharg"), "source", None)
    name = "" if source is None else source.name if isinstance(source.name, str) else source.name()
    return is_parameter(root) or "._buffers[" in name


def _with_unique_names(matches: list[Match]) -> list[Match]:
    """A block that the model runs twice gives two regions over the same parameters: ``name``, ``name#2``."""
    counts: dict[str, int] = {}
    named: list[Match] = []
    for match in matches:
        name = match.region.name
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > 1:
            match = replace(match, region=replace(match.region, name=f"{name}#{counts[name]}"))
        named.append(match)
    return named
