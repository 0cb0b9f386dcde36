"""Faults Q06, Q08, T03, T06 and K03's kind (code for one device) under FSDP2: experts packed where they lie.

Each rank first does everything alone on the whole data, then on its own part with the model sharded over the ranks; six
experts or five do not divide evenly. The second job loads what the first saved, with twice as many ranks in two groups.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.faults.parts import assert_near, assert_same
from tests.faults.test_ranks import step, together, tokens
from tests.ranks import collectives, run_ranks
from tests.tiny import qwen3
from trace_compile import trace_compile
from trace_compile.errors import ExportError, NonFiniteWeightError
from trace_compile.model import session_of
from trace_compile.state.sharded import reshard, whole

LAYERS, EXPERTS = 2, 5
DOWN = "model.layers.1.mlp.experts.down_proj"


def sharded(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(t.detach()).clone() for name, t in tensors.items()}


def parameters(model: Any) -> dict[str, Tensor]:
    reshard(model)
    return values(dict(model.named_parameters()))


def move(model: Any) -> None:
    """The policy moves on: a trace of before now guides something else."""
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").mul_(1.05)


def steps(model: Any, inputs: dict[str, Any], share: float, **trace: Any) -> dict[str, Any]:
    """Traced with a twin, then one step with own rounding and one guided, of weights that moved on."""
    rollout = model.rollout()
    with model.trace(**trace) as record:
        logits = rollout(**inputs).logits
    move(model)
    own = values(step(model, inputs, share))
    model.guide(record)
    guided = values(step(model, inputs, share))
    model.guide(None)
    return {"rollout": logits, "ranges": record.ranges, "own": own, "guided": guided, "twin": rollout}


def gathered_bytes(work: Callable[[], Any]) -> int:
    """Bytes that one rank has after FSDP2's all-gathers during ``work()``."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    total, plain = 0, module.foreach_all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal total
        result = plain(*args, **kwargs)
        total += 0 if result is None else result.all_gather_output.nbytes
        return result

    module.foreach_all_gather = counted
    try:
        work()
    finally:
        module.foreach_all_gather = plain
    return total


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except NonFiniteWeightError as error:
        return str(error)
    return "nothing was raised"


def fsdp_work(rank: int, world: int) -> dict[str, Any]:
    every = [tokens(r) for r in range(world)]
    model = trace_compile(qwen3(num_hidden_layers=LAYERS, num_experts=EXPERTS), recipe="trace").eval()
    start = parameters(model)
    found: dict[str, Any] = {"alone": steps(model, together(every), 1 / 100, group=None)}
    del found["alone"]["twin"]
    model.load_state_dict(start, strict=False)

    sharded(model)
    found["sharded"] = steps(model, every[rank], world / 100)
    twin = found["sharded"].pop("twin")
    session = session_of(model)
    found["packed"] = sorted(session.shards.packed)
    found["hollow bytes"] = sum(p._unsharded_param.untyped_storage().nbytes() for p in session.shards._params.values())

    # two guided forwards before their backwards, with and without recomputation
    traces = []
    for seed in (rank, rank + 5):
        with model.trace() as record:
            twin(**tokens(seed))
        traces.append((record, tokens(seed)))
    move(model)
    model.train()
    found["kept"] = pending(model, traces)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found["recomputed"] = pending(model, traces)
    model.gradient_checkpointing_disable()
    model.eval()

    # what travels in one forward, and how often anything does in a step
    with torch.no_grad():
        reshard(model)
        found["bytes"] = gathered_bytes(lambda: model(**every[rank]))
    reshard(model)
    found["collectives"] = collectives(lambda: step(model, every[rank], 1 / 100))

    # refit, and what the ranks agree on
    twin.refit()
    found["scales"] = {site: float(g) for site, g in session.outer.as_dict().items()}
    with torch.no_grad():
        found["twin equals trainer"] = torch.equal(twin(**every[0]).logits, model(**every[0]).logits)

    # one rank's shard is broken: all ranks say so, and nothing changed
    reshard(model)
    broken = model.get_parameter(DOWN)
    if rank == 1:
        broken.to_local().detach()[0, 0, 0] = torch.nan
    version = twin.weights_version
    found["refused"] = [refused(lambda: model(**every[rank])), refused(twin.refit)]
    found["version kept"] = twin.weights_version == version
    if rank == 1:
        broken.to_local().detach()[0, 0, 0] = 0.1
    try:
        model.export("nowhere")
    except ExportError as error:
        found["export"] = str(error)

    # saved, trained on, loaded, trained on again
    reshard(model)  # or the optimizer would hold what the last forward left unsharded
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update(model, optimizer, every[rank])
    save(model, optimizer, os.environ["CHECKPOINT"])
    found["saved"] = parameters(model)
    update(model, optimizer, every[rank])
    found["went on"] = parameters(model)
    again = trace_compile(qwen3(7, num_hidden_layers=LAYERS, num_experts=EXPERTS), recipe="trace").eval()
    sharded(again)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-3)
    load(again, optimizer, os.environ["CHECKPOINT"])
    found["loaded"] = parameters(again)
    found["loaded scales"] = {site: float(g) for site, g in session_of(again).outer.as_dict().items()}
    update(again, optimizer, every[rank])
    found["resumed"] = parameters(again)
    return found


