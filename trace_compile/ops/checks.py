"""Checks that ops make on their operands before they compute, in the real and in the fake implementation alike."""

from __future__ import annotations

from torch import Tensor

from ..errors import BlockSizeError, DeviceMismatchError


def same_device(**tensors: Tensor | None) -> None:
    """Raises :class:`DeviceMismatchError` naming two operands and both devices. ``None`` operands are skipped."""
    given = [(name, t) for name, t in tensors.items() if t is not None]
    first, anchor = given[0]
    for name, t in given:
        if t.device != anchor.device:
            raise DeviceMismatchError(
                f"{first} is on {anchor.device} but {name} is on {t.device}: move one of them, ops never copy silently"
            )


def whole_blocks(block: int, **widths: int) -> None:
    """Raises :class:`BlockSizeError` when one of the named ``widths`` is no multiple of ``block``."""
    for name, width in widths.items():
        if width % block:
            raise BlockSizeError(
                f"{name} is {width}, not a multiple of the format's block of {block}: scales would straddle rows. "
                f"Leave this region unquantized or choose a width of {width + -width % block}"
            )
