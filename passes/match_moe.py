"""Finding mixture-of-experts regions: pure, structural, and never silent.

Anchored on the expert GEMMs (grouped, batched over gathered weights, dense over all experts, or one product per expert:
``loops``). Around them the matcher collects the tokens, expert ids and gates, the activation between the GEMMs,
biases, the parameters' layout and the node that holds the weighted sum. Nothing in between may be used by anything
outside: such a user would go on reading unquantized values. Every product with a stacked expert parameter that ends up
in no region is returned as a :class:`NoMatch` with the reason, the node and the line of the model.

Where the experts are understood and their dispatch is not (tokens dropped over a capacity, permuted by an unknown
kernel), the region holds the experts alone: their rows are its tokens, one expert each (``MoERegion.slots`` says why).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..ops.activation import Activation
from ..ops.weights import WeightLayout
from .activations import Translator, bends
from .dense import DenseGemm, DenseRows, dense_gemm
from .experts import Gemm, expert_gemm, result_of
from .graph import Scope, body_of, fake, line_of, op_name, same, same_shape, scopes, shape
from .halves import Half, is_pre
from .inventory import expert_operand, hidden_product, weights_of
from .loops import match_loops
from .matching import Chosen, Dispatch, Match, Reject, Routed, Slots, Sorted, check_private, interior_of, param
from .meaning import TOKEN_MAJOR, Meaning, PerPair, PerToken
from .region import MoERegion, NoMatch

AnyGemm = Gemm | DenseGemm


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
    of = Meaning(scope)
    pending: dict[Node, AnyGemm] = {}
    matches, refused = match_loops(scope)
    for node in scope.graph.nodes:  # in order: what a later GEMM means depends on earlier ones
        found = expert_gemm(of, node) or dense_gemm(of, node)
        if isinstance(found, NoMatch):
            refused[node] = found
        elif found is not None:
            pending[node] = found
            of.define(node, result_of(found) if isinstance(found, Gemm) else DenseRows(found))
    for node in [n for n in scope.graph.nodes if n in pending]:
        gemm = pending.get(node)
        if gemm is None or _enters(of, gemm):
            continue
        try:
            block = _read(of, gemm)
            match = _match(scope, of, block)
        except Reject as reject:
            known, why = reject.no_match, getattr(gemm, "unknown", "")
            refused[node] = known if why in known.reason else replace(known, reason=f"{why}, and {known.reason}")
            continue
        matches.append(match)
        for used in (node, *(up.node for up in block.ups)):
            pending.pop(used, None)
            refused.pop(used, None)
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
    matches.sort(key=lambda match: order[match.output])
    return matches, [
        replace(refused[n], where=refused[n].where or line_of(n), weights=weights_of(scope, n))
        for n in sorted(refused, key=order.__getitem__)
    ]


def _enters(of: Meaning, gemm: AnyGemm) -> bool:
    """Whether a GEMM takes the tokens (rather than what an activation made of another GEMM's result)."""
    return gemm.tokens is not None if isinstance(gemm, DenseGemm) else isinstance(of(gemm.rows), PerToken)


@dataclass(frozen=True)
class _Block:
    """The two projections and what lies between. ``ups`` are one GEMM, or gate's and up's; ``pre`` their results as the
    activation reads them."""

    ups: tuple[AnyGemm, ...]
    pre: tuple[Any, ...]
    down: AnyGemm
    activation: Activation
    interleaved: bool

    @property
    def up(self) -> AnyGemm:
        return self.ups[0]

    @property
    def limits(self) -> frozenset[int]:
        """Numbers of experts that ids were limited to before or at the GEMMs."""
        parts = (*self.pre, *self.ups, self.down)
        return frozenset().union(*(getattr(part, "experts", frozenset()) for part in parts))


def _read(of: Meaning, down: AnyGemm) -> _Block:
    """The block around a down projection."""
    value = of(down.rows)
    if isinstance(value, Half) or is_pre(value):
        raise Reject(down.node, "no activation stands between the two expert GEMMs")
    leaves = first_values(of, down.rows)
    ups = tuple(dict.fromkeys(v.gemm for v in leaves if not isinstance(v, Half)))
    if len(ups) == 2 and len(leaves) == 2:
        return _split_block(of, down, {up.node: value for up, value in zip(ups, leaves, strict=True)})
    pre: list[Any] = []

    def leaf(node: Node) -> str | None:
        meaning = of(node)
        if isinstance(meaning, Half):
            pre.append(meaning)
            return ("gate", "up")[meaning.part]
        if is_pre(meaning) and not any(isinstance(of(user), Half) for user in node.users):
            pre.append(meaning)
            return "x"
        return None

    gated = any(isinstance(v, Half) for v in leaves)
    activation = _program(down, leaf, gated)
    rows = {p.rows if isinstance(p, Half) else p for p in pre}
    interleaved = {p.interleaved for p in pre if isinstance(p, Half)}
    if len(rows) != 1 or len(interleaved) > 1 or {isinstance(p, Half) for p in pre} != {gated}:
        raise Reject(down.node, "the activation's inputs are not the two halves of one expert GEMM's result")
    (found,) = rows
    return _Block((found.gemm,), (found,), down, activation, interleaved == {True})


def _split_block(of: Meaning, down: AnyGemm, pre: dict[Node, Any]) -> _Block:
    """Gate and up from parameters of their own: gate is the one that a nonlinear function is applied to."""

    def program(roles: dict[Node, str]) -> Activation:
        def leaf(node: Node) -> str | None:
            meaning = of(node)
            return roles.get(meaning.gemm.node) if is_pre(meaning) else None

        return _program(down, leaf, True)

    first, second = pre
    activation = program({first: "gate", second: "up"})
    if bends(activation, "up") and not bends(activation, "gate"):
        first, second = second, first
        activation = program({first: "gate", second: "up"})
    rows = (pre[first], pre[second])
    gate, up = (r.gemm for r in rows)
    if type(gate) is not type(up) or not _same_rows(of, gate, up):
        raise Reject(down.node, f"gate {gate.node} and up {up.node} do not read the same rows")
    if gate.transposed != up.transposed or shape(gate.param) != shape(up.param):
        raise Reject(down.node, f"the parameters of gate {gate.node} and up {up.node} differ in layout or shape")
    if (rows[0].bias is None) != (rows[1].bias is None):
        raise Reject(down.node, f"one of gate {gate.node} and up {up.node} has a bias, the other has none")
    return _Block((gate, up), rows, down, activation, False)


def _same_rows(of: Meaning, a: Any, b: Any) -> bool:
    known = of(a.rows) is not None and of(a.rows) == of(b.rows)
    alike = a.rows.target == b.rows.target and a.rows.args == b.rows.args and a.rows.kwargs == b.rows.kwargs
    if not (a.rows is b.rows or known or (alike and a.rows.op != "placeholder")):
        return False
    if isinstance(a, DenseGemm):
        return a.expert_dim == b.expert_dim and a.gates == b.gates
    return a.ids is b.ids and a.order == b.order and a.ends is b.ends


def _program(down: AnyGemm, leaf: Any, gated: bool) -> Activation:
    activation = Translator(leaf).program(down.rows, gated=gated)
    if isinstance(activation, NoMatch):
        raise Reject(down.node, f"activation not understood: {activation}")
    return activation


def first_values(of: Meaning, node: Node) -> list[Any]:
    """The pre-activations, or halves of them, that ``node`` is computed from, in the order in which it reads them."""
    found: dict[Any, None] = {}
    todo, seen = [node], {node}
    while todo:
        n = todo.pop()
        value = of(n)
        if isinstance(value, Half) or is_pre(value):
            found[value] = None
        elif value is None:
            new = [a for a in reversed(n.all_input_nodes) if a not in seen]
            seen.update(new)
            todo += new
    return list(found)


# --- what the block's rows are ----------------------------------------------------------------------------------------


def _match(scope: Scope, of: Meaning, block: _Block) -> Match:
    try:
        return _by_token(scope, of, block)
    except Reject as reject:
        return _by_row(scope, of, block, reject)


def _by_token(scope: Scope, of: Meaning, block: _Block) -> Match:
    for gemm in (*block.ups, block.down):
        if isinstance(gemm, Gemm) and gemm.unknown:
            raise Reject(gemm.node, gemm.unknown)
    result, end = _combined(of, block.down)
    found = _operands(of, block, end)
    dispatch = Routed(found.x, found.ids, found.gates.source, found.gates.casts)
    _check_shapes(dispatch)
    top_k = int(shape(found.ids)[-1])  # type: ignore[index]
    slots = f"its input is scaled by the gates of a token's {top_k} experts" if found.weight_input and top_k > 1 else ""
    base = getattr(end, "base", None)
    return _finish(scope, block, dispatch, end, result, top_k, found.weight_input, slots, base)


def _by_row(scope: Scope, of: Meaning, block: _Block, unknown: Reject) -> Match:
    """The experts alone, each row with one expert. Raises ``unknown``, why tokens are not known, where that fails."""
    up, down = block.up, block.down
    if isinstance(up, DenseGemm) != isinstance(down, DenseGemm):
        raise unknown
    result, end = _plain_end(of, down)
    experts = shape(up.param)[0]  # type: ignore[index]
    if (block.limits | getattr(end, "experts", frozenset())) - {experts}:
        raise unknown
    dispatch: Dispatch
    if isinstance(up, DenseGemm) and isinstance(down, DenseGemm):
        rank = len(shape(up.rows) or ())
        if up.tokens is not None or up.gates is not None or up.expert_dim != down.expert_dim or end.stage != "dense":
            raise unknown
        dispatch = Slots(up.rows, up.expert_dim % rank)
    elif isinstance(up, Gemm) and isinstance(down, Gemm):
        if up.ids is not down.ids or up.order != down.order or up.ends is not down.ends or end.stage != "rows":
            raise unknown
        if up.ends is None and up.order != TOKEN_MAJOR:
            raise unknown
        dispatch = Chosen(up.rows, up.ids) if up.ends is None else Sorted(up.rows, up.ends)
    why = replace(unknown.no_match, where=unknown.no_match.where or line_of(down.node))
    return _finish(scope, block, dispatch, end, result, 1, False, str(why), None, unknown)


def _plain_end(of: Meaning, down: AnyGemm) -> tuple[Node, Any]:
    """The down projection's result with its bias, before anything is done with it."""
    node = down.node
    while len(node.users) == 1:
        (user,) = node.users
        value, before = of(user), of(node)
        mine = getattr(value, "gemm", None) == down and value.gates is None and not value.widened
        order = getattr(value, "order", None) == getattr(before, "order", None)
        if not mine or not order or value.stage not in ("column", "rows", "dense"):
            break
        node = user
    return node, of(node)


def _finish(
    scope: Scope,
    block: _Block,
    dispatch: Dispatch,
    end: Any,
    result: Node,
    top_k: int,
    weight_input: bool,
    slots: str,
    base: Node | None,
    otherwise: Reject | None = None,
) -> Match:
    inside: dict[Node, None] = {}
    for up in block.ups:
        inside |= dict.fromkeys(interior_of(up.node, result))
    interior = [n for n in scope.graph.nodes if n in inside]
    try:
        check_private(interior, {result})
        w13, w2 = tuple(up.param for up in block.ups), (block.down.param,)
        b13 = tuple(rows.bias for rows in block.pre if rows.bias is not None)
        b2 = (end.bias,) if end.bias is not None else ()
        region = _region(scope, block, (w13, w2, b13, b2), top_k, weight_input, slots)
    except Reject as reject:
        raise (otherwise or reject) from None
    return Match(scope, region, dispatch, w13, w2, b13, b2, result, tuple(interior), base)


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
            raise Reject(node, f"{node} is used by {names}; one step of the weighted sum was expected")
        following = of(users[0])
        if getattr(following, "gemm", None) != down:
            raise Reject(users[0], f"{op_name(users[0]) or users[0].op} is no known step from expert results to tokens")
        node = users[0]
    return node, value


@dataclass(frozen=True)
class _Operands:
    x: Node
    ids: Node
    gates: PerPair
    weight_input: bool


def _operands(of: Meaning, block: _Block, end: Any) -> _Operands:
    """Tokens, ids and gates. Checks that both GEMMs serve the same routing and that gates are applied once."""
    up, down = block.up, block.down
    if isinstance(up, DenseGemm) and isinstance(down, DenseGemm):
        return _dense_operands(up, down, block, end)
    if isinstance(up, DenseGemm) or isinstance(down, DenseGemm):
        raise Reject(down.node, "one expert GEMM runs over all experts, the other over chosen ones")
    tokens = of(up.rows)
    if not isinstance(tokens, PerToken):
        raise Reject(up.node, f"rows {up.rows} are not tokens gathered by their routing")
    if up.ids is not down.ids or up.order != down.order or tokens.order != up.order:
        raise Reject(
            down.node, f"the expert GEMMs are routed differently: {up.node} by {up.ids}, this one by {down.ids}"
        )
    experts, dtype = shape(up.param)[0], fake(up.param).dtype  # type: ignore[index]
    limits = tokens.experts | end.experts | block.limits
    if limits - {experts}:
        raise Reject(down.node, f"ids are limited to {sorted(limits)}, but there are {experts} experts")
    if any(cast != dtype for cast in tokens.casts):
        raise Reject(up.node, f"tokens are cast to {tokens.casts[0]} before a GEMM in {dtype}")
    if tokens.gates is not None and fake(tokens.source).dtype != dtype:
        raise Reject(up.node, f"gates scale tokens in {fake(tokens.source).dtype} before a GEMM in {dtype}")
    top_k = (shape(up.ids) or (None,))[-1]
    if not same(tokens.top_k, top_k):
        raise Reject(up.node, f"rows repeat each token {tokens.top_k} times, but {top_k} experts are chosen")
    gates: PerPair = _once(down.node, tokens.gates, end.gates)
    widened = gates if gates is tokens.gates else replace(gates, casts=(*gates.casts, *end.widened))
    return _Operands(tokens.source, down.ids, widened, gates is tokens.gates)


def _dense_operands(up: DenseGemm, down: DenseGemm, block: _Block, end: DenseRows) -> _Operands:
    if up.tokens is None:
        raise Reject(up.node, f"{up.rows} are not the tokens, the same for every expert")
    gates = _once(down.node, up.gates, end.gates)
    if gates is up.gates:
        # Experts that were not chosen got zeros: they must also give zeros for their sum not to matter.
        silent = not block.activation.evaluate(torch.zeros(1, 2)).any()
        if block.pre[0].bias is not None or end.bias is not None or not silent:
            raise Reject(down.node, "gates scale the input of experts that do not map zero to zero")
    return _Operands(up.tokens, gates.ids, gates.per_pair, gates is up.gates)


def _once(node: Node, on_input: Any, on_output: Any) -> Any:
    if (on_input is None) == (on_output is None):
        raise Reject(node, "no gate weights are applied" if on_output is None else "gate weights are applied twice")
    return on_input or on_output


def _region(
    scope: Scope, block: _Block, nodes: tuple[tuple[Node, ...], ...], top_k: int, weight_input: bool, slots: str
) -> MoERegion:
    up, down = block.up, block.down
    w13, w2 = (param(scope, made, gemm.node) for made, gemm in ((nodes[0], up), (nodes[1], down)))
    b13, b2 = (param(scope, made, down.node) if made else None for made in nodes[2:])
    e1, a1, c1 = shape(up.param)  # type: ignore[misc]
    e2, a2, c2 = shape(down.param)  # type: ignore[misc]
    n1, hidden = (c1, a1) if up.transposed else (a1, c1)
    out, width = (c2, a2) if down.transposed else (a2, c2)
    if e1 != e2 or out != hidden or block.activation.width(int(n1) * len(block.ups)) != width:
        raise Reject(down.node, f"parameter shapes {(e1, a1, c1)} and {(e2, a2, c2)} do not form one expert network")
    split = len(block.ups) == 2 and not w13.computed
    return MoERegion(
        name=w13.parameters[0].name.rpartition(".")[0] or w13.name,
        w13=w13,
        w2=w2,
        b13=b13,
        b2=b2,
        w13_layout=WeightLayout(transposed=up.transposed, interleaved=block.interleaved, split=split),
        w2_layout=WeightLayout(transposed=down.transposed),
        activation=block.activation,
        top_k=top_k,
        num_experts=int(e1),
        hidden=int(hidden),
        width=int(width),
        source=up.source,
        weight_input=weight_input,
        slots=slots,
    )


def _check_shapes(match: Routed) -> None:
    """One row of ids and gates per token."""
    x, ids, gates = shape(match.x), shape(match.ids), shape(match.gates)
    assert x is not None and ids is not None and gates is not None
    if fake(match.ids).dtype.is_floating_point:
        raise Reject(match.ids, f"expert ids {match.ids} are {fake(match.ids).dtype}")
    if not same_shape(ids, gates):
        raise Reject(match.gates, f"gates {tuple(gates)} and expert ids {tuple(ids)} differ in shape")
    if not same(_count(x), _count(ids)):
        raise Reject(match.ids, f"expert ids {tuple(ids)} are not one row per token of {tuple(x)}")


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
