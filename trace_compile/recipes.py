"""Recipes: which operands each graph quantizes, where activation scales come from, and what the trainer replays.

A recipe is data. It names the scheme of the training graph, that of the generation graph, the kind of guidance the
trainer replays from a rollout trace, and the source of the activations' outer scale once ranges have been traced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trace_compile.errors import UnknownRecipeError
from trace_compile.ops.scheme import MoEScheme, OperandScheme

_WEIGHT = OperandScheme(fmt="nvfp4", profile="pow2", outer="expert")
_ACT = OperandScheme(fmt="nvfp4", profile="pow2", outer="row")
_W4A4 = MoEScheme(weight=_WEIGHT, act=_ACT)
_W4A16 = MoEScheme(weight=_WEIGHT, act=None)


@dataclass(frozen=True)
class Recipe:
    """One way to pair a training graph with a generation graph.

    Attributes:
        name: what users type.
        train: scheme of the training graph; ``None`` computes in the model's own dtype.
        rollout: scheme of the generation graph; ``None`` likewise.
        guidance: what the trainer replays: ``"none"``, ``"bit"`` (mantissa bit, block scale), ``"code"`` (whole code).
        outer: outer scale of activations once ranges exist: ``"row"`` (each token's own) or ``"traced"``.
        about: one line for people.
    """

    name: str
    train: MoEScheme | None
    rollout: MoEScheme | None
    guidance: str = "none"
    outer: str = "row"
    about: str = ""

    def schemes(self, *, traced: bool) -> tuple[MoEScheme | None, MoEScheme | None]:
        """The (train, rollout) schemes with the activations' outer source filled in; ``traced`` says ranges exist."""
        source = "traced" if traced and self.outer == "traced" else "row"
        return _with_outer(self.train, source), _with_outer(self.rollout, source)


def _with_outer(scheme: MoEScheme | None, source: str) -> MoEScheme | None:
    if scheme is None or scheme.act is None:
        return scheme
    return replace(scheme, act=replace(scheme.act, outer=source))


RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe("bf16", None, None, about="no quantization anywhere: the floor (the model's own compute dtype)"),
        Recipe("naive", None, _W4A4, about="unquantized trainer, W4A4 rollout: what goes wrong"),
        Recipe("w4a16", _W4A16, _W4A16, about="weights only, both graphs"),
        Recipe("qat", _W4A4, _W4A4, about="symmetric W4A4, each side its own scales and rounding"),
        Recipe("static", _W4A4, _W4A4, outer="traced", about="symmetric W4A4, outer scales from traced ranges"),
        Recipe("trace", _W4A4, _W4A4, "bit", "traced", about="TRACE: the rollout's scales and mantissa bits replayed"),
        Recipe("trace_full", _W4A4, _W4A4, "code", "traced", about="TRACE with whole codes replayed"),
    )
}


def get_recipe(name: str | Recipe) -> Recipe:
    """Look a recipe up by name. Raises ``UnknownRecipeError`` with the names there are."""
    if isinstance(name, Recipe):
        return name
    if name not in RECIPES:
        raise UnknownRecipeError(f"unknown recipe {name!r}; choose one of {', '.join(RECIPES)}, or pass a Recipe")
    return RECIPES[name]
