"""Rollouts and the trainer's view of them, on a tiny plain model: the same tokens, the same log-probabilities."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from trace_compile.demo import sft
from trace_compile.demo.drift import InputProbe
from trace_compile.demo.presets import PRESETS
from trace_compile.demo.rollouts import Rollouts, sample, token_log_probs, train_batch
from trace_compile.demo.task import BEGIN, END, PAD, decode

MICRO = PRESETS["micro"]
PROBLEMS = MICRO.task.problems("rl", 0, 0, 12)


@cache
def model() -> Any:
    return sft.build_model(MICRO, 0).eval()


@cache
def rollouts() -> Rollouts:
    torch.manual_seed(0)
    return sample(model(), MICRO.task, PROBLEMS, "cpu")


def test_sampled_tokens_end_at_the_first_full_stop() -> None:
    found = rollouts()
    for row, keep in zip(found.ids[:, found.prompt_length :], found.sampled):
        stops = (row == END).nonzero().flatten().tolist()
        length = stops[0] + 1 if stops else len(row)
        assert keep.tolist() == [i < length for i in range(len(row))]
    assert found.log_probs.max() <= 0 and found.entropy > 0


def test_rewards_are_those_of_the_sampled_text() -> None:
    found = rollouts()
    responses = found.ids[:, found.prompt_length :]
    for problem, row, keep, reward in zip(PROBLEMS, responses, found.sampled, found.rewards):
        assert MICRO.task.reward(problem, decode(row[keep].tolist())) == pytest.approx(float(reward))


def test_trainer_rows_hold_the_same_tokens_at_the_other_edge() -> None:
    found = rollouts()
    rows = torch.tensor([7, 0, 3])
    batch = train_batch(found, torch.arange(12.0), rows)
    assert batch.advantages.tolist() == [7.0, 0.0, 3.0]
    for index, row in enumerate(rows):
        real = found.ids[row][found.attention[row].bool()]
        keep = batch.attention[index].bool()
        assert real[0] == BEGIN
        assert torch.equal(batch.ids[index][keep], real[:-1])
        assert torch.equal(batch.targets[index][keep], real[1:])
        assert bool((batch.ids[index][~keep] == PAD).all())
        sampled = found.sampled[row]
        assert torch.equal(batch.targets[index][batch.loss_mask[index]], found.ids[row, found.prompt_length :][sampled])
        assert torch.equal(batch.rollout_log_probs[index][batch.loss_mask[index]], found.log_probs[row][sampled])


def test_one_forward_gives_the_log_probabilities_of_decoding() -> None:
    batch = train_batch(rollouts(), torch.zeros(12), torch.randperm(12))
    with torch.no_grad():
        gap = (token_log_probs(model(), batch) - batch.rollout_log_probs)[batch.loss_mask]
    assert gap.numel() == int(rollouts().sampled.sum())
    assert gap.abs().max() < 1e-5


def test_forced_responses_are_decoded_instead_of_sampled() -> None:
    found = rollouts()
    torch.manual_seed(99)
    again = sample(model(), MICRO.task, PROBLEMS, "cpu", forced=found.ids[:, found.prompt_length :])
    assert torch.equal(again.ids, found.ids) and torch.equal(again.sampled, found.sampled)
    assert torch.equal(again.log_probs[again.sampled], found.log_probs[found.sampled])


def test_drift_is_zero_without_staleness_and_grows_with_the_weights() -> None:
    probe, weights = InputProbe(MICRO), model().state_dict()
    decoded = probe.decoded(weights, PROBLEMS, rollouts())
    drifts = []
    for scale in (0.0, 0.01, 0.1):
        torch.manual_seed(0)
        later = {name: w + scale * w.std() * torch.randn_like(w) for name, w in weights.items()}
        drifts.append(probe.drift(later, rollouts(), decoded))
    assert drifts[0] < 1e-5 < drifts[1] < drifts[2]
