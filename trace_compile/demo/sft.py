"""The supervised warm start: worked-out solutions until the model is right on part of the tasks.

Stops on purpose while the policy still has entropy: a solved task has no gap between rollout and trainer to look at.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trace_compile.demo.optimizer import MasterAdamW
from trace_compile.demo.presets import Preset
from trace_compile.demo.task import PAD, ChainSums, solution_batch
from trace_compile.errors import TraceCompileError

WARM_START = Path(__file__).parent / "warmstart"
RECIPE = "recipe.json"
_WARM_UP = 50
_SHARD_BYTES = 14_000_000  # files that any repository takes


@dataclass(frozen=True)
class WarmStart:
    """Where a model's first weights come from, and how good they are.

    ``loss``: mean supervised loss of the last 20 steps, nats per solution token.
    """

    source: str
    seed: int
    steps: int
    batch: int
    learning_rate: float
    loss: float


def build_model(preset: Preset, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Qwen3-MoE of the preset's shape with random weights drawn from ``seed``, on the preset's device."""
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = preset.shape.config(preset.positions)
    config._experts_implementation = "grouped_mm"
    return cast(Qwen3MoeForCausalLM(config), dtype).to(preset.device)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` with its parameters, and nothing else, in ``dtype``: ``Module.to`` rounds rotary frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def supervised_loss(model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    """Mean ``-log p`` of solution tokens, a float32 scalar. ids i64 ``[B, L]`` right-padded, target bool ``[B, L]``."""
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long()).logits.float()
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -log_probs[target[:, 1:]].mean()


def train(
    preset: Preset, on_step: Callable[[int, float], None] = lambda step, loss: None
) -> tuple[nn.Module, WarmStart]:
    """Train the preset's model from scratch; ``on_step(step, loss)`` is called after every step.

    Computes in the preset's dtype on float32 masters, which the returned model consists of.
    """
    plan = preset.sft
    model = build_model(preset, plan.seed, preset.dtype)
    parameters = list(model.parameters())
    optimizer = MasterAdamW(parameters, plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    order = random.Random(plan.seed)
    losses: list[float] = []
    for step in range(plan.steps):
        ids, target = supervised_batch(preset.task, plan.seed, step, plan.batch, order)
        loss = supervised_loss(model, ids.to(preset.device), target.to(preset.device))
        loss.backward()
        optimizer.step(plan.learning_rate * _schedule(step, plan.steps))
        losses.append(loss.item())
        on_step(step, losses[-1])
    optimizer.adopt()
    last = losses[-20:]
    start = WarmStart("from scratch", plan.seed, plan.steps, plan.batch, plan.learning_rate, sum(last) / len(last))
    return model, start


def supervised_batch(task: ChainSums, seed: int, step: int, batch: int, order: random.Random) -> tuple[Tensor, Tensor]:
    """Batch ``step`` of the supervised stream ``seed``: ids and target mask, cut to the longest row."""
    problems = task.problems("sft", seed, step * batch, batch)
    ids, target = solution_batch(problems, order, task.prompt_length + task.response_length)
    longest = int((ids != PAD).sum(1).max())
    return ids[:, :longest], target[:, :longest]


def save(model: nn.Module, start: WarmStart, measured: dict[str, float], path: Path) -> None:
    """Write ``model`` in bfloat16 and transformers' format, and beside it the recipe and what was ``measured``."""
    half: Any = cast(model, torch.bfloat16)
    half.save_pretrained(path, max_shard_size=_SHARD_BYTES)
    (path / RECIPE).write_text(json.dumps({**asdict(start), **measured}, indent=1) + "\n")


def load(preset: Preset, path: Path = WARM_START) -> tuple[nn.Module, WarmStart]:
    """The warm start in ``path``, float32, on the preset's device. Raises ``TraceCompileError`` if it does not fit."""
    from transformers import Qwen3MoeForCausalLM

    if not (path / RECIPE).exists():
        raise TraceCompileError(f"no warm start in {path}; run with --from-scratch, which trains one")
    recipe = json.loads((path / RECIPE).read_text())
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = preset.shape.config(preset.positions)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_experts", "moe_intermediate_size"):
        found, wanted = getattr(model.config, name), getattr(expected, name)
        if found != wanted:
            raise TraceCompileError(f"the warm start in {path} has {name} {found}, preset {preset.name!r} {wanted}")
    fields = {name: recipe[name] for name in WarmStart.__dataclass_fields__ if name != "source"}
    return model.to(preset.device), WarmStart(source="checkpoint", **fields)


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over 50 steps, cosine decay to a tenth."""
    return min(1.0, (step + 1) / _WARM_UP) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
