"""Golden graphs: what is captured of three families and what the passes make of it, line by line.

After a change that is meant, ``python -m tools.golden_graphs`` writes them anew; the difference belongs into review.
"""

from __future__ import annotations

import difflib

import pytest

from tools.golden_graphs import FAMILIES, FOLDER, VERSIONS, golden


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_graph(family: str) -> None:
    expected = (FOLDER / f"{family}.txt").read_text()
    made_with, _, _ = expected.partition("\n")
    if made_with != VERSIONS:
        pytest.skip(f"golden graphs are of {made_with}, here is {VERSIONS}")
    difference = list(difflib.unified_diff(expected.splitlines(), golden(family).splitlines(), "golden", "now", n=1))
    assert not difference, "\n".join(difference)


def test_golden_graphs_hold_the_region() -> None:
    for family in FAMILIES:
        captured, _, rewritten = (FOLDER / f"{family}.txt").read_text().partition("\nrewritten\n")
        assert captured.count("grouped_mm_fallback(") == 2 and "nvfp4_moe" not in captured
        assert rewritten.count("nvfp4_moe(") == 1 and "grouped_mm_fallback" not in rewritten
        assert rewritten.count("feed packed") == 6 and "topk(" in rewritten
