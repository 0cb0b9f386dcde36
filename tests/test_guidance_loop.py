"""What is recorded and replayed, by choice: layers by rule, the down projection's input, and running diagnostics."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import prompts, qwen3
from trace_compile import trace_compile
from trace_compile.errors import GuidanceError, TraceCompileError
from trace_compile.model import session_of

NAMES = [f"model.layers.{i}.mlp.experts" for i in range(2)]
EVERY = ["*"]


def move(model, by: float = 0.01) -> None:
    """Another optimizer step's worth of drift, the same for every model of these tests."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + by * torch.randn(p.shape, generator=generator))


@pytest.fixture(scope="module")
def down():
    """A model whose down inputs are recorded too, with traced scales, a trace of codes, and the batch it is of."""
    model = trace_compile(qwen3(), recipe="trace", layers=EVERY, sites=("gate_up", "down"))
    twin, batch = model.rollout(copy=True), prompts()
    with model.trace(record="ranges"):
        twin(**batch)
    twin.refit()
    with model.trace(record="code") as trace:
        logits = twin(**batch, use_cache=True).logits
    return model, trace, batch, logits


def test_down_inputs_take_the_bytes_of_the_formula(down):
    _, trace, _, _ = down
    per_layer = (64 + 2 * 32) // 2 + (64 + 2 * 32) // 16  # gate/up once, down once per routed expert
    assert trace.layout.guidance_bytes == 2 * per_layer
    bits = trace.compact()
    assert bits.layout.guidance_bytes == 2 * (64 + 2 * 32) * 3 // 16
    assert bits.layout.kind == "bit+down" and len(bits) == len(trace) > 0
    assert set(trace.ranges.sites) == {(n, p) for n in NAMES for p in ("gate_up", "down")}


def test_guided_down_inputs_restore_the_rollout(down):
    """Unmoved weights replay exactly; moved ones are nearer to the rollout with the down inputs than without."""
    model, trace, batch, logits = down
    bits = trace.compact()
    with torch.no_grad():
        assert torch.equal(model.guide(bits)(**batch).logits, logits)
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    move(model)
    with torch.no_grad():
        model.guide(trace, diagnose=True)(**batch)
        guided = {(r.region, r.projection): r for r in model.diagnostics()}
        model.guide(None)
    assert set(guided) == {(n, p) for n in NAMES for p in ("gate_up", "down")}
    for (_, projection), report in guided.items():
        assert report.tokens > 0 and report.mismatch_after < 0.3 * report.mismatch_before
        assert report.d_after < 0.6 * report.d_before and 0.8 < report.adjacent <= 1, projection
    real = int(batch["attention_mask"].sum())
    assert guided[NAMES[0], "gate_up"].tokens == real and guided[NAMES[0], "down"].tokens <= 2 * real
    loss = model.guide(bits)(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert all(r.d_after is None for r in model.diagnostics())
    model.guide(None)
    model.zero_grad()
    model.load_state_dict(weights)


def test_diagnostics_add_up_and_are_those_of_one_diagnosis(down):
    model, trace, batch, _ = down
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    move(model)
    with torch.no_grad():
        model.guide(trace, diagnose=True)
        assert model.diagnostics() == ()
        model(**batch)
        once = model.diagnostics()
        model(**batch)
        twice = model.diagnostics()
        alone = model.diagnose(trace, **batch)
    model.guide(None)
    model.load_state_dict(weights)
    assert alone == once and len(once) == 4
    for a, b in zip(once, twice):
        assert b.tokens == 2 * a.tokens and b.mismatch_before == a.mismatch_before
        assert b.d_before == pytest.approx(a.d_before)


def test_recomputing_a_checkpointed_layer_changes_no_code_and_counts_once(down):
    """T06, Q03: guided codes, routes and gradients are those of the run without checkpoints."""
    model, trace, batch, _ = down
    move_back = {name: p.clone() for name, p in model.state_dict().items()}
    move(model)
    found = {}
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model.guide(trace, diagnose=True)
        model.zero_grad()
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found[checkpointing] = grads, model.diagnostics(), trace.counters.lookups
    model.gradient_checkpointing_disable()
    model.guide(None)
    model.zero_grad()
    model.load_state_dict(move_back)
    assert found[True][1] == found[False][1]
    assert [n for n, g in found[True][0].items() if not torch.equal(g, found[False][0][n])] == []


@pytest.mark.slow
def test_layers_are_chosen_by_any_rule():
    model = trace_compile(qwen3(), recipe="trace", layers=lambda name: ".0." in name)
    session = session_of(model)
    assert session.guided_regions() == {NAMES[0]}
    with model.trace() as trace:
        model.rollout()(**prompts())
    assert [site.region for site in trace.layout.sites] == [NAMES[0]]
    for rule, chosen in (
        (["*.1.*"], {NAMES[1]}),
        (["re:.*layers.[01]"], set(NAMES)),
        (NAMES, set(NAMES)),
    ):
        assert session_of(trace_compile(qwen3(), layers=rule)).guided_regions() == chosen
    nothing = trace_compile(qwen3(), layers=["*.7.*"])
    with pytest.raises(GuidanceError, match="chooses none of the regions"), nothing.trace():
        pass
    for options, message in (({"layers": "*"}, "lists of patterns"), ({"sites": ("down",)}, "gate_up")):
        with pytest.raises(TraceCompileError, match=message):
            trace_compile(qwen3(), **options)


@pytest.mark.slow
def test_a_recipe_that_replays_nothing_is_diagnosed_by_codes_alone():
    model = trace_compile(qwen3(), recipe="qat", layers=EVERY)
    twin, batch = model.rollout(copy=True), prompts()
    with model.trace(record="code") as codes:
        twin(**batch)
    move(model)
    with torch.no_grad():
        model.guide(None)
        plain = model(**batch).logits
        assert torch.equal(model.guide(codes, diagnose=True)(**batch).logits, plain)
    for report in model.diagnostics():
        assert report.mismatch_before == report.mismatch_after > 0 and report.d_before == report.d_after > 0
    with model.trace(record="bit") as bits:
        twin(**batch)
    with pytest.raises(GuidanceError, match="only whole codes"):
        model.guide(bits, diagnose=True)
