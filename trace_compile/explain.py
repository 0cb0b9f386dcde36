"""``model.explain()``: what the passes did to a model, for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from trace_compile.capture import CompileReport
from trace_compile.numerics import FORMATS
from trace_compile.passes.mode import Mode
from trace_compile.passes.region import LinearRegion, MoERegion, NoMatch, Region
from trace_compile.passes.report import formula

if TYPE_CHECKING:
    from trace_compile.engine import Engine
    from trace_compile.session import Session

Reports = tuple[tuple[Mode, CompileReport], ...]


@dataclass(frozen=True)
class Explanation:
    """What was rewritten, what was not and why. ``print()`` shows it as tables.

    Attributes:
        recipe: name of the recipe.
        regions: the rewritten expert regions and linear layers, in graph order.
        unmatched: expert-shaped operations that were left alone, with node and reason.
        guided: names of the regions whose rollout outcome is replayed.
        weights: by region, what the rollout holds of its experts: format and bits per weight (without outer scales).
        reports: one per compiled graph of the trainer, with pass timings and lowering choices. Graphs are compiled when
            they are first needed: before the first forward there is only the one that found the regions.
        rollouts: likewise for each twin that there is, oldest first.
    """

    recipe: str
    about: str
    regions: tuple[Region, ...]
    unmatched: tuple[NoMatch, ...]
    guided: frozenset[str]
    weights: dict[str, str]
    reports: Reports
    rollouts: tuple[Reports, ...] = ()

    @classmethod
    def of(cls, session: Session) -> Explanation:
        reports, *rollouts = (_reports(engine) for engine in (session.engine, *session.twin_engines))
        unmatched = {str(n): n for graphs in (reports, *rollouts) for _, report in graphs for n in report.unmatched}
        regions = session.need_regions()
        guided = session.guided_regions() if session.recipe.guidance != "none" else frozenset()
        recipe = session.recipe
        weights = dict.fromkeys((r.name for r in regions), "own dtype")
        if recipe.rollout is not None and recipe.rollout.weight is not None:
            fmt = FORMATS[recipe.rollout.weight.fmt]
            form = f"{fmt.name}, {fmt.bits_per_value:g} bits"
            weights |= dict.fromkeys((r.name for r in session.quantized_regions()), form)
        return cls(
            recipe.name, recipe.about, regions, tuple(unmatched.values()), guided, weights, reports, tuple(rollouts)
        )

    def __str__(self) -> str:
        console = Console(width=140, no_color=True)
        with console.capture() as text:
            for table in (self._regions(), self._layers()):
                if table.row_count:
                    console.print(table)
            console.print(self._graphs())
            for region in self.regions:
                if region.slots:
                    console.print(f"not recorded by token: {region.name}, {region.slots}", soft_wrap=True)
            for missed in self.unmatched:
                console.print(f"left alone: {missed}", soft_wrap=True)
        return text.get().rstrip()

    __repr__ = __str__

    def _regions(self) -> Table:
        regions = [r for r in self.regions if isinstance(r, MoERegion)]
        table = Table(title=f"recipe {self.recipe}: {self.about}; {len(regions)} expert regions rewritten")
        sizes_of = ("experts", "top-k", "hidden", "width")
        for column in ("region", "found as", *sizes_of, "activation", "weights", "replayed"):
            table.add_column(column)
        for r in regions:
            replayed = "yes" if r.name in self.guided else "no"
            sizes = (r.num_experts, r.top_k, r.hidden, r.width)
            table.add_row(r.name, r.source, *map(str, sizes), formula(r), self.weights[r.name], replayed)
        return table

    def _layers(self) -> Table:
        regions = [r for r in self.regions if isinstance(r, LinearRegion)]
        table = Table(title=f"recipe {self.recipe}: {self.about}; {len(regions)} inputs of linear layers quantized")
        for column in ("linear layers", "in", "out", "replayed"):
            table.add_column(column)
        for r in regions:
            table.add_row(r.name, str(r.hidden), "+".join(map(str, r.rows)), "yes" if r.name in self.guided else "no")
        return table

    def _graphs(self) -> Table:
        table = Table(title="compiled graphs")
        for column in ("of", "scheme", "guidance", "record", "lowered to", "passes (ms)"):
            table.add_column(column)
        owners = [("trainer", self.reports)]
        owners += [(f"twin {i}" if len(self.rollouts) > 1 else "twin", r) for i, r in enumerate(self.rollouts, 1)]
        for owner, mode, report in ((owner, *pair) for owner, reports in owners for pair in reports):
            scheme = mode.scheme.key if mode.scheme else "unquantized"
            lowered = ", ".join(sorted({f"{c.op}: {c.provider} ({c.reason})" for c in report.choices}))
            times = ", ".join(f"{t.name} {t.seconds * 1e3:.0f}" for t in report.timings)
            table.add_row(owner, scheme, mode.guidance, mode.record, lowered, times)
        return table


def _reports(engine: Engine) -> Reports:
    return tuple((mode, report) for mode, reports in engine.reports.items() for report in reports)
