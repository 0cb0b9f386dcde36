"""The support table: runs the checks of families and writes ``docs/support.json`` and, from it, ``docs/support.md``.

    python -m tools.support_table                  # all families, some twenty minutes on one core
    python -m tools.support_table mixtral jamba    # these rows only

``tests/test_families.py`` runs a few families and compares their rows with the committed ones, the slow tests all.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict
from pathlib import Path

import transformers

from tools.families import families
from tools.family_checks import Row, check

DOCS = Path(__file__).parent.parent / "docs"
RESULTS, TABLE = DOCS / "support.json", DOCS / "support.md"

_TITLE = """# Model families

What the tests found of every mixture-of-experts family in transformers {version}: tiny random models in float32 on a
CPU, made by `tools/families.py`, checked by `tools/family_checks.py`. This page is written by
`python -m tools.support_table`; the tests compare it with what they find.

- **regions**: expert blocks that were rewritten; nothing expert-shaped was left. `refused` says at which operation and
  why; the model is then untouched.
- **layout**: how the family keeps its gate/up parameter (E experts, H hidden, I expert width).
- **identity**: the compiled model without quantization against the untouched one: logits, router loss and every
  gradient are equal bit for bit, or (`yes`) to the rounding of another order of summation.
- **QAT**: one quantization-aware step: every gradient is finite and is that of the model's own eager experts on
  operands quantized by hooks.
- **generate**: the twin's greedy tokens are the trainer's, and every recorded token guides it.
- **export**: a compressed-tensors checkpoint loads again, experts bit for bit as packed, all else as it was.

`{nothing}`: no such thing. Told of a family: {options}.

"""
_COLUMNS = {
    "family": "family",
    "model": "class",
    "regions": "regions",
    "layout": "layout",
    "activation": "activation",
    "identity": "identity",
    "training": "QAT",
    "generation": "generate",
    "export": "export",
}


def read() -> dict[str, Row]:
    """The committed rows by family."""
    content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"families": {}}
    return {name: Row(**row) for name, row in content["families"].items()}


def version() -> str:
    """Of transformers, for which the committed rows hold."""
    return str(json.loads(RESULTS.read_text())["transformers"])


def render(rows: dict[str, Row]) -> str:
    """The page."""
    from tools.families import OPTIONS
    from tools.family_checks import NOTHING

    told = "; ".join(f"{name}: `{', '.join(f'{k}={v}' for k, v in o.items())}`" for name, o in OPTIONS.items())
    lines = [_TITLE.format(version=transformers.__version__, nothing=NOTHING, options=told)]
    lines.append(f"| {' | '.join(_COLUMNS.values())} |\n|{'---|' * len(_COLUMNS)}\n")
    for row in rows.values():
        cells = (str(getattr(row, name)).replace("|", "\\|") for name in _COLUMNS)
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def write(rows: dict[str, Row]) -> None:
    """Both files, in alphabetical order of families."""
    rows = dict(sorted(rows.items()))
    content = {"transformers": transformers.__version__, "families": {name: asdict(row) for name, row in rows.items()}}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    TABLE.write_text(render(rows))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="rows to make anew; default: all")
    chosen = parser.parse_args(arguments).families or list(families())
    transformers.logging.set_verbosity_error()
    logging.getLogger("trace_compile").setLevel(logging.ERROR)
    rows = {name: row for name, row in read().items() if name in families()}
    for name in chosen:
        rows[name] = check(families()[name])
        print(rows[name], flush=True)
        write(rows)  # after each, so that an interrupted run keeps what it has


if __name__ == "__main__":
    main()
