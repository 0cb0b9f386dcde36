"""The backend: few compilations, parameters by position, errors that name their cause, use by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backends import Compiled, RuntimeForTests, assert_equal, chain, gradients
from tests.passes.blocks import E, Grouped, H, capture
from trace_compile.capture import Backend, capturing
from trace_compile.errors import GraphCaptureError, NoMoERegionError
from trace_compile.ops import W4A4_ROW, W4A4_TRACED, W4A16, MoEScheme
from trace_compile.passes import PIPELINE, Mode

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
    ignoring = Compiled(module, Mode(scheme=None, ignore=("mix*",)))
    ignoring(x)
    assert ignoring.backend.reports[0].unmatched == report.unmatched and report.unmatched[0].weights == ("mixing",)
    with pytest.raises(NoMoERegionError, match="mixing"):
        Compiled(module, Mode(scheme=None, ignore=("block",)))(x)


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
    with pytest.raises(GraphCaptureError, match="compiler 'tvm'; choose one of eager, aot_eager, inductor"):
        Backend(Mode(scheme=None), RuntimeForTests(None), compiler="tvm")


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    compiled = Compiled(chain(), Mode(scheme=W4A4_ROW), dump_dir=tmp_path)
    with torch.no_grad():
        compiled(torch.randn(4, H))
    (report,) = compiled.backend.reports
    assert [r.name for r in report.regions] == ["blocks.0", "blocks.1"]
    assert report.untouched == ("blocks.0.router.weight", "blocks.1.router.weight")
    assert [c.provider for c in report.choices] == ["native", "native"]
    assert [t.name for t in report.timings] == [step.name for step in PIPELINE]
    text = str(report)
    assert "blocks.1: grouped_mm_fallback, E=8 K=2 H=64 I=32, [E, N, K], silu(gate) * up; nvfp4_moe by native" in text
    assert list((tmp_path / "graph0").glob("*_quantize.diff"))


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
