"""What users do that nobody planned for: errors half-way, hidden writes, inference mode, copies, several models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.faults.parts import assert_same, batch, generate, gradients
from tests.tiny import qwen3
from trace_compile import trace_compile
from trace_compile.errors import GuidanceError, NonFiniteWeightError, TraceCompileError
from trace_compile.model import session_of

TOKENS = {name: value for name, value in batch().items() if name != "labels"}


@pytest.fixture(scope="module")
def shared() -> tuple[Any, Any]:
    """One model with recipe trace and its twin. Tests leave it usable: that is what they are about."""
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="trace")
    return model, model.rollout()


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(**TOKENS).logits


def down(model: Any) -> nn.Parameter:
    return model.model.layers[0].mlp.experts.down_proj


def test_a_model_of_one_layer_is_guided(shared: tuple[Any, Any]) -> None:
    """Half of one layer rounds to none."""
    model, rollout = shared
    with model.trace() as trace:
        rollout(**TOKENS)
    assert [site.region for site in trace.layout.sites] == ["model.layers.0.mlp.experts"]
    model.guide(trace)
    assert torch.equal(logits(model), logits(rollout))
    model.guide(None)


@pytest.mark.parametrize("fused", [True, False])
def test_every_step_of_an_optimizer_reaches_both_graphs(shared: tuple[Any, Any], fused: bool) -> None:
    """Fused optimizers leave version counters alone."""
    model, rollout = shared
    optimizer = torch.optim.AdamW([down(model)], lr=1e-2, fused=fused)
    for _ in range(2):
        gradients(model, **batch())
        before = logits(model)
        optimizer.step()
        after = logits(model)
        assert not torch.equal(before, after)
        rollout.refit()
        assert torch.equal(logits(rollout), after)


def test_hidden_writes_reach_the_twin_at_refit_and_the_trainer_after_refresh(shared: tuple[Any, Any]) -> None:
    model, rollout = shared
    before = logits(rollout)
    down(model).data.mul_(1.5)
    rollout.refit()
    after = logits(rollout)
    assert not torch.equal(before, after)
    model.refresh()
    assert torch.equal(logits(model), after)
    down(model).data = down(model).data / 1.5  # another storage needs no refresh
    rollout.refit()
    assert torch.equal(logits(model), logits(rollout))
    assert not torch.equal(logits(model), after)


def test_a_refit_that_fails_changes_neither_weights_nor_scales() -> None:
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="trace")
    rollout = model.rollout(copy=True)
    with model.trace():
        rollout(**TOKENS)
    session, before, version = session_of(model), logits(rollout), rollout.weights_version
    kept = down(model)[3, 0, 0].item()
    with torch.no_grad():
        down(model)[3, 0, 0] = float("nan")
    with pytest.raises(NonFiniteWeightError, match="expert 3"):
        rollout.refit()
    assert not session.outer and session.pending_ranges is not None and rollout.weights_version == version
    assert torch.equal(logits(rollout), before)
    with torch.no_grad():
        down(model)[3, 0, 0] = kept
    assert rollout.refit() == version + 1 and session.outer


@pytest.mark.slow
def test_refit_inside_a_trace_keeps_the_layout_and_starts_a_new_version() -> None:
    """Ranges of the trace before wait for a refit outside; weights do not."""
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="trace")
    rollout = model.rollout()
    with model.trace():
        rollout(**TOKENS)
    first = rollout.weights_version
    with model.trace() as trace:
        rollout(**TOKENS)
        with torch.no_grad():
            down(model).mul_(1.1)
        rollout.refit()
        rollout(**TOKENS)
    assert trace.versions == (first, first + 1)
    assert not session_of(model).outer
    rollout.refit()
    assert session_of(model).outer


class Stop(RuntimeError):
    pass


def test_an_error_while_generating_leaves_everything_usable(shared: tuple[Any, Any]) -> None:
    model, rollout = shared
    session = session_of(model)
    pending, scales = session.pending_ranges, session.outer.as_dict()

    def stop(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 7:
            raise Stop
        return scores

    with pytest.raises(Stop), model.trace() as broken:
        generate(rollout, 4, logits_processor=[stop])
    assert session.recording is None and session.pending_ranges is pending
    assert session.outer.as_dict() == scales and not broken.ranges.sites
    with model.trace() as trace:
        generate(rollout, 2)
    assert len(trace) > 0 and session.pending_ranges is trace.ranges
    model.guide(trace)
    gradients(model, **batch())
    model.guide(None)


def test_traces_do_not_nest_and_the_outer_one_goes_on(shared: tuple[Any, Any]) -> None:
    model, rollout = shared
    with model.trace() as trace:
        rollout(**TOKENS)
        rows = len(trace)
        with pytest.raises(GuidanceError, match="already"), model.trace():
            pass
        rollout(**{**TOKENS, "input_ids": TOKENS["input_ids"].flip(0)})
    assert len(trace) > rows > 0


def test_a_trace_of_another_kind_is_refused_and_guidance_stays(shared: tuple[Any, Any]) -> None:
    model, rollout = shared
    with model.trace() as good:
        rollout(**TOKENS)
    model.guide(good)
    for kind in ("ranges", "code"):
        with model.trace(record=kind) as other:
            rollout(**TOKENS)
        with pytest.raises(GuidanceError, match="'bit'"):
            model.guide(other)
    assert session_of(model).guiding is good
    model.guide(None)
    with pytest.raises(GuidanceError, match="nibble"), model.trace(record="nibble"):  # type: ignore[arg-type]
        pass
    assert session_of(model).recording is None


def test_outcomes_of_a_rollout_without_quantized_activations_are_refused() -> None:
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="w4a16")
    with pytest.raises(GuidanceError, match=r"'w4a16' quantizes no activations.*ranges"), model.trace(record="code"):
        pass


def test_training_while_tracing_is_not_recorded(shared: tuple[Any, Any]) -> None:
    model, rollout = shared
    expected = gradients(model, **batch())
    with model.trace() as trace:
        rollout(**TOKENS)
        rows = len(trace)
        assert_same(gradients(model, **batch(5)), gradients(model, **batch(5)))
        assert_same(gradients(model, **batch()), expected)
        assert len(trace) == rows
        model.guide(trace)  # guided by the rows so far
        gradients(model, **batch())
        model.guide(None)
    assert trace.counters.hits > 0


@pytest.mark.slow
def test_train_and_eval_change_nothing(shared: tuple[Any, Any]) -> None:
    model, rollout = shared
    model.eval()
    expected = gradients(model, **batch())
    model.train()
    assert_same(gradients(model, **batch()), expected)
    rollout.train()
    first = logits(rollout)
    rollout.eval()
    assert torch.equal(logits(rollout), first)


@pytest.mark.slow
def test_two_models_of_one_class_do_not_meet(shared: tuple[Any, Any]) -> None:
    model, rollout = shared
    before, twins = logits(model), logits(rollout)
    other = trace_compile(qwen3(seed=9, num_hidden_layers=1), recipe="trace")
    theirs = other.rollout()
    with other.trace() as trace:
        theirs(**TOKENS)
    assert session_of(model).recording is None and session_of(other) is not session_of(model)
    with torch.no_grad():
        down(other).mul_(2)
    theirs.refit()
    assert torch.equal(logits(model), before) and torch.equal(logits(rollout), twins)
    assert torch.equal(logits(other), logits(theirs))
    assert len(trace) > 0


def test_a_deep_copy_has_twins_and_scales_of_its_own(shared: tuple[Any, Any]) -> None:
    model, rollout = shared
    with model.trace():
        rollout(**TOKENS)
    rollout.refit()
    clone = copy.deepcopy(model)
    twin = clone.rollout()  # before its first forward
    expected = logits(rollout)
    assert torch.equal(logits(twin), expected) and torch.equal(logits(clone), logits(model))
    assert session_of(clone).outer.as_dict() == session_of(model).outer.as_dict()
    with torch.no_grad():
        down(clone).mul_(2)
    twin.refit()
    assert torch.equal(logits(rollout), expected) and not torch.equal(logits(twin), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
def test_a_twin_is_not_copied_half_way(shared: tuple[Any, Any], copied: Any) -> None:
    """Its graphs read the first twin's weights; a copy would generate with those whatever it is refitted to."""
    with pytest.raises(TraceCompileError, match="rollout"):
        copied(shared[1])


@pytest.mark.slow
def test_inference_mode_and_no_grad_mix() -> None:
    """What outlives a rollout in inference mode is written to, and saved for backwards, later."""
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="trace")
    with torch.inference_mode():
        rollout = model.rollout(copy=True)
        with model.trace():
            generate(rollout, 2)
        rollout.refit()
    with model.trace() as trace:
        with torch.inference_mode():
            generate(rollout, 2)
        generate(rollout, 3)
    model.guide(trace)
    gradients(model, **batch())
    rollout.refit()
    assert trace.counters.hits > 0


@pytest.mark.slow
def test_bfloat16_masters_train_on_a_cpu() -> None:
    model = trace_compile(qwen3(num_hidden_layers=1).bfloat16(), recipe="trace")
    rollout = model.rollout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        with model.trace() as trace:
            rollout(**TOKENS)
        model.guide(trace)
        found = gradients(model, **batch())
        assert {g.dtype for n, g in found.items() if n != "loss"} == {torch.bfloat16}
        losses.append(float(found["loss"]))
        optimizer.step()
        rollout.refit()
    assert losses[-1] < losses[0]
    model.guide(None)
    assert torch.equal(logits(model), logits(rollout))
