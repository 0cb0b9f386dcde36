"""Launch choices of the inference kernels: pure functions, from a measured table of the device where there is one.

Invariant: no choice changes a bit of a result; what would (the segments of K) depends on the weight's shape alone.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trace_compile.kernels.launch import INTERPRETER, Target


@dataclass(frozen=True)
class DispatchLaunch:
    """Slots that a program reads at a time."""

    block: int
    num_warps: int


def dispatch_launch(slots: int, target: Target) -> DispatchLaunch:
    """Configuration of ``dispatch.tiles_of`` for ``slots`` slots."""
    block = min(1024, max(32, 1 << (slots - 1).bit_length()))
    return DispatchLaunch(block, num_warps=max(1, min(8, block // 128)))


@dataclass(frozen=True)
class GemmLaunch:
    """``tile`` slots by ``block_n`` columns of the result (twice as many of the weight when gated) per program.

    64 columns of K are loaded at a time, ``stages`` times ahead. ``side_by_side``: the segments of K in a warp each.
    None of it changes a bit of the result.
    """

    tile: int
    block_n: int
    stages: int
    num_warps: int
    side_by_side: bool = False


def segments(columns: int, k: int) -> int:
    """Segments of K whose sums are added in order, for weights of ``columns`` x ``k``: a part of the result's meaning,
    so it may depend on nothing else. Long narrow weights give one token too few programs to fill a device."""
    if k >= 8192:
        return 4
    return 2 if k >= 2560 and k >= columns else 1


@dataclass(frozen=True)
class MoELaunch:
    """Of one expert layer."""

    gate_up: GemmLaunch
    down: GemmLaunch


def moe_launch(
    tokens: int, top_k: int, experts: int, hidden: int, columns: int, width: int, target: Target, *, fp4: bool = False
) -> MoELaunch:
    """Configuration of ``moe_forward`` for ``tokens`` x ``hidden``, weights [experts, columns, hidden] and
    [experts, hidden, width].

    A measured table of this device and these shapes, where there is one, for the measured number of tokens that is
    nearest on a logarithmic scale; else by the rows that an expert with rows has on average.
    """
    slots = tokens * top_k
    if target == INTERPRETER:  # its time goes by operations, not by elements
        return MoELaunch(GemmLaunch(16, 256, 2, 4), GemmLaunch(16, 256, 2, 4))
    if fp4:
        return MoELaunch(*(_fp4_launch(slots / max(1, min(experts, slots)), first) for first in (True, False)))
    table = _table(target.name).get(f"{experts}x{columns}x{hidden}x{width}", {})
    if table:
        nearest = min(table, key=lambda measured: abs(math.log(int(measured) / max(tokens, 1))))
        return MoELaunch(*(GemmLaunch(*launch) for launch in table[nearest]))
    rows = slots / max(1, min(experts, slots))
    return MoELaunch(_gemm_launch(rows, columns, hidden, True), _gemm_launch(rows, hidden, width, False))


def _gemm_launch(rows: float, columns: int, k: int, first: bool) -> GemmLaunch:
    """For about ``rows`` per expert, as measured on an H200: tiles follow the rows; few rows want many small programs,
    and segments of K side by side where the weight has them."""
    if rows <= 4:
        parts = segments(columns, k)
        if parts > 1:
            return GemmLaunch(8, 32 if rows <= 1 else 64, 4, parts, side_by_side=True)
        return GemmLaunch(8, 16, 6, 1) if rows <= 1 else GemmLaunch(8, 64, 4, 4 if rows > 1.5 else 2)
    if rows <= 12:
        return GemmLaunch(16, 128, 4, 4)
    if rows <= 24:
        return GemmLaunch(32, 64 if first else 128, 4, 4)
    if rows <= 96:
        return GemmLaunch(64, 64 if first else 128, 4, 4)
    return GemmLaunch(128, 64, 4, 4) if first else GemmLaunch(128, 128, 4, 8)


def _fp4_launch(rows: float, first: bool) -> GemmLaunch:
    """For ``kernels.grouped_gemm_fp4``, not measured: 128 weight rows a program, which is the tensor core's height and
    twice ``block_n`` where gate and up go together; tiles follow the rows."""
    tile = next(t for t in (16, 32, 64, 128) if rows <= t or t == 128)
    return GemmLaunch(tile, 64 if first else 128, 3, 4 if tile < 64 else 8)


@lru_cache(maxsize=8)
def _table(name: str) -> dict[str, dict[str, list[list[Any]]]]:
    """Measured launches of a device by shape and tokens, as ``tools/tune.py`` writes them; empty without a file."""
    path = Path(__file__).with_name("launches") / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
    return json.loads(path.read_text())["launches"] if name and path.is_file() else {}
