"""The number formats and residual rules once more, row by row in NumPy, from their written formulas alone.

Nothing here comes from ``trace_compile``. Every quantizer takes float32 rows ``[M, K]`` and gives the float64 values
they stand for; NVFP4 ones also take the float32 outer scale of each row. Slow and plain on purpose: loops over rows
and blocks, distances to tables of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

F32 = np.float32
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
Rows = np.ndarray
Quantize = Callable[[Rows, Rows], Rows]


def nearest(values: Rows | float, table: list[float]) -> Rows:
    """The entries nearest to values >= 0, a tie to the even index, beyond the end the last."""
    entries = np.array(table)
    distances = np.abs(np.asarray(values, dtype=float)[..., None] - entries)
    ties = distances == distances.min(-1, keepdims=True)
    even = ties & (np.arange(len(table)) % 2 == 0)
    return entries[np.where(even.any(-1), even.argmax(-1), ties.argmax(-1))]


def blocks_of(size: int, one: Callable[[Rows, float], Rows]) -> Quantize:
    """Applies ``one(block float32 [size], outer) -> float64 [size]`` to every block of every row."""

    def quantize(x: Rows, outer: Rows) -> Rows:
        out = np.zeros(x.shape)
        for i, row in enumerate(x):
            for j in range(0, len(row), size):
                out[i, j : j + size] = one(row[j : j + size], float(outer[i]))
        return out

    return quantize


def _e2m1(block: Rows, unit: float) -> Rows:
    return np.copysign(nearest((np.abs(block) / F32(unit)).astype(F32), E2M1), block) * unit


def _nvfp4_pow2(block: Rows, g: float) -> Rows:
    scale = float(nearest(max(float(np.abs(block).max()) / g / 6, 2.0**-6), E4M3))
    return _e2m1(block, scale * g)


def _four_over_six(error: Callable[[Rows], float], floor: float) -> Callable[[Rows, float], Rows]:
    def one(block: Rows, g: float) -> Rows:
        found = []
        for top in (6, 4):
            scale = float(nearest(max(float(F32(np.abs(block).max()) / F32(F32(top) * F32(g))), floor), E4M3))
            # A scale that rounds to zero stands for zeros.
            values = _e2m1(block, float(F32(scale) * F32(g))) if scale else block * 0.0
            found.append((error(block.astype(float) - values), values))
        return found[1][1] if found[1][0] < found[0][0] else found[0][1]

    return one


def _mxfp4(block: Rows, g: float = 1.0) -> Rows:
    largest = float(np.abs(block).max())
    scale = 2.0 ** max(math.floor(math.log2(largest)) - 2, -127) if largest else 2.0**-127
    return _e2m1(block, scale)


def _macro(block: Rows, g: float) -> Rows:
    target = float(F32(np.abs(block).max()) / F32(6))
    fraction = target / 2.0 ** math.floor(math.log2(target)) - 1 if target else 0.0
    factor = 1 + round(fraction * 256) % 256 / 256
    reduced = (block / F32(factor)).astype(F32)
    return np.concatenate([_mxfp4(reduced[i : i + 32]) for i in range(0, 128, 32)]) * factor


def _to_bits(value: float, digits: int) -> float:
    """value > 0 rounded to ``digits`` significant bits, ties to even."""
    step = 2.0 ** (math.floor(math.log2(value)) - digits + 1)
    return round(value / step) * step


def _hif4(block: Rows, g: float) -> Rows:
    x = np.abs(block).astype(float)
    scale = _to_bits(float(x.max()) * _to_bits(1 / 7, 8), 8) if x.max() else 0.0
    e6m2 = _to_bits(min(max(scale, 2.0**-48), 49152.0), 3)
    rec, out = _to_bits(1 / e6m2, 8), np.zeros(64)
    for i in range(64):
        wide, narrow = x[i // 8 * 8 : i // 8 * 8 + 8].max(), x[i // 4 * 4 : i // 4 * 4 + 4].max()
        exponent = int(wide * rec >= 4)
        exponent += int(narrow * rec / 2**exponent >= 2)
        m = min(math.floor(x[i] * rec / 2**exponent * 4 + 0.5) / 4, 1.75)
        out[i] = math.copysign(e6m2 * 2**exponent * m, block[i])
    return out


def _int4(block: Rows, g: float) -> Rows:
    scale = max(F32(np.abs(block).max()) / F32(7), F32(1e-5))
    return np.array([round(float(v) / float(scale)) for v in block]).clip(-7, 7) * float(scale)


def _squares(error: Rows) -> float:
    return float((error * error).sum())


def _magnitudes(error: Rows) -> float:
    return float(np.abs(error).sum())


QUANTIZERS: dict[tuple[str, str], Quantize] = {
    ("nvfp4", "pow2"): blocks_of(16, _nvfp4_pow2),
    ("nvfp4", "four_over_six"): blocks_of(16, _four_over_six(_squares, 0.0)),
    ("nvfp4", "four_over_six_mae"): blocks_of(16, _four_over_six(_magnitudes, 0.0)),
    ("nvfp4", "pow2_four_over_six"): blocks_of(16, _four_over_six(_squares, 2.0**-6)),
    ("mxfp4", "pow2"): blocks_of(32, _mxfp4),
    ("mxfp4_macro", "pow2"): blocks_of(128, _macro),
    ("hif4", "pow2"): blocks_of(64, _hif4),
    ("int4_g32", "pow2"): blocks_of(32, _int4),
    ("int4_g128", "pow2"): blocks_of(128, _int4),
}
BLOCKS = {"nvfp4": 16, "mxfp4": 32, "mxfp4_macro": 128, "hif4": 64, "int4_g32": 32, "int4_g128": 128}


def outer_of(largest: float, fmt: str, profile: str) -> float:
    """Outer scale of a maximum: 1 for formats without one."""
    if fmt != "nvfp4" or largest == 0:
        return 1.0
    bound = 6 * (256 if "four_over_six" in profile else 448)
    if profile.startswith("pow2"):
        return 2.0 ** math.ceil(math.log2(largest / bound))
    return float(F32(largest / bound))


def quantize_rows(x: Rows, fmt: str, profile: str, outer: Rows | None = None) -> tuple[Rows, Rows]:
    """Values and outer scales, each row's own unless given."""
    if outer is None:
        outer = np.array([outer_of(float(np.abs(row).max()), fmt, profile) for row in x])
    return QUANTIZERS[fmt, profile](x, outer), outer


