"""The backend on blocks: feeds resolved, emits delivered, few compilations, errors that name their cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.passes.blocks import E, Grouped, H, K, capture
from tests.passes.test_match import transformers_block
from trace_compile.capture import Backend, capturing
from trace_compile.errors import GraphCaptureError, GuidanceError, NoMoERegionError
from trace_compile.ops import W4A4_ROW, W4A4_TRACED, W4A16, Activation, MoEScheme
from trace_compile.ops.nvfp4_moe import Out
from trace_compile.ops.weights import Packed, pack_experts
from trace_compile.passes import Mode, MoERegion


@dataclass
class GuideRows:
    rows: Tensor
    outer: Tensor
    hit: Tensor


@dataclass
class RuntimeForTests:
    """Packs at every call, counts tokens that are not zero, keeps what is emitted."""

    scheme: MoEScheme | None
    guide: GuideRows | None = None
    replayed: Tensor | None = None
    masked: int = 0
    emitted: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)
    asked: list[tuple[str, str, int]] = field(default_factory=list)

    def packed(self, region: MoERegion, which: str, param: Tensor) -> Packed:
        assert self.scheme is not None and self.scheme.weight is not None
        expert, layout = region.weight(which)
        self.asked.append((region.name, which, id(param)))
        return pack_experts(param, layout, self.scheme.weight, name=expert.name)

    def outer(self, sites: tuple[tuple[str, str], ...]) -> Tensor:
        return torch.tensor([2.0 ** -(6 + i) for i in range(len(sites))])

    def guidance(self) -> GuideRows:
        assert self.guide is not None
        return self.guide

    def routing(self) -> Tensor:
        assert self.replayed is not None
        return self.replayed

    def valid(self, tokens: int) -> Tensor:
        return torch.arange(tokens) >= self.masked

    def emit(self, emits: dict[str, dict[str, Tensor]]) -> None:
        self.emitted.append(emits)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing: router products and the region's own op are kept, the rest is computed again."""
    kept = op in (torch.ops.aten.mm.default, torch.ops.trace_compile.nvfp4_moe.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "not reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, keep_products),
    },
}


class Chain(nn.Module):
    """Blocks with residuals, under checkpoints of a kind or not."""

    def __init__(self, blocks: int = 2, checkpointed: bool | str = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Grouped() for _ in range(blocks)])
        self.flags = CHECKPOINTS[checkpointed if isinstance(checkpointed, str) else "not reentrant"]
        self.checkpointed = bool(checkpointed)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, **self.flags) if self.checkpointed else block(x))
        return x


def chain(**options: Any) -> Chain:
    torch.manual_seed(0)
    return Chain(**options)


