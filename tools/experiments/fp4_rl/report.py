"""Tables and plots of the experiment's results: a folder with ``<arm>-<seed>/steps.jsonl`` and ``sweep.json``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

Lines = list[dict[str, Any]]

_WINDOW = 10
"""Steps that one point of a curve averages over."""


def write(results: Path, console: Console) -> None:
    """Print what is there and write ``rl.json`` (per arm and seed, every figure by step) and the plots beside it."""
    runs = _read_runs(results)
    if runs:
        (results / "rl.json").write_text(json.dumps(_columns(runs)) + "\n")
        _print_runs(runs, console)
        _plot_runs(runs, results / "rl.png")
    if (results / "sweep.json").exists():
        points = json.loads((results / "sweep.json").read_text())["points"]
        _print_sweep(points, console)
        _plot_sweep(points, results / "sweep.png")


def _read_runs(results: Path) -> dict[str, dict[int, Lines]]:
    runs: dict[str, dict[int, Lines]] = defaultdict(dict)
    for log in sorted(results.glob("*/steps.jsonl")):
        arm, _, seed = log.parent.name.rpartition("-")
        runs[arm][int(seed)] = [json.loads(line) for line in log.read_text().splitlines()]
    return runs


def _columns(runs: dict[str, dict[int, Lines]]) -> dict[str, Any]:
    return {
        arm: {
            str(seed): {
                key: [[line["step"], line[key]] for line in lines if line.get(key) is not None]
                for key in sorted({key for line in lines for key in line} - {"step"})
            }
            for seed, lines in seeds.items()
        }
        for arm, seeds in runs.items()
    }


def _mean(lines: Lines, key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return sum(values) / len(values) if values else None


def _text(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def _print_runs(runs: dict[str, dict[int, Lines]], console: Console) -> None:
    table = Table(title="RL, per arm and seed: first and last twenty steps")
    names = (
        "arm",
        "seed",
        "steps",
        "reward",
        "held out FP4",
        "held out bf16",
        "mean |gap|",
        "max |gap|",
        "drift",
        "s/step",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for arm, seeds in runs.items():
        for seed, lines in seeds.items():
            steps = [line for line in lines if line["step"]]
            early, late = steps[:20], steps[-20:]

            def change(key: str, pattern: str, early: Lines = early, late: Lines = late) -> str:
                return f"{_text(_mean(early, key), pattern)}→{_text(_mean(late, key), pattern)}"

            evaluated = [line for line in lines if "held_out" in line]
            ends = (evaluated[:1], evaluated[-1:])
            table.add_row(
                arm,
                str(seed),
                str(len(steps)),
                change("reward", ".3f"),
                "→".join(_text(_mean(end, "held_out"), ".3f") for end in ends),
                "→".join(_text(_mean(end, "held_out_bf16"), ".3f") for end in ends),
                change("gap_mean", ".4f"),
                _text(max((line["gap_max"] for line in steps), default=None), ".2f"),
                _text(_mean(late, "drift"), ".2%"),
                _text(_mean(steps, "seconds"), ".2f"),
            )
    console.print(table)


def _print_sweep(points: Lines, console: Console) -> None:
    for source in dict.fromkeys(point["source"] for point in points):
        table = Table(title=f"Sweep, drift by {source}: mean |gap| (gradient cosine)")
        table.add_column("arm")
        chosen = [point for point in points if point["source"] == source]
        steps = list(dict.fromkeys(point["steps"] for point in chosen))
        for step in steps:
            table.add_column(f"{step} steps", justify="right", no_wrap=True)
        for arm in dict.fromkeys(point["arm"] for point in chosen):
            row = {point["steps"]: point for point in chosen if point["arm"] == arm}
            cells = [
                f"{row[s]['gap_mean']:.4f} ({_text(row[s].get('gradient_cosine'), '.3f')})" for s in steps if s in row
            ]
            table.add_row(arm, *cells)
        console.print(table)


def _plot_runs(runs: dict[str, dict[int, Lines]], path: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), constrained_layout=True)
    panels = (
        ("reward", "reward, training"),
        ("gap_mean", "mean |log-prob gap|"),
        ("gap_max", "largest |log-prob gap|"),
    )
    for (key, title), axis in zip(panels, axes.flat):
        for index, (arm, seeds) in enumerate(runs.items()):
            for lines in seeds.values():
                axis.plot(*_smoothed(lines, key), color=f"C{index}", alpha=0.8, linewidth=1, label=arm)
        axis.set_title(title)
        if key != "reward":
            axis.set_yscale("log")
    for index, (arm, seeds) in enumerate(runs.items()):
        for lines in seeds.values():
            points = [(line["step"], line["held_out"]) for line in lines if "held_out" in line]
            axes.flat[3].plot(*zip(*points), color=f"C{index}", marker=".", linewidth=1, label=arm)
    axes.flat[3].set_title("reward on held-out problems, FP4 rollout")
    for axis in axes.flat:
        axis.set_xlabel("step")
    _legend(axes.flat[0])
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _smoothed(lines: Lines, key: str) -> tuple[list[float], list[float]]:
    values = [(line["step"], line[key]) for line in lines if line["step"] and line.get(key) is not None]
    parts = [values[i : i + _WINDOW] for i in range(0, len(values), _WINDOW)]
    return [p[-1][0] for p in parts], [sum(v for _, v in p) / len(p) for p in parts]


def _plot_sweep(points: Lines, path: Path) -> None:
    chosen = [point for point in points if point["source"] == "optimizer steps"]
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True)
    panels: tuple[tuple[str, str, Callable[[Any], None]], ...] = (
        ("gap_mean", "mean |log-prob gap|", lambda axis: axis.set_yscale("log")),
        ("mismatch_after", "codes that differ, as used", lambda axis: None),
        ("gradient_cosine", "policy gradient, cosine to unquantized", lambda axis: None),
    )
    for (key, title, scale), axis in zip(panels, axes):
        for arm in dict.fromkeys(point["arm"] for point in chosen):
            line = [
                (p["drift"], p[key]) for p in chosen if p["arm"] == arm and None not in (p.get("drift"), p.get(key))
            ]
            if line:
                axis.plot(*zip(*line), marker=".", label=arm)
        axis.set_title(title)
        axis.set_xlabel("measured drift of the experts' inputs")
        scale(axis)
    _legend(axes[0])
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _legend(axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    axis.legend(unique.values(), unique.keys(), fontsize=7)
