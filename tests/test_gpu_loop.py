"""The loop of ``test_rollout`` on a GPU, in bfloat16: compile, roll out, trace, guide, train, refit."""

from __future__ import annotations

import pytest
import torch

from tests.test_rollout import generate
from tests.tiny import prompts, qwen3, right_padded
from trace_compile import trace_compile
from trace_compile.model import session_of

pytestmark = pytest.mark.gpu


def on_gpu(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in batch.items()}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_the_whole_loop(compiler):
    plain = qwen3().to("cuda", torch.bfloat16)
    model = trace_compile(plain, recipe="trace", compiler=compiler, last=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rollout = model.rollout(copy=True)
    for step in range(3):
        with model.trace(record="code", inputs=True) as trace:
            out, mask = generate(rollout, on_gpu(prompts(batch=8)))
        batch = right_padded(out.sequences, mask)
        model.guide(trace.compact())
        reports = model.diagnose(trace, **batch)
        assert all(r.tokens > 0 and r.mismatch_after <= r.mismatch_before for r in reports)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert rollout.refit() == step + 2
    assert session_of(model).outer


def test_static_cache_generation_records_the_same_tokens():
    model = trace_compile(qwen3().to("cuda", torch.bfloat16), recipe="trace", compiler="eager", last=1.0)
    rollout = model.rollout()
    counts = []
    for cache in ("dynamic", "static"):
        with model.trace() as trace:
            generate(rollout, on_gpu(prompts()), cache_implementation=cache)
        counts.append(len(trace))
    assert counts[0] == counts[1] > 0


def test_training_and_generation_graphs_agree_in_bfloat16():
    model = trace_compile(qwen3().to("cuda", torch.bfloat16), recipe="qat", compiler="eager")
    batch = on_gpu(prompts())
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, model.rollout()(**batch).logits)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_captured_decode_loop_equals_the_steps_it_was_captured_from(compiler, monkeypatch):
    """Tokens, log-probabilities, keys, codes and ranges; also after a refit, which the graph has to see."""
    model = trace_compile(qwen3().to("cuda", torch.bfloat16), recipe="trace", compiler=compiler, last=1.0)
    twin = model.rollout(copy=True)
    decoder = twin.__dict__["_trace_compile_twin"].decoder
    batch = on_gpu(prompts(batch=8))

    def run() -> tuple:
        generator = torch.Generator().manual_seed(5)
        with model.trace(record="code") as trace:
            found = twin.sample(**batch, max_new_tokens=40, generator=generator, entropy=True)
        rows = {int(k): bytes(r.numpy()) for part in trace.runs for k, r in zip(part.keys, part.rows)}
        return found, rows, trace.ranges.to("cpu")

    def same(a: tuple, b: tuple) -> None:
        for name in ("ids", "log_probs", "entropy", "sampled"):
            assert torch.equal(getattr(a[0], name), getattr(b[0], name)), name
        assert a[1] == b[1] and a[2] == b[2]

    for _ in range(2):  # before and after a refit that changes the scales' source, then one that changes weights alone
        captured = run()
        assert decoder.captures > 0
        same(captured, run())
        with monkeypatch.context() as patch:
            patch.setattr("trace_compile.decode._Loop.capturable", lambda *_: False)
            same(captured, run())
        twin.refit()
    captures = decoder.captures
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.05)
    stale = run()
    twin.refit()
    fresh = run()
    assert not torch.equal(stale[0].log_probs, fresh[0].log_probs)
    assert decoder.captures <= captures + 1  # the scales became traced ones once; weights change in place
    other = model.rollout(copy=True)
    with model.trace(record="code"):
        expected = other.sample(**batch, max_new_tokens=40, generator=torch.Generator().manual_seed(5), entropy=True)
    assert torch.equal(expected.ids, fresh[0].ids) and torch.equal(expected.log_probs, fresh[0].log_probs)
