"""Noise on norm weights of a rollout, drawn anew at every refit; see ``recipes.Noise`` for how large it is.

What is added is a function of the recipe's seed, the weights version and the norm's name alone, so a run can be
repeated and the order in which graphs ask does not matter. Tensors keep their addresses.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class NormNoise:
    """The noise of one twin. ``sigma`` 0 until the first ``draw``."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._version = 0
        self.sigma = 0.0
        self._stacked: dict[tuple[tuple[str, ...], int, torch.device], Tensor] = {}

    def draw(self, sigma: float, version: int) -> None:
        """New noise of standard deviation ``sigma`` for weights of this version, written in place."""
        self.sigma, self._version = sigma, version
        with torch.inference_mode(False), torch.no_grad():
            for (norms, width, _), tensor in self._stacked.items():
                tensor.copy_(self._sample(norms, width))

    def stacked(self, norms: tuple[str, ...], width: int, device: torch.device) -> Tensor:
        """float32 [norms, width] on ``device``."""
        key = (norms, width, device)
        if key not in self._stacked:
            with torch.inference_mode(False):
                self._stacked[key] = self._sample(norms, width).to(device)
        return self._stacked[key]

    def _sample(self, norms: tuple[str, ...], width: int) -> Tensor:
        return torch.stack([self._one(name, width) for name in norms])

    def _one(self, name: str, width: int) -> Tensor:
        if self.sigma == 0:
            return torch.zeros(width)
        digest = hashlib.sha256(f"{self._seed}/{self._version}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(width, generator=generator) * self.sigma