def quantize_experts(w: Rows, fmt: str, profile: str) -> Rows:
    """[E, N, K]: one outer scale per expert."""
    found = []
    for expert in w:
        outer = np.full(len(expert), outer_of(float(np.abs(expert).max()), fmt, profile))
        found.append(quantize_rows(expert, fmt, profile, outer)[0])
    return np.stack(found)


def compensated(
    x: Rows, fmt: str, profile: str, select: str, keep: float, gain: float, counted: Rows, outer: Rows | None = None
) -> Rows:
    """``q(x)`` plus ``gain`` times what ``select`` keeps of the residual; rows not ``counted`` have no say."""
    values, outer = quantize_rows(x, fmt, profile, outer)
    rest = (x - values).astype(F32)
    (rows, k), quantize = x.shape, QUANTIZERS[fmt, profile]
    if select == "gathered":
        count = max(1, round(keep * k / BLOCKS[fmt])) * BLOCKS[fmt]
        energy = [sum(float(rest[i, j]) ** 2 for i in range(rows) if counted[i]) for j in range(k)]
        channels = sorted(sorted(range(k), key=lambda j: -energy[j])[:count])
        more = np.zeros(x.shape)
        more[:, channels] = quantize(rest[:, channels], outer)
        return values + gain * more
    more = quantize(rest, outer)
    seen = np.where(counted[:, None], more, 0.0)
    if select == "channels":
        energy = [sum(v * v for v in seen[:, j]) for j in range(k)]
        kept = set(sorted(range(k), key=lambda j: -energy[j])[: max(1, round(keep * k))])
        more = more * np.array([j in kept for j in range(k)])
    if select == "2of4":
        for i in range(rows):
            for j in range(0, k, 4):
                ranked = sorted(range(4), key=lambda c: -abs(more[i, j + c]))
                more[i, [j + c for c in ranked[2:]]] = 0.0
    if select == "blocks":
        corners = [(i, j) for i in range(0, rows, 32) for j in range(0, k, 64)]
        energy = [float((seen[i : i + 32, j : j + 64] ** 2).sum()) for i, j in corners]
        for at in sorted(range(len(corners)), key=lambda c: -energy[c])[round(keep * len(corners)) :]:
            i, j = corners[at]
            more[i : i + 32, j : j + 64] = 0.0
    return values + gain * more
