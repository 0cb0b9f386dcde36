"""Faults T01, C01, C04, C05, C06, C07, S01, S03, S04, Q02: what is rewritten, for which shapes and routings, and what
flows back. Small blocks where a block shows the fault, whole models where it takes one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.faults.parts import assert_near, assert_same, batch, gradients, route
from tests.passes.blocks import E, Grouped, H
from tests.tiny import qwen3
from trace_compile import trace_compile
from trace_compile.errors import BlockSizeError, NoMoERegionError
from trace_compile.model import session_of
from trace_compile.ops.registry import OPS

ROOT = Path(__file__).resolve().parents[2]


def compiled(block: nn.Module, recipe: str = "bf16", **options: Any) -> Any:
    """``block`` after trace_compile, which captured it on five tokens."""
    return trace_compile(block, recipe=recipe, example_inputs={"x": torch.randn(5, H)}, **options)


def results(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and all gradients of a block."""
    x = x.detach().requires_grad_()
    out = block(x=x)
    block.zero_grad()
    (out * torch.linspace(-1, 1, max(out.numel(), 1))[: out.numel()].view_as(out)).sum().backward()
    grads = {name: p.grad for name, p in block.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}


def same_block(make: Callable[[], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    first = make()
    torch.manual_seed(0)
    return first, make()


def poison() -> None:
    """Leave freed memory full of NaN behind."""
    for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20):
        torch.full((size,), torch.nan)


# --- what is rewritten ------------------------------------------------------------------------------------------------


def gpt_oss() -> Any:
    from tests.export.models import build

    return build("GptOssForCausalLM", num_hidden_layers=2)


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        pytest.param(lambda: qwen3(num_hidden_layers=3), 3, id="tiny"),
        pytest.param(gpt_oss, 2, id="gpt-oss", marks=pytest.mark.slow),
    ],
)
def test_T01_every_layers_experts_are_quantized_and_packed(make: Callable[[], Any], layers: int) -> None:
    model = trace_compile(make(), recipe="w4a16")
    explanation = model.explain()
    assert [r.name for r in explanation.regions] == [f"model.layers.{i}.mlp.experts" for i in range(layers)]
    assert explanation.unmatched == ()
    rollout = model.rollout()
    twin = rollout.__dict__["_trace_compile_twin"]
    weights = {n: p for n, p in model.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))}
    assert set(twin.experts) == set(weights)
    bits = 8 * sum(p.nbytes for p in twin.experts.values()) / sum(p.numel() for p in weights.values())
    assert 4.5 <= bits < 4.6


class Unknown(nn.Module):
    """A block that is known, and stacked experts used in a way of their own; ``alone`` leaves only those."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.block = None if alone else Grouped()
        self.mixing = nn.Parameter(torch.randn(E, H, H) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("th,ehd->td", x, self.mixing)
        return y if self.block is None else y + self.block(x)


def test_T01_an_unknown_experts_class_is_never_left_in_silence() -> None:
    with pytest.raises(NoMoERegionError, match="mixing"):
        compiled(Unknown(), recipe="qat")
    model = compiled(Unknown(), recipe="qat", strict=False)
    assert [r.name for r in model.explain().regions] == ["block"]
    assert ["mixing" in str(missed) for missed in model.explain().unmatched] == [True]
    with pytest.raises(NoMoERegionError, match="mixing"):
        compiled(Unknown(alone=True), recipe="qat", strict=False)


class Viewed(Grouped):
    """An extra view and a cast there and back between router and experts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, 2, H // 2).reshape(-1, H).double().float())


class Watched(Grouped):
    """Somebody else uses the router's choice too."""

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x)
        return super().forward(x) + gates.sum(-1, keepdim=True) + (ids == 3).any(-1, keepdim=True)


class Shared(nn.Module):
    """Two blocks behind one router."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Grouped(), Grouped()
        self.second.router = self.first.router

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


class Twice(nn.Module):
    """One block run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Grouped()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x + self.block(x))


@pytest.mark.parametrize(("make", "regions"), [(Viewed, 1), (Watched, 1), (Shared, 2)])
def test_C06_changed_surroundings_are_matched_and_compute_the_same(make: Callable[[], Any], regions: int) -> None:
    block, plain = same_block(make)
    model = compiled(block)
    assert len(model.explain().regions) == regions and model.explain().unmatched == ()
    x = torch.randn(9, H)
    assert_near(results(model, x), results(plain, x), 1e-5)


