"""The generation twin, tracing, guidance: the loop that users write, on a real transformers model."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import EOS, PAD, VOCAB, prompts, qwen3, right_padded
from trace_compile import trace_compile
from trace_compile.errors import FingerprintMismatchError, GuidanceError, NonFiniteWeightError, TraceFileError
from trace_compile.model import session_of
from trace_compile.ops.scheme import W4A4_TRACED
from trace_compile.state.ranges import RangeWarning
from trace_compile.state.trace import Trace

NEW = 8


def generate(rollout, batch, **options):
    torch.manual_seed(0)
    out = rollout.generate(
        **batch, max_new_tokens=NEW, do_sample=True, return_dict_in_generate=True, output_logits=True, **options
    )
    mask = torch.cat([batch["attention_mask"], torch.ones_like(out.sequences[:, batch["input_ids"].shape[1] :])], 1)
    ended = (out.sequences == EOS).cumsum(1) - (out.sequences == EOS).long()
    return out, mask * (ended == 0)


def experts_of(model):
    return [p for name, p in model.named_parameters() if "experts" in name]


@pytest.fixture(scope="module")
def traced():
    """A model, its twin, one trace, and the training batch of what was generated; recipe trace_full, all layers."""
    model = trace_compile(qwen3(), recipe="trace_full", last=1.0)
    rollout = model.rollout()
    with model.trace(inputs=True) as trace:
        out, mask = generate(rollout, prompts())
    return model, rollout, trace, mask, right_padded(out.sequences, mask)


def test_generation_equals_the_scoring_of_the_same_twin():
    rollout = trace_compile(qwen3(), recipe="qat").rollout()
    out, mask = generate(rollout, prompts())
    logits = torch.stack(out.logits, 1)
    scored = rollout(**right_padded(out.sequences, mask)).logits
    start = prompts()["attention_mask"].sum(1)
    for row in range(4):
        length = int(mask[row, 6:].sum())
        expected = scored[row, start[row] - 1 : start[row] - 1 + length]
        torch.testing.assert_close(logits[row, :length], expected, atol=2e-2, rtol=0)


def test_every_fed_token_is_recorded_and_found_again_under_another_padding(traced):
    model, _, trace, mask, batch = traced
    before = trace.counters.lookups, trace.counters.hits
    model.guide(trace)
    with torch.no_grad():
        model(**{k: v[:, :-1] for k, v in batch.items()})
    model.guide(None)
    lookups, hits = trace.counters.lookups - before[0], trace.counters.hits - before[1]
    # A token in the last column was sampled last and never fed to the rollout; shorter rows still have it here.
    missed = ((mask[:, -1] == 1) & (batch["attention_mask"][:, -1] == 0)).sum()
    assert lookups == int(batch["attention_mask"][:, :-1].sum())
    assert hits == lookups - int(missed)


def test_guided_training_uses_the_rollouts_codes(traced):
    model, _, trace, _, batch = traced
    model.guide(trace)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    reports = model.diagnose(trace, **batch)
    model.guide(None)
    assert len(reports) == 2
    for report in reports:
        assert report.tokens > 0
        assert 0 < report.drift < 0.2
        assert report.mismatch_before > 0
        assert report.mismatch_after < 0.5 * report.mismatch_before
        assert report.d_after < report.d_before
        assert report.adjacent > 0.8


def test_ranges_set_the_scales_of_both_graphs():
    model = trace_compile(qwen3(), recipe="trace")
    rollout = model.rollout()
    with model.trace() as first:
        generate(rollout, prompts())
    assert all(site.outer_bytes == 1 for site in first.layout.sites)
    session = session_of(model)
    assert not session.outer
    rollout.refit()
    assert set(session.outer.as_dict()) == set(session.sites())
    for site, scale in session.outer.as_dict().items():
        amax = first.ranges.sites[site].amax.max()
        assert torch.frexp(scale)[0] == 0.5  # a power of two
        assert 2 * amax <= 2688 * scale and 2 * amax > 2688 * scale / 2
    with model.trace() as second:
        generate(rollout, prompts())
    assert all(site.outer_bytes == 0 for site in second.layout.sites)
    twin = rollout.__dict__["_trace_compile_twin"]
    assert session.train_mode().scheme == twin.mode(None).scheme == W4A4_TRACED
    assert all(int(s.saturated) == 0 for s in second.ranges.sites.values())
    model.guide(second)
    loss = model(**prompts(), labels=prompts()["input_ids"]).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_compact_trace_has_the_bytes_of_the_formula():
    model = trace_compile(qwen3(), recipe="trace", last=1.0)
    rollout = model.rollout()
    with model.trace(record="code") as trace:
        generate(rollout, prompts())
    compact = trace.compact("bit")
    assert compact.layout.guidance_bytes == 2 * (64 // 8 + 64 // 16 + 1)
    assert compact.layout.routing_bytes == 2 * 2 * 2
    assert len(compact) == len(trace) > 0
    model.guide(compact)
    with torch.no_grad():
        assert torch.isfinite(model(**prompts()).logits).all()
    with pytest.raises(GuidanceError, match="compact"):
        model.guide(trace)


def test_refit_follows_the_trainer_and_keeps_addresses():
    model = trace_compile(qwen3(), recipe="qat")
    rollout = model.rollout(copy=True)
    batch = prompts()
    twin = rollout.__dict__["_trace_compile_twin"]
    addresses = {name: packed.codes.data_ptr() for name, packed in twin.experts.items()}
    stale = rollout(**batch).logits
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    assert torch.equal(rollout(**batch).logits, stale)
    version = rollout.weights_version
    assert rollout.refit() == version + 1
    fresh = rollout(**batch).logits
    assert not torch.equal(fresh, stale)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, fresh)
    assert addresses == {name: packed.codes.data_ptr() for name, packed in twin.experts.items()}


def test_a_shared_twin_follows_everything_but_experts_at_once():
    model = trace_compile(qwen3(), recipe="qat")
    rollout = model.rollout()
    assert rollout.model.embed_tokens.weight is model.model.embed_tokens.weight
    before = rollout(**prompts()).logits
    with torch.no_grad():
        for p in experts_of(model):
            p.mul_(1.5)
    assert torch.equal(rollout(**prompts()).logits, before)
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    assert not torch.equal(rollout(**prompts()).logits, before)


def test_refit_is_all_or_nothing():
    model = trace_compile(qwen3(), recipe="qat")
    rollout = model.rollout(copy=True)
    before, version = rollout(**prompts()).logits, rollout.weights_version
    with torch.no_grad():
        experts_of(model)[0].mul_(3.0)
        experts_of(model)[-1][2, 1, 3] = float("nan")
    with pytest.raises(NonFiniteWeightError, match=r"layers\.1.*down_proj.*expert 2"):
        rollout.refit()
    assert rollout.weights_version == version
    assert torch.equal(rollout(**prompts()).logits, before)


def test_packed_experts_take_at_most_4_6_bits_per_weight():
    model = trace_compile(qwen3(), recipe="qat")
    rollout = model.rollout()
    twin = rollout.__dict__["_trace_compile_twin"]
    packed = sum(packed.nbytes for packed in twin.experts.values())
    weights = sum(p.numel() for p in experts_of(model))
    assert 8 * packed / weights <= 4.6


def test_trace_files_come_back_equal_and_refuse_other_models(tmp_path, traced):
    model, _, trace, _, _ = traced
    path = tmp_path / "trace.safetensors"
    trace.save(path)
    loaded = Trace.load(path, fingerprint=session_of(model).fingerprint)
    assert len(loaded) == len(trace) and loaded.ranges == trace.ranges
    model.guide(loaded).guide(None)
    other = trace_compile(qwen3(num_experts=6), recipe="trace_full")
    with pytest.raises(FingerprintMismatchError, match=trace.fingerprint):
        other.guide(loaded)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TraceFileError, match=r"trace\.safetensors"):
        Trace.load(path)


def test_what_cannot_be_named_is_refused():
    model = trace_compile(qwen3(), recipe="trace")
    rollout = model.rollout()
    with model.trace() as trace:
        generate(rollout, prompts())
        with pytest.raises(GuidanceError, match="already"), model.trace():
            pass
        with pytest.raises(GuidanceError, match="beam"):
            rollout.generate(**prompts(), max_new_tokens=2, num_beams=2)
    model.guide(trace)
    embedded = model.model.embed_tokens(prompts()["input_ids"])
    with pytest.raises(GuidanceError, match="input_ids"):
        model(inputs_embeds=embedded)
    model.guide(None)
    assert torch.isfinite(model(inputs_embeds=embedded).logits).all()


def test_tokens_after_the_end_are_not_recorded():
    model = trace_compile(qwen3(), recipe="trace")
    rollout = model.rollout()
    ids = torch.full((2, 3), 5)
    with torch.no_grad():  # one sequence ends at once, the other never does
        cache = rollout(input_ids=ids, use_cache=True).past_key_values
    del cache
    with model.trace() as trace:
        out = rollout(input_ids=ids, use_cache=True)
        step = torch.tensor([[EOS], [7]])
        for _ in range(3):
            out = rollout(input_ids=step, past_key_values=out.past_key_values, use_cache=True)
            step = torch.tensor([[PAD], [7]])
    # 3 shared prompt tokens, EOS, and three 7s; the pads behind EOS are nobody's tokens
    assert len(trace) == 3 + 1 + 3
    assert VOCAB > 7


def test_rollout_scores_are_those_of_the_dequantized_weights():
    """R01: training graph, generation graph, and plain eager code on dequantized weights score tokens alike."""
    from trace_compile.ops.scheme import OperandScheme
    from trace_compile.ops.weights import WeightLayout, pack_experts

    model = trace_compile(qwen3(), recipe="w4a16")
    batch = prompts()
    eager = qwen3()
    eager.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        for name, p in eager.named_parameters():
            if "experts" in name:
                p.copy_(pack_experts(p, WeightLayout(), OperandScheme(outer="expert")).dequantize())
        training, generation, reference = model(**batch).logits, model.rollout()(**batch).logits, eager(**batch).logits
    torch.testing.assert_close(training, generation, atol=0, rtol=0)
    torch.testing.assert_close(training, reference, atol=1e-5, rtol=1e-5)


def test_routing_is_replayed_by_token():
    model = trace_compile(qwen3(), recipe="bf16", replay_routing=True)
    rollout = model.rollout(copy=True)
    with model.trace() as trace:
        out, mask = generate(rollout, prompts())
    batch = right_padded(out.sequences, mask)
    with torch.no_grad():
        before = model(**batch).logits
        assert torch.equal(model.guide(trace)(**batch).logits, before)  # the same weights choose the same experts
        for name, p in model.named_parameters():
            if "mlp.gate." in name:
                p.neg_()
        forced = model(**batch).logits
        assert not torch.equal(model.guide(None)(**batch).logits, forced)
    model.guide(trace)(**batch).logits.square().mean().backward()
    assert all(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "mlp.gate." in name)


def test_activations_that_outgrow_their_range_are_warned_of_until_ranges_are_refreshed():
    model = trace_compile(qwen3(), recipe="static")
    rollout = model.rollout()

    def record() -> float:
        with model.trace() as trace:
            rollout(**prompts())
        return max(site.saturation for site in trace.ranges.sites.values())

    assert record() == 0
    rollout.refit()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.mul_(64)
    with pytest.warns(RangeWarning, match="saturate"):
        assert record() > 1e-4
        rollout.refit()
        record()  # what lies behind a saturated site was observed too small: its own refresh comes one trace later
        rollout.refit()
    assert record() == 0
