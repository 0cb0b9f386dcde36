"""Linear layers beside the experts: rules, grouping, and the whole loop with shared experts and attention in 4 bits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.backends import Compiled
from tools.families import families
from tools.family_checks import compiled, export, generation, training
from trace_compile import trace_compile
from trace_compile.errors import BlockSizeError, NoMoERegionError, TraceCompileError
from trace_compile.model import session_of
from trace_compile.ops import W4A4_ROW
from trace_compile.passes import LinearRegion, Mode
from trace_compile.state.packed import PackedWeights

QKV, OUT = "model.layers.0.self_attn.{q_proj,k_proj,v_proj}", "model.layers.0.self_attn.o_proj"
SHARED, DOWN = "model.layers.0.mlp.shared_expert.{gate_proj,up_proj}", "model.layers.0.mlp.shared_expert.down_proj"
ONE_LAYER = replace(families()["qwen2_moe"], changes={"num_hidden_layers": 1})
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def qwen2() -> Any:
    """One layer: attention with biases, experts, a shared expert behind a gate."""
    return compiled(ONE_LAYER, "trace", include=["*"])


def test_everything_but_what_decides_is_taken_and_grouped_by_input(qwen2: Any) -> None:
    regions = session_of(qwen2).regions
    assert [r.name for r in regions] == [QKV, OUT, SHARED, DOWN, EXPERTS]
    qkv = regions[0]
    assert isinstance(qkv, LinearRegion) and qkv.rows == (64, 32, 32) and qkv.hidden == 64
    assert qkv.b is not None and [p.name.rpartition(".")[2] for p in qkv.b.parameters] == ["bias"] * 3
    (report,) = next(iter(session_of(qwen2).engine.reports.values()))
    left = {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.shared_expert_gate.weight", "lm_head.weight"}
    assert left | {"model.embed_tokens.weight"} == set(report.untouched)
    shown = str(qwen2.explain())
    assert QKV in shown and "64+32+32" in shown and "nvfp4_linear: native" in shown


def test_training_is_the_reference(qwen2: Any) -> None:
    assert training(ONE_LAYER, qwen2) == "yes"


@pytest.mark.slow
def test_the_twin_generates_what_the_trainer_predicts_and_transformers_loads_it(qwen2: Any) -> None:
    assert generation(qwen2) == "yes"
    assert export(qwen2) == "yes"


def test_traced_scales_and_records_reach_every_layer(qwen2: Any) -> None:
    rollout = qwen2.rollout()
    ids = torch.randint(2, 64, (2, 6), generator=torch.Generator().manual_seed(4))
    with qwen2.trace():
        rollout(input_ids=ids, use_cache=False)
    rollout.refit()  # adopts ranges
    session = session_of(qwen2)
    assert {site for site, _ in session.sites()} == {QKV, OUT, SHARED, DOWN, EXPERTS}
    assert all(float(session.outer[site]) > 0 for site in session.sites())
    with qwen2.trace(record="code", inputs=True) as trace:
        rollout(input_ids=ids, use_cache=False)
    assert [s.region for s in trace.layout.sites] == [QKV, OUT, SHARED, DOWN, EXPERTS]
    assert [r.region for r in trace.layout.routings] == [EXPERTS]
    for site in qwen2.diagnose(trace, input_ids=ids, use_cache=False):
        assert site.tokens == 12 and site.mismatch_before == 0 and site.drift == 0
    with torch.no_grad():
        for name, parameter in qwen2.named_parameters():
            if "norm" in name:
                parameter += 0.05
        try:
            drifted = {s.region: s for s in qwen2.diagnose(trace, input_ids=ids, use_cache=False)}
        finally:
            for name, parameter in qwen2.named_parameters():
                if "norm" in name:
                    parameter -= 0.05
    assert all(s.mismatch_before > 0 and s.adjacent > 0.5 for s in drifted.values())


def test_the_twin_holds_packed_layers_and_follows_a_refit(qwen2: Any) -> None:
    rollout = qwen2.rollout(copy=True)
    ids = torch.randint(2, 64, (1, 4), generator=torch.Generator().manual_seed(5))
    run = lambda: rollout(input_ids=ids, use_cache=False).logits  # noqa: E731
    before, weight = run(), qwen2.get_parameter("model.layers.0.self_attn.k_proj.weight")
    with torch.no_grad():
        weight *= -1
    assert torch.equal(run(), before)  # stays behind
    rollout.refit()
    assert not torch.equal(run(), before)
    with torch.no_grad():
        weight *= -1
    rollout.refit()
    assert torch.equal(run(), before)


class Mixed(nn.Module):
    """Two layers on one input, one of another module, a router, a head, and a layer of an odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"q": nn.Linear(32, 48), "k": nn.Linear(32, 16)})
        self.mlp = nn.ModuleDict({"up": nn.Linear(32, 64, bias=False), "down": nn.Linear(64, 32, bias=False)})
        self.chooser = nn.Linear(32, 4)
        self.odd = nn.Linear(16, 8)
        self.small = nn.Linear(8, 16)
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        ids = (self.chooser(x).softmax(-1) + 1).topk(2)[1]
        x = x + self.mlp["down"](self.mlp["up"](x).relu()) + ids.sum(-1, keepdim=True)
        y = self.small(self.odd(self.attn["q"](x)[..., :16] * self.attn["k"](x)))
        return self.head(x + torch.cat([y, y], -1)).float() / 3


