"""Recipes: which operands each graph quantizes and how, what the trainer replays, what the rollout adds.

A recipe is data: two schemes, a kind of guidance, the source of the activations' outer scale, noise. Names are written
like sums: a pairing of the two graphs and modifiers of it, as in ``trace+mxfp4`` or ``hif4+resq_2of4+aqn``; without a
pairing, the first modifier says which it changes. Some take a number: ``quads=0.25``. Nothing else in the package knows
a name: passes and ops see only what a recipe consists of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trace_compile.errors import UnknownFormatError, UnknownRecipeError
from trace_compile.numerics import FORMATS
from trace_compile.ops.scheme import MoEScheme, OperandScheme, Residual

_WEIGHT = OperandScheme(fmt="nvfp4", profile="pow2", outer="expert")
_ACT = OperandScheme(fmt="nvfp4", profile="pow2", outer="row")
_W4A4 = MoEScheme(weight=_WEIGHT, act=_ACT)
_W4A16 = MoEScheme(weight=_WEIGHT, act=None)


@dataclass(frozen=True)
class Noise:
    """Adaptive quantization noise (QeRL, arXiv 2510.11696): N(0, sigma^2) on RMSNorm weights of the rollout.

    Training is cut into ``stages + 1`` equal parts. The first has no noise; sigma then falls geometrically from
    ``start`` to ``end``, one value per part.
    """

    start: float = 1e-2
    end: float = 1e-4
    stages: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.end <= self.start or self.stages < 1:
            raise UnknownRecipeError(f"noise needs 0 < end <= start and at least one stage, got {self}")

    def sigma(self, progress: float) -> float:
        """Standard deviation at ``progress``, the finished fraction of training in [0, 1]."""
        stage = min(int(progress * (self.stages + 1)), self.stages)
        if stage == 0:
            return 0.0
        return self.start * (self.end / self.start) ** ((stage - 1) / max(self.stages - 1, 1))


@dataclass(frozen=True)
class Recipe:
    """One way to pair a training graph with a generation graph.

    Attributes:
        name: what users type.
        train: scheme of the training graph; ``None`` computes in the model's own dtype.
        rollout: scheme of the generation graph; ``None`` likewise.
        guidance: what the trainer replays: ``"none"``, ``"bit"`` (mantissa bit, block scale), ``"code"`` (whole code).
        outer: outer scale of activations once ranges exist: ``"row"`` (each token's own) or ``"traced"``.
        noise: added to norm weights in the generation graph.
        about: one line for people.
    """

    name: str
    train: MoEScheme | None
    rollout: MoEScheme | None
    guidance: str = "none"
    outer: str = "row"
    noise: Noise | None = None
    about: str = ""

    def schemes(self, *, traced: bool) -> tuple[MoEScheme | None, MoEScheme | None]:
        """The (train, rollout) schemes with the activations' outer source filled in; ``traced`` says ranges exist."""
        source = "traced" if traced and self.outer == "traced" else "row"
        return _with_outer(self.train, source), _with_outer(self.rollout, source)


def _with_outer(scheme: MoEScheme | None, source: str) -> MoEScheme | None:
    if scheme is None or scheme.act is None:
        return scheme
    return replace(scheme, act=replace(scheme.act, outer=source))


_PAIRINGS: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe("bf16", None, None, about="no quantization anywhere: the floor (the model's own compute dtype)"),
        Recipe("naive", None, _W4A4, about="unquantized trainer, W4A4 rollout: what goes wrong"),
        Recipe("w4a16", _W4A16, _W4A16, about="weights only, both graphs"),
        Recipe("asymmetric", _W4A16, _W4A4, about="weights-only trainer, W4A4 rollout"),
        Recipe("qat", _W4A4, _W4A4, about="symmetric W4A4, each side its own scales and rounding"),
        Recipe("static", _W4A4, _W4A4, outer="traced", about="symmetric W4A4, outer scales from traced ranges"),
        Recipe("trace", _W4A4, _W4A4, "bit", "traced", about="TRACE: the rollout's scales and mantissa bits replayed"),
        Recipe("trace_full", _W4A4, _W4A4, "code", "traced", about="TRACE with whole codes replayed"),
    )
}

_Apply = Callable[[Recipe, float], Recipe]


@dataclass(frozen=True)
class Modifier:
    """One change of a pairing: ``apply(recipe, number)``.

    A name holds at most one of each ``kind``. ``alone``: the pairing it changes where the name has none. ``number``:
    what is meant where none is written after ``=``; None for modifiers that take none.
    """

    name: str
    kind: str
    about: str
    apply: _Apply
    alone: str = "qat"
    number: float | None = None


def _format(fmt: str, profile: str = "pow2") -> _Apply:
    """Every quantized operand in ``fmt`` under ``profile``. A format without outer scales has none to trace."""

    def operand(scheme: OperandScheme | None) -> OperandScheme | None:
        return None if scheme is None else replace(scheme, fmt=fmt, profile=profile)

    def apply(recipe: Recipe, number: float) -> Recipe:
        outer = recipe.outer if FORMATS[fmt].outer else "row"
        return _with_schemes(replace(recipe, outer=outer), lambda s: MoEScheme(operand(s.weight), operand(s.act)))

    return apply


