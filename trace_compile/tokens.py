"""Which tokens a forward call carries, and under which keys their records lie.

Training forwards name their positions from their own ids and masks. Generation sees a few new ids at a time; what came
before is remembered per key-value cache, so that a decoded token gets the key it will have in the training batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trace_compile.errors import GuidanceError
from trace_compile.state.prefix import PrefixState, prefix_keys


@dataclass(frozen=True)
class Tokens:
    """Keys int64 [T] and validity bool [T] of the tokens of one call (T = batch x length, row-major)."""

    keys: Tensor
    valid: Tensor


def decoded_tokens(
    ids: Tensor, real: Tensor, state: PrefixState, ended: Tensor, eos: Tensor | None, trajectory_ids: Tensor | None
) -> tuple[Tokens, PrefixState, Tensor]:
    """Names one decoded token of each sequence: what every way of decoding does, without a look at the values.

    ids: integer [B, 1]. real: bool or integer [B, 1], zero where the caller knows padding. state, ended (bool [B]):
    where the sequences stand. eos: ids int64 [n] after which a sequence has ended (the id itself still counts).
    Returns the tokens, and where the sequences stand after them.
    """
    keys, valid, state = prefix_keys(ids, (real != 0) & ~ended[:, None], None, trajectory_ids, start=state)
    if eos is not None:
        ended = ended | torch.isin(ids, eos).any(1)
    return Tokens(keys.reshape(-1), valid.reshape(-1)), state, ended


@dataclass(frozen=True)
class _Cached:
    """What one cache holds: the prefix state of its sequences, which of them have ended, how many columns it has."""

    state: PrefixState
    ended: Tensor
    columns: int


class TokenTracker:
    """Names tokens call by call.

    Args:
        eos_token_ids: after one of these has been fed while decoding, a sequence counts as ended and what generation
            feeds in its place (padding) is neither hashed nor recorded. Several tokens at once (a prompt, the next turn
            of a dialogue) are the caller's: they are told from padding by the mask alone, whatever they hold.
    """

    def __init__(self, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.eos_token_ids = eos_token_ids
        self.generation_mask: Tensor | None = None
        """2-D mask that ``generate()`` works with, where the model itself is only given a 4-D one (static caches)."""
        self.trajectory_ids: Tensor | None = None
        """Ids [B], or one per group of samples, for the calls of one ``generate()``."""
        self._caches: weakref.WeakKeyDictionary[Any, _Cached] = weakref.WeakKeyDictionary()
        self._pending: _Cached | None = None

    def begin(self, arguments: Mapping[str, Any], trajectory_ids: Tensor | None) -> Tokens:
        """Keys of this call's tokens from the model's own arguments (``input_ids``, masks, positions, cache).

        Raises ``GuidanceError`` without token ids, and when a cache comes back that this tracker did not see filled.
        """
        ids = arguments.get("input_ids")
        if ids is None:
            raise GuidanceError(
                "tokens are named by the ids before them, and this call has no input_ids (inputs_embeds, images?); "
                "call with input_ids, or turn tracing and guidance off (model.guide(None))"
            )
        if ids.dim() == 1:
            ids = ids[None]
        cache = arguments.get("past_key_values")
        filled = 0 if cache is None else int(cache.get_seq_length())
        before = self._caches.get(cache) if filled else None
        if filled and (before is None or before.columns != filled or before.state.total.shape[0] != ids.shape[0]):
            raise GuidanceError(
                f"the cache holds {filled} tokens that were not seen here, so the new ones cannot be named; start "
                "generation inside `with model.trace()`, without beam search, assisted decoding or a prefix cache"
            )
        mask = arguments.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            mask = self.generation_mask
            if mask is None and before is None:
                raise GuidanceError(
                    "a prepared attention_mask does not say which tokens are padding, so they cannot be named; pass "
                    "the 2-D mask [batch, length]"
                )
        if trajectory_ids is None and self.trajectory_ids is not None:
            trajectory_ids = self.trajectory_ids.repeat_interleave(ids.shape[0] // self.trajectory_ids.shape[0], 0)
        if before is not None and ids.shape[1] == 1:
            real = torch.ones_like(ids) if mask is None else mask[:, -1:]
            tokens, state, ended = decoded_tokens(
                ids, real, before.state, before.ended, self._eos(ids.device), trajectory_ids
            )
        else:
            # Positions tell packed sequences apart; with a cache they only repeat what it says.
            positions = arguments.get("position_ids") if cache is None else None
            start = None if before is None else before.state
            keys, valid, state = prefix_keys(ids, mask, positions, trajectory_ids, start=start)
            tokens = Tokens(keys.reshape(-1), valid.reshape(-1))
            ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        self._pending = _Cached(state, ended, filled + ids.shape[1])
        return tokens

    def _eos(self, device: torch.device) -> Tensor | None:
        return torch.tensor(self.eos_token_ids, device=device) if self.eos_token_ids else None

    def end(self, arguments: Mapping[str, Any], outputs: Any) -> None:
        """Remember where the sequences stand, under the cache that the model filled."""
        cache = getattr(outputs, "past_key_values", None)
        if cache is None:
            cache = arguments.get("past_key_values")
        if cache is not None and self._pending is not None:
            self._caches[cache] = self._pending
        self._pending = None


def id_tuple(ids: Any) -> tuple[int, ...]:
    """Token ids as configurations give them: one, several, a tensor, or none."""
    if ids is None:
        return ()
    if isinstance(ids, Tensor):
        ids = ids.flatten().tolist()
    return tuple(int(i) for i in ids) if isinstance(ids, (list, tuple)) else (int(ids),)
