"""The controlled sweep: every arm on the same tokens, with drift from one source at a time.

The rollout of each arm decodes the same responses with the weights of the warm start; the trainer then scores them with
weights some optimizer steps ahead, or with another attention implementation. Per point: drift of the experts' inputs,
the log-prob gap, mismatches, and two figures on what guidance hides: the importance ratio's bias (guided minus unguided
log-probabilities of the same trainer) and the policy gradient against that of the unquantized trainer at the same
weights on the same tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tools.experiments.fp4_rl.arms import Spec
from trace_compile.demo.arms import Arm, Generated
from trace_compile.demo.grpo import group_advantages, policy_loss
from trace_compile.demo.loop import SWEEP_SEED, Start, problems
from trace_compile.demo.presets import Preset
from trace_compile.demo.rollouts import TrainBatch, token_log_probs


def sweep(spec: Spec, start: Start, reference: Arm) -> list[dict[str, Any]]:
    """The points of one arm. ``reference``: an unquantized arm, whose gradient is the yardstick."""
    preset, points = start.preset, []
    arm = spec.build(preset)
    arm.restart(start.ahead[0])
    generated = arm.generate(problems(preset, SWEEP_SEED, 0), SWEEP_SEED, start.responses)
    unquantized = _rollout(reference, start)
    advantages = group_advantages(generated.rollouts.rewards, preset.rl.group_size)
    for source in ("optimizer steps", "eager attention"):
        if source == "eager attention":
            arm.model.set_attn_implementation("eager")
        for steps, weights in start.ahead.items():
            if source == "eager attention" and steps not in (0, 1):
                continue
            arm.load(weights)
            shuffle = torch.Generator().manual_seed(0)
            batches = arm.batches(generated, advantages, shuffle)
            old = arm.score(generated, batches)
            gap, alignment = arm.gap(batches, old), arm.align(generated, batches)
            point: dict[str, Any] = {"arm": spec.name, "source": source, "steps": steps}
            point |= {"drift": alignment.drift, "gap_mean": gap.mean, "gap_max": gap.max, "k1": gap.k1, "k3": gap.k3}
            point |= {"mismatch_before": alignment.mismatch_before, "mismatch_after": alignment.mismatch_after}
            point |= {"adjacent": alignment.adjacent, "distance": alignment.distance}
            point |= _hidden(arm, generated, batches, old)
            if source == "optimizer steps":
                point |= _gradients(arm, generated, batches, old, reference, unquantized, weights)
            points.append(point)
    return points


def _rollout(reference: Arm, start: Start) -> Generated:
    reference.restart(start.ahead[0])
    return reference.generate(problems(start.preset, SWEEP_SEED, 0), SWEEP_SEED, start.responses, measure=False)


def _hidden(arm: Arm, generated: Generated, batches: list[TrainBatch], old: list[Tensor]) -> dict[str, float | None]:
    """How guidance moves the trainer's log-probabilities: mean and mean absolute, guided minus unguided."""
    if generated.guidance is None:
        return {"guided_shift_mean": None, "guided_shift_abs": None}
    arm.model.guide(None)
    free = [token_log_probs(arm.model, batch).detach() for batch in batches]
    shift = torch.cat([(a - b)[batch.loss_mask] for a, b, batch in zip(old, free, batches)])
    return {"guided_shift_mean": shift.mean().item(), "guided_shift_abs": shift.abs().mean().item()}


def _gradients(
    arm: Arm,
    generated: Generated,
    batches: list[TrainBatch],
    old: list[Tensor],
    reference: Arm,
    unquantized: Generated,
    weights: dict[str, Tensor],
) -> dict[str, float | None]:
    """Cosine and norm ratio of the arm's policy gradient to the unquantized one: same tokens, weights, advantages.

    None where no response earned more than its group.
    """
    reference.load(weights)
    rollout = unquantized.rollouts
    advantages = group_advantages(rollout.rewards, arm.preset.rl.group_size)
    theirs = reference.batches(unquantized, advantages, torch.Generator().manual_seed(0))
    arm.model.guide(generated.guidance)
    mine = _gradient(arm, batches, old, arm.preset)
    yardstick = _gradient(reference, theirs, reference.score(unquantized, theirs), arm.preset)
    if not mine.any() or not yardstick.any():
        return {"gradient_cosine": None, "gradient_norm_ratio": None}
    cosine = (mine @ yardstick) / (mine.norm() * yardstick.norm())
    return {"gradient_cosine": cosine.item(), "gradient_norm_ratio": (mine.norm() / yardstick.norm()).item()}


def _gradient(arm: Arm, batches: list[TrainBatch], old: list[Tensor], preset: Preset) -> Tensor:
    """The policy gradient, float32, flat."""
    for batch, before in zip(batches, old):
        new = token_log_probs(arm.model, batch)
        loss = policy_loss(
            new,
            before,
            batch.rollout_log_probs,
            batch.advantages,
            batch.loss_mask,
            clip=preset.rl.clip,
            truncate=preset.rl.truncate,
        )
        loss.backward()
    parameters = [p for p in arm.model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.float().flatten() for p in parameters])
    for parameter in parameters:
        parameter.grad = None
    return flat
