"""Whole models made of other people's blocks, through the loop: what is recorded and guided, what is only quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.blocks import H, I
from tests.passes.foreign import Sequential, ThreeWeights
from trace_compile import trace_compile
from trace_compile.errors import ExportError, GuidanceError
from trace_compile.model import session_of

VOCAB = 32


class Foreign(nn.Module):
    """A causal language model without a cache: embedding, running mean, blocks, head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, H), nn.Linear(H, VOCAB, bias=False)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        for block in self.blocks:
            x = x + block(x.reshape(-1, H)).view_as(x)
        return {"logits": self.head(F.layer_norm(x, (H,)))}


@pytest.fixture(scope="module")
def loop() -> tuple[Any, Any, Any, Tensor]:
    """A model of three kinds of blocks, its twin with copies, and a trace that guides it."""
    torch.manual_seed(0)
    plain = Foreign(Sequential("selected"), Sequential("split", fused=True), ThreeWeights())
    ids = torch.randint(VOCAB, (3, 5))
    model = trace_compile(plain, recipe="trace", example_inputs={"input_ids": ids})
    rollout = model.rollout(copy=True)
    with model.trace():
        rollout(ids)
    rollout.refit()
    with model.trace() as trace:
        rollout(ids)
    return model, rollout, trace, ids


def test_blocks_by_token_are_guided_and_the_others_say_why_not(loop: tuple[Any, Any, Any, Tensor]) -> None:
    model, rollout, trace, ids = loop
    names = [r.name for r in model.explain().regions]
    assert names == ["blocks.0.experts", "blocks.1.experts", "blocks.2"]
    assert [s.region for s in trace.layout.sites][:1] == ["blocks.2"] == sorted(model.explain().guided)
    assert [r.region for r in trace.layout.routings] == ["blocks.2"]
    assert {region for region, _ in trace.ranges.sites} == set(names)
    assert "not recorded by token: blocks.1.experts, experts run one after the other" in str(model.explain())
    model.guide(trace)
    with torch.no_grad():
        assert torch.equal(model(ids)["logits"], rollout(ids)["logits"])
    model.guide(None)


def test_every_parameter_trains_and_refit_packs_all_of_them(loop: tuple[Any, Any, Any, Tensor]) -> None:
    model, rollout, trace, ids = loop
    model.guide(trace)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        logits = model(ids)["logits"]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    model.guide(None)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        stale = rollout(ids)["logits"]
        assert not torch.equal(stale, model(ids)["logits"])
        rollout.refit()
        assert torch.equal(rollout(ids)["logits"], model(ids)["logits"])
    twin = rollout.__dict__["_trace_compile_twin"]
    packed = sum(p.nbytes for p in twin.experts.values())
    assert 8 * packed / (8 * 3 * H * I * 3) < 4.6  # three blocks of eight experts of three matrices


def test_what_goes_by_token_is_refused_where_rows_are_none(
    loop: tuple[Any, Any, Any, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, _, ids = loop
    with pytest.raises(ExportError, match=r"blocks\.0\.experts: .* is no stacked tensor"):
        model.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with caplog.at_level("WARNING", logger="trace_compile"):
        alone = trace_compile(Foreign(Sequential("every_token")), recipe="trace", example_inputs={"input_ids": ids})
    assert "blocks.0.experts is quantized but not recorded or guided: experts run one after the other" in caplog.text
    with alone.trace() as trace:
        alone.rollout()(ids)
    assert not trace.layout.sites and trace.ranges.sites and not alone.explain().guided
    with pytest.raises(GuidanceError, match="ranges only"):
        alone.guide(trace)
    assert session_of(alone).guiding is None
