"""What a recipe's or a rollout's options change in the graphs: unquantized regions, pruned experts, noise on norms.

Each against ``tests.toy.reference``, which loops over tokens and experts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.tiny import prompts, qwen3
from tests.toy import E, K, Toy, batch, reference
from trace_compile import trace_compile
from trace_compile.errors import ExportError, PruningError, TraceCompileError
from trace_compile.export import reload
from trace_compile.passes.mode import Unquantized
from trace_compile.pruning import pruning_report
from trace_compile.recipes import Noise, get_recipe
from trace_compile.state.usage import Kept, Usage, count_routes

LIMIT = 1e-5
REGIONS = ("layers.0", "layers.1")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a = a.detach()
    return float((a - b).norm() / b.norm())


def compiled(recipe: str, **options: Any) -> Any:
    return trace_compile(Toy(), recipe=recipe, example_inputs={"input_ids": batch()}, **options)


# --- unquantized regions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "plain"), [(Unquantized(first=1), 0), pytest.param(["*.1"], 1, marks=pytest.mark.slow)]
)
def test_unquantized_regions_compute_as_the_model_does(rule: Any, plain: int) -> None:
    ids = batch()
    model = compiled("trace", last=1.0, unquantized=rule)
    assert [r.name for r in model.explain().regions] == list(REGIONS)
    assert "own dtype" in str(model.explain()) and "nvfp4, 4.5 bits" in str(model.explain())
    schemes: list[Any] = [get_recipe("trace").rollout] * 2
    schemes[plain] = None
    expected, _ = reference(Toy(), ids, schemes)
    rollout = model.rollout()
    assert relative(model(ids), expected) < LIMIT
    with model.trace() as trace:
        assert relative(rollout(ids), expected) < LIMIT
    assert [site.region for site in trace.layout.sites] == [REGIONS[1 - plain]]
    assert {region for region, _ in trace.ranges.sites} == {REGIONS[1 - plain]}
    assert rollout.packed_bytes < 0.6 * compiled("trace").rollout().packed_bytes
    rollout.refit()  # traced scales of the quantized regions alone
    out = model.guide(trace)(ids)
    assert torch.equal(out.detach(), rollout(ids))
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_rules_that_do_not_fit_are_refused_and_the_model_stays() -> None:
    for rule, match in (
        (["*.7"], r"'\*\.7' matches none"),
        (Unquantized(last=2), "all 2 regions"),
        (Unquantized(first=1, last=1), "all 2 regions"),
    ):
        model = Toy()
        with pytest.raises(TraceCompileError, match=match):
            trace_compile(model, recipe="qat", unquantized=rule, example_inputs={"input_ids": batch()})
        assert type(model) is Toy
    with pytest.raises(TraceCompileError, match="-1"):
        Unquantized(first=-1)
    names = [f"model.layers.{i}.experts" for i in range(10)]
    assert Unquantized(1, 2, ("*.4.*",)).of(names) == {names[i] for i in (0, 4, 8, 9)}


# --- pruned experts ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced() -> tuple[Any, Any, Any]:
    """A model, its twin, and a trace of a prompt and of single tokens."""
    model = compiled("qat")
    rollout = model.rollout()
    with model.trace() as trace:
        rollout(batch())
        rollout(batch(rows=5, length=1, seed=9))
    return model, rollout, trace


def test_usage_counts_prompts_and_decoded_tokens_apart(traced: tuple[Any, Any, Any]) -> None:
    for phase, ids in (("prefill", batch()), ("decode", batch(rows=5, length=1, seed=9))):
        _, routes = reference(Toy(), ids, [get_recipe("qat").rollout] * 2)
        for region, chosen in zip(REGIONS, routes, strict=True):
            assert torch.equal(traced[2].usage[phase][region], torch.bincount(chosen.flatten(), minlength=E))


def test_a_pruned_rollout_is_the_model_without_the_other_experts(traced: tuple[Any, Any, Any]) -> None:
    model, rollout, _ = traced
    kept = Kept(prefill={"layers.0": (0, 2), "layers.1": (0, 1, 3)}, decode={"layers.0": (2, 3), "layers.1": (0, 1, 3)})
    pruned = model.rollout(keep=kept)
    scheme = get_recipe("qat").rollout
    prompt, tokens = batch(), batch(rows=5, length=1, seed=9)
    with model.trace() as trace:
        for ids, phase in ((prompt, "prefill"), (tokens, "decode")):
            names = [list(kept[phase][region]) for region in REGIONS]  # type: ignore[index]
            expected, routes = reference(Toy(), ids, [scheme] * 2, kept=names)
            assert relative(pruned(ids), expected) < LIMIT
            for allowed, chosen in zip(names, routes, strict=True):
                assert set(chosen.flatten().tolist()) <= set(allowed)
    assert relative(pruned(tokens), expected) < LIMIT  # without a trace as well
    # Three of four experts are packed in each layer: the union over phases. Statistics and routes keep the model's ids.
    assert pruned.packed_bytes * 4 == rollout.packed_bytes * 3
    for region, missing in (("layers.0", 1), ("layers.1", 2)):
        assert trace.ranges.sites[region, "down"].tokens[missing] == 0
        assert (
            trace.usage.prefill[region][missing] == 0 and int(trace.usage.prefill[region].sum()) == prompt.numel() * K
        )
    assert relative(rollout(prompt), reference(Toy(), prompt, [scheme] * 2)[0]) < LIMIT  # the whole twin is as it was

    with torch.no_grad():
        model.layers[0].w2.mul_(1.5)
    changed = Toy()
    with torch.no_grad():
        changed.layers[0].w2.mul_(1.5)
    pruned.refit()
    prefill = [list(kept.prefill[region]) for region in REGIONS]
    assert relative(pruned(prompt), reference(changed, prompt, [scheme] * 2, kept=prefill)[0]) < LIMIT
    with torch.no_grad():
        model.layers[0].w2.div_(1.5)


def test_keeping_all_experts_changes_nothing(traced: tuple[Any, Any, Any]) -> None:
    model, rollout, trace = traced
    everything = trace.usage.covering(1.0, at_least=E)
    report = pruning_report(model, rollout, model.rollout(keep=everything), input_ids=batch())
    assert report.pruning.max == 0 and report.full == report.pruned and report.full_bytes == report.pruned_bytes
    assert report.tokens == batch().numel() - len(batch())


@pytest.mark.parametrize(
    ("experts", "match"),
    [
        ({"layers.9": (0, 1)}, "no region 'layers.9'"),
        ({"layers.0": (0, 4)}, "0 to 3"),
        ({"layers.0": (1, 1)}, "each kept once"),
        ({"layers.0": (1,)}, "to 2 experts"),
    ],
)
def test_what_cannot_be_kept_is_said(traced: tuple[Any, Any, Any], experts: Any, match: str) -> None:
    with pytest.raises(PruningError, match=match):
        traced[0].rollout(keep=Kept.everywhere(experts))


def test_a_pruned_twin_is_not_exported(traced: tuple[Any, Any, Any], tmp_path: Any) -> None:
    pruned = traced[0].rollout(keep=Kept.everywhere({"layers.0": (0, 1)}))
    with pytest.raises(PruningError, match="be exported"):
        pruned.export(tmp_path / "out")


def test_a_compensated_rollout_is_not_exported_as_a_plain_one(tmp_path: Any) -> None:
    model = trace_compile(qwen3(), recipe="quads")
    with pytest.raises(ExportError, match=r"gathered@0\.5.*activations=False"):
        model.export(tmp_path / "out")
    assert model.export(tmp_path / "out", activations=False).bits_per_expert_weight < 5


@pytest.mark.slow
@pytest.mark.parametrize("format", ["compressed-tensors", "bf16"])
def test_unquantized_regions_are_exported_as_they_are(format: str, tmp_path: Any) -> None:
    """The reloaded checkpoint computes what the rollout's weights compute with unquantized activations."""
    model = trace_compile(qwen3(), recipe="w4a16", unquantized=Unquantized(last=1))
    batch = prompts()
    with torch.no_grad():
        expected = model(**batch).logits
        model.export(tmp_path / "out", format=format)
        found = reload(tmp_path / "out", dtype=torch.float32)(**batch).logits
    assert relative(found, expected) < LIMIT


