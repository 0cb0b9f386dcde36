"""Faults T03, S03, C02, Q08 with several ranks: DistributedDataParallel over two gloo processes.

One pair of processes does all of the work; each test looks at one part of what the two ranks saw.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.faults.parts import EXPERTS, assert_near
from tests.ranks import collectives, run_ranks
from tests.tiny import VOCAB, qwen3
from trace_compile import trace_compile
from trace_compile.model import session_of

LENGTHS = (9, 33, 1)


def tokens(rank: int, rows: int = 2, length: int = 7) -> dict[str, Any]:
    """A batch of its own for each rank."""
    ids = torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(100 + rank))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}


def together(batches: list[dict[str, Any]]) -> dict[str, Any]:
    whole = {k: torch.cat([b[k] for b in batches]) for k in ("input_ids", "attention_mask")}
    return {**whole, "use_cache": False}


def step(model: Any, inputs: dict[str, Any], share: float) -> dict[str, Tensor]:
    """Gradients of ``share`` times the sum of squared logits, by the plain model's names."""
    model.zero_grad()
    logits = model(**inputs).logits
    (logits.float().square().sum() * share).backward()
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    assert all(p.grad is not None for p in named.values())
    return {name: p.grad.clone() for name, p in named.items()}  # type: ignore[union-attr]


def traced(recipe: str = "trace", **changes: Any) -> tuple[Any, Any]:
    model = trace_compile(qwen3(num_hidden_layers=1, **changes), recipe=recipe).eval()
    return model, model.rollout()


@torch.no_grad()
def route_by_token(model: Any) -> None:
    """Even token ids go to experts 0 and 1, odd ones to 2 and 3, whatever stands around them."""
    sign = torch.where(torch.arange(VOCAB) % 2 == 0, 20.0, -20.0)
    model.model.embed_tokens.weight[:, 0] = sign
    for layer in model.model.layers:
        layer.mlp.gate.weight.zero_()
        layer.mlp.gate.weight[:4, 0] = torch.tensor([2.0, 1.0, -2.0, -1.0])


def ddp_work(rank: int, world: int) -> dict[str, Any]:
    """Everything that one rank does; the single-process runs on the whole data are its yardstick."""
    found: dict[str, Any] = {}
    every = [tokens(r) for r in range(world)]
    model, rollout = traced()
    alone, alone_rollout = traced()
    ddp = DistributedDataParallel(model)

    # ranges: each rank traces its own tokens; the yardstick traces all of them and is told not to ask the other rank
    with model.trace() as trace:
        rollout(**every[rank])
    with alone.trace(group=None) as whole:
        alone_rollout(**together(every))
    with model.trace(group=None, record="ranges") as own:
        rollout(**every[rank])
    found["ranges"], found["whole ranges"], found["own ranges"] = trace.ranges, whole.ranges, own.ranges
    with model.trace(record="ranges") as one_sided:  # a rank that generates nothing
        if rank == 0:
            rollout(**every[0])
    found["one-sided ranges"] = one_sided.ranges
    with alone.trace(group=None, record="ranges") as first:
        alone_rollout(**every[0])
    found["first ranges"] = first.ranges

    # steps of weights that moved on since the trace: unguided and guided
    scaled = 1.0 / 100
    for moved in (model, alone):
        with torch.no_grad():
            moved.model.embed_tokens.weight.mul_(1.05)
    for name, guide, whole_guide in (("own rounding", None, None), ("guided", trace, whole)):
        model.guide(guide)
        alone.guide(whole_guide)
        found[name] = step(ddp, every[rank], world * scaled)
        found[f"{name}, alone"] = step(alone, together(every), scaled)
    found["hits"] = trace.counters.hits, trace.counters.lookups
    model.guide(None)
    alone.guide(None)

    # scales after a refit with ranges of both ranks
    with model.trace():
        rollout(**every[rank])
    rollout.refit()
    found["scales"] = {site: float(g) for site, g in session_of(model).outer.as_dict().items()}

    # graphs over lengths
    torch._dynamo.utils.counters.clear()
    before = dict(session_of(model).engine.compile_counts)
    for n in LENGTHS:
        step(ddp, tokens(rank, 2, n), 1.0)
    after = session_of(model).engine.compile_counts
    found["compilations"] = max(n - before.get(mode, 0) for mode, n in after.items())
    found["regions per graph"] = {
        len(r.regions) for reports in session_of(model).engine.reports.values() for r in reports
    }
    found["limit hit"] = dict(torch._dynamo.utils.counters["recompile_limit"])

    found["collectives"] = {8: traced_collectives(rank, model, rollout)}
    found["collectives"][16] = traced_collectives(rank, *traced(num_experts=16))
    found["disjoint"] = disjoint(rank)
    found["empty rank"], found["only rank 0"] = empty_rank(rank)
    return found


