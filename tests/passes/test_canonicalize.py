"""Canonicalization: not a bit changes, and in-place operations become ordinary ones only where nobody could notice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.passes.blocks import Captured, Grouped, H, capture, captured_grouped, run_with_gradients
from tests.passes.test_match import transformers_block
from trace_compile.passes import PIPELINE, Mode, PassRunner
from trace_compile.passes.canonicalize import canonicalize
from trace_compile.passes.graph import op_name, scopes

MODE = Mode(scheme=None)


def names(gm: torch.fx.GraphModule) -> list[str]:
    return [op_name(n) for scope in scopes(gm) for n in scope.graph.nodes if op_name(n)]


GRAPHS: dict[str, Callable[[], Captured]] = {
    "grouped": captured_grouped,
    "qwen3-grouped": cache(lambda: capture(transformers_block("qwen3", "grouped_mm"), torch.randn(2, 5, H))),
    "gpt_oss-batched": cache(lambda: capture(transformers_block("gpt_oss", "batched_mm"), torch.randn(2, 5, H))),
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("step", [p for p in PIPELINE if not p.changes_numerics], ids=lambda p: p.name)
def test_passes_that_promise_it_change_no_bit(graph: str, step) -> None:  # type: ignore[no-untyped-def]
    found = GRAPHS[graph]()
    after = step.run(found.graph(), found.inputs, config=MODE)
    after.graph.lint()
    before = run_with_gradients(found.graph(), found.args)
    for a, b in zip(run_with_gradients(after, found.args), before, strict=True):
        assert torch.equal(a, b)


def test_in_place_operations_of_the_experts_disappear() -> None:
    found = GRAPHS["qwen3-grouped"]()
    assert {"clamp_", "masked_fill_", "setitem", "div_"} <= set(names(found.graph()))
    after = names(canonicalize(found.graph(), found.inputs, config=MODE))
    assert not [n for n in after if n.endswith("_") or n == "setitem"]
    assert {"masked_fill", "index_put", "div"} <= set(after)
    assert "clamp" not in after  # of ids that index biases, which these experts do not have


def aliased_before(x: Tensor) -> Tensor:
    y = x * 2
    seen = y[:, :1]
    y.add_(1)
    return y + seen  # the view shows the change


def argument(x: Tensor) -> Tensor:
    x.clamp_(max=0.5)
    return x * 2


def read_before_and_after(x: Tensor) -> Tensor:
    y = x.sigmoid()
    z = y + 1
    y.mul_(3)
    return y * z


def narrower_than_its_operand(x: Tensor) -> Tensor:
    y = x.to(torch.float16) + 1
    y.add_(x)
    return y.float()


def twice(x: Tensor) -> Tensor:
    y = F.relu(x)
    y.add_(1)
    y.mul_(y)
    return y.masked_fill_(y > 4, 0.0)


def twin_items(x: Tensor) -> Tensor:
    top = torch.topk(x, 2)
    top.values.mul_(2)
    return top[0] + 1


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (aliased_before, {"add_"}),
        (argument, {"clamp_"}),
        (read_before_and_after, set()),
        (narrower_than_its_operand, {"add_"}),
        (twice, set()),
        (twin_items, set()),
    ],
    ids=lambda v: v.__name__ if callable(v) else None,
)
def test_in_place_operations(function: Callable[[Tensor], Tensor], left: set[str]) -> None:
    x = torch.linspace(-2, 2, 12).view(3, 4)
    found = capture(function, x.clone())
    after = canonicalize(found.graph(), found.inputs, config=MODE)
    after.graph.lint()
    assert {n for n in names(after) if n.endswith("_")} == left
    (result,) = after(*(x.clone() if isinstance(a, Tensor) else a for a in found.args))
    assert torch.equal(result, function(x.clone()))


def test_casts_and_views_that_change_nothing_disappear() -> None:
    def function(x: Tensor) -> Tensor:
        y = (x * 2).to(torch.float32).reshape(3, 4).contiguous()
        return y.to(torch.float64).reshape(4, 3)

    found = capture(function, torch.randn(3, 4))
    after = canonicalize(found.graph(), found.inputs, config=MODE)
    assert [n for n in names(after) if n in ("to", "reshape", "contiguous")] == ["to", "reshape"]


def test_every_checkpoint_call_gets_its_own_subgraph() -> None:
    block = Grouped()

    def function(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) + checkpoint(block, x, use_reentrant=False)

    found = capture(function, torch.randn(6, H))
    shared = found.graph()
    calls = [n for n in shared.graph.nodes if op_name(n) == "tag_activation_checkpoint"]
    calls[1].args = calls[0].args  # as a tracer that reuses bodies would write it
    gm = PassRunner(PIPELINE).run(shared, found.inputs, config=MODE)
    bodies = [scope.module for scope in scopes(gm) if scope.call is not None]
    assert len(bodies) == 2 and bodies[0] is not bodies[1]
    assert len(gm.meta["regions"]) == 2
    for a, b in zip(run_with_gradients(gm, found.args), run_with_gradients(found.graph(), found.args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
