"""What a value in a mixture-of-experts block means: the vocabulary, and how meanings are found.

Every way of writing the block arranges the same S = T*K *pairs* (token, choice) into rows, works on the rows, and
arranges them back. A small set of meanings is enough to follow any of them: "row r is token(r) of x", "row r is pair(r)
of the gates", "the permutation that sorted the ids", "group ends per expert". :class:`Meaning` computes them backwards
from a node by short rules, one or more per operation; an operation without a rule has no meaning (None), and the
matcher says so instead of guessing. Views, casts of indices and masks that keep a meaning are thereby looked through.

Rules state equalities, so a match is a proof: what is returned holds for every routing, not only for the traced one.
One kind of row is exempt, that of ids outside ``[0, E)`` (other ranks' experts): such rows are dropped by the masks
and group ends recognised here and by our op alike. A limit other than the block's own E is no such mask, so every limit
met on the way is kept in ``experts`` and compared with E at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .graph import Scope, fake, op_name, shape
from .parameters import parameters_of

Limits = frozenset[int]
Step = torch.dtype | str
"""A cast, or ``sigmoid`` or ``softmax`` over a token's choices."""
NO_LIMITS: Limits = frozenset()


@dataclass(frozen=True)
class Order:
    """How pairs are laid out in rows: token by token (``sort`` None), or as the node ``sort`` sorted ``ids``."""

    sort: Node | None = None
    ids: Node | None = None


TOKEN_MAJOR = Order()


@dataclass(frozen=True)
class PerPair:
    """Row r is ``source.reshape(S)[pair(r)]`` after each of ``casts`` in turn; ``source`` is ``[T, K]``."""

    source: Node
    order: Order = TOKEN_MAJOR
    casts: tuple[Step, ...] = ()
    experts: Limits = NO_LIMITS

    @property
    def integer(self) -> bool:
        return not fake(self.source).dtype.is_floating_point


@dataclass(frozen=True)
class PerToken:
    """Row r is ``source[pair(r) // top_k]``; with ``gates``, times the pair's gate."""

    source: Node
    order: Order
    top_k: int
    casts: tuple[torch.dtype, ...] = ()
    gates: PerPair | None = None
    experts: Limits = NO_LIMITS


@dataclass(frozen=True)
class PairIndex:
    """Row r holds pair(r)."""

    order: Order


@dataclass(frozen=True)
class TokenIndex:
    """Row r holds pair(r) // top_k."""

    order: Order
    top_k: int


@dataclass(frozen=True)
class Inverse:
    """Pair p holds the row that it has in ``order``."""

    order: Order


@dataclass(frozen=True)
class Iota:
    """0, 1, 2, ..."""


@dataclass(frozen=True)
class Sorted:
    """The (values, indices) of a sort of ``ids``."""

    order: Order
    ids: PerPair


@dataclass(frozen=True)
class Dropped:
    """Whether row r's expert lies at or above ``experts`` (or, ``inverted``, below)."""

    order: Order
    experts: int
    inverted: bool = False


@dataclass(frozen=True)
class OneHot:
    """``[S, E]``: 1 where the pair's id is the column."""

    ids: PerPair


@dataclass(frozen=True)
class Counts:
    """``[E]``: pairs per expert."""

    ids: Node
    experts: Limits


@dataclass(frozen=True)
class Offsets:
    """``[E]``: where each expert's rows end, when rows are sorted by expert."""

    ids: Node
    experts: Limits


@dataclass(frozen=True)
class Weight:
    """A stacked parameter ``[E, a, b]``, or what parameters make up, its last two dimensions ``swapped`` or not."""

    param: Node
    swapped: bool = False


@dataclass(frozen=True)
class Picked:
    """Row r is the stacked parameter's slice for the row's expert: ``param[ids[pair(r)]]``."""

    param: Node
    ids: Node
    order: Order
    experts: Limits
    swapped: bool = False


Value = Any
"""One of the meanings above, or one that another file adds."""


class Meaning:
    """Meanings of one graph's nodes, remembered. ``meaning(node)`` is None where no rule applies."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._known: dict[Node, Value] = {}

    def define(self, node: Node, value: Value) -> None:
        """States a meaning that does not follow from the operation alone."""
        self._known[node] = value

    def __call__(self, node: Any) -> Value:
        if not isinstance(node, Node):
            return None
        if node not in self._known:
            self._known[node] = None
            self._known[node] = self._derive(node)
        return self._known[node]

    def _derive(self, node: Node) -> Value:
        if node.op in ("placeholder", "get_attr"):
            return Weight(node) if len(shape(node) or ()) == 3 else None
        for rule in _RULES.get(op_name(node), ()):
            value = rule(self, node)
            if value is not None:
                return value
        made = len(shape(node) or ()) == 3 and fake(node).dtype.is_floating_point and parameters_of(self._scope, node)
        return Weight(node) if made else None


Rule = Callable[[Meaning, Node], Value]
_RULES: dict[str, list[Rule]] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operations; where there are several, the first that knows the case decides."""

    def register(function: Rule) -> Rule:
        for name in names:
            _RULES.setdefault(name, []).append(function)
        return function

    return register