def _int4(recipe: Recipe, number: float) -> Recipe:
    """Weights in INT4 with groups of ``number``."""
    fmt = f"int4_g{number:g}"
    if fmt not in FORMATS:
        raise UnknownRecipeError(f"INT4 weights come in groups of 32 or 128, not of {number:g}")
    return _with_schemes(recipe, lambda s: replace(s, weight=replace(_WEIGHT, fmt=fmt)))


def _with_schemes(recipe: Recipe, change: Callable[[MoEScheme], MoEScheme]) -> Recipe:
    if recipe.train is None and recipe.rollout is None:
        raise UnknownRecipeError(f"recipe {recipe.name!r} quantizes nothing that could change")
    train, rollout = (None if s is None else change(s) for s in (recipe.train, recipe.rollout))
    return replace(recipe, train=train, rollout=rollout)


def _residual(select: str, *, both: bool = False, gain: float = 1.0) -> _Apply:
    """Residual compensation of the rollout's activations (``both``: and of the trainer's)."""

    def add(scheme: MoEScheme | None, recipe: Recipe, keep: float) -> MoEScheme:
        if scheme is None or scheme.act is None:
            raise UnknownRecipeError(f"recipe {recipe.name!r} quantizes no activations that could leave a residual")
        return replace(scheme, act=replace(scheme.act, residual=Residual(select, keep, gain)))

    def apply(recipe: Recipe, number: float) -> Recipe:
        train = add(recipe.train, recipe, number) if both else recipe.train
        return replace(recipe, train=train, rollout=add(recipe.rollout, recipe, number))

    return apply


def _aqn(recipe: Recipe, number: float) -> Recipe:
    return replace(recipe, noise=Noise())


_R = "residual"
_MODIFIERS: dict[str, Modifier] = {
    m.name: m
    for m in (
        Modifier("hif4", "format", "HiF4", _format("hif4")),
        Modifier("mxfp4", "format", "MXFP4", _format("mxfp4")),
        Modifier("mxfp4_macro", "format", "MXFP4 with macro-block scaling", _format("mxfp4_macro")),
        Modifier("four_over_six", "format", "four over six by MSE", _format("nvfp4", "four_over_six")),
        Modifier("four_over_six_mae", "format", "four over six by MAE", _format("nvfp4", "four_over_six_mae")),
        Modifier("int4", "format", "INT4 weights", _int4, alone="w4a16", number=32),
        Modifier("quads", _R, "rollout with its residual's main channels", _residual("gathered"), "asymmetric", 0.5),
        Modifier("resq_dense", _R, "rollout with its whole residual", _residual("dense"), number=1.0),
        Modifier("resq_channels", _R, "rollout with its residual's main channels", _residual("channels"), number=0.5),
        Modifier("resq_2of4", _R, "rollout with its residual, two of four", _residual("2of4"), number=0.5),
        Modifier("resq_blocks", _R, "rollout with its residual's 32x64 blocks", _residual("blocks"), number=0.5),
        Modifier("fallback", _R, "both with half their residual", _residual("dense", both=True, gain=0.5), number=1.0),
        Modifier("aqn", "noise", "noise on the rollout's norms", _aqn, alone="w4a16"),
    )
}


def _compose(name: str) -> Recipe:
    parts = [part.strip() for part in name.split("+")]
    pairings = [part for part in parts if part in _PAIRINGS]
    modifiers = [_modifier(name, part) for part in parts if part not in _PAIRINGS]
    kinds = [modifier.kind for modifier, _ in modifiers]
    if len(pairings) > 1 or len(set(kinds)) < len(kinds):
        raise UnknownRecipeError(f"recipe {name!r}: one pairing and at most one format, residual and noise each")
    recipe = replace(_PAIRINGS[pairings[0] if pairings else modifiers[0][0].alone], name=name)
    for modifier, number in modifiers:
        try:
            recipe = modifier.apply(recipe, number)
        except UnknownFormatError as error:
            raise UnknownRecipeError(f"recipe {name!r}: {error}") from None
    return replace(recipe, about="; ".join([recipe.about, *(modifier.about for modifier, _ in modifiers)]))


def _modifier(name: str, part: str) -> tuple[Modifier, float]:
    key, sign, text = part.partition("=")
    if key not in _MODIFIERS:
        of = "" if part == name else f" in {name!r}"
        raise UnknownRecipeError(
            f"unknown recipe {part!r}{of}; choose one of {', '.join((*_PAIRINGS, *_MODIFIERS))}, joined by '+', "
            "or pass a Recipe"
        )
    modifier = _MODIFIERS[key]
    if sign and modifier.number is None:
        raise UnknownRecipeError(f"recipe {name!r}: {key!r} takes no number")
    try:
        return modifier, float(text) if sign else modifier.number or 0.0
    except ValueError:
        raise UnknownRecipeError(f"recipe {name!r}: {text!r} after '=' is no number") from None


RECIPES: dict[str, Recipe] = {name: _compose(name) for name in (*_PAIRINGS, *_MODIFIERS)}
"""Every pairing, and every modifier on its own."""


def get_recipe(name: str | Recipe) -> Recipe:
    """The recipe of a name; see the module. Raises ``UnknownRecipeError`` with the names there are."""
    return name if isinstance(name, Recipe) else _compose(name)
