"""Faults of two sides that should agree: other source dtypes, a resumed run, ranks, the router (Q05, Q06, Q08, R02)."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.parts import batch
from tests.tiny import prompts, qwen3
from trace_compile import trace_compile
from trace_compile.model import session_of
from trace_compile.ops.scheme import OperandScheme
from trace_compile.ops.weights import WeightLayout, pack_experts
from trace_compile.state.prefix import prefix_keys
from trace_compile.state.trace import Trace


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for seed in steps:
        loss = model(**batch(seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_Q05_both_sides_quantize_the_same_source_after_every_update(dtype: torch.dtype) -> None:
    """Trainer and twin pack the parameter as it is; a step too small for bfloat16 is a step in float32."""
    model = trace_compile(qwen3(num_hidden_layers=1).to(dtype), recipe="qat")
    twin = model.rollout(copy=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0), range(3))
    model(**batch(9))  # packs the weights of the last step
    version = twin.weights_version
    assert twin.refit() == version + 1
    packed = twin.__dict__["_trace_compile_twin"].experts
    for name, p in model.named_parameters():
        if "experts" not in name:
            continue
        fresh = pack_experts(p, WeightLayout(), OperandScheme(outer="expert"))
        trainers = session_of(model).weights.get(name, p, WeightLayout(), OperandScheme(outer="expert"))
        for part in ("codes", "scales", "outer"):
            assert torch.equal(getattr(packed[name], part), getattr(fresh, part)), (name, part)
            assert torch.equal(getattr(trainers, part), getattr(fresh, part)), (name, part)
        moved = (p != before[name]).float().mean()
        assert moved > 0.9 if dtype == torch.float32 else moved < 0.5, (name, moved)


def test_Q06_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    """Weights, optimizer and the trace's ranges are all there is to save; loading recalibrates nothing."""
    straight = trace_compile(qwen3(num_hidden_layers=1), recipe="static")
    twin = straight.rollout(copy=True)
    with straight.trace(record="ranges") as trace:
        twin(**prompts())
    twin.refit()
    optimizer = torch.optim.AdamW(straight.parameters(), lr=1e-3)
    train(straight, optimizer, range(3))
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    trace.save(tmp_path / "trace.safetensors")
    expected = train(straight, optimizer, range(3, 6))

    resumed = trace_compile(qwen3(seed=5, num_hidden_layers=1), recipe="static")
    saved = torch.load(tmp_path / "state.pt")
    assert not resumed.load_state_dict(saved["model"], strict=True).missing_keys
    assert not session_of(resumed).outer
    resumed.use_ranges(Trace.load(tmp_path / "trace.safetensors", fingerprint=session_of(resumed).fingerprint).ranges)
    assert session_of(resumed).outer.as_dict() == session_of(straight).outer.as_dict()
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved["optimizer"])
    assert train(resumed, optimizer, range(3, 6)) == expected
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters()):
        assert torch.equal(a, b), name


def test_R02_the_router_is_the_models_own() -> None:
    """10 000 tokens, pairs of experts with nearly the same logits, all shifted by more than 20: the same ids."""
    plain = qwen3(num_hidden_layers=1)
    with torch.no_grad():
        gate = plain.model.layers[0].mlp.gate.weight
        gate[1::2] = gate[::2] + 1e-4
        gate[:, 0] = 10.0
        plain.model.embed_tokens.weight[:, 0] = 1.0
    plain.set_experts_implementation("grouped_mm")
    ids = torch.randint(2, 64, (40, 250), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = plain(input_ids=ids, output_router_logits=True, use_cache=False).router_logits[0]
    assert logits.mean() > 20
    expected = logits.softmax(-1, dtype=torch.float32).topk(2, -1).indices
    model = trace_compile(plain, recipe="trace")
    with model.trace() as trace:
        model.rollout()(input_ids=ids, use_cache=False)
    keys, _, _ = prefix_keys(ids)
    found = trace.lookup(keys, session_of(model).version)
    assert found.hit.all() and torch.equal(found.routing(0), expected)
    assert len(expected.unique()) == 8


def _rank(rank: int, path: str, results: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    results.put((rank, _scales(slice(2 * rank, 2 * rank + 2), dist.group.WORLD)))
    dist.destroy_process_group()


def _scales(rows: slice, group: Any) -> dict[tuple[str, str], float]:
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="static")
    twin = model.rollout()
    with model.trace(record="ranges", group=group):
        twin(**{name: t[rows] for name, t in prompts().items()})
    twin.refit()
    return {site: float(scale) for site, scale in session_of(model).outer.as_dict().items()}


@pytest.mark.slow
def test_Q08_ranks_with_different_data_set_the_scales_of_all_of_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, str(tmp_path / "store"), results)) for r in range(2)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=240) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    alone = [_scales(slice(2 * r, 2 * r + 2), None) for r in range(2)]
    assert found[0] == found[1] == _scales(slice(0, 4), None)
    assert {site: max(a[site] for a in alone) for site in alone[0]} == found[0]
