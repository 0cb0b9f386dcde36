"""The guidance benchmark: it measures what it says, at a size for CPUs; and on a GPU, the decode loop's target."""

from __future__ import annotations

import pytest

from tools.bench_guidance import SHAPES, measure


@pytest.mark.slow
def test_every_figure_is_there_and_bytes_are_those_of_the_formula() -> None:
    found = measure("tiny", repeats=1)
    assert [m["what"] for m in found] == ["rollout"] * 3 + ["bytes per token", "training step", "lookup", "lookup"]
    shape, sizes = SHAPES["tiny"], found[3]
    assert sizes["guidance"] == shape.hidden * 3 // 16 * (shape.layers // 2)
    assert sizes["routing"] == 2 * shape.top_k * shape.layers
    assert sizes["rows"] == shape.batch * (shape.prompt + shape.new - 1)
    assert all(m["ms"] > 0 for m in found if "ms" in m)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_decode_step_takes_at_most_four_milliseconds() -> None:
    """Batch 256, 8 layers of hidden 192 with 32 experts; recording or not."""
    rollouts = [m for m in measure("small") if m["what"] == "rollout"]
    assert max(m["decode_ms"] for m in rollouts) <= 4.0, rollouts