def test_C01_one_graph_for_any_routing() -> None:
    """Captured while every token goes to experts 0 and 1, run with 6 and 7, then with all: equal to the plain model."""
    plain = qwen3(num_hidden_layers=1)
    plain.set_experts_implementation("grouped_mm")
    gate = plain.model.layers[0].mlp.gate.weight.detach().clone()
    gate[:, 0] = 0  # the channel that forces the route otherwise
    model = qwen3(num_hidden_layers=1)
    route(model, 0, 1)
    model = trace_compile(model, recipe="bf16")
    inputs = batch()
    for routed in ((0, 1), (7, 6), None):
        for m in (model, plain):
            if routed:
                route(m, *routed)
            else:
                with torch.no_grad():
                    m.model.layers[0].mlp.gate.weight.copy_(gate)
        found = gradients(model, **inputs)
        assert_same(found, gradients(plain, **inputs))
        used = (found["model.layers.0.mlp.experts.down_proj"].flatten(1) != 0).any(1).nonzero().flatten().tolist()
        assert used == sorted(routed) if routed else len(used) > 2
    assert sum(session_of(model).engine.compile_counts.values()) == 2  # the capture, and the one for training


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_S01_widths_that_are_no_multiple_of_128() -> None:
    """Hidden 80, width 48, six experts: every expert's outputs and gradients, the last one's too, are those of plain
    code on the dequantized weights."""
    odd = {"hidden_size": 80, "moe_intermediate_size": 48, "num_experts": 6, "num_hidden_layers": 1}
    model = trace_compile(qwen3(**odd), recipe="w4a16")
    rollout = model.rollout()
    twin = rollout.__dict__["_trace_compile_twin"]
    plain = qwen3(**odd)
    plain.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        for name, packed in twin.experts.items():
            plain.get_parameter(name).copy_(packed.dequantize())
    inputs = batch(2, 8, 12)
    found, expected = gradients(model, **inputs), gradients(plain, **inputs)
    assert bool(expected["model.layers.0.mlp.experts.down_proj"][-1].any())
    assert_near(found, expected)


def test_S01_other_widths_are_refused_by_value() -> None:
    with pytest.raises(BlockSizeError, match="72"):
        trace_compile(qwen3(hidden_size=72, num_hidden_layers=1), recipe="qat").rollout()


@pytest.mark.parametrize("recipe", ["bf16", "w4a16", "qat"])
def test_S03_no_token_and_one_token(recipe: str) -> None:
    torch.manual_seed(0)
    model = compiled(Grouped(), recipe)
    rollout = model.rollout()
    for tokens in (0, 1, 3):
        x = torch.randn(tokens, H)
        found = results(model, x)
        assert all(g is not None for g in found.values()) and found["out"].shape == (tokens, H)
        assert all(bool(g.isfinite().all()) and (tokens > 0 or not bool(g.any())) for g in found.values())
        assert torch.equal(rollout(x=x), found["out"])


