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
