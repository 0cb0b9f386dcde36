"""The lean decode loop against ``generate()``: the same tokens, keys, codes and ranges."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

from tests.tiny import EOS, PAD, VOCAB, prompts, qwen3
from trace_compile import trace_compile
from trace_compile.errors import TraceCompileError

NEW, LENGTH = 12, 64


@pytest.fixture(scope="module")
def pair():
    """A model whose greedy responses end at different lengths, and its twin."""
    model = trace_compile(qwen3(), recipe="trace", last=1.0)
    return model, model.rollout()


def generate(twin, batch, **options):
    """Greedy decoding by transformers over a static cache as long as the loop's."""
    cache = StaticCache(config=twin.config, max_cache_len=LENGTH)
    return twin.generate(**batch, max_new_tokens=NEW, do_sample=False, past_key_values=cache, **options)


def records(trace):
    """Rows by key; a trace without conflicts says everything with that."""
    assert trace.counters.conflicts == 0
    return {int(k): bytes(r.numpy()) for run in trace.runs for k, r in zip(run.keys, run.rows)}


def responses_end_apart(twin, batch):
    """Ids that end the rows at different tokens, one early, one never."""
    free = twin.sample(**batch, max_new_tokens=NEW, temperature=0, eos_token_id=()).responses.tolist()
    found = [free[0][2], free[1][7]]
    ends = {min((row.index(i) for i in found if i in row), default=NEW) for row in free}
    assert len(ends) > 2 and NEW in ends
    return found


def test_greedy_decoding_records_what_generate_records(pair):
    model, twin = pair
    batch = prompts()
    end = responses_end_apart(twin, batch)
    with model.trace(record="code") as reference:
        expected = generate(twin, batch, eos_token_id=end, pad_token_id=PAD)
    for every in (1, 5):  # whether the loop looks at once or later, nothing is recorded behind the end
        with model.trace(record="code") as trace:
            found = twin.sample(
                **batch, max_new_tokens=NEW, temperature=0, eos_token_id=end, pad_token_id=PAD, check_every=every
            )
        assert torch.equal(found.ids, expected)
        assert records(trace) == records(reference) and len(trace) > 30
        assert trace.ranges == reference.ranges


def test_all_rows_may_end_early(pair):
    model, twin = pair
    batch = prompts()
    first = twin.sample(**batch, max_new_tokens=1, temperature=0, eos_token_id=()).responses.flatten().tolist()
    with model.trace(record="code") as reference:
        expected = generate(twin, batch, eos_token_id=first, pad_token_id=PAD)
    with model.trace(record="code") as trace:
        found = twin.sample(**batch, max_new_tokens=NEW, temperature=0, eos_token_id=first, pad_token_id=PAD)
    assert torch.equal(found.ids, expected) and found.ids.shape[1] == 7
    assert records(trace) == records(reference) and trace.ranges == reference.ranges


def test_log_probs_are_those_of_the_twins_own_forward(pair):
    _, twin = pair
    batch = prompts()
    end = responses_end_apart(twin, batch)
    for temperature in (0.0, 0.7, 1.0):
        found = twin.sample(
            **batch, max_new_tokens=NEW, temperature=temperature, eos_token_id=end, entropy=True, pad_token_id=PAD
        )
        logits = twin(input_ids=found.ids, attention_mask=found.attention).logits[:, 5:-1].float()
        log_p = (logits / (temperature or 1)).log_softmax(-1)
        expected = log_p.gather(-1, found.responses[..., None])[..., 0]
        assert found.log_probs.dtype == torch.float32
        torch.testing.assert_close(found.log_probs[found.sampled], expected[found.sampled], atol=2e-2, rtol=0)
        assert (found.log_probs[~found.sampled] == 0).all() and (found.ids[:, 6:][~found.sampled] == PAD).all()
        entropy = -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(found.entropy[found.sampled], entropy[found.sampled], atol=5e-2, rtol=0)
        assert torch.equal(found.attention[:, 6:].bool(), found.sampled)


def test_sampling_follows_the_distribution_and_the_generator(pair):
    _, twin = pair
    one = prompts(batch=1)
    batch = {name: t.expand(2048, -1) for name, t in one.items()}

    def draw(seed, temperature=1.0):
        generator = torch.Generator().manual_seed(seed)
        return twin.sample(**batch, max_new_tokens=1, temperature=temperature, generator=generator)

    first = draw(3)
    assert torch.equal(first.ids, draw(3).ids) and not torch.equal(first.ids, draw(4).ids)
    for temperature in (1.0, 0.5):
        found = draw(3, temperature).responses.flatten().bincount(minlength=VOCAB)
        p = (twin(**one).logits[0, -1].float() / temperature).softmax(-1).double()
        likely = p * 2048 >= 5
        chi = ((found - 2048 * p).square() / (2048 * p))[likely].sum()
        assert chi < 2.5 * likely.sum() + 10
        assert found[p * 2048 < 1e-3].sum() == 0


def test_forced_tokens_are_scored_and_recorded_under_their_own_keys(pair):
    model, twin = pair
    batch = prompts()
    sampled = twin.sample(**batch, max_new_tokens=NEW, generator=torch.Generator().manual_seed(0), eos_token_id=())
    with model.trace(record="code") as trace:
        forced = twin.sample(**batch, max_new_tokens=NEW, forced=sampled.responses, eos_token_id=())
    assert torch.equal(forced.ids, sampled.ids) and torch.equal(forced.log_probs, sampled.log_probs)
    guiding = trace.compact()
    model.guide(guiding)
    with torch.no_grad():
        model(input_ids=forced.ids[:, :-1], attention_mask=forced.attention[:, :-1])
    model.guide(None)
    assert guiding.counters.hits == int(forced.attention[:, :-1].sum())


def test_refit_and_new_shapes_need_no_new_loop():
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="qat")
    twin = model.rollout(copy=True)
    batch = prompts()
    before = twin.sample(**batch, max_new_tokens=NEW, temperature=0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.3)
    assert torch.equal(twin.sample(**batch, max_new_tokens=NEW, temperature=0).log_probs, before.log_probs)
    twin.refit()
    after = twin.sample(**batch, max_new_tokens=NEW, temperature=0)
    fresh = model.rollout(copy=True).sample(**batch, max_new_tokens=NEW, temperature=0)
    assert not torch.equal(after.log_probs, before.log_probs)
    assert torch.equal(after.ids, fresh.ids) and torch.equal(after.log_probs, fresh.log_probs)
    other = twin.sample(**prompts(length=9), max_new_tokens=3, temperature=0)
    assert other.ids.shape == (4, 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0]] * 2)}, "left"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"forced": torch.zeros(2, 3, dtype=torch.long)}, "forced"),
        ({"input_ids": torch.ones(2, 3)}, "integer"),
    ],
)
def test_what_does_not_fit_is_refused(pair, changes, message):
    options = {"input_ids": torch.full((2, 3), 5), "max_new_tokens": 2}
    with pytest.raises(TraceCompileError, match=message):
        pair[1].sample(**(options | changes))


def test_ends_are_recognised_by_the_models_own_configuration(pair):
    _, twin = pair
    batch = prompts()
    found = twin.sample(**batch, max_new_tokens=NEW, forced=torch.full((4, NEW), EOS))
    assert found.responses.tolist() == [[EOS]] * 4
