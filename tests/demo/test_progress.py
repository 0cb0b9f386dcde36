"""Progress of the demo where nobody watches a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from trace_compile.demo.progress import Bars


def test_a_log_gets_the_first_and_the_last_step_of_every_bar() -> None:
    log = io.StringIO()
    with Bars(Console(file=log, force_terminal=False)) as bars:
        bars.add("trace", 3)
        bars.add("qat", 2)
        for step in range(3):
            bars.update("trace", step + 1, f"reward [{step}]")
        bars.update("qat", 1, "")
    lines = [line.split(" s ", 1)[1].strip() for line in log.getvalue().splitlines()]
    assert lines == ["trace 1/3 reward [0]", "trace 3/3 reward [2]", "qat 1/2"]
