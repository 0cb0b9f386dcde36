"""``trace_compile(model)``: what stays, what is new, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeForCausalLM

from tests.tiny import prompts, qwen3
from trace_compile import trace_compile
from trace_compile.errors import BlockSizeError, NoMoERegionError, TraceCompileError, UnknownRecipeError
from trace_compile.model import session_of
from trace_compile.passes import Mode


def test_the_model_stays_itself():
    plain = qwen3()
    before = dict(plain.named_parameters())
    keys = list(plain.state_dict())
    model = trace_compile(plain, recipe="qat")
    assert model is plain
    assert isinstance(model, Qwen3MoeForCausalLM)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert list(model.state_dict()) == keys
    assert all(p is before[name] for name, p in model.named_parameters())


def test_pickle_holds_the_plain_model():
    model = trace_compile(qwen3(), recipe="qat")
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is Qwen3MoeForCausalLM
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))
    batch = prompts()
    assert torch.isfinite(loaded(**batch).logits).all()
    assert model.explain().recipe == "qat"  # pickling took nothing from the model itself


def test_deepcopy_is_compiled_anew_and_independent():
    model = trace_compile(qwen3(), recipe="qat")
    clone = copy.deepcopy(model)
    batch = prompts()
    with torch.no_grad():
        expected = model(**batch).logits
        assert torch.equal(clone(**batch).logits, expected)
        next(clone.parameters()).add_(1.0)
        assert torch.equal(model(**batch).logits, expected)
        assert not torch.equal(clone(**batch).logits, expected)
    assert clone.explain().recipe == "qat"


def test_quantization_changes_the_forward_and_bf16_does_not():
    batch = prompts()
    with torch.no_grad():
        plain = qwen3()
        plain.set_experts_implementation("grouped_mm")
        expected = plain(**batch).logits
        assert torch.equal(trace_compile(qwen3(), recipe="bf16")(**batch).logits, expected)
        assert torch.equal(trace_compile(qwen3(), recipe="naive")(**batch).logits, expected)
        quantized = trace_compile(qwen3(), recipe="qat")(**batch).logits
    assert not torch.equal(quantized, expected)
    assert (quantized - expected).norm() < 0.5 * expected.norm()


def test_explain_says_what_was_rewritten():
    model = trace_compile(qwen3(), recipe="trace")
    explanation = model.explain()
    text = str(explanation)
    assert [r.name for r in explanation.regions] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert explanation.guided == {"model.layers.1.mlp.experts"}
    assert "model.layers.0.mlp.experts" in text and "silu" in text and "native" in text
    assert explanation.rollouts == ()
    rollout = model.rollout()
    assert model.explain().rollouts == ((),)  # a twin compiles when it first runs
    rollout(**prompts())
    ((graph,),) = model.explain().rollouts
    assert graph[0].train is False and "twin" in str(model.explain())
    del rollout, graph
    gc.collect()
    assert model.explain().rollouts == ()


def test_eager_experts_are_switched_and_said_so(caplog):
    plain = qwen3()
    plain.set_experts_implementation("eager")
    with caplog.at_level("WARNING", logger="trace_compile"):
        trace_compile(plain, recipe="qat")
    assert "grouped_mm" in caplog.text


def test_a_refused_model_keeps_its_experts_implementation():
    plain = qwen3(moe_intermediate_size=24)
    plain.set_experts_implementation("eager")
    before = dict(plain.__dict__)
    with pytest.raises(BlockSizeError, match="24"):
        trace_compile(plain, recipe="qat")
    assert type(plain) is Qwen3MoeForCausalLM and plain.__dict__.keys() == before.keys()
    assert {m.config._experts_implementation for m in plain.modules() if hasattr(m, "config")} == {"eager"}


def test_the_compiler_is_chosen_where_the_model_is_when_a_graph_is_needed(monkeypatch):
    engine = session_of(trace_compile(qwen3(), recipe="qat")).engine
    made = []
    monkeypatch.setattr("trace_compile.engine.Backend", lambda *a, compiler, **o: made.append(compiler))
    for device, compiler in (("cuda", "inductor"), ("cpu", "eager")):
        engine.runtime.device = torch.device(device)
        engine._entry(Mode(scheme=None))
        assert made[-1] == compiler
    engine._entry(Mode(scheme=None))
    assert len(made) == 2  # a model that comes back finds its graphs


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_model_without_experts_is_refused_and_left_as_it_was():
    model = Dense()
    with pytest.raises(NoMoERegionError):
        trace_compile(model, recipe="qat", example_inputs={"x": torch.randn(3, 16)})
    assert type(model) is Dense and not any(k.startswith("_trace") for k in model.__dict__)
    assert torch.isfinite(model(torch.randn(2, 16))).all()


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (UnknownRecipeError, "'fp3'.*trace", {"recipe": "fp3"}),
        (TraceCompileError, "last.*1.5", {"last": 1.5}),
        (TraceCompileError, "last.*0", {"last": 0.0}),
        (TraceCompileError, "'tvm'.*inductor", {"compiler": "tvm"}),
    ],
)
def test_bad_options_name_the_value_and_the_choices(error, match, options):
    with pytest.raises(error, match=match):
        trace_compile(qwen3(), **({"recipe": "qat"} | options))


def test_a_second_application_is_refused():
    model = trace_compile(qwen3(), recipe="qat")
    with pytest.raises(TraceCompileError, match="already"):
        trace_compile(model, recipe="trace")


def test_something_that_is_no_module_is_refused():
    with pytest.raises(TraceCompileError, match="dict"):
        trace_compile({}, recipe="qat")  # type: ignore[arg-type]
