"""Supervision, and the checkpoint that is committed with the package."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from trace_compile.demo import sft
from trace_compile.demo.presets import PRESETS, get_preset
from trace_compile.demo.rollouts import sample
from trace_compile.errors import TraceCompileError

MICRO = PRESETS["micro"]


def test_supervision_lowers_the_loss_and_repeats() -> None:
    preset = replace(MICRO, sft=replace(MICRO.sft, steps=30, learning_rate=1e-2))
    losses: list[float] = []
    model, warm = sft.train(preset, lambda step, loss: losses.append(loss))
    assert losses[-1] < losses[0] - 0.2
    assert warm.loss == pytest.approx(sum(losses[-20:]) / 20)
    again, _ = sft.train(preset)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_loss_counts_solution_tokens_only() -> None:
    model = sft.build_model(MICRO, 0)
    ids, target = sft.supervised_batch(MICRO.task, 0, 0, 8, random.Random(0))
    log_probs = model(input_ids=ids).logits.log_softmax(-1).detach()
    expected = [-float(log_probs[row, column - 1, ids[row, column]]) for row, column in target.nonzero().tolist()]
    assert sft.supervised_loss(model, ids, target).item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_checkpoint_round_trip_and_refusals(tmp_path: Path) -> None:
    model, warm = sft.train(MICRO)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    sft.save(model, warm, {"reward": 0.1}, tmp_path)
    loaded, found = sft.load(MICRO, tmp_path)
    assert replace(found, source=warm.source) == warm
    for a, b in zip(loaded.parameters(), before):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.bfloat16().float())
    with pytest.raises(TraceCompileError, match="hidden_size 32, preset 'cpu' 96"):
        sft.load(PRESETS["cpu"], tmp_path)
    with pytest.raises(TraceCompileError, match="--from-scratch"):
        sft.load(MICRO, tmp_path / "nowhere")


def test_the_committed_checkpoint_is_small_and_right_on_part_of_the_tasks() -> None:
    files = list(sft.WARM_START.iterdir())
    assert sum(file.stat().st_size for file in files) <= 4 << 20
    preset = get_preset("cpu")
    model, warm = sft.load(preset)
    assert warm == replace(warm, **asdict(preset.sft)), "made by another recipe than --from-scratch would repeat"
    recorded = json.loads((sft.WARM_START / sft.RECIPE).read_text())
    torch.manual_seed(0)
    sampled = sample(model, preset.task, preset.task.problems("eval", 0, 0, 128), "cpu")
    assert sampled.rewards.mean().item() == pytest.approx(recorded["reward"], abs=0.15)
    assert 0.3 < sampled.entropy < 0.6


def test_the_large_warm_start_fits_its_preset_and_any_repository() -> None:
    path = Path(__file__).parents[2] / "tools/experiments/fp4_rl/warmstart"
    sizes = [file.stat().st_size for file in path.iterdir()]
    assert sum(sizes) <= 48 << 20 and max(sizes) <= 16 << 20
    preset = replace(PRESETS["h200"], device="cpu")
    model, warm = sft.load(preset, path)
    assert warm == replace(warm, **asdict(preset.sft)), "made by another recipe than --from-scratch would repeat"
    recorded = json.loads((path / sft.RECIPE).read_text())
    assert 0.1 < recorded["reward"] < 0.6 and recorded["entropy"] > 0.3
    ids, target = sft.supervised_batch(preset.task, 1, 0, 16, random.Random(0))
    with torch.no_grad():
        assert sft.supervised_loss(model, ids, target).item() == pytest.approx(recorded["loss"], abs=0.08)


@pytest.mark.parametrize("name", ["", "gpu", "CPU"])
def test_unknown_presets_are_named(name: str) -> None:
    with pytest.raises(TraceCompileError, match=r"choose one of cpu, h200"):
        get_preset(name)
