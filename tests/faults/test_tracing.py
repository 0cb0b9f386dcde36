"""Faults T02, T03, T04 at the level of the API: what observers see, experts without tokens, and families of routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.parts import assert_near, assert_same, batch, generate, gradients, read_experts, route
from tests.tiny import qwen3
from trace_compile import trace_compile
from trace_compile.errors import GuidanceError
from trace_compile.model import session_of
from trace_compile.session import RangeAccumulator
from trace_compile.state.ranges import RangeWarning

TOKENS = {name: value for name, value in batch().items() if name != "labels"}


@pytest.mark.slow
def test_T02_ranges_are_equal_for_all_implementations() -> None:
    ranges = []
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model = qwen3(num_hidden_layers=1)
        model.set_experts_implementation(implementation)
        model = trace_compile(model, recipe="static")
        with model.trace() as trace:
            model.rollout()(**TOKENS)
        assert set(trace.ranges.sites) == set(session_of(model).sites())
        assert all(int(site.tokens.sum()) > 0 for site in trace.ranges.sites.values())
        ranges.append(trace.ranges)
    assert ranges[0] == ranges[1] == ranges[2]


def test_T02_a_quantizer_without_observations_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a refit that fails for it change anything."""
    model = trace_compile(qwen3(), recipe="static")
    rollout = model.rollout()
    add = RangeAccumulator.add

    def disconnected(self: RangeAccumulator, emits: dict[str, dict[str, torch.Tensor]], *more: Any) -> None:
        add(self, {kind: {r: t for r, t in by.items() if "layers.1" not in r} for kind, by in emits.items()}, *more)

    monkeypatch.setattr(RangeAccumulator, "add", disconnected)
    with model.trace():
        rollout(**TOKENS)
    version = rollout.weights_version
    with pytest.raises(GuidanceError, match=r"observed nothing at model\.layers\.1\.mlp\.experts\.gate_up, .*down"):
        rollout.refit()
    assert rollout.weights_version == version and not session_of(model).outer
    monkeypatch.undo()
    with model.trace():
        rollout(**TOKENS)
    assert rollout.refit() == version and session_of(model).outer  # new scales, the same weights


def test_T03_experts_without_tokens_use_their_layers_scale_and_are_named(tmp_path: Path) -> None:
    model = qwen3(num_hidden_layers=1)
    route(model, 0, 1)
    model = trace_compile(model, recipe="static")
    rollout = model.rollout()
    with model.trace() as trace:
        generate(rollout, 2)
    assert trace.ranges.unused_experts() == {"model.layers.0.mlp.experts": (2, 3, 4, 5, 6, 7)}
    with pytest.warns(RangeWarning, match=r"experts \[2, 3, 4, 5, 6, 7\] got no token"):
        rollout.refit()
    scales = list(session_of(model).outer.as_dict().values())
    assert len(scales) == 2 and all(bool(g.isfinite()) and float(g) > 0 for g in scales)
    model.export(tmp_path / "out", format="modelopt")
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    inputs = {name: float(t) for name, t in found.items() if name.endswith("input_scale")}
    assert len(inputs) == 8 * 3 and set(inputs.values()) == {float(g) for g in scales}
    assert (read_experts(tmp_path / "out", "up_proj")["outer"] > 0).all()
    route(model, 5, 2)  # experts that the trace never saw: in use without a NaN
    rollout.refit()
    assert bool(rollout(**TOKENS).logits.isfinite().all())


def deepseek() -> Any:
    """Sigmoid scores, a correction bias for the choice only, groups of experts, a shared expert."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=0, q_lora_rank=None, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, pad_token_id=0, bos_token_id=None, eos_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def llama4() -> Any:
    """One expert per token, whose score multiplies the input; experts by batched products."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, intermediate_size_mlp=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=1,
        interleave_moe_layer_step=1, pad_token_id=0, bos_token_id=None, eos_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    return Llama4ForCausalLM(config)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: qwen3(num_hidden_layers=1, output_router_logits=True), id="qwen3"),
        pytest.param(deepseek, id="deepseek", marks=pytest.mark.slow),
        pytest.param(llama4, id="llama4", marks=pytest.mark.slow),
    ],
)
def test_T04_without_quantization_the_function_is_the_models_own(make: Any) -> None:
    models = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.15)
        if compiled:
            model = trace_compile(model, recipe="bf16")
        elif hasattr(model, "set_experts_implementation") and "Llama4" not in type(model).__name__:
            model.set_experts_implementation("grouped_mm")
        models.append(model)
    plain, model = models
    assert len(model.explain().regions) == 1
    inputs = {**batch(2, 4, 9)}
    found, expected = gradients_of_all(model, inputs), gradients_of_all(plain, inputs)
    if plain.config.model_type == "qwen3_moe":
        assert_same(found, expected)
    assert_near(found, expected, 1e-5)
    routers = [n for n in expected if ".gate.weight" in n or "router.weight" in n]
    assert routers and all(bool(expected[n].any()) and bool(found[n].any()) for n in routers)


@pytest.mark.slow
def test_T04_router_logits_may_be_asked_for_at_any_call() -> None:
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="bf16")
    plain = qwen3(num_hidden_layers=1)
    plain.set_experts_implementation("grouped_mm")
    for wanted in (False, True, False):
        found, expected = (m(**batch(), output_router_logits=wanted) for m in (model, plain))
        assert torch.equal(found.loss, expected.loss) and (found.router_logits is not None) == wanted
        if wanted:
            assert torch.equal(found.router_logits[0], expected.router_logits[0])


def gradients_of_all(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Logits, and router logits and auxiliary loss where the model gives them, beside loss and gradients."""
    model.zero_grad()
    with torch.no_grad():
        out = model(**inputs)
    extra = {"logits": out.logits}
    if getattr(out, "aux_loss", None) is not None:
        extra |= {"aux": out.aux_loss, **{f"router {i}": t for i, t in enumerate(out.router_logits)}}
    if model.config.model_type == "qwen3_moe":
        assert len(extra) == 3
    return {**extra, **gradients(model, **inputs)}
