"""Rollouts with fewer experts: what a twin needs to run them, and what they cost in agreement.

    with model.trace() as trace:
        rollout.generate(...)
    pruned = model.rollout(keep=trace.usage.covering(0.98, at_least=top_k))
    report = pruning_report(model, rollout, pruned, **batch)

Which experts are kept comes from the trace (``state.usage``); prompts and decoded tokens may keep different ones. The
packed weights hold the union; routers choose among those of the phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trace_compile.errors import PruningError
from trace_compile.losses import GapStats, gap_stats
from trace_compile.ops.weights import Packed
from trace_compile.passes.region import MoERegion
from trace_compile.state.usage import PHASES, Kept


class Pruned:
    """A ``Kept`` checked against a model's regions, as tensors on the device that asks."""

    def __init__(self, kept: Kept, regions: Sequence[MoERegion]) -> None:
        known = {region.name: region for region in regions}
        for phase in PHASES:
            for name, ids in kept[phase].items():
                _check(name, ids, known)
        names = [r.name for r in regions if any(r.name in kept[phase] for phase in PHASES)]
        self._masks: dict[str, dict[bool, Tensor]] = {}
        self._union: dict[str, Tensor] = {}
        for name in names:
            masks = {}
            for phase in PHASES:
                mask = torch.zeros(known[name].num_experts, dtype=torch.bool)
                mask[list(kept[phase].get(name, range(mask.numel())))] = True
                masks[phase == "decode"] = mask
            self._masks[name], self._union[name] = masks, (masks[False] | masks[True]).nonzero().flatten()
        self._placed: dict[tuple[str, str, bool, torch.device], Tensor] = {}

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """(region, number of packed experts)."""
        return tuple((name, ids.numel()) for name, ids in self._union.items())

    def select(self, region: str, packed: Packed) -> Packed:
        """The kept experts of a packed parameter."""
        if region not in self._union:
            return packed
        ids = self._union[region].to(packed.codes.device)
        return Packed(packed.codes[ids], packed.scales[ids], packed.outer[ids])

    def tensor(self, region: str, part: str, decoding: bool, device: torch.device) -> Tensor:
        """See ``Feed``; at a stable address."""
        key = (region, part, decoding and part == "allowed", device)
        if key not in self._placed:
            with torch.inference_mode(False):
                self._placed[key] = self._made(region, part, decoding).to(device)
        return self._placed[key]

    def _made(self, region: str, part: str, decoding: bool) -> Tensor:
        if part == "allowed":
            return self._masks[region][decoding]
        if part == "kept":
            return self._union[region]
        index = torch.full_like(self._masks[region][False], -1, dtype=torch.int64)
        index[self._union[region]] = torch.arange(self._union[region].numel())
        return index


def _check(name: str, ids: tuple[int, ...], known: dict[str, MoERegion]) -> None:
    if name not in known:
        raise PruningError(f"there is no region {name!r} to prune; regions: {', '.join(known)}")
    region = known[name]
    wrong = [e for e in ids if not 0 <= e < region.num_experts]
    if wrong or len(set(ids)) < len(ids):
        raise PruningError(f"{name} has experts 0 to {region.num_experts - 1}, each kept once; got {list(ids)}")
    if len(ids) < region.top_k:
        raise PruningError(
            f"{name} routes each token to {region.top_k} experts, so at least as many have to be kept, not {len(ids)}; "
            "raise the number, or at_least of Usage.covering"
        )


@dataclass(frozen=True)
class PruningReport:
    """What a pruned twin costs and saves on given tokens.

    full, pruned: statistics of ``log pi_train - log pi_rollout`` of the tokens for the whole and the pruned twin.
    pruning: of ``log pi_full - log pi_pruned``. full_bytes, pruned_bytes: packed expert weights. tokens: compared.
    """

    full: GapStats
    pruned: GapStats
    pruning: GapStats
    full_bytes: int
    pruned_bytes: int
    tokens: int


@torch.no_grad()
def pruning_report(
    model: Any,
    full: Any,
    pruned: Any,
    *,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    truncate: float = 5.0,
) -> PruningReport:
    """Score the next tokens of ``input_ids`` int64 [B, L] with the trainer, its twin and its pruned twin.

    One forward each; prompts and responses alike count as prompt tokens, so the experts kept for ``prefill`` are used.
    ``truncate``: for ``GapStats.clip_fraction``.
    """
    inputs = {"input_ids": input_ids}
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    real = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)

    def scores(module: Any) -> Tensor:
        out = module(**inputs)
        log_p = getattr(out, "logits", out)[:, :-1].float().log_softmax(-1)
        return log_p.gather(-1, input_ids[:, 1:, None])[..., 0][real]

    trainer, whole, less = scores(model), scores(full), scores(pruned)
    return PruningReport(
        full=gap_stats(trainer - whole, truncate),
        pruned=gap_stats(trainer - less, truncate),
        pruning=gap_stats(whole - less, truncate),
        full_bytes=full.packed_bytes,
        pruned_bytes=pruned.packed_bytes,
        tokens=int(real.sum()),
    )
