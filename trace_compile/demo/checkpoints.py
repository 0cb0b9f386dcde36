"""Exports the trained rollout, loads it back with transformers and compressed-tensors, and compares logits.

transformers computes a reloaded checkpoint with dequantized weights and unquantized activations, which is what a
rollout with weights alone in NVFP4 does: that one must agree up to summation order. The rollout with quantized
activations is compared too, which shows what the activations' four bits cost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trace_compile.api import trace_compile
from trace_compile.demo import sft
from trace_compile.demo.arms import Arm
from trace_compile.demo.result import ExportCheck
from trace_compile.demo.rollouts import sample
from trace_compile.demo.task import Problem
from trace_compile.export import reload

FORMATS = ("compressed-tensors", "bf16")


@torch.no_grad()
def check_exports(arm: Arm, problems: list[Problem], out: Path) -> list[ExportCheck]:
    """Write the arm's current policy to ``out/<format>`` and compare each reloaded checkpoint; float32 on the CPU.

    The logits are those of full forwards over responses sampled from the rollout itself.
    """
    arm.refit()
    rollouts = sample(arm.twin, arm.preset.task, problems, arm.preset.device)
    inputs = {"input_ids": rollouts.ids, "attention_mask": rollouts.attention, "use_cache": False}
    real = rollouts.attention.bool()
    weights_only: Any = sft.build_model(arm.preset, 0)
    weights_only.to(arm.preset.dtype).load_state_dict(arm.model.state_dict())
    twin = trace_compile(weights_only, recipe="w4a16", compiler=arm.preset.compiler).rollout()
    references = {"w4a16 rollout": twin(**inputs).logits[real], f"{arm.name} rollout": arm.twin(**inputs).logits[real]}
    checks = []
    for format in FORMATS:
        written = arm.model.export(out / format, format=format, overwrite=True)
        model: Any = reload(out / format).to(arm.preset.device)
        logits = model(**inputs).logits[real]
        checks += [_compare(format, name, written.bytes, logits, reference) for name, reference in references.items()]
    return checks


def _compare(format: str, against: str, size: int, logits: Tensor, reference: Tensor) -> ExportCheck:
    logits, reference = logits.float(), reference.float()
    error = logits - reference
    return ExportCheck(
        format=format,
        against=against,
        bytes=size,
        logits_max_error=error.abs().max().item(),
        logits_relative_error=(error.norm() / reference.norm()).item(),
        top1_agreement=(logits.argmax(-1) == reference.argmax(-1)).float().mean().item(),
    )
