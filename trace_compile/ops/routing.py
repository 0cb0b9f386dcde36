"""Dispatch and combine: token order to expert order and back, with every size known before the data is.

A *slot* is (token, k), numbered ``token * K + k``. Sorting the slots by expert gives the S = T*K *rows* the grouped
GEMMs work on; rows of ids outside ``[0, E)`` (other ranks' experts, padding) sort behind the last group, and
``dropped`` marks them. Nothing here waits for the device, uses atomics on floats, or loops over experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OperandError

_MOST_ROWS = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Routing:
    """Invariants: ``inverse[order] == arange(S)``; ``expert`` is non-decreasing; group e is
    ``rows[offsets[e-1]:offsets[e]]`` (from 0 for e = 0); ``dropped[s]`` iff ``s >= offsets[E-1]``."""

    order: Tensor  # i64 [S]: row -> slot
    inverse: Tensor  # i64 [S]: slot -> row
    token: Tensor  # i64 [S]: row -> token
    expert: Tensor  # i64 [S]: row -> expert, E-1 for dropped rows so that it can index weights
    dropped: Tensor  # bool [S, 1]
    offsets: Tensor  # i32 [E]: end of each group

    @property
    def bounds(self) -> Tensor:
        """i64 [E + 1]: group e is ``bounds[e]:bounds[e+1]``."""
        return torch.cat([self.offsets.new_zeros(1), self.offsets]).long()

    @property
    def counts(self) -> Tensor:
        """i64 [E]: rows of each expert."""
        return self.bounds.diff()


def check_rows(expert_ids: Tensor) -> None:
    """Raises ``OperandError`` where ``expert_ids [T, K]`` make more rows than int32 can number."""
    tokens, top_k = expert_ids.shape
    if tokens * top_k > _MOST_ROWS:
        raise OperandError(
            f"{tokens} tokens with {top_k} experts each are {tokens * top_k} rows; they are numbered in int32, which "
            f"ends at {_MOST_ROWS}: split the batch"
        )


def route(expert_ids: Tensor, num_experts: int, *, stable: bool = True) -> Routing:
    """Sorts the slots of ``expert_ids i64 [T, K]`` by expert.

    ``stable`` keeps tokens in order within an expert. Without it the rows stand as plain ``torch.sort`` leaves them,
    which is what transformers uses: only so are sums over an expert's tokens equal to its sums bit for bit.
    Raises ``OperandError`` for more rows than int32 group ends can hold.
    """
    check_rows(expert_ids)
    ids = expert_ids.reshape(-1)
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    # A stable order is the same for any dtype, and a radix sort of two bytes takes a quarter of the time of eight.
    narrow = ids.short() if num_experts < torch.iinfo(torch.int16).max else ids
    _, order = torch.sort(narrow, stable=True) if stable else torch.sort(ids)
    offsets = torch.searchsorted(ids[order], torch.arange(num_experts, device=ids.device), right=True, out_int32=True)
    return routing_of(order, offsets, expert_ids.shape[1])


def routing_of(order: Tensor, offsets: Tensor, top_k: int) -> Routing:
    """The routing that has this ``order i64 [S]`` and these ``offsets i32 [E]`` (what a backward has saved)."""
    rows = torch.arange(order.shape[0], device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, rows)
    expert = torch.searchsorted(offsets.long(), rows, right=True)
    last = offsets.shape[0] - 1
    return Routing(
        order=order,
        inverse=inverse,
        token=order // top_k,
        expert=expert.clamp(max=last),
        dropped=(expert > last).unsqueeze(-1),
        offsets=offsets,
    )


def routed_tokens(routing: Routing, tokens: int, top_k: int) -> Tensor:
    """bool [T]: tokens with at least one route that is not dropped."""
    return ~routing.dropped[:, 0][routing.inverse].view(tokens, top_k).all(1)


def combine(rows: Tensor, routing: Routing, tokens: int, top_k: int) -> Tensor:
    """Sums ``rows [S, H]`` over each token's K slots, in slot order: ``[T, H]``."""
    return rows[routing.inverse].view(tokens, top_k, rows.shape[-1]).sum(dim=1)
