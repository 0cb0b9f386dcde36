"""Fault S07, and Q08 and S03 once more, with experts spread over ranks that tokens travel between.

Five experts over two ranks; each rank first computes alone what both compute together.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.faults.parts import assert_near
from tests.faults.test_fsdp import move, steps, values
from tests.faults.test_ranks import step, together, tokens
from tests.ranks import collectives, run_ranks
from tests.tiny import qwen3
from trace_compile import trace_compile
from trace_compile.errors import TraceCompileError
from trace_compile.model import session_of
from trace_compile.parallel import ExpertParallel
from trace_compile.state.sharded import is_dtensor

LAYERS, EXPERTS = 2, 5


def means(gradients: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Whole gradients: those of spread experts are means already, those of replicated parameters are averaged here."""
    spread = {name for name, p in model.named_parameters() if is_dtensor(p)}
    found = values(gradients)
    for name, grad in found.items():
        if name not in spread:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
    return found


def ep_work(rank: int, world: int) -> dict[str, Any]:
    every = [tokens(r) for r in range(world)]
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    model = trace_compile(qwen3(num_hidden_layers=LAYERS, num_experts=EXPERTS), recipe="trace").eval()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    found: dict[str, Any] = {"alone": steps(model, together(every), 1 / 100, group=None)}
    del found["alone"]["twin"]
    model.load_state_dict(start, strict=False)

    parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})
    experts = model.model.layers[0].mlp.experts
    found["local"] = [tuple(p.to_local().shape) for p in experts.parameters()], experts.num_experts
    twin = model.rollout()
    found["twin"] = twin.model.layers[0].mlp.experts.num_experts
    with model.trace() as record:
        logits = twin(**every[rank]).logits
    move(model)
    results = {"rollout": logits, "ranges": record.ranges}
    for name, guide in (("own", None), ("guided", record)):
        model.guide(guide)
        results[name] = means(step(model, every[rank], world / 100), model)
    model.guide(None)
    found["spread"] = results
    found["collectives"] = sum(collectives(lambda: step(model, every[rank], 1.0)).values())
    twin.refit()
    found["scales"] = {site: float(g) for site, g in session_of(model).outer.as_dict().items()}
    with torch.no_grad():
        found["twin equals trainer"] = float((twin(**every[rank]).logits - model(**every[rank]).logits).abs().max())
    found["empty"], found["only rank 0"] = empty_rank(rank, mesh)
    found["lost"], found["lost alone"] = lost_routes(rank, mesh)
    try:
        parallelize_module(model.model.layers[0].mlp, mesh, {"gate": ExpertParallel()})
    except TraceCompileError as error:
        found["refused"] = str(error)
    return found


def block() -> Any:
    torch.manual_seed(3)
    block = Qwen3MoeSparseMoeBlock(qwen3(num_hidden_layers=1, num_experts=EXPERTS).config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return block


def empty_rank(rank: int, mesh: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a block whose second rank has no token, and of the first rank's tokens alone."""
    x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(4))
    model = trace_compile(block(), recipe="qat", example_inputs={"hidden_states": x[:1]})
    model(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    parallelize_module(model, mesh, {"experts": ExpertParallel()})
    model(x if rank == 0 else x[:0]).square().sum().backward()
    found = means({name: p.grad for name, p in model.named_parameters()}, model)
    return {name: dist.get_world_size() * grad for name, grad in found.items()}, expected


def lost_routes(rank: int, mesh: Any) -> tuple[Tensor, Tensor]:
    """Outputs with some routes that go nowhere, of the plain experts: spread, and alone with their own sentinel."""
    generator = torch.Generator().manual_seed(rank)
    x, gates = torch.randn(9, 64, generator=generator), torch.rand(9, 2, generator=generator)
    ids = torch.rand(9, EXPERTS, generator=generator).argsort(1)[:, :2]
    ids[::3, 1] = -1
    ids[4] = -1
    experts = block().experts
    experts.config._experts_implementation_internal = "grouped_mm"
    with torch.no_grad():
        expected = experts(x, torch.where(ids < 0, EXPERTS, ids), gates)
        parallelize_module(experts, mesh, ExpertParallel())
        return experts(x, ids, gates), expected


@pytest.fixture(scope="module")
def ep() -> list[dict[str, Any]]:
    return run_ranks(ep_work, 2)


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["own", "guided"])
def test_S07_steps_equal_one_process_on_the_whole_data(ep: list[dict[str, Any]], kind: str) -> None:
    """Ranks' partial sums and sums over tokens are added in another order; nothing else differs."""
    for rank in ep:
        assert_near(rank["spread"][kind], rank["alone"][kind], 1e-4)
    assert any(not torch.equal(ep[0]["spread"]["guided"][n], g) for n, g in ep[0]["spread"]["own"].items())


def test_S07_uneven_experts_lie_on_their_ranks_and_twins_are_whole(ep: list[dict[str, Any]]) -> None:
    assert [rank["local"][1] for rank in ep] == [3, 2] and [rank["twin"] for rank in ep] == [EXPERTS] * 2
    assert ep[0]["local"][0] == [(3, 64, 64), (3, 64, 32)] and ep[1]["local"][0] == [(2, 64, 64), (2, 64, 32)]


def test_Q08_ranges_and_scales_are_those_of_all_ranks(ep: list[dict[str, Any]]) -> None:
    first, second = ep
    for number, rank in enumerate(ep):
        rows = slice(2 * number, 2 * number + 2)
        assert torch.equal(rank["spread"]["rollout"], rank["alone"]["rollout"][rows])
        assert rank["twin equals trainer"] < 1e-4
    assert first["spread"]["ranges"] == second["spread"]["ranges"] == first["alone"]["ranges"]
    assert first["scales"] == second["scales"] and len(first["scales"]) == 2 * LAYERS


def test_S03_a_rank_without_tokens_serves_the_others(ep: list[dict[str, Any]]) -> None:
    for rank in ep:
        assert_near(rank["empty"], rank["only rank 0"], 1e-5)


def test_S07_routes_to_nobody_contribute_nothing(ep: list[dict[str, Any]]) -> None:
    for rank in ep:
        assert_near({"y": rank["lost"]}, {"y": rank["lost alone"]}, 1e-6)
        assert not rank["lost"][4].any() and rank["lost"][3].any()


def test_Q08_collectives_per_step(ep: list[dict[str, Any]]) -> None:
    """Five exchanges forward and three backward per block, as documented."""
    for rank in ep:
        assert rank["collectives"] == 8 * LAYERS
        assert "owns no stacked expert parameters" in rank["refused"]