@pytest.mark.parametrize("used", [(1, 2), (0, 7), (3, 3)], ids=["inner", "first-and-last", "one-alone"])
@pytest.mark.parametrize("recipe", ["bf16", "qat"])
def test_S04_experts_without_tokens_get_exact_zeros(recipe: str, used: tuple[int, int]) -> None:
    """Also over two accumulated steps, with an allocator full of NaN."""

    block, plain = same_block(lambda: Grouped(bias=True))
    for b in (block, plain):
        with torch.no_grad():
            b.router.weight.zero_()
            b.router.weight[used[0], 0] = 2.0
            b.router.weight[used[1], 0] += 1.0
            # Where one expert takes all first places, the second ones go where ties fall.
    model = compiled(block, recipe)
    x = torch.randn(20, H).abs() + 0.1
    empty = torch.ones(E, dtype=torch.bool)
    _, ids = plain.router(x)
    empty[ids.flatten().unique()] = False
    assert int(empty.sum()) == 6
    for accumulated in range(2):
        poison()
        model(x=x).square().sum().backward()
        plain(x).square().sum().backward()
        for name in ("w13", "w2", "b13", "b2"):
            found, expected = getattr(model, name).grad, getattr(plain, name).grad
            assert not bool(found[empty].any()), (name, accumulated)
            assert bool(found[~empty].flatten(1).any(1).all()) and bool(found.isfinite().all())
            if recipe == "bf16":
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# --- backward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [pytest.param("w4a16", marks=pytest.mark.slow), "qat"])
def test_Q02_overfitting_lowers_the_loss(recipe: str) -> None:
    model = trace_compile(qwen3(num_hidden_layers=1), recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    losses = []
    for _ in range(20):
        found = gradients(model, **batch(1, 2))
        losses.append(float(found["loss"]))
        assert all(bool(found[n].any()) for n in found)
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    with torch.no_grad():
        model(**batch())
    with torch.enable_grad():
        assert model(**batch()).loss.requires_grad


@pytest.mark.parametrize("recipe", ["bf16", "qat"])
def test_Q02_a_module_used_twice_accumulates_both_gradients(recipe: str) -> None:
    block, plain = same_block(Twice)
    model, x = compiled(block, recipe), torch.randn(9, H)
    found = results(model, x)
    if recipe == "bf16":
        assert_near(found, results(plain, x), 1e-5)
    again = {name: p.grad.clone() for name, p in model.named_parameters()}
    model(x=x).sum().backward()
    loss_only = {name: p.grad - again[name] for name, p in model.named_parameters()}
    model.zero_grad()
    model(x=x).sum().backward()
    for name, p in model.named_parameters():  # accumulated gradients are sums
        torch.testing.assert_close(loss_only[name], p.grad, rtol=1e-4, atol=1e-3)
        assert bool(found[name].any())


# --- custom ops -------------------------------------------------------------------------------------------------------


def test_C04_ops_change_nothing_in_place() -> None:
    """By schema, and in use: what the graph is fed with, and what it hands out, are other tensors afterwards."""
    import trace_compile.ops  # noqa: F401  (registers them)

    names = [n for n in dir(torch.ops.trace_compile) if not n.startswith("_") and n != "name"]
    assert set(OPS) <= set(names) and not any(
        getattr(torch.ops.trace_compile, n).default._schema.is_mutable for n in names
    )
    torch.manual_seed(0)
    model = compiled(Grouped(), "qat")
    rollout = model.rollout()
    twin = rollout.__dict__["_trace_compile_twin"]
    fed = {n: [t.clone() for t in (p.codes, p.scales, p.outer)] for n, p in twin.experts.items()}
    x = torch.randn(6, H)
    kept = x.clone()
    first, second = results(model, x), results(model, x.clone())
    assert_same(second, first)
    assert torch.equal(x, kept)
    for n, p in twin.experts.items():
        assert all(torch.equal(a, b) for a, b in zip((p.codes, p.scales, p.outer), fed[n], strict=True))


_LOAD = """
import sys, torch
path = sys.argv[1]
saved = torch.load(path + ".pt")
try:
    torch.export.load(path)
    raise SystemExit("loaded without the ops")
except RuntimeError as error:
    print(error)  # the log says which op is unknown
import trace_compile
program = torch.export.load(path).module()
assert torch.equal(program(*saved["inputs"]), saved["out"])
print("equal")
"""


@pytest.mark.slow
def test_C05_a_saved_program_needs_the_import_and_then_gives_the_same(tmp_path: Path) -> None:
    from trace_compile.ops import SWIGLU

    w13, w2 = torch.randn(4, 32, 32), torch.randn(4, 32, 16)

    class Program(nn.Module):
        def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            return torch.ops.trace_compile.moe_float(x, ids, gates, w13, w2, None, None, SWIGLU.key, False)

    inputs = (torch.randn(5, 32), torch.randint(0, 4, (5, 2)), torch.rand(5, 2))
    path = str(tmp_path / "program.pt2")
    torch.export.save(torch.export.export(Program(), inputs), path)
    torch.save({"inputs": inputs, "out": Program()(*inputs)}, path + ".pt")
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, path],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0 and run.stdout.strip().endswith("equal"), run.stderr[-2000:]
    assert "torch.ops.trace_compile.moe_float" in run.stderr


def test_C05_fake_and_real_results_agree_in_a_compiled_model() -> None:
    """Results of odd strides and of a transposed input, through shapes that the compiler inferred."""
    block, plain = same_block(Grouped)
    model = compiled(block, "bf16", compiler="aot_eager")
    for x in (torch.randn(H, 7).t(), torch.randn(7, 2 * H)[:, ::2], torch.randn(1, H).expand(7, H)):
        found, expected = model(x=x), plain(x)
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "qat"])
def test_C07_autocast_changes_neither_dtypes_nor_whether_it_runs(recipe: str, dtype: torch.dtype) -> None:
    x = torch.randn(6, H).to(dtype)
    outputs = []
    for compiler, block in zip(("eager", "aot_eager"), same_block(lambda: Grouped().to(dtype)), strict=True):
        inputs = {"x": torch.randn(5, H, dtype=dtype)}
        model = trace_compile(block, recipe=recipe, compiler=compiler, example_inputs=inputs)
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = results(model, x)
            assert found["out"].dtype == dtype
            assert {g.dtype for g in found.values()} == {dtype} and all(
                bool(g.isfinite().all()) for g in found.values()
            )
            outputs.append(found["out"])
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])  # eager and compiled
    torch.testing.assert_close(
        outputs[1], outputs[0], rtol=3e-2, atol=3e-2
    )  # the router's own bf16 is all that differs