def test_choosing_experts() -> None:
    usage = Usage({"a": torch.tensor([5, 0, 90, 5])}, {"a": torch.tensor([40, 60, 0, 0])})
    assert usage.top(2) == Kept({"a": (0, 2)}, {"a": (0, 1)})
    assert usage.top(2, together=True) == Kept.everywhere({"a": (1, 2)})
    assert usage.covering(0.9) == Kept({"a": (2,)}, {"a": (0, 1)})
    assert usage.covering(0.91, at_least=3) == Kept({"a": (0, 2, 3)}, {"a": (0, 1, 2)})
    assert usage.share(usage.covering(0.9)) == {"prefill": {"a": 0.9}, "decode": {"a": 1.0}}
    assert usage.merge(usage).prefill["a"].tolist() == [10, 0, 180, 10]
    assert Usage.from_dict(usage.to_dict()).to_dict() == usage.to_dict()
    assert Usage({}, usage.decode).top(2) == Kept.everywhere({"a": (0, 1)})
    with pytest.raises(PruningError, match="5 of them"):
        usage.top(5)
    with pytest.raises(PruningError, match="0 < share"):
        usage.covering(0.0)
    with pytest.raises(PruningError, match="no expert usage"):
        Usage().top(1)
    ids, valid = torch.tensor([[0, 1], [1, -1], [3, 3], [2, 0]]), torch.tensor([True, True, True, False])
    assert count_routes(ids, valid, 4).tolist() == [1, 2, 0, 2]


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_is_on_the_rollouts_norms_alone_and_follows_the_schedule() -> None:
    ids, noise = batch(), Noise()
    model = compiled("aqn")
    rollout = model.rollout()
    scheme = get_recipe("aqn").rollout
    quiet, _ = reference(Toy(), ids, [scheme] * 2)
    assert relative(rollout(ids), quiet) < LIMIT  # the first stage has none
    seen = []
    for progress in (0.2, 0.6, 0.6, 1.0):
        with torch.no_grad():
            model.layers[0].w2.add_(0.0)  # the same values count as new weights: new noise
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        rollout.refit(progress=progress)
        out = rollout(ids)
        twin = rollout.__dict__["_trace_compile_twin"]
        added = twin.noise.stacked(tuple(f"layers.{i}.norm.weight" for i in range(2)), 64, torch.device("cpu"))
        norms = [p + n for p, n in zip((before[f"layers.{i}.norm.weight"] for i in range(2)), added, strict=True)]
        assert relative(out, reference(Toy(), ids, [scheme] * 2, norms=norms)[0]) < LIMIT
        assert 0.7 < float(added.std()) / noise.sigma(progress) < 1.3
        seen.append(added.clone())
    assert not torch.equal(seen[1], seen[2]) and not torch.equal(seen[0][0], seen[0][1])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert relative(model(ids), quiet) < LIMIT
    with pytest.raises(TraceCompileError, match="progress=step"):
        rollout.refit()
    with pytest.raises(TraceCompileError, match=r"got 1\.5"):
        rollout.refit(progress=1.5)


