"""Faults T06, Q03, C02 and what else can happen to a guided training step, on one tiny model with its twin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.faults.parts import assert_same, batch, generate, gradients
from tests.tiny import VOCAB, qwen3
from trace_compile import trace_compile
from trace_compile.model import session_of


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A model with recipe trace and its twin, scales traced."""
    model = trace_compile(qwen3(num_hidden_layers=1, output_router_logits=True), recipe="trace").train()
    rollout = model.rollout()
    with model.trace():
        generate(rollout, 1)
    rollout.refit()
    return model, rollout


@pytest.fixture
def guided(pair: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The model, guided by a trace of ``batch()`` from a twin whose weights were a little different."""
    model, rollout = pair
    inputs = {k: v for k, v in batch().items() if k != "labels"}
    with model.trace() as trace:
        rollout(**inputs)
    model.guide(trace)
    yield model, trace
    model.guide(None)


def step(model: Any, trace: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Loss, gradients, and what the step added to the trace's counters."""
    before = asdict(trace.counters)
    found = gradients(model, **inputs)
    added = {f"counter {k}": torch.tensor(v - before[k]) for k, v in asdict(trace.counters).items()}
    assert added["counter hits"] > 0
    return {**found, **added}


REENTRANT = (True, False)


def test_T06_recompute_repeats_no_bookkeeping_and_uses_the_same_scales(guided: tuple[Any, Any]) -> None:
    model, trace = guided
    rows = len(trace)
    expected = step(model, trace, batch())
    for reentrant in REENTRANT:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        try:
            found = step(model, trace, batch())
        finally:
            model.gradient_checkpointing_disable()
        assert_same(found, expected)
    assert len(trace) == rows


@pytest.mark.slow
def test_T06_train_and_eval_between_forward_and_backward(guided: tuple[Any, Any]) -> None:
    model, trace = guided
    expected = step(model, trace, batch())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        model.zero_grad()
        loss = model(**batch()).loss
        model.eval()
        model.guide(None)  # the recomputation belongs to the forward that was guided
        loss.backward()
    finally:
        model.train()
        model.gradient_checkpointing_disable()
    found = {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}
    assert_same(found, {name: expected[name] for name in found})


@pytest.mark.slow
def test_Q03_ties_of_the_router_fall_alike_in_forward_and_recompute(guided: tuple[Any, Any]) -> None:
    """All experts tie for every token: another choice in the recomputation would give other gradients."""
    model, _ = guided
    gate = model.model.layers[0].mlp.gate.weight
    kept = gate.detach().clone()
    tied = {**batch(), "input_ids": torch.full((4, 6), 9)}
    with torch.no_grad():
        gate[:] = gate[0]
    try:
        expected = gradients(model, **tied)
        experts = expected["model.layers.0.mlp.experts.down_proj"].flatten(1).norm(dim=1)
        assert int((experts > 0).sum()) == 2  # one choice for all tokens
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same(gradients(model, **tied), expected)
    finally:
        model.gradient_checkpointing_disable()
        with torch.no_grad():
            gate.copy_(kept)


LENGTHS = (7, 8, 9, 16, 33, 64, 1, 100)


@pytest.mark.slow
def test_C02_lengths_share_graphs() -> None:
    """At most two graphs per mode for lengths of two and more, one for length 1: trainer and twin, guided or not."""
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="trace").eval()
    rollout = model.rollout()
    ids = {n: torch.randint(2, VOCAB, (2, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS}
    torch._dynamo.utils.counters.clear()
    with model.trace() as trace:
        for n in LENGTHS:
            rollout(input_ids=ids[n], use_cache=False)
    twin = rollout.__dict__["_trace_compile_twin"].engine
    engine = session_of(model).engine
    for guide in (None, trace):
        model.guide(guide)
        for train in (True, False):
            before = dict(engine.compile_counts)
            with torch.set_grad_enabled(train):
                for n in LENGTHS:
                    out = model(input_ids=ids[n], use_cache=False)
                    assert out.logits.shape == (2, n, VOCAB) and out.logits.requires_grad == train
            grown = {mode: n - before.get(mode, 0) for mode, n in engine.compile_counts.items()}
            assert [n for n in grown.values() if n] and max(grown.values()) <= 3
    assert {mode.guidance for mode in engine.compile_counts} == {"none", "bit"} and len(engine.compile_counts) == 2
    for n in LENGTHS:
        rollout(input_ids=ids[n], use_cache=False)
    assert len(twin.compile_counts) == 2 and max(twin.compile_counts.values()) <= 3
    assert not torch._dynamo.utils.counters["recompile_limit"]
    assert trace.counters.hits == trace.counters.lookups > 0
