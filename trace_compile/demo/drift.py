"""Drift of the experts' inputs for an arm whose rollout quantizes nothing, so that no record holds them.

A plain, uncompiled copy of the model decodes the rollout's own tokens with the rollout's weights, and reads them again
in one forward with the trainer's weights; hooks take the inputs of the experts in both. The layers are those that the
other arms record, so that all arms stand on one axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trace_compile.demo import sft
from trace_compile.demo.presets import Preset
from trace_compile.demo.rollouts import Rollouts, sample
from trace_compile.demo.task import Problem

Inputs = list[Tensor]
"""Inputs of the experts, float32 ``[B, P+R-1, H]`` per layer."""


class InputProbe:
    """Reads the inputs of the experts in the last half of the layers of a plain model of the preset's shape."""

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        model: Any = sft.build_model(preset, 0, preset.dtype)
        self._model, layers = model, model.model.layers
        self._seen: list[Inputs] = []
        for layer in layers[len(layers) - round(len(layers) / 2) :]:
            calls: Inputs = []
            self._seen.append(calls)
            layer.mlp.experts.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args[0].float()))

    @torch.no_grad()
    def decoded(self, weights: Mapping[str, Tensor], problems: list[Problem], rollouts: Rollouts) -> Inputs:
        """Inputs while decoding the tokens of ``rollouts``, sampled for ``problems``, token by token."""
        self._start(weights)
        responses = rollouts.ids[:, rollouts.prompt_length :]
        sample(self._model, self._preset.task, problems, self._preset.device, forced=responses)
        return self._collect(len(problems))

    @torch.no_grad()
    def drift(self, weights: Mapping[str, Tensor], rollouts: Rollouts, decoded: Inputs) -> float:
        """Mean over layers of ``||x - x_rollout|| / ||x_rollout||`` over real tokens, ``x`` by one full forward."""
        self._start(weights)
        mask, positions = rollouts.attention[:, :-1], rollouts.positions[:, :-1]
        self._model(input_ids=rollouts.ids[:, :-1], attention_mask=mask, position_ids=positions, use_cache=False)
        real = mask.bool() & rollouts.attention[:, 1:].bool()  # a last token was never fed to the rollout
        pairs = [(x[real], y[real]) for x, y in zip(self._collect(len(mask)), decoded)]
        return sum(float((x - y).norm() / y.norm()) for x, y in pairs) / len(pairs)

    def _start(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(weights)
        for calls in self._seen:
            calls.clear()

    def _collect(self, rows: int) -> Inputs:
        return [torch.cat([x.reshape(rows, -1, x.shape[-1]) for x in calls], 1) for calls in self._seen]
