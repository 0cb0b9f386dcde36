"""The backend on whole transformers models: identity is bitwise, checkpointing or not, and lengths share graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends import Compiled, RuntimeForTests, assert_equal
from tests.tiny import VOCAB, qwen3
from trace_compile.ops import W4A4_ROW
from trace_compile.passes import Mode


def model(**changes: Any) -> Any:
    found = qwen3(**changes)
    found.config._experts_implementation = "grouped_mm"
    with torch.no_grad():
        found(input_ids=ids(1, 2))  # transformers installs its output hooks at the first call, under a lock
    return found.train()


def ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def everything(run: Any, module: Any, tokens: Tensor) -> list[Tensor]:
    """Loss with the auxiliary loss in it, logits, router logits, and every gradient."""
    module.zero_grad()
    out = run(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    grads = [p.grad for p in module.parameters()]
    assert all(g is not None for g in grads)
    return [t.detach() for t in (out.loss, out.aux_loss, out.logits, *out.router_logits)] + [g.clone() for g in grads]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_identity_is_bitwise(checkpointed: bool) -> None:
    module, tokens = model(output_router_logits=True), ids(2, 9)
    expected = everything(module, module, tokens)
    if checkpointed:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = Compiled(module, Mode(scheme=None))
    assert_equal(everything(compiled, module, tokens), expected)
    (report,) = compiled.backend.reports
    assert [r.name for r in report.regions] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert report.unmatched == () and "model.layers.1.mlp.gate.weight" in report.untouched
    routers = [p.grad for name, p in module.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2 and all(bool(g.any()) for g in routers)


def test_quantized_training_with_records_is_equal_under_checkpointing() -> None:
    found = []
    for checkpointed in (False, True):
        module, tokens = model(output_router_logits=True, num_hidden_layers=1), ids(2, 7)
        if checkpointed:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        compiled = Compiled(module, Mode(scheme=W4A4_ROW, train=True, record="bit", routing=True))
        found.append(everything(compiled, module, tokens))
        (emitted,) = compiled.runtime.emitted
        assert emitted["routing"]["model.layers.0.mlp.experts"].shape == (14, 2)
        found[-1] += [emitted[kind][region] for kind in sorted(emitted) for region in sorted(emitted[kind])]
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["training", "inference"])
def test_few_compilations_over_many_lengths(train: bool) -> None:
    module = model(num_hidden_layers=1)
    runtime = RuntimeForTests(W4A4_ROW)
    compiled = Compiled(module, Mode(scheme=W4A4_ROW, train=train), runtime)
    counts = []
    with torch.set_grad_enabled(train):
        for length in (7, 8, 9, 16, 33, 64, 100, 257, 1):
            out = compiled(input_ids=ids(2, length), use_cache=False)
            assert out.logits.shape == (2, length, VOCAB)
            counts.append(compiled.backend.compile_count)
    assert counts[-2] <= 2
    assert counts[-1] - counts[-2] <= 1


def test_generation_compiles_a_few_graphs_and_gives_the_models_own_tokens() -> None:
    """Prefill and cached decoding through one backend, unquantized: greedy tokens equal the model's."""
    module = model(num_hidden_layers=1).eval()
    prompt = ids(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    with torch.no_grad():
        expected = module.generate(prompt, **options)
        compiled = Compiled(module, Mode(scheme=None))
        forward = module.forward
        torch._dynamo.reset()
        compiled.run = torch.compile(forward, backend=compiled.backend, dynamic=True, fullgraph=True)
        module.forward = compiled.__call__
        try:
            found = module.generate(prompt, **options)
        finally:
            del module.forward
    assert torch.equal(found, expected)
    assert compiled.backend.compile_count <= 4
