"""Scheme keys: which numbers each operand of a mixture-of-experts region is made of.

A scheme is frozen and hashable; its ``key`` is the string that graphs, caches, tolerances and benchmarks are indexed
by, and ``parse(key)`` gives the same object back. Invariant: ``MoEScheme.parse(s.key) == s`` for every scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..errors import UnknownFormatError

SELECTIONS = {
    "dense": "all of it",
    "gathered": "channels of the largest residual energy, gathered and then quantized: a GEMM with K augmented (QUADS)",
    "channels": "channels of the largest energy of the quantized residual (Rollout-ResQ)",
    "2of4": "the two largest of every four channels of the quantized residual (Rollout-ResQ, 2:4)",
    "blocks": "blocks of 32 rows and 64 channels of the largest energy of the quantized residual (Rollout-ResQ)",
}
"""What of an operand's quantization error is kept; see ``ops.residual``."""
WEIGHT_OUTERS = ("expert", "tensor")
ACT_OUTERS = ("row", "tensor", "traced")
_UNQUANTIZED = "none"


@dataclass(frozen=True)
class Residual:
    """What of the error ``x - q(x)`` goes through the GEMM as well: ``(q(x) + gain * select(q(x - q(x)))) . W^T``.

    ``select`` is a row of ``SELECTIONS``, ``keep`` the share that is kept (of channels or blocks; ``dense`` and
    ``2of4`` state theirs themselves: 1 and 0.5). The residual has the operand's format, profile and outer scale.
    """

    select: str = "dense"
    keep: float = 1.0
    gain: float = 1.0

    def __post_init__(self) -> None:
        if self.select not in SELECTIONS:
            raise UnknownFormatError(f"residual selection {self.select!r}: use one of {', '.join(SELECTIONS)}")
        stated = {"dense": 1.0, "2of4": 0.5}.get(self.select, self.keep)
        if self.keep != stated or not 0.0 < self.keep <= 1.0:
            allowed = "0 < keep <= 1" if stated == self.keep else f"it always keeps {stated}"
            raise UnknownFormatError(f"residual {self.select!r} is to keep {self.keep}: {allowed}")
        if not 0.0 < self.gain <= 1.0:
            raise UnknownFormatError(f"residual gain {self.gain}: 0 < gain <= 1")

    @property
    def key(self) -> str:
        return f"{self.select}@{self.keep!r}*{self.gain!r}"

    @classmethod
    def parse(cls, key: str) -> Residual:
        """The residual of ``"select@keep*gain"``. Raises :class:`UnknownFormatError` when it is not of that form."""
        select, _, numbers = key.partition("@")
        try:
            keep, gain = (float(n) for n in numbers.split("*"))
        except ValueError:
            raise UnknownFormatError(
                f"residual {key!r}: expected 'select@keep*gain', e.g. 'gathered@0.5*1.0'"
            ) from None
        return cls(select, keep, gain)


@dataclass(frozen=True)
class OperandScheme:
    """How one operand is quantized.

    ``fmt`` names a row of ``numerics.FORMATS``, ``profile`` a row of ``numerics.PROFILES``. ``outer`` says whose
    maximum sets the float32 outer scale: ``row`` (one token), ``tensor`` (the whole operand), ``expert`` (one expert's
    weight, gate and up together), ``traced`` (a range recorded while rollouts ran, handed in from outside).
    ``residual``, for activations: what of the quantization error is multiplied too.
    """

    fmt: str = "nvfp4"
    profile: str = "pow2"
    outer: str = "row"
    residual: Residual | None = None

    def __post_init__(self) -> None:
        if self.outer not in (*WEIGHT_OUTERS, *ACT_OUTERS):
            raise UnknownFormatError(f"outer scale source {self.outer!r}: use row, tensor, expert or traced")

    @property
    def key(self) -> str:
        residual = f":{self.residual.key}" if self.residual else ""
        return f"{self.fmt}:{self.profile}:{self.outer}{residual}"

    @classmethod
    def parse(cls, key: str) -> OperandScheme:
        """The scheme of ``"fmt:profile:outer[:residual]"``. Raises :class:`UnknownFormatError` when it is not of that
        form."""
        parts = key.split(":")
        if len(parts) not in (3, 4) or not all(parts):
            raise UnknownFormatError(
                f"operand scheme {key!r}: expected 'format:profile:outer[:residual]', e.g. 'nvfp4:pow2:row'"
            )
        fmt, profile, outer, *residual = parts
        return cls(fmt, profile, outer, Residual.parse(residual[0]) if residual else None)


@dataclass(frozen=True)
class MoEScheme:
    """Schemes of the two operands of both expert GEMMs; ``None`` leaves that operand as it is."""

    weight: OperandScheme | None
    act: OperandScheme | None

    def __post_init__(self) -> None:
        if self.weight is not None and self.weight.outer not in WEIGHT_OUTERS:
            raise UnknownFormatError(f"weight outer scale source {self.weight.outer!r}: use one of {WEIGHT_OUTERS}")
        if self.weight is not None and self.weight.residual is not None:
            raise UnknownFormatError("only activations have a residual: weights are quantized once, ahead of time")
        if self.act is not None and self.act.outer not in ACT_OUTERS:
            raise UnknownFormatError(f"activation outer scale source {self.act.outer!r}: use one of {ACT_OUTERS}")

    @property
    def key(self) -> str:
        weight, act = (s.key if s else _UNQUANTIZED for s in (self.weight, self.act))
        return f"w={weight}|a={act}"

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(key: str) -> MoEScheme:
        """The scheme of ``"w=...|a=..."``. Raises :class:`UnknownFormatError` when it is not of that form."""
        operands = key.split("|")
        if len(operands) != 2 or not operands[0].startswith("w=") or not operands[1].startswith("a="):
            raise UnknownFormatError(f"scheme {key!r}: expected 'w=<operand>|a=<operand>'")
        weight, act = (None if o[2:] == _UNQUANTIZED else OperandScheme.parse(o[2:]) for o in operands)
        return MoEScheme(weight, act)


UNQUANTIZED = MoEScheme(None, None)
W4A16 = MoEScheme(OperandScheme(outer="expert"), None)
W4A4_ROW = MoEScheme(OperandScheme(outer="expert"), OperandScheme(outer="row"))
W4A4_TRACED = MoEScheme(OperandScheme(outer="expert"), OperandScheme(outer="traced"))
