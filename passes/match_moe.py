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
from torch.fx import GraphModule, Node

from ..ops.activation import Activation
from ..ops.weights import WeightLayout
from .activations import Translator
from .dense import DenseGemm, DenseRows, dense_gemm
from .experts import Gemm, expert_gemm, result_of
from .graph import (
    Scope,
    body_of,
    dotted_name,
    fake,
    line_of,
    op_name,
    origin,
    same,
    same_shape,
    scopes,
    shape,
)
from .halves import Half, is_pre
from .inventory import expert_operand, hidden_product
from .meaning import Meaning, PerPair, PerToken, Step
from .region import ExpertParam, MoERegion, NoMatch

AnyGemm = Gemm | DenseGemm


@dataclass(frozen=True)
class Match:
    """A region and the nodes of its graph that outlining needs.

    x ``[..., H]``, ids and gates ``[..., K]`` (gates go through ``gate_steps``), weights as placeholders of the
    level; ``output`` is the node that is replaced, ``interior`` the nodes that only serve it.
    """

    scope: Scope
    region: MoERegion
    x: Node
    ids: Node
    gates: Node
    gate_steps: tuple[Step, ...]
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
        operand = expert_operand(scope, node) if node not in taken and node not in refused else None
        if operand is not None:
            refused[node] = NoMatch(f"{op_name(node)} with the stacked parameter {operand} is no known form", node.name)
        if body_of(scope.module, node) is None and (inner := hidden_product(scope.module, node)) is not None:
            refused[node] = NoMatch(f"{inner} runs inside {op_name(node)}, whose body is not rewritten", node.name)
    order = {n: i for i, n in enumerate(scope.graph.nodes)}
    return matches, [
        replace(refused[n], where=refused[n].where or line_of(n)) for n in sorted(refused, key=order.__getitem__)
    ]


def _enters(of: Meaning, gemm: AnyGemm) -> bool:
    """Whether a GEMM takes the tokens (rather than what an activation made of another GEMM's result)."""
    return gemm.tokens is not None if isinstance(gemm, DenseGemm) else isinstance(of(gemm.rows), PerToken)


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
    found = _operands(of, up, down, rows, end, activation)
    region = _region(scope, up, down, rows, end, activation, interleaved == {True}, found)
    interior = _interior(up.node, result)
    _check_private(interior, result)
    match = Match(
        scope=scope,
        region=region,
        x=found.x,
        ids=found.ids,
        gates=found.gates.source,
        gate_steps=found.gates.casts,
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


@dataclass(frozen=True)
class _Operands:
    x: Node
    ids: Node
    gates: PerPair
    weight_input: bool


def _operands(of: Meaning, up: AnyGemm, down: AnyGemm, rows: Any, end: Any, activation: Activation) -> _Operands:
    """Tokens, ids and gates. Checks that both GEMMs serve the same routing and that gates are applied once."""
    if isinstance(up, DenseGemm) and isinstance(down, DenseGemm):
        return _dense_operands(up, down, rows, end, activation)
    if isinstance(up, DenseGemm) or isinstance(down, DenseGemm):
        raise _Reject(down.node, "one expert GEMM runs over all experts, the other over chosen ones")
    tokens = of(up.rows)
    if not isinstance(tokens, PerToken):
        raise _Reject(up.node, f"rows {up.rows} are not tokens gathered by their routing")
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
    gates: PerPair = _once(down.node, tokens.gates, end.gates)
    widened = gates if gates is tokens.gates else replace(gates, casts=(*gates.casts, *end.widened))
    return _Operands(tokens.source, down.ids, widened, gates is tokens.gates)


def _dense_operands(up: DenseGemm, down: DenseGemm, rows: Any, end: DenseRows, activation: Activation) -> _Operands:
    if up.tokens is None:
        raise _Reject(up.node, f"{up.rows} are not the tokens, the same for every expert")
    gates = _once(down.node, up.gates, end.gates)
    if gates is up.gates:
        # Experts that were not chosen got zeros: they must also give zeros for their sum not to matter.
        silent = not activation.evaluate(torch.zeros(1, 2)).any()
        if rows.bias is not None or end.bias is not None or not silent:
            raise _Reject(down.node, "gates scale the input of experts that do not map zero to zero")
    return _Operands(up.tokens, gates.ids, gates.per_pair, gates is up.gates)


def _once(node: Node, on_input: Any, on_output: Any) -> Any:
    if (on_input is None) == (on_output is None):
        raise _Reject(node, "no gate weights are applied" if on_output is None else "gate weights are applied twice")
    return on_input or on_output


def _region(
    scope: Scope,
    up: AnyGemm,
    down: AnyGemm,
    rows: Any,
    end: Any,
    activation: Any,
    interleaved: bool,
    found: _Operands,
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
    return MoERegion(
        name=w13.name.rpartition(".")[0] or w13.name,
        w13=w13,
        w2=w2,
        b13=b13,
        b2=b2,
        w13_layout=WeightLayout(transposed=up.transposed, interleaved=interleaved),
        w2_layout=WeightLayout(transposed=down.transposed),
        activation=activation,
        top_k=int(shape(found.ids)[-1]),  # type: ignore[index]
        num_experts=int(e1),
        hidden=int(hidden),
        width=int(width),
        source=up.source,
        weight_input=found.weight_input,
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