def empty_rank(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of an expert block whose second rank gets no token, and of the first rank's tokens alone."""

    def block() -> Any:
        torch.manual_seed(3)
        block = Qwen3MoeSparseMoeBlock(qwen3(num_hidden_layers=1).config)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        return trace_compile(block, recipe="qat", example_inputs={"hidden_states": torch.zeros(1, 2, 64)})

    def gradients(module: Any, x: Tensor) -> dict[str, Tensor]:
        module(x).square().sum().backward()
        return {n.removeprefix("module."): p.grad.clone() for n, p in module.named_parameters()}

    x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(4))
    shared = gradients(DistributedDataParallel(block()), x if rank == 0 else x[:0])
    return {name: 2 * g for name, g in shared.items()}, gradients(block(), x)


def disjoint(rank: int) -> dict[str, Any]:
    """The ranks' tokens go to different experts."""
    plain = qwen3(num_hidden_layers=1)
    route_by_token(plain)
    model = trace_compile(plain, recipe="static")
    rollout = model.rollout()
    inputs = tokens(rank)
    inputs["input_ids"] = inputs["input_ids"] // 2 * 2 + rank
    with model.trace(group=None) as own:
        rollout(**inputs)
    with model.trace() as trace:
        rollout(**inputs)
    rollout.refit()
    ddp = DistributedDataParallel(model)
    gradients = step(ddp, inputs, 1.0)
    return {
        "own": own.ranges.unused_experts(),
        "all": trace.ranges.unused_experts(),
        "scales": {site: float(g) for site, g in session_of(model).outer.as_dict().items()},
        "experts with gradients": (
            gradients["model.layers.0.mlp.experts.down_proj"].flatten(1).norm(dim=1) > 0
        ).tolist(),
        "finite": all(bool(g.isfinite().all()) for g in gradients.values()),
    }


def traced_collectives(rank: int, model: Any, rollout: Any) -> int:
    """Collectives of one trace. Those of a step are DDP's own, by bytes of gradients."""

    def trace() -> None:
        with model.trace():
            rollout(**tokens(rank))

    return sum(collectives(trace).values())


@pytest.fixture(scope="module")
def ddp() -> list[dict[str, Any]]:
    return run_ranks(ddp_work, 2)


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["own rounding", "guided"])
def test_Q08_steps_equal_one_process_on_the_whole_data(ddp: list[dict[str, Any]], kind: str) -> None:
    """Rows are quantized by themselves, so only the order of float32 sums over tokens differs."""
    for rank in ddp:
        assert_near(rank[kind], rank[f"{kind}, alone"], 1e-5)
    if kind == "guided":
        assert all(hits == lookups == 14 for hits, lookups in (rank["hits"] for rank in ddp))
        assert any(not torch.equal(ddp[0]["guided"][n], g) for n, g in ddp[0]["own rounding"].items())


def test_Q08_ranges_and_scales_are_those_of_all_ranks(ddp: list[dict[str, Any]]) -> None:
    first, second = ddp
    assert first["ranges"] == second["ranges"] == first["whole ranges"]
    assert first["own ranges"] != second["own ranges"] != first["whole ranges"]
    assert first["scales"] == second["scales"] and len(first["scales"]) == 2
    assert first["one-sided ranges"] == second["one-sided ranges"] == first["first ranges"]


def test_S03_an_empty_rank_finishes_and_adds_nothing(ddp: list[dict[str, Any]]) -> None:
    for rank in ddp:
        assert_near(rank["empty rank"], rank["only rank 0"], 1e-6)


def test_T03_ranks_with_disjoint_experts_get_equal_scales(ddp: list[dict[str, Any]]) -> None:
    first, second = (rank["disjoint"] for rank in ddp)
    assert first["own"] == {EXPERTS: (2, 3, 4, 5, 6, 7)} and second["own"] == {EXPERTS: (0, 1, 4, 5, 6, 7)}
    assert first["all"] == second["all"] == {EXPERTS: (4, 5, 6, 7)}
    assert first["scales"] == second["scales"]
    for rank in (first, second):
        assert rank["experts with gradients"] == [True] * 4 + [False] * 4 and rank["finite"]


def test_C02_lengths_share_graphs_that_no_bucket_splits(ddp: list[dict[str, Any]]) -> None:
    for rank in ddp:
        assert rank["compilations"] <= 3 and not rank["limit hit"]
        assert rank["regions per graph"] == {1}


def test_Q08_a_trace_takes_one_collective_however_many_experts(ddp: list[dict[str, Any]]) -> None:
    for rank in ddp:
        assert rank["collectives"] == {8: 1, 16: 1}
