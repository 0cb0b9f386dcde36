"""Every recipe end to end on a small model, against a reference that loops over tokens and experts (``tests.toy``).

Each is compiled with routing replay: the trainer's forward alone, the rollout's, and the trainer's with another router
that replays the rollout's choices.
"""

from __future__ import annotations

import pytest
import torch

from tests.toy import Toy, batch, reference
from trace_compile import trace_compile
from trace_compile.errors import UnknownRecipeError
from trace_compile.recipes import RECIPES, Recipe, get_recipe

COMBINED = (
    "quads=0.25",
    "trace+quads",
    "trace+mxfp4",
    "trace_full+hif4",
    "trace+mxfp4_macro",
    "trace+four_over_six",
    "hif4+resq_2of4",
    "mxfp4+fallback",
    "naive+resq_blocks=0.25",
    "int4=128",
)
FAST = ("quads", "mxfp4+fallback")
LIMIT = 1e-5


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a = a.detach()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in (*RECIPES, *COMBINED)]
)
def test_both_graphs_and_replay(name: str) -> None:
    recipe, ids = get_recipe(name), batch()
    hidden = 128 if "macro" in name or "128" in name else 64
    plain = Toy(hidden=hidden)
    model = trace_compile(
        Toy(hidden=hidden), recipe=name, last=1.0, replay_routing=True, example_inputs={"input_ids": ids}
    )
    train, generate = recipe.schemes(traced=False)
    rollout = model.rollout()
    with model.trace() as trace:
        generated = rollout(ids)
    expected, routes = reference(plain, ids, [generate] * 2)
    assert relative(generated, expected) < LIMIT
    alone, own_routes = reference(plain, ids, [train] * 2)
    assert relative(model(ids), alone) < LIMIT

    for each in (plain, model):
        with torch.no_grad():
            for layer in each.layers:
                layer.router.weight.neg_()
    assert not torch.equal(reference(plain, ids, [train] * 2)[1][0], own_routes[0])
    replayed, _ = reference(plain, ids, [train] * 2, routes)
    out = model.guide(trace)(ids)
    assert trace.counters.hit_rate == 1.0
    if recipe.guidance == "none":
        assert relative(out, replayed) < LIMIT
    out.square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0


@pytest.mark.parametrize(
    "name", ["trace+mxfp4", "trace_full+hif4", pytest.param("trace+mxfp4_macro", marks=pytest.mark.slow)]
)
def test_guidance_in_other_formats(name: str) -> None:
    """Without drift the trainer is the rollout, bit for bit; with it, guidance brings every operand closer."""
    ids = batch()
    hidden = 128 if "macro" in name else 64
    model = trace_compile(Toy(hidden=hidden), recipe=name, last=1.0, example_inputs={"input_ids": ids})
    rollout = model.rollout()
    with model.trace(record="code", inputs=True) as trace:
        generated = rollout(ids)
    model.guide(trace.compact() if get_recipe(name).guidance == "bit" else trace)
    with torch.no_grad():
        assert torch.equal(model(ids), generated)
        torch.manual_seed(5)
        for parameter in (model.embed.weight, model.layers[0].norm.weight):
            parameter.mul_(1 + 0.02 * torch.randn(parameter.shape))
    reports = model.diagnose(trace, ids)
    assert len(reports) == 2
    for report in reports:
        assert 0.005 < report.drift < 0.1 and report.adjacent > 0.9
        assert report.d_after < 0.5 * report.d_before and report.mismatch_after < 0.5 * report.mismatch_before


def test_names_are_read_as_sums() -> None:
    quads, halved = get_recipe("quads"), get_recipe("quads=0.25")
    assert isinstance(quads, Recipe) and quads.rollout is not None and quads.rollout.act is not None
    assert quads.rollout.act.residual.keep == 0.5 and halved.rollout.act.residual.keep == 0.25  # type: ignore[union-attr]
    assert get_recipe("resq_2of4+hif4").rollout == get_recipe("hif4+resq_2of4").rollout
    assert get_recipe("hif4+resq_2of4").train == get_recipe("hif4").train
    assert get_recipe("mxfp4+trace").guidance == "bit" and get_recipe("mxfp4+trace").outer == "row"
    assert get_recipe("trace+four_over_six").outer == "traced"
    keys = [
        (r.train and r.train.key, r.rollout and r.rollout.key, r.guidance, r.outer, r.noise) for r in RECIPES.values()
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("fp3", "unknown recipe 'fp3'.*trace"),
        ("trace+fp3", "'fp3' in 'trace.fp3'"),
        ("", "unknown recipe ''"),
        ("qat+trace", "one pairing"),
        ("hif4+mxfp4", "one format"),
        ("hif4+int4", "one format"),
        ("quads+resq_dense", "residual"),
        ("bf16+hif4", "'bf16.hif4' quantizes nothing"),
        ("w4a16+resq_2of4", "no activations"),
        ("naive+fallback", "no activations"),
        ("quads=x", "'x' after '='"),
        ("quads=0", "0 < keep"),
        ("resq_2of4=0.25", "always keeps 0.5"),
        ("hif4=3", "takes no number"),
        ("int4=64", "32 or 128, not of 64"),
    ],
)
def test_what_does_not_fit_is_said(name: str, match: str) -> None:
    with pytest.raises(UnknownRecipeError, match=match):
        get_recipe(name)
