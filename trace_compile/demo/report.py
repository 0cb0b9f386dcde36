"""The demo's tables and plots, drawn from the result alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from trace_compile.demo.result import ArmResult, DemoResult

_COLOURS = {"bf16": "tab:gray", "naive": "tab:red", "qat": "tab:orange", "trace": "tab:blue"}


def print_tables(result: DemoResult, console: Console) -> None:
    """One table of arms, one of the sweep, one of exported checkpoints, one line of facts."""
    console.print(_arms_table(result))
    if result.sweep:
        console.print(_sweep_table(result))
    if result.exports:
        console.print(_export_table(result))
    warm = result.warm_start
    console.print(
        f"{result.task}; warm start: {warm['source']}, loss {warm['loss']:.3f}; {result.steps} steps, "
        f"{result.compute_dtype} on {result.device}, torch {result.versions['torch']}; {result.seconds:.0f} s in all"
    )


def write_plots(result: DemoResult, out: Path) -> list[Path]:
    """``reward.png``, ``gap.png``, ``mismatch.png`` and ``drift.png`` in ``out``; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def save(figure: Any, name: str) -> Path:
        figure.tight_layout()
        path = out / name
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        return path

    return [
        save(_reward_plot(pyplot, result), "reward.png"),
        save(_gap_plot(pyplot, result), "gap.png"),
        save(_mismatch_plot(pyplot, result), "mismatch.png"),
        save(_drift_plot(pyplot, result), "drift.png"),
    ]


def _arms_table(result: DemoResult) -> Table:
    table = _table(
        f"RL: means over {result.steps} steps and {len(result.arms[0].seeds)} seed(s), largest for max |gap|"
    )
    headings = ("arm", "reward", "held out", "mean\n|gap|", "max\n|gap|", "drift", "mismatch", "as used", "B/token")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for arm in result.arms:
        table.add_row(
            arm.name,
            _number(_mean(arm.reward), ".3f"),
            "→".join(f"{reward:.3f}" for reward in arm.held_out_reward),
            _number(_mean(arm.gap_mean), ".4f"),
            _number(max((v for v in arm.gap_max if v is not None), default=None), ".2f"),
            _number(arm.drift, ".1%"),
            _number(_mean(arm.mismatch_before), ".1%"),
            _number(_mean(arm.mismatch_after), ".1%"),
            _number(arm.guidance_bytes_per_token, ".0f"),
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _sweep_table(result: DemoResult) -> Table:
    table = _table("Sweep: mean |gap| and drift on the same tokens, the trainer some steps ahead")
    steps = sorted({point.steps for point in result.sweep})
    table.add_column("arm", no_wrap=True)
    for step in steps:
        table.add_column(f"{step} ahead", justify="right", no_wrap=True)
    for arm in result.arms:
        points = {point.steps: point for point in result.sweep if point.arm == arm.name}
        cells = [f"{points[s].gap_mean:.4f} {_number(points[s].drift, '.1%')}" if s in points else "" for s in steps]
        table.add_row(arm.name, *cells)
    return table


def _export_table(result: DemoResult) -> Table:
    table = _table("Export: logits of the reloaded checkpoint against a rollout of the same weights")
    for heading in ("format", "KiB", "logits against", "max error", "relative", "same top"):
        table.add_column(heading, justify="left" if heading in ("format", "logits against") else "right")
    for check in result.exports:
        table.add_row(
            check.format,
            f"{check.bytes / 1024:.0f}",
            check.against,
            f"{check.logits_max_error:.1e}",
            f"{check.logits_relative_error:.1e}",
            f"{check.top1_agreement:.1%}",
        )
    return table


def _reward_plot(pyplot: Any, result: DemoResult) -> Any:
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for arm in result.arms:
        _line(axes, arm, arm.reward)
    axes.set(xlabel="RL step", ylabel="reward", title="Reward of the rollouts", ylim=(0, 1))
    axes.legend()
    return figure


def _gap_plot(pyplot: Any, result: DemoResult) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4))
    for axes, field, title in zip(panels, ("gap_mean", "gap_max"), ("mean |gap|", "max |gap|")):
        for arm in result.arms:
            _line(axes, arm, getattr(arm, field))
        axes.set(xlabel="RL step", ylabel="nats", title=title)
        axes.set_yscale("log")
        axes.legend()
    return figure


def _mismatch_plot(pyplot: Any, result: DemoResult) -> Any:
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for arm in result.arms:
        if any(value is not None for value in arm.mismatch_before):
            _line(axes, arm, arm.mismatch_before, style=":", label=f"{arm.name}, own rounding")
            _line(axes, arm, arm.mismatch_after, label=f"{arm.name}, as used")
    axes.set(xlabel="RL step", ylabel="share of values", title="Quantized values that differ from the rollout's")
    axes.legend(fontsize="small")
    return figure


def _drift_plot(pyplot: Any, result: DemoResult) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4))
    for arm in result.arms:
        colour = _COLOURS.get(arm.name)
        points = [p for p in result.sweep if p.arm == arm.name]
        panels[0].plot([p.steps for p in points], [p.gap_mean for p in points], "o-", color=colour, label=arm.name)
        measured = [p for p in points if p.drift is not None]
        panels[1].plot([p.drift for p in measured], [p.gap_mean for p in measured], "o-", color=colour, label=arm.name)
    panels[0].set(xlabel="optimizer steps ahead", ylabel="mean |gap|, nats", title="Same tokens, later trainer")
    panels[1].set(xlabel="measured drift of the experts' inputs", ylabel="mean |gap|, nats", title="Against drift")
    for axes in panels:
        axes.legend()
    return figure


def _line(
    axes: Any, arm: ArmResult, values: Sequence[float | None], *, style: str = "-", label: str | None = None
) -> None:
    numbers = [float("nan") if value is None else value for value in values]
    axes.plot(range(len(numbers)), numbers, style, color=_COLOURS.get(arm.name), label=label or arm.name)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
