"""Raw inputs of recorded sites, kept beside a trace to measure drift with; never used in training.

They are float32 rows as the rollout's quantizers saw them, found again by the same token keys as the records.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class InputLog:
    """Appended call by call: keys int64 [n] and, per region, float32 [n, H], on the CPU."""

    keys: list[Tensor] = field(default_factory=list)
    values: dict[str, list[Tensor]] = field(default_factory=dict)

    def append(self, keys: Tensor, valid: Tensor, inputs: dict[str, Tensor]) -> None:
        """Keep the valid rows: keys int64 [T], valid bool [T], inputs float [T, H] per region."""
        self.keys.append(keys[valid].cpu())
        for region, x in inputs.items():
            self.values.setdefault(region, []).append(x.detach()[valid].float().cpu())

    def find(self, keys: Tensor, region: str) -> Tensor:
        """float32 [M, H]: the first row logged under each of ``keys`` int64 [M]; NaN where there is none."""
        known, order = torch.sort(torch.cat(self.keys), stable=True)
        values = torch.cat(self.values[region])[order]
        wanted = keys.cpu()
        at = torch.searchsorted(known, wanted).clamp(max=known.numel() - 1)
        return torch.where((known[at] == wanted)[:, None], values[at], torch.nan).to(keys.device)