def test_the_schedule() -> None:
    noise = Noise(1e-2, 1e-4, 10)
    found = [noise.sigma(i / 11 + 1e-9) for i in range(11)]
    assert found[0] == 0.0 and found[1] == pytest.approx(1e-2) and found[10] == pytest.approx(1e-4)
    ratios = [b / a for a, b in pairwise(found[1:])]
    assert ratios == pytest.approx([10 ** (-2 / 9)] * 9) and noise.sigma(1.0) == found[10]
    assert Noise(1e-2, 1e-2, 1).sigma(0.9) == 1e-2


@pytest.mark.slow
def test_noise_finds_the_norms_of_a_transformers_model() -> None:
    """In front of attention and experts; not those of queries and keys, nor the last one."""
    model = trace_compile(qwen3(), recipe="aqn")
    rollout = model.rollout()
    ids = torch.randint(2, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    quiet = rollout(input_ids=ids).logits
    rollout.refit(progress=0.5)
    assert not torch.equal(rollout(input_ids=ids).logits, quiet)
    (stacked,) = rollout.__dict__["_trace_compile_twin"].noise._stacked
    assert sorted(stacked[0]) == sorted(
        f"model.layers.{i}.{n}.weight" for i in range(2) for n in ("input_layernorm", "post_attention_layernorm")
    )