class Compiled:
    """A module under one backend, with a code cache of its own."""

    def __init__(self, module: nn.Module, mode: Mode, runtime: RuntimeForTests | None = None, **options: Any) -> None:
        self.module = module
        self.runtime = runtime or RuntimeForTests(mode.scheme)
        self.backend = Backend(mode, self.runtime, **options)
        torch._dynamo.reset()
        self.run = torch.compile(module, backend=self.backend, dynamic=True, fullgraph=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with capturing():
            return self.run(*args, **kwargs)


def gradients(module: nn.Module, output: Tensor, x: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, max(output.numel(), 1))[: output.numel()].view_as(output)
    return list(torch.autograd.grad((output * weights).sum(), [x, *module.parameters()]))


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"value {i} differs by {(a - b).abs().max()}"


# --- what the graph computes ------------------------------------------------------------------------------------------


def test_a_quantized_block_is_the_op_on_the_routers_choice() -> None:
    block, x = Grouped(), torch.randn(9, H)
    compiled = Compiled(block, Mode(scheme=W4A4_TRACED))
    with torch.no_grad():
        found = compiled(x)
        gates, ids = block.router(x)
        (region,) = compiled.backend.reports[0].regions
        packed = [compiled.runtime.packed(region, w, p) for w, p in (("w13", block.w13), ("w2", block.w2))]
        weights = [t for p in packed for t in (p.codes, p.scales, p.outer)]
        outer = compiled.runtime.outer((("", ""), ("", "")))
        swiglu = Activation.build(True, [("silu", ("gate",)), ("mul", ("%0", "up"))]).key
        flags = (W4A4_TRACED.key, swiglu, "none", "none", False, False)
        expected = torch.ops.trace_compile.nvfp4_moe(
            x, ids, gates, None, None, None, None, *weights, outer, None, None, None, None, *flags
        )
    assert torch.equal(found, expected[Out.Y])


@pytest.mark.parametrize(
    ("kind", "compiler"),
    [*((kind, "eager") for kind in CHECKPOINTS), ("not reentrant", "aot_eager"), ("selective", "aot_eager")],
)
def test_checkpointing_changes_neither_results_nor_gradients_nor_records(kind: str, compiler: str) -> None:
    mode = Mode(scheme=W4A4_ROW, train=True, record="bit", routing=True)
    found = []
    for checkpointed in (False, kind):
        module = chain(checkpointed=checkpointed)
        compiled = Compiled(module, mode, compiler=compiler)
        torch.manual_seed(1)
        x = torch.randn(7, H, requires_grad=True)
        out = compiled(x)
        found.append([out.detach(), *gradients(module, out, x)])
        assert len(compiled.runtime.emitted) == 1  # the recomputation of the backward hands out nothing
        emitted = compiled.runtime.emitted[0]
        found[-1] += [emitted[kind][region] for kind in sorted(emitted) for region in sorted(emitted[kind])]
    assert_equal(found[1], found[0])


def test_training_steps_agree_with_and_without_checkpointing() -> None:
    """Recorded amax and counters, losses and parameters over five steps, with eval toggled in between."""
    mode = Mode(scheme=W4A4_ROW, train=True, record="ranges")
    runs = []
    for checkpointed in (False, True):
        module = chain(checkpointed=checkpointed)
        compiled = Compiled(module, mode)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        values = []
        for step in range(5):
            torch.manual_seed(step)
            loss = compiled(torch.randn(6, H)).square().mean()
            module.eval()
            loss.backward()
            module.train()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
        assert len(compiled.runtime.emitted) == 5
        records = [t for e in compiled.runtime.emitted for kind in sorted(e) for t in e[kind].values()]
        runs.append([*values, *(p.detach().clone() for p in module.parameters()), *records])
        assert not torch.equal(values[0], values[-1])
    assert_equal(runs[1], runs[0])


def test_what_was_recorded_guides_the_trainer_to_the_same_codes() -> None:
    module, x = chain(), torch.randn(8, H)
    recording = Compiled(module, Mode(scheme=W4A4_ROW, record="bit", recorded=frozenset({"blocks.1"})))
    with torch.no_grad():
        rollout = recording(x)
    record = recording.runtime.emitted[0]["record"]
    assert set(record) == {"blocks.1"} and set(recording.runtime.emitted[0]["amax"]) == {"blocks.0", "blocks.1"}
    rows = record["blocks.1"][:, : H // 8 + H // 16].contiguous()
    outer = recording.runtime.emitted[0]["record_outer"]["blocks.1"][:, None]
    hit = torch.arange(8) > 0
    mode = Mode(scheme=W4A4_ROW, train=True, guidance="bit", guided=frozenset({"blocks.1"}), diagnose=True)
    guided = Compiled(module, mode, RuntimeForTests(W4A4_ROW, GuideRows(rows, outer, hit)))
    assert torch.equal(guided(x).detach(), rollout)
    elements, before, after = guided.runtime.emitted[0]["diag"]["blocks.1"][:3].tolist()
    assert (elements, before, after) == (7 * H, 0, 0)  # the token without a record is not compared
    drifted = guided(x + 0.01 * torch.randn_like(x))
    elements, before, after = guided.runtime.emitted[1]["diag"]["blocks.1"][:3].tolist()
    assert elements == 7 * H and before > 0 and after < before
    assert drifted.requires_grad


@pytest.mark.parametrize("checkpointed", [False, True])
def test_replayed_routing_chooses_and_the_gates_stay_the_trainers_own(checkpointed: bool) -> None:
    module = chain(checkpointed=checkpointed)
    x = torch.randn(6, H, requires_grad=True)
    free = Compiled(module, Mode(scheme=None, routing=True))
    out = free(x)
    expected = [out.detach(), *gradients(module, out, x)]
    own = torch.cat([free.runtime.emitted[0]["routing"][f"blocks.{i}"] for i in range(2)], 1)

    replay = Compiled(module, Mode(scheme=None, replay=True, routing=True))
    for recorded in (own, torch.full_like(own, -1)):  # the model's own choice, given or not given
        replay.runtime.replayed = recorded
        out = replay(x)
        assert_equal([out.detach(), *gradients(module, out, x)], expected)

    other = (own + 1) % E
    other[0] = -1
    replay.runtime.replayed = other
    out = replay(x)
    chosen = torch.cat([replay.runtime.emitted[-1]["routing"][f"blocks.{i}"] for i in range(2)], 1)
    assert torch.equal(chosen[1:], other[1:]) and torch.equal(chosen[0], own[0])

    y = x
    for i, block in enumerate(module.blocks):
        probabilities = torch.nn.functional.linear(y, block.router.weight).softmax(-1)  # type: ignore[union-attr, arg-type]
        ids = chosen[:, i * K : (i + 1) * K]
        gates = probabilities.gather(-1, ids)
        y = y + reference(block, y, gates / gates.sum(-1, keepdim=True), ids)
    torch.testing.assert_close(out, y, rtol=1e-4, atol=1e-4)
    for a, b in zip(gradients(module, out, x), gradients(module, y, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def reference(block: Any, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
    """One token and one choice at a time."""
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros(H)
        for k in range(K):
            e = int(ids[t, k])
            row = row + gates[t, k] * (block.w2[e] @ block.act((block.w13[e] @ x[t])[None])[0])
        rows.append(row)
    return torch.stack(rows)


def test_guidance_of_another_shape_is_refused() -> None:
    runtime = RuntimeForTests(
        W4A4_ROW, GuideRows(torch.zeros(5, 12, dtype=torch.uint8), torch.ones(5, 1), torch.ones(5) > 0)
    )
    compiled = Compiled(chain(blocks=1), Mode(scheme=W4A4_ROW, guidance="bit"), runtime)
    with pytest.raises(GuidanceError, match="guidance has 5 rows of 12 bytes; this call runs 8 tokens"):
        compiled(torch.randn(8, H))


def test_masked_tokens_are_not_counted() -> None:
    runtime = RuntimeForTests(W4A4_ROW, masked=3)
    compiled = Compiled(chain(blocks=1), Mode(scheme=W4A4_ROW, record="ranges"), runtime)
    with torch.no_grad():
        compiled(torch.randn(8, H))
    assert int(runtime.emitted[0]["counts"]["blocks.0"].sum()) == (8 - 3) * K


def test_ranges_are_equal_for_every_implementation_of_the_experts() -> None:
    """The observer sits in the region, so however the model spells its GEMMs, it sees the same inputs."""
    amax = []
    x = torch.randn(2, 6, H)
    for implementation in ("grouped_mm", "batched_mm"):
        block = transformers_block("qwen3", implementation)
        compiled = Compiled(block, Mode(scheme=W4A4_ROW, record="ranges"))
        with torch.no_grad():
            compiled(x)
        emitted = compiled.runtime.emitted[0]
        amax.append([emitted[kind]["experts"] for kind in ("amax", "counts", "hist", "saturated")])
    assert_equal(amax[1], amax[0])
    assert bool((amax[0][0] > 0).any())


@pytest.mark.parametrize(
    ("compiler", "dtype"),
    [
        ("aot_eager", torch.bfloat16),
        pytest.param("inductor", torch.float32, marks=pytest.mark.slow),
        pytest.param("inductor", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_compilers_see_the_same_bits_in_front_of_the_quantizer(compiler: str, dtype: torch.dtype) -> None:
    """An elementwise chain right before the quantizer, and the activation between the GEMMs."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.scale = Grouped(), nn.Parameter(torch.rand(H) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
            return self.block(torch.nn.functional.silu(y) * y)

    found = []
    torch.manual_seed(0)
    module, x = Normed().to(dtype), torch.randn(9, H).to(dtype)
    for name in ("eager", compiler):
        compiled = Compiled(module, Mode(scheme=W4A4_ROW, record="code", inputs=dtype == torch.bfloat16), compiler=name)
        with torch.no_grad():
            out = compiled(x)
        emitted = compiled.runtime.emitted[0]
        found.append([emitted[kind]["block"] for kind in sorted(emitted)] + [out] * (name != "inductor"))
    for i, (a, b) in enumerate(zip(found[1], found[0], strict=False)):
        assert torch.equal(a, b), f"value {i} differs"


# --- how often it compiles --------------------------------------------------------------------------------------------

LENGTHS = (7, 8, 9, 16, 33, 64, 1, 0, 100, 257)


@pytest.mark.parametrize("train", [False, True])
def test_few_compilations_over_many_lengths(train: bool) -> None:
    module = chain(blocks=1)
    compiled = Compiled(module, Mode(scheme=W4A4_ROW, train=train))
    torch._dynamo.utils.counters.clear()
    counts = {}
    with torch.set_grad_enabled(train):
        for length in LENGTHS:
            out = compiled(torch.randn(length, H))
            assert out.shape == (length, H) and out.requires_grad == train
            counts[length] = compiled.backend.compile_count
    assert counts[64] <= 2  # lengths of two and more share a graph
    assert counts[1] - counts[64] <= 1 and counts[0] - counts[1] <= 1
    assert counts[257] == counts[0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counts[257]
    assert not torch._dynamo.utils.counters["recompile_limit"]


@pytest.mark.parametrize("scheme", [None, W4A4_ROW, W4A16], ids=["float", "w4a4", "w4a16"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_one_token(tokens: int, scheme: MoEScheme | None) -> None:
    module = chain(blocks=1)
    compiled = Compiled(module, Mode(scheme=scheme, train=True))
    x = torch.randn(tokens, H, requires_grad=True)
    out = compiled(x)
    assert out.shape == (tokens, H)
    found = gradients(module, out, x)
    assert [g.shape for g in found] == [x.shape, *(p.shape for p in module.parameters())]
    assert tokens > 0 or not any(bool(g.any()) for g in found)


def test_parameters_are_found_by_position_not_by_identity() -> None:
    block, x = Grouped(), torch.randn(6, H)
    compiled = Compiled(block, Mode(scheme=W4A4_ROW))
    with torch.no_grad():
        first = compiled(x)
        block.w2 = nn.Parameter(-block.w2)
        second = compiled(x)
    assert torch.equal(second, -first)
    assert compiled.runtime.asked[-1][1:] == ("w2", id(block.w2))
    assert compiled.backend.compile_count == 1


def test_the_backend_may_be_called_twice_with_one_graph() -> None:
    found = capture(chain(), torch.randn(5, H))
    backend = Backend(Mode(scheme=W4A4_ROW, routing=True), runtime := RuntimeForTests(W4A4_ROW))
    before = str(found.gm.graph)
    results = [backend(found.gm, found.inputs)(*found.args)[0] for _ in range(2)]
    assert torch.equal(results[0], results[1])
    assert str(found.gm.graph) == before
    assert backend.compile_count == 2 and len(runtime.emitted) == 2
    assert backend.reports[0].regions == backend.reports[1].regions


def test_many_models_in_one_process() -> None:
    x = torch.randn(4, H)
    models = [(chain(blocks=1 + i % 2), Mode(scheme=None if i % 2 else W4A4_ROW)) for i in range(4)]
    compiled = [Compiled(module, mode) for module, mode in models]
    with torch.no_grad():
        outputs = [c(x) for c in compiled]
    assert [c.backend.compile_count for c in compiled] == [1] * 4
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])


# --- what goes wrong --------------------------------------------------------------------------------------------------


class PartlyKnown(nn.Module):
    """One block, and one stacked parameter used in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Grouped()
        self.mixing = nn.Parameter(torch.randn(E, H, H) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + torch.einsum("th,ehd->td", x, self.mixing)


def test_strict_refuses_what_it_does_not_understand_and_otherwise_lists_it() -> None:
    module, x = PartlyKnown(), torch.randn(5, H)
    with pytest.raises(
        NoMoERegionError, match=r"(?s)1 region\(s\) found, but 1 .*einsum with the stacked parameter mixing"
    ):
        Compiled(module, Mode(scheme=W4A4_ROW))(x)
    lenient = Compiled(module, Mode(scheme=None, strict=False))
    torch.testing.assert_close(lenient(x), module(x), rtol=1e-4, atol=1e-5)
    (report,) = lenient.backend.reports
    assert [r.name for r in report.regions] == ["block"]
    (missed,) = report.unmatched
    assert "mixing" in missed.reason and "test_capture.py" in missed.where and missed.node == "einsum"
    assert "left as it is: einsum" in str(report)


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_without_experts_is_an_error(strict: bool) -> None:
    with pytest.raises(NoMoERegionError, match="no operation is expert-shaped"):
        Compiled(nn.Linear(H, H), Mode(scheme=None, strict=strict))(torch.randn(3, H))


class Loop(nn.Module):
    """One GEMM per expert that was chosen: which they are is known only at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Grouped()

    def forward(self, x: Tensor) -> Tensor:
        _, ids = self.block.router(x)
        for expert in ids.unique().tolist():
            x = x + x @ self.block.w13[expert, :H].T
        return x


def test_a_graph_break_names_the_line() -> None:
    with pytest.raises(GraphCaptureError, match=r"test_capture.py:\d+, in forward: .*ids.unique\(\)"):
        Compiled(Loop(), Mode(scheme=None))(torch.randn(3, H))


def test_an_unknown_compiler_is_refused() -> None:
    with pytest.raises(GraphCaptureError, match="compiler 'tvm': use 'eager', 'aot_eager' or 'inductor'"):
        Backend(Mode(scheme=None), RuntimeForTests(None), compiler="tvm")


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    compiled = Compiled(chain(), Mode(scheme=W4A4_ROW), dump_dir=tmp_path)
    with torch.no_grad():
        compiled(torch.randn(4, H))
    (report,) = compiled.backend.reports
    assert [r.name for r in report.regions] == ["blocks.0", "blocks.1"]
    assert report.untouched == ("blocks.0.router.weight", "blocks.1.router.weight")
    assert [c.provider for c in report.choices] == ["native", "native"]
    assert [t.name for t in report.timings] == [
        "canonicalize",
        "outline",
        "replay_routing",
        "quantize",
        "observe",
        "lower",
    ]
    text = str(report)
    assert "blocks.1: grouped_mm_fallback, E=8 K=2 H=64 I=32, [E, N, K], silu(gate) * up; nvfp4_moe by native" in text
    assert (tmp_path / "graph0" / "04_quantize.diff").exists()


# --- torch.compile(backend="trace_compile") ---------------------------------------------------------------------------


def compile_by_name(module: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="trace_compile", dynamic=True, options=options)


def test_the_registered_backend_trains_quantized() -> None:
    module, x = chain(), torch.randn(6, H)
    run = compile_by_name(module)
    out = run(x)
    assert_equal([out.detach()], [Compiled(module, Mode(scheme=W4A4_ROW, train=True))(x).detach()])
    out.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in module.parameters())
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.5)
    run = compile_by_name(module)
    changed = run(x)
    assert_equal([changed.detach()], [Compiled(module, Mode(scheme=W4A4_ROW, train=True))(x).detach()])
    assert not torch.equal(changed, out)


def test_the_registered_backend_takes_options() -> None:
    module, x = chain(), torch.randn(6, H)
    exact = compile_by_name(module, scheme="none", compiler="eager")(x)
    assert_equal([exact], [module(x)])
    for options, message in (
        ({"scheme": W4A4_TRACED.key}, "traced outer scales need a trace"),
        ({"speed": 3}, "no option 'speed'"),
    ):
        with pytest.raises(Exception, match=message), capturing():
            compile_by_name(module, **options)(x)


@pytest.mark.slow
def test_inductor_computes_the_same_codes() -> None:
    module, x = chain(checkpointed=True), torch.randn(7, H, requires_grad=True)
    mode = Mode(scheme=W4A4_ROW, train=True, record="code", routing=True)
    found = []
    for compiler in ("eager", "inductor"):
        compiled = Compiled(module, mode, compiler=compiler)
        out = compiled(x)
        emitted = compiled.runtime.emitted[0]
        found.append([emitted[kind]["blocks.0"] for kind in sorted(emitted)])
        found[-1] += [out.detach(), *gradients(module, out, x)]
    kinds = len(compiled.runtime.emitted[0])
    assert_equal(found[1][:kinds], found[0][:kinds])
    for a, b in zip(found[1][kinds:], found[0][kinds:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
