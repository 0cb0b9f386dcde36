"""Writes what the passes make of three families' blocks, as text that tests compare with.

    python -m tools.golden_graphs

One line per node, numbered in order, so that names that PyTorch invents do not matter: operation, operands, dtype and
shape. Captured graphs differ between versions of torch and transformers; files name the versions that made them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.passes.blocks import H, capture
from tests.passes.test_match import transformers_block
from trace_compile.ops import W4A4_TRACED
from trace_compile.passes import PIPELINE, Mode, PassRunner
from trace_compile.passes.graph import dotted_name, fake, op_name, output_of

FAMILIES = ("qwen3", "mixtral", "gpt_oss")
FOLDER = Path(__file__).parents[1] / "tests" / "passes" / "golden"
MODE = Mode(scheme=W4A4_TRACED, guidance="bit", train=True)
VERSIONS = f"torch {'.'.join(torch.__version__.split('.')[:2])}, transformers {transformers.__version__}"


def golden(family: str) -> str:
    """The family's block as captured and behind the last pass."""
    found = capture(transformers_block(family, "grouped_mm"), torch.randn(2, 5, H))
    rewritten = PassRunner(PIPELINE).run(found.graph(), found.inputs, config=MODE)
    return f"{VERSIONS}\n\ncaptured\n{text(found.gm)}\nrewritten\n{text(rewritten)}"


def text(gm: GraphModule) -> str:
    """A graph in a form that says what it computes and nothing else."""
    numbers: dict[Node, str] = {}
    sizes: dict[str, str] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            feed = node.meta.get("feed")
            words = f"feed {feed.kind} {feed.weight} {feed.part}" if feed else f"input {dotted_name(node)}"
        else:
            named = [f"{k}={_word(v, numbers)}" for k, v in sorted(node.kwargs.items())]
            words = f"{op_name(node) or node.op}({', '.join([*(_word(a, numbers) for a in node.args), *named])})"
        numbers[node] = f"%{len(numbers)}"
        lines.append(f"{numbers[node]} = {' '.join(words.split())}{_kind(fake(node), sizes)}")
    results = ", ".join(_word(a, numbers) for a in output_of(gm.graph).args[0])  # type: ignore[union-attr]
    return "\n".join([*lines, f"return {results}"]) + "\n"


def _word(value: Any, numbers: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return numbers[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_word(v, numbers) for v in value)}]"
    if isinstance(value, slice):
        return f"{_word(value.start, numbers)}:{_word(value.stop, numbers)}:{_word(value.step, numbers)}"
    return str(value)


def _kind(value: Any, sizes: dict[str, str]) -> str:
    if isinstance(value, Tensor):
        dims = ", ".join(str(d) if isinstance(d, int) else _size(str(d), sizes) for d in value.shape)
        return f"  {str(value.dtype).removeprefix('torch.')}[{dims}]"
    return ""


def _size(expression: str, sizes: dict[str, str]) -> str:
    """Symbols by the order in which they appear."""
    return sizes.setdefault(expression, f"n{len(sizes)}")


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for family in FAMILIES:
        (FOLDER / f"{family}.txt").write_text(golden(family))
    return 0


if __name__ == "__main__":
    sys.exit(main())
