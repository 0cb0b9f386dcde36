"""Progress of long work: bars on a terminal, a line now and then in a log.

A log shows nothing of a bar until it ends, which on a GPU machine without a terminal looks like a hang.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_SECONDS_BETWEEN_LINES = 5.0


class Bars:
    """Named bars, as a context manager. In a log each bar prints a line every few seconds, and its last one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin = time.monotonic()
        self._totals: dict[str, int] = {}
        self._printed: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def add(self, name: str, total: int, note: str = "") -> None:
        """Add the bar ``name`` of ``total`` steps."""
        self._totals[name] = total
        self._printed[name] = float("-inf")
        self._tasks[name] = self._progress.add_task(name, total=total, note=note)

    def update(self, name: str, completed: int, note: str) -> None:
        """Set the bar to ``completed`` steps, with a few words."""
        self._progress.update(self._tasks[name], completed=completed, note=note)
        now = time.monotonic()
        due = completed >= self._totals[name] or now - self._printed[name] >= _SECONDS_BETWEEN_LINES
        if due and not self._console.is_terminal:
            self._printed[name] = now
            self._console.print(
                f"{now - self._begin:6.0f} s {name:>10} {completed}/{self._totals[name]} {note}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