@pytest.fixture(scope="module")
def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def regions(module: nn.Module, **rules: Any) -> list[str]:
    patterns: dict[str, Any] = {name: tuple(given) for name, given in rules.items()}
    run = Compiled(module, Mode(scheme=W4A4_ROW, train=True, **patterns))
    run(torch.randn(2, 3, 32))
    return [r.name for r in run.backend.reports[0].regions]


@pytest.mark.parametrize(
    ("include", "ignore", "expected"),
    [
        (["*"], ["small"], ["mlp.up", "mlp.down", "attn.{q,k}", "odd"]),
        (["attn.*", r"re:mlp\.(up|down)$"], ["*.k"], ["mlp.up", "mlp.down", "attn.q"]),
        (["chooser", "head"], [], ["chooser", "head"]),
        (["mlp.up"], [], ["mlp.up"]),
    ],
    ids=["everything", "ignore wins", "by name", "one"],
)
def test_rules(mixed: Mixed, include: list[str], ignore: list[str], expected: list[str]) -> None:
    assert regions(mixed, include=include, ignore=ignore) == expected


def test_rules_that_cannot_be_followed_are_refused(mixed: Mixed) -> None:
    with pytest.raises(BlockSizeError, match="small has 8 input features.*ignore"):
        regions(mixed, include=["*"])
    with pytest.raises(NoMoERegionError, match="attention.*names no linear layer.*attn.q"):
        regions(mixed, include=["attention.*"])
    with pytest.raises(TraceCompileError, match="lists of patterns"):
        trace_compile(mixed, include="*")


def test_a_model_without_experts_trains_and_packs_only_what_changed(mixed: Mixed) -> None:
    model = trace_compile(mixed, recipe="qat", include=["attn.*", "mlp.*"], compiler="eager")
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.attn.parameters())
    weights: PackedWeights = session_of(model).weights
    assert len(weights) == 3
    packs = weights.pack_count
    model(x)
    assert weights.pack_count == packs
    with torch.no_grad():
        model.attn["k"].weight *= 2  # the second part of a joined weight
    model(x)
    assert weights.pack_count == packs + 1
    twin = model.rollout()
    assert torch.equal(twin(x), model(x))


def test_checkpoints_hold_the_twins_bytes_and_come_back(qwen2: Any, tmp_path: Path) -> None:
    rollout = qwen2.rollout()
    ids = torch.randint(2, 64, (2, 6), generator=torch.Generator().manual_seed(6))
    with qwen2.trace(record="ranges"):
        rollout(input_ids=ids, use_cache=False)
    rollout.refit()
    qwen2.export(tmp_path / "out")
    stored: dict[str, Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        stored |= load_file(file)
    session, twin = session_of(qwen2), rollout.__dict__["_trace_compile_twin"]
    for region in (r for r in session.regions if isinstance(r, LinearRegion)):
        packed, outer = twin.experts[region.w.name], float(session.outer[region.name, "input"])
        codes, scales = packed.codes[0].split(region.rows), packed.scales[0].split(region.rows)
        for module, code, scale in zip(region.modules, codes, scales, strict=True):
            assert torch.equal(stored[f"{module}.weight_packed"], code)
            assert torch.equal(stored[f"{module}.weight_scale"].view(torch.uint8), scale)
            assert 1 / float(stored[f"{module}.weight_global_scale"]) == float(packed.outer)
            assert 1 / float(stored[f"{module}.input_global_scale"]) == outer
            assert f"{module}.weight" not in stored
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert not any(re.match(p.removeprefix("re:"), "model.layers.0.self_attn.q_proj") for p in ignored)
    assert any(re.match(p.removeprefix("re:"), "model.layers.0.mlp.shared_expert_gate") for p in ignored)

    with torch.no_grad():
        expected, weight = rollout(input_ids=ids, use_cache=False).logits, qwen2.model.layers[0].self_attn.q_proj.weight
        kept = {name: p.clone() for name, p in qwen2.named_parameters()}
        weight += 1
        report = qwen2.import_checkpoint(tmp_path / "out")
        assert session.regions[0].w.name in report.packed  # type: ignore[union-attr]
        rollout.refit()
        assert torch.equal(rollout(input_ids=ids, use_cache=False).logits, expected)
        for name, parameter in qwen2.named_parameters():
            parameter.copy_(kept[name])
