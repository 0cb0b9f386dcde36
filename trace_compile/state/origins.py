"""The bytes that expert parameters were loaded from.

Quantizing a dequantized weight again does not always give its bytes back (a block at the floor of a scale that moved,
the scales of another quantizer). So an import keeps the bytes, and whoever packs a parameter gets them for as long as
the parameter holds exactly the values they stand for; the first change of a value ends that.

Invariant: what ``pack`` hands out is the caller's to overwrite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trace_compile.numerics import FORMATS
from trace_compile.ops.scheme import OperandScheme
from trace_compile.ops.weights import Packed, WeightLayout, pack_experts
from trace_compile.state.sharded import is_dtensor, pack_whole

Packer = Callable[..., Packed]

_TOGETHER = 8  # experts that are compared at once


@dataclass(frozen=True)
class Provenance:
    """What packed bytes do not say of themselves.

    foreign: they hold scales that this package never writes, and that are to be kept.
    inverse: float32 [E], the reciprocals of the outer scales where a file holds those: they do not follow from the
    scales, since not every float32 is a reciprocal.
    """

    foreign: bool = False
    inverse: Tensor | None = None


@dataclass(frozen=True)
class Origin:
    """Packed form of a parameter as a file held it."""

    layout: WeightLayout
    packed: Packed
    provenance: Provenance
    fmt: str = "nvfp4"

    def values(self, dtype: torch.dtype) -> Tensor:
        """The parameter that the bytes stand for: exact for power-of-two outer scales, else rounded to ``dtype``."""
        return self.layout.parameter(self.packed.dequantize(dtype, self.fmt))

    def stands_for(self, param: Tensor) -> bool:
        """Whether ``param`` holds these values. Compared on its device, some experts at a time; a parameter that was
        trained is told at its first ones."""
        canonical = self.layout.canonical(param.detach())
        if canonical.shape != self.packed.shape:
            return False
        parts = (getattr(self.packed, part.name).split(_TOGETHER) for part in fields(Packed))
        for held, *packed in zip(canonical.split(_TOGETHER), *parts, strict=True):
            values = Packed(*(part.to(param.device) for part in packed)).dequantize(param.dtype, self.fmt)
            if not torch.equal(values, held):
                return False
        return True


class Origins:
    """Origins of a model's parameters by dotted name."""

    def __init__(self) -> None:
        self._origins: dict[str, Origin] = {}

    def set(self, origins: dict[str, Origin]) -> None:
        """Replaces those of the named parameters."""
        self._origins |= origins

    def inherit(self, other: Origins) -> None:
        """Takes over what ``other`` knows; origins are never written."""
        self._origins |= other._origins

    def current(self, name: str, param: Tensor) -> Origin | None:
        """The origin of ``param`` if it still stands for it; a parameter that changed loses its own for good."""
        origin = None if is_dtensor(param) else self._origins.get(name)
        if origin is not None and not origin.stands_for(param):
            del self._origins[name]
            return None
        return origin

    def provenance(self, name: str, param: Tensor) -> Provenance:
        """That of the bytes which ``pack`` gives for ``param`` now."""
        origin = self.current(name, param)
        return Provenance() if origin is None else origin.provenance

    def pack(self, param: Tensor, layout: WeightLayout, scheme: OperandScheme, *, name: str = "weight") -> Packed:
        """``pack_experts``, or a copy of the bytes that ``param`` came from while it is what they stand for.

        A parameter that is sharded over ranks is packed whole, on all ranks at once.
        """
        if is_dtensor(param):
            return pack_whole(param, layout, scheme, name=name)
        origin = self._origins.get(name)
        if origin is None or origin.layout != layout or origin.fmt != scheme.fmt or not FORMATS[scheme.fmt].outer:
            return pack_experts(param, layout, scheme, name=name)
        if self.current(name, param) is None:
            return pack_experts(param, layout, scheme, name=name)
        parts = (getattr(origin.packed, part.name) for part in fields(Packed))
        return Packed(*(part.to(param.device, copy=True) for part in parts))
