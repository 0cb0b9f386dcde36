"""Names a token position by the ids before it, so that records survive re-batching, shuffling, padding and packing.

A causal model's activation at a position is a function of the ids up to that position (and of the weights). The key of
a prefix ``id_0 .. id_n`` is

    key = mix(seed + sum_j mix(mix(id_j) + GOLDEN * (j + 1)))        (all arithmetic modulo 2^64)

with ``mix`` the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), j
the index among the *real* tokens of the sequence, and seed 0 or ``mix(trajectory_id + TRAJECTORY)``. A sum of mixed
(id, index) pairs is as good as a rolling polynomial, but it is one cumulative sum, needs no loop, and continues from a
single number per sequence while decoding. Unlike a polynomial it has no algebraic collisions modulo 2^64 (Thue-Morse).

Invariants: padding never enters a key and is never valid; nothing here reads a value back from the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_compile.errors import GuidanceError


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)
TRAJECTORY = _signed(0xD1B54A32D192ED03)
"""Keeps trajectory seeds apart from mixed ids; any odd constant would do."""


@dataclass(frozen=True)
class PrefixState:
    """Where each sequence of a batch stands after a call: all int64 [B].

    total: sum of the mixed pairs so far; count: real tokens so far; position: position id of the last real token.
    With packed rows it describes the last sequence of each row.
    """

    total: Tensor
    count: Tensor
    position: Tensor


def prefix_keys(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    start: PrefixState | None = None,
) -> tuple[Tensor, Tensor, PrefixState]:
    """Keys of all prefixes in a batch.

    input_ids: integer [B, L]. attention_mask: bool or integer [B, L], nonzero = real token; with ``start`` it may cover
    earlier tokens as well ([B, >= L]), as caches need it. position_ids: integer [L] or [B or 1, L]; a real token whose
    position does not exceed the one before it starts a new packed sequence. trajectory_ids: integer [B] or [B, L], join
    the key. start: the state of the call before, when ``input_ids`` continue it.

    Returns keys int64 [B, L] (0 at padding), valid bool [B, L], and the state after the call.
    Raises ``GuidanceError`` for shapes from which positions cannot be read (4-D masks, several position axes).
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise GuidanceError(
            f"token ids must be integers [B, L], got {input_ids.dtype} {tuple(input_ids.shape)}; inputs that are not "
            "token ids (embeddings, images) cannot be keyed by prefix"
        )
    batch, length = input_ids.shape
    ids = input_ids.to(torch.int64)
    valid = _real_tokens(attention_mask, ids, continued=start is not None)
    if start is None:
        zero = ids.new_zeros(batch)
        start = PrefixState(zero, zero, zero - 1)
    elif start.total.shape != (batch,):
        raise GuidanceError(f"the prefix state is for {tuple(start.total.shape)} sequences, the ids for {batch}")
    if length == 0:
        return ids, valid, start

    ones = valid.to(torch.int64)
    count = torch.cumsum(ones, 1) + start.count[:, None]
    if position_ids is None:
        positions, restart = count - 1, None
    else:
        positions = _expand(position_ids, "position_ids", batch, length).to(torch.int64)
        restart = _restarts(positions, valid, start.position)

    index = count - 1 - _before_start(count - ones, restart)
    pair = torch.where(valid, _mix(_mix(ids) + GOLDEN * (index + 1)), 0)
    total = torch.cumsum(pair, 1) + start.total[:, None]
    prefix = total - _before_start(total - pair, restart)

    seed = 0 if trajectory_ids is None else _mix(_trajectories(trajectory_ids, batch, length) + TRAJECTORY)
    keys = torch.where(valid, _mix(prefix + seed), 0)
    # Padding keeps the running numbers, so the last column always speaks for the last real token.
    last = _last_real(valid)
    position = torch.where(last[:, -1] < 0, start.position, _take(positions, last[:, -1:]).squeeze(1))
    return keys, valid, PrefixState(prefix[:, -1], index[:, -1] + 1, position)


def positions_from_cu_seqlens(cu_seqlens: Tensor, length: int) -> Tensor:
    """Position ids int64 [1, L] of one packed row from sequence boundaries ``[0, n_0, n_0 + n_1, ...]`` [S + 1]."""
    token = torch.arange(length, device=cu_seqlens.device)
    bounds = cu_seqlens.to(torch.int64)
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    return (token - bounds[sequence])[None]


def _mix(x: Tensor) -> Tensor:
    """splitmix64 finaliser on int64 bit patterns; a bijection."""
    x = (x ^ _shift(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift(x, 27)) * _MULTIPLIER_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch shifts the sign in, the mask takes it out."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _real_tokens(mask: Tensor | None, ids: Tensor, *, continued: bool) -> Tensor:
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    length = ids.shape[1]
    wide = mask.dim() == 2 and mask.shape[0] == ids.shape[0] and mask.shape[1] > length
    if wide and continued:
        mask = mask[:, mask.shape[1] - length :]
    if mask.shape != ids.shape:
        hint = " (continue from the prefix state of the tokens before)" if wide else ""
        raise GuidanceError(f"attention_mask {tuple(mask.shape)} does not fit ids {tuple(ids.shape)}{hint}")
    return mask != 0


def _expand(tensor: Tensor, name: str, batch: int, length: int) -> Tensor:
    if (
        tensor.dim() not in (1, 2)
        or tensor.shape[-1] != length
        or (tensor.dim() == 2 and tensor.shape[0] not in (1, batch))
    ):
        raise GuidanceError(f"{name} {tuple(tensor.shape)} does not fit ids [{batch}, {length}]; give [L] or [B, L]")
    return tensor.expand(batch, length)


def _trajectories(tensor: Tensor, batch: int, length: int) -> Tensor:
    if tensor.shape == (batch,):
        tensor = tensor[:, None]
    elif tensor.shape != (batch, length):
        raise GuidanceError(f"trajectory_ids {tuple(tensor.shape)} must be [{batch}] or [{batch}, {length}]")
    return tensor.to(torch.int64)


def _restarts(positions: Tensor, valid: Tensor, position_before: Tensor) -> Tensor:
    """bool [B, L]: real tokens that do not stand behind the real token before them."""
    last = _last_real(valid)
    before = torch.cat((last.new_full((last.shape[0], 1), -1), last[:, :-1]), 1)
    previous = torch.where(before < 0, position_before[:, None], _take(positions, before))
    return valid & (positions <= previous)


def _last_real(valid: Tensor) -> Tensor:
    """int64 [B, L]: column of the last real token up to and including each column, -1 if none."""
    column = torch.arange(valid.shape[1], device=valid.device)
    return torch.cummax(torch.where(valid, column, -1), 1).values


def _take(x: Tensor, column: Tensor) -> Tensor:
    return torch.gather(x, 1, column.clamp(min=0))


def _before_start(exclusive: Tensor, restart: Tensor | None) -> Tensor | int:
    """Value of an exclusive running sum at the start of each token's own sequence; 0 in the first sequence of a row."""
    if restart is None:
        return 0
    first = _last_real(restart)
    return torch.where(first < 0, 0, _take(exclusive, first))
