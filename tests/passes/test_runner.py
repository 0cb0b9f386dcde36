"""The runner: order, timing, dumps, skipping, bisecting, and invariants that a broken pass cannot hide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from tests.passes.blocks import captured_grouped, find, run_with_gradients
from trace_compile.errors import PassError
from trace_compile.passes import PIPELINE, Mode, Pass, PassRunner
from trace_compile.passes.graph import add_input, output_of

MODE = Mode(scheme=None)
Args = list[Any]


def run(passes: tuple[Pass, ...], **options: Any) -> tuple[PassRunner, GraphModule]:
    found = captured_grouped()
    runner = PassRunner(passes, **options)
    return runner, runner.run(found.graph(), found.inputs, config=MODE)


def test_passes_run_in_order_and_are_timed() -> None:
    runner, gm = run(PIPELINE)
    assert [t.name for t in runner.timings] == [step.name for step in PIPELINE]
    assert all(t.seconds >= 0 and t.nodes > 0 for t in runner.timings)
    assert runner.timings[-1].nodes == len(gm.graph.nodes)


def test_disabled_passes_do_not_run() -> None:
    runner, gm = run(PIPELINE, disabled=("outline", "lower"))
    left = [step.name for step in PIPELINE if step.name not in ("outline", "lower")]
    assert [t.name for t in runner.timings] == left
    assert find(gm, "grouped_mm_fallback") is not None


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(PassError, match="no pass is called 'fuse'; passes: canonicalize, outline"):
        PassRunner(PIPELINE, disabled=("fuse",))


def test_dumps_show_each_graph_and_what_changed(tmp_path: Path) -> None:
    run(PIPELINE, dump_dir=tmp_path / "graphs")
    files = sorted(p.name for p in (tmp_path / "graphs").iterdir())
    assert files[:3] == ["00_captured.txt", "01_canonicalize.diff", "01_canonicalize.txt"]
    assert "grouped_mm_fallback" in (tmp_path / "graphs" / "00_captured.txt").read_text()
    changes = (tmp_path / "graphs" / "02_outline.diff").read_text()
    assert any(line.startswith("+") and "moe_float" in line for line in changes.splitlines())
    assert any(line.startswith("-") and "grouped_mm_fallback" in line for line in changes.splitlines())


def negate_the_result(gm: GraphModule, example_inputs: Args, *, config: Mode) -> GraphModule:
    output = output_of(gm.graph)
    (result,) = output.args[0]  # type: ignore[misc, str-unpack]
    with gm.graph.inserting_before(output):
        output.args = ((gm.graph.call_function(torch.neg, (result,)),),)
    gm.recompile()
    return gm


def test_bisect_names_the_pass_that_breaks_something() -> None:
    found = captured_grouped()
    expected = run_with_gradients(found.graph(), found.args)[0]

    def good(gm: GraphModule) -> bool:
        return torch.allclose(gm(*found.args)[0], expected, atol=1e-4)

    broken = (*PIPELINE[:2], Pass("negate", True, negate_the_result), *PIPELINE[2:])
    gm = found.graph()
    before = str(gm.graph)
    assert PassRunner(broken).bisect(gm, found.inputs, config=MODE, good=good) == "negate"
    assert PassRunner(broken, disabled=("negate",)).bisect(gm, found.inputs, config=MODE, good=good) is None
    assert str(gm.graph) == before


def reads_before_it_is_made(gm: GraphModule, example_inputs: Args, *, config: Mode) -> GraphModule:
    first, last = find(gm, "linear"), find(gm, "index_add")
    first.args = (last, *first.args[1:])
    return gm


def adds_an_input_in_secret(gm: GraphModule, example_inputs: Args, *, config: Mode) -> GraphModule:
    add_input(gm, "secret", torch.zeros(1))
    return gm


def loses_a_result(gm: GraphModule, example_inputs: Args, *, config: Mode) -> GraphModule:
    gm.meta["emits"] = (object(),)
    gm.meta["results"] = 1
    return gm


def forgets_the_region(gm: GraphModule, example_inputs: Args, *, config: Mode) -> GraphModule:
    del find(gm, "moe_float").meta["region"]
    return gm


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (reads_before_it_is_made, "after pass 'broken': .*before it has been defined"),
        (adds_an_input_in_secret, "after pass 'broken': 8 inputs, expected 7 and 0 feeds"),
        (loses_a_result, "after pass 'broken': 1 results, expected 1 and 1 emits"),
        (forgets_the_region, "after pass 'broken': moe_float.* carries no region"),
    ],
    ids=lambda v: v.__name__ if callable(v) else None,
)
def test_a_pass_that_breaks_an_invariant_is_named(broken: Any, message: str) -> None:
    passes = (
        (*PIPELINE[:2], Pass("broken", False, broken))
        if broken is forgets_the_region
        else (Pass("broken", False, broken),)
    )
    with pytest.raises(PassError, match=message):
        run(passes)
