"""Scheme keys: which numbers each operand of a mixture-of-experts region is made of.

A scheme is frozen and hashable; its ``key`` is the string that graphs, caches, tolerances and benchmarks are indexed
by, and ``parse(key)`` gives the same object back. Invariant: ``MoEScheme.parse(s.key) == s`` for every scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..errors import UnknownFormatError

WEIGHT_OUTERS = ("expert", "tensor")
ACT_OUTERS = ("row", "tensor", "traced")
_UNQUANTIZED = "none"


@dataclass(frozen=True)
class OperandScheme:
    """How one operand is quantized.

    ``fmt`` names a row of ``numerics.FORMATS``, ``profile`` a row of ``numerics.PROFILES``. ``outer`` says whose
    maximum sets the float32 outer scale: ``row`` (one token), ``tensor`` (the whole operand), ``expert`` (one expert's
    weight, gate and up together), ``traced`` (a range recorded while rollouts ran, handed in from outside).
    """

    fmt: str = "nvfp4"
    profile: str = "pow2"
    outer: str = "row"

    def __post_init__(self) -> None:
        if self.outer not in (*WEIGHT_OUTERS, *ACT_OUTERS):
            raise UnknownFormatError(f"outer scale source {self.outer!r}: use row, tensor, expert or traced")

    @property
    def key(self) -> str:
        return f"{self.fmt}:{self.profile}:{self.outer}"

    @classmethod
    def parse(cls, key: str) -> OperandScheme:
        """The scheme of ``"fmt:profile:outer"``. Raises :class:`UnknownFormatError` when it is not of that form."""
        parts = key.split(":")
        if len(parts) != 3 or not all(parts):
            raise UnknownFormatError(f"operand scheme {key!r}: expected 'format:profile:outer', e.g. 'nvfp4:pow2:row'")
        return cls(*parts)


@dataclass(frozen=True)
class MoEScheme:
    """Schemes of the two operands of both expert GEMMs; ``None`` leaves that operand as it is."""

    weight: OperandScheme | None
    act: OperandScheme | None

    def __post_init__(self) -> None:
        if self.weight is not None and self.weight.outer not in WEIGHT_OUTERS:
            raise UnknownFormatError(f"weight outer scale source {self.weight.outer!r}: use one of {WEIGHT_OUTERS}")
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