def pending(model: Any, traces: list[tuple[Any, dict[str, Any]]]) -> dict[str, Tensor]:
    """Gradients of two forwards, each guided by its own trace, whose backwards come when both are over."""
    model.zero_grad()
    losses = []
    for record, inputs in traces:
        model.guide(record)
        losses.append(model(**inputs).logits.square().sum())
    model.guide(None)
    torch.stack(losses).sum().backward()
    return values({name: p.grad for name, p in model.named_parameters()})


def update(model: Any, optimizer: Any, inputs: dict[str, Any]) -> None:
    step(model, inputs, 1 / 100)
    optimizer.step()


def save(model: Any, optimizer: Any, folder: str) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "trace": model.trace_state}, checkpoint_id=folder)


def load(model: Any, optimizer: Any, folder: str) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments, "trace": model.trace_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def hsdp_work(rank: int, world: int) -> dict[str, Any]:
    """Two copies of a model sharded over two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = trace_compile(qwen3(9, num_hidden_layers=LAYERS, num_experts=EXPERTS), recipe="trace").eval()
    sharded(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    load(model, optimizer, os.environ["CHECKPOINT"])
    found: dict[str, Any] = {"loaded": parameters(model)}
    update(model, optimizer, tokens(rank % 2))
    found["resumed"] = parameters(model)
    found["packed"] = sorted(session_of(model).shards.packed)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    os.environ["CHECKPOINT"] = str(folder)
    return folder


@pytest.fixture(scope="module")
def fsdp(checkpoint: Path) -> list[dict[str, Any]]:
    return run_ranks(fsdp_work, 2)


@pytest.fixture(scope="module")
def hsdp(fsdp: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_ranks(hsdp_work, 4)


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["own", "guided"])
def test_Q08_steps_equal_one_process_on_the_whole_data(fsdp: list[dict[str, Any]], kind: str) -> None:
    """The ranks' experts pack to the bytes of the whole; only the order of float32 sums over tokens differs."""
    for rank, found in enumerate(fsdp):
        rows = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(found["sharded"]["rollout"], found["alone"]["rollout"][rows])
        assert_near(found["sharded"][kind], found["alone"][kind], 1e-5)
    assert any(not torch.equal(fsdp[0]["sharded"]["guided"][n], g) for n, g in fsdp[0]["sharded"]["own"].items())


def test_T06_recomputation_is_guided_by_the_forward_that_it_belongs_to(fsdp: list[dict[str, Any]]) -> None:
    for rank in fsdp:
        assert_same(rank["recomputed"], rank["kept"])


def test_Q08_ranges_and_scales_are_those_of_all_ranks(fsdp: list[dict[str, Any]]) -> None:
    first, second = fsdp
    assert first["sharded"]["ranges"] == second["sharded"]["ranges"] == first["alone"]["ranges"]
    assert first["scales"] == second["scales"] and len(first["scales"]) == 2 * LAYERS
    assert first["twin equals trainer"] and second["twin equals trainer"]


def test_Q08_experts_travel_packed_and_collectives_do_not_grow_with_them(fsdp: list[dict[str, Any]]) -> None:
    plain = qwen3(num_hidden_layers=LAYERS, num_experts=EXPERTS)
    rows = 2 * -(-EXPERTS // 2)  # both ranks send three experts, one of them padding
    packed = others = 0
    for name, p in plain.named_parameters():
        if ".experts." in name:
            n, k = p.shape[1:]
            packed += rows * (n * k // 2 + n * k // 16 + 4)
        else:
            others += 4 * 2 * -(-p.shape[0] // 2) * (p.numel() // p.shape[0])
    for rank in fsdp:
        assert len(rank["packed"]) == 2 * LAYERS and rank["hollow bytes"] == 0
        assert rank["bytes"] == packed + others
        assert sum(rank["collectives"].values()) <= 3 * (LAYERS + 1)


def test_Q08_a_broken_shard_is_named_on_every_rank(fsdp: list[dict[str, Any]]) -> None:
    for rank in fsdp:
        assert all(DOWN in message for message in rank["refused"]) and rank["version kept"]
        assert "export a twin" in rank["export"]


def test_Q06_a_resumed_run_goes_on_bit_for_bit(fsdp: list[dict[str, Any]]) -> None:
    for rank in fsdp:
        assert_same(rank["loaded"], rank["saved"])
        assert_same(rank["resumed"], rank["went on"])
        assert rank["loaded scales"] == rank["scales"]
        assert any(not torch.equal(rank["went on"][name], p) for name, p in rank["saved"].items())


def test_Q06_a_checkpoint_of_two_ranks_goes_on_with_four_in_two_groups(
    fsdp: list[dict[str, Any]], hsdp: list[dict[str, Any]]
) -> None:
    for rank in hsdp:
        assert_same(rank["loaded"], fsdp[0]["saved"])
        assert_near(rank["resumed"], fsdp[0]["went on"], 1e-4)
        assert len(rank["packed"]) == 2 * LAYERS
