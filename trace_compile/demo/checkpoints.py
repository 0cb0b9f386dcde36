"""Exports the trained rollout, loads it back with transformers and compressed-tensors, and compares logits.

transformers computes a reloaded checkpoint with dequantized weights and unquantized activations. So it must equal, bit
for bit, a plain model whose expert weights went through the quantizer's definition; how far it is from the rollout that
was exported shows what the four bits of the rollout's activations cost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trace_compile.demo import sft
from trace_compile.demo.arms import Arm
from trace_compile.demo.result import ExportCheck
from trace_compile.demo.rollouts import Rollouts
from trace_compile.demo.task import Problem
from trace_compile.export import reload
from trace_compile.numerics import quantize

FORMATS = ("compressed-tensors", "bf16")


@torch.no_grad()
def check_exports(arm: Arm, problems: list[Problem], out: Path) -> list[ExportCheck]:
    """Write the arm's current policy to ``out/<format>`` and compare each reloaded checkpoint on sampled responses."""
    arm.refit()
    rollouts = arm.generate(problems, 0).rollouts
    references = {
        "quantized weights": _response_logits(_quantized(arm), rollouts),
        f"{arm.name} rollout": _response_logits(arm.twin, rollouts),
    }
    checks = []
    for format in FORMATS:
        written = arm.model.export(out / format, format=format, overwrite=True)
        logits = _response_logits(reload(out / format, dtype=arm.preset.dtype).to(arm.preset.device), rollouts)
        checks += [_compare(format, name, written.bytes, logits, reference) for name, reference in references.items()]
    return checks


def _quantized(arm: Arm) -> Any:
    """A plain model with the arm's weights, the experts' rounded to NVFP4 with one outer scale per expert."""
    model: Any = sft.build_model(arm.preset, 0, arm.preset.dtype)
    model.load_state_dict(arm.model.state_dict())
    for layer in model.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            weight.copy_(quantize(weight, outer="expert").dequantize())
    return model.eval()


def _response_logits(model: Any, rollouts: Rollouts) -> Tensor:
    """Logits f32 ``[n, V]`` from which each sampled response token would be drawn, by one full forward."""
    logits = model(
        input_ids=rollouts.ids,
        attention_mask=rollouts.attention,
        position_ids=rollouts.positions,
        use_cache=False,
    ).logits.float()
    return logits[:, rollouts.prompt_length - 1 : -1][rollouts.sampled]


def _compare(format: str, against: str, size: int, logits: Tensor, reference: Tensor) -> ExportCheck:
    error = logits - reference
    return ExportCheck(
        format=format,
        against=against,
        bytes=size,
        logits_max_error=error.abs().max().item(),
        logits_relative_error=(error.norm() / reference.norm()).item(),
        top1_agreement=(logits.argmax(-1) == reference.argmax(-1)).float().mean().item(),
    )
