"""What trainers and generation loops do to a model: wrap its forward, replace its parameters, configure generate."""

from __future__ import annotations

import copy
from functools import wraps
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from tests.tiny import EOS, PAD, prompts, qwen3
from trace_compile import trace_compile
from trace_compile.errors import GuidanceError, NonFiniteWeightError, RefitError
from trace_compile.model import session_of


def wrap_forward(model):
    """What accelerate does to a model under mixed precision; returns the list of the objects that ran through it."""
    seen, inner = [], model.forward.__func__

    @wraps(inner)
    def wrapped(self, *args, **kwargs):
        seen.append(self)
        return inner(self, *args, **kwargs)

    model._original_forward = model.forward
    model.forward = MethodType(wrapped, model)
    return seen


def test_a_wrapped_forward_serves_the_model_its_twin_and_its_copies():
    model = trace_compile(qwen3())
    seen = wrap_forward(model)
    rollout, clone = model.rollout(), copy.deepcopy(model)
    with model.trace() as trace:
        rollout.generate(**prompts(), max_new_tokens=2)
    assert len(trace) > 0 and trace.ranges.sites
    assert all(module is rollout for module in seen)
    for module in (model, clone):
        ran = sum(session_of(module).engine.compile_counts.values())
        module(**prompts())
        assert seen[-1] is module
        assert sum(session_of(module).engine.compile_counts.values()) == ran + 1  # with gradients, unlike the discovery
    assert not hasattr(type(model).forward, "__wrapped__")  # accelerate would unwrap to the uncompiled forward


def test_replaced_parameters_and_buffers_reach_a_shared_twin_at_refit():
    model = trace_compile(qwen3(tie_word_embeddings=False), recipe="qat")
    rollout = model.rollout()
    model.load_state_dict(qwen3(seed=5, tie_word_embeddings=False).state_dict(), assign=True)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    rollout.refit()
    assert rollout.lm_head.weight is model.lm_head.weight
    assert rollout.model.rotary_emb.inv_freq is model.model.rotary_emb.inv_freq


def test_generation_settings_reach_the_record():
    model = trace_compile(qwen3())
    rollout, batch = model.rollout(), prompts()
    fixed = {"max_new_tokens": 3, "do_sample": True, "top_k": 1}
    real = int(batch["attention_mask"].sum())
    with model.trace() as trace:
        beams = GenerationConfig(num_beams=2, pad_token_id=PAD)
        with pytest.raises(GuidanceError, match="beam"):
            rollout.generate(**batch, generation_config=beams)
        assert beams.disable_compile is None  # the caller's object stays as it was
        rollout.generate(**batch, **fixed, trajectory_ids=torch.arange(4), num_return_sequences=2)
    with model.trace() as static:
        rollout.generate(
            **batch, **fixed, trajectory_ids=torch.arange(8), num_return_sequences=2, cache_implementation="static"
        )
    assert len(trace) > real and trace.counters.duplicates == len(trace)  # two equal samples of each prompt
    assert len(static) == 2 * len(trace)


def test_the_next_turn_is_recorded_whatever_it_holds():
    model = trace_compile(qwen3())
    rollout, cache = model.rollout(), DynamicCache(config=model.config)
    ids = torch.tensor([[5, 6, 7, 8]])
    with model.trace() as trace:
        for turn in ([], [EOS, 9, 10, 11]):
            ids = torch.cat([ids, torch.tensor([turn], dtype=torch.long)], 1)
            ids = rollout.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3)
    assert len(trace) == ids.shape[1] - 1


@pytest.fixture(scope="module")
def guided() -> tuple[Any, Any, Any]:
    """A model that is guided by its twin's trace, and the twin, which has copies of everything."""
    model = trace_compile(qwen3())
    rollout = model.rollout(copy=True)
    with model.trace() as trace:
        rollout.generate(**prompts(), max_new_tokens=2)
    return model.guide(trace), rollout, trace


def test_a_twin_has_settings_of_its_own(guided):
    model, rollout, _ = guided
    assert rollout.config is rollout.model.config is rollout.model.layers[0].self_attn.config is not model.config
    rollout.generation_config.temperature = 0.5
    rollout.config.output_router_logits = True
    try:
        assert model.generation_config.temperature != 0.5 and not model.config.output_router_logits
        rollout.refit()
        assert rollout.generation_config.temperature == 0.5
    finally:
        rollout.config.output_router_logits = False


def test_the_trainers_own_generate_is_not_guided(guided):
    model, _, trace = guided
    sampled = {"max_new_tokens": 3, "do_sample": False}
    lookups = trace.counters.lookups
    found = model.generate(**prompts(), **sampled)
    assert trace.counters.lookups == lookups and session_of(model).guiding is not None
    with torch.no_grad():
        assert torch.isfinite(model(**prompts()).logits).all()
    assert trace.counters.lookups > lookups
    model.guide(None)
    assert torch.equal(found, model.generate(**prompts(), **sampled))
    model.guide(trace)


def test_a_twin_of_copies_checks_all_before_it_takes_any(guided):
    model, rollout, _ = guided
    with torch.no_grad():
        before = rollout(**prompts()).logits
        model.model.layers[0].mlp.experts.down_proj.mul_(2.0)
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(NonFiniteWeightError, match=r"model\.norm\.weight: NaN"):
        rollout.refit()
    norm = model.model.norm.weight
    model.model.norm.weight = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(RefitError, match=r"model\.norm\.weight is \(32,\) in the trainer and \(64,\) in the twin"):
        rollout.refit()
    assert torch.equal(rollout(**prompts()).logits, before)
    model.model.norm.weight = norm
    with torch.no_grad():
        norm.fill_(1.0)
    rollout.refit()
    assert not torch.equal(rollout(**prompts()).logits, before)


@pytest.mark.parametrize("copies", [False, True])
def test_a_twin_follows_adapters_that_come_after_it(guided, copies):
    peft = pytest.importorskip("peft")
    model = guided[0].guide(None)
    rollout = model.rollout(copy=copies)
    before = rollout(**prompts()).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    try:
        rollout.refit()
        assert (rollout.model.layers[0].self_attn.q_proj.lora_A.default.weight is not None) and not torch.equal(
            rollout(**prompts()).logits, before
        )
        with torch.no_grad():
            torch.testing.assert_close(rollout(**prompts()).logits, model(**prompts()).logits)
    finally:
        adapted.unload()
    rollout.refit()
    assert torch.equal(rollout(**prompts()).logits, before)
