"""The support table says what the checks find: a few families always, all of them with the slow tests."""

from __future__ import annotations

import pytest
import transformers

from tools import support_table
from tools.families import families
from tools.family_checks import check, compiled, experts_of, identity

pytestmark = pytest.mark.skipif(
    transformers.__version__ != support_table.version(), reason="the committed table is of another transformers"
)


def test_the_table_has_every_family_and_is_made_from_its_results() -> None:
    rows = support_table.read()
    assert list(rows) == sorted(families())
    assert support_table.TABLE.read_text() == support_table.render(rows)
    assert not [f"{name}.{cell}" for name, row in rows.items() for cell, text in vars(row).items() if "differ" in text]


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_identity_holds_as_the_table_says(name: str) -> None:
    """Transposed, interleaved, biased, clamped; and a router with groups, sigmoid scores and a correction bias."""
    row, model = support_table.read()[name], compiled(families()[name], "bf16")
    assert row.regions == str(len(experts_of(model)))
    assert identity(families()[name], model) == row.identity


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
def test_every_cell_of_the_table(name: str) -> None:
    assert check(families()[name]) == support_table.read()[name]
