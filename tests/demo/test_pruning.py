"""Pruning a rollout's experts: on the committed warm start it matters which stay; the tool measures what it costs."""

from __future__ import annotations

import pytest
import torch

from tools.prune_experts import measure
from trace_compile import trace_compile
from trace_compile.demo import sft
from trace_compile.demo.presets import PRESETS, get_preset
from trace_compile.demo.rollouts import sample, train_batch
from trace_compile.pruning import pruning_report
from trace_compile.state.usage import PHASES, Usage


@pytest.mark.slow
def test_the_most_used_experts_are_the_ones_to_keep() -> None:
    preset = get_preset("cpu")
    plain, _ = sft.load(preset)
    model = trace_compile(plain, recipe="qat", compiler=preset.compiler)
    whole = model.rollout()
    with model.trace(record="ranges") as trace:
        rollouts = sample(whole, preset.task, preset.task.problems("eval", 0, 0, 8), preset.device)
    batch = train_batch(rollouts, torch.zeros(8), torch.arange(8))
    inverted = Usage(*({r: -c for r, c in trace.usage[phase].items()} for phase in PHASES))
    reports = []
    for usage in (trace.usage, inverted):
        pruned = model.rollout(keep=usage.top(12, together=True))
        reports.append(pruning_report(model, whole, pruned, input_ids=batch.ids, attention_mask=batch.attention))
        assert reports[-1].pruned_bytes * preset.shape.experts == reports[-1].full_bytes * 12
        assert reports[-1].tokens == int((batch.attention[:, 1:] * batch.attention[:, :-1]).sum())
    most, least = reports
    assert most.full == least.full and most.full.max < 1e-4  # trainer and whole twin: the same arithmetic
    assert 0 < most.pruning.mean < 0.8 * least.pruning.mean and most.pruned.k3 < least.pruned.k3


@pytest.mark.slow
def test_the_tool_measures_every_share() -> None:
    preset = PRESETS["micro"]
    model = trace_compile(sft.build_model(preset, 0), recipe="qat", compiler=preset.compiler)
    whole, less = measure(model, preset, preset.task.problems("eval", 0, 0, 4), (1.0, 0.6))
    assert whole.gap.max < 1e-3 < less.gap.mean and less.packed_bytes < whole.packed_bytes
    assert max(less.experts) < max(whole.experts) <= preset.shape.experts and min(less.experts) >= preset.shape.top_k
