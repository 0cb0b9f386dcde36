"""Make the golden numerics vectors of tests/numerics/vectors with NumPy and ml_dtypes, independent of this package.

    python tools/make_vectors.py FOLDER [SEED]

Every rounding is a nearest-neighbour search in float64 over a table of the format's values, ties to the even
code, so each byte is the correctly rounded one. Files and arrays:
  nvfp4_pow2_row, nvfp4_pow2_tensor: x_bf16 (uint16 bits), outer, scale (E4M3 bytes), code, packed, dequant
  mxfp4: x_bf16, scale (E8M0 bytes), code, packed
  e2m1, e4m3: x, code or byte, and the table `decode`
  guided: z, q_rollout, bit, q_full, q_bit (codeword values)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FP4 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
FP8 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
FP4_SIGNED = np.concatenate((-FP4[:0:-1], FP4))
WIDTH, SCALE_FLOOR = 128, 2.0**-6


def nearest(values: Array, table: Array) -> Array:
    """Index of the entry of an ascending table next to each non-negative value, halves to the even index, clipped."""
    middle = (table[1:] + table[:-1]) / 2
    below, up_to = np.searchsorted(middle, values, side="left"), np.searchsorted(middle, values, side="right")
    return np.where(below % 2 == 0, below, up_to).astype(np.uint8)  # they differ on a tie only, and there by one


def fp4(values: Array) -> Array:
    return nearest(np.abs(values), FP4) | (np.signbit(values).astype(np.uint8) << 3)


def fp4_value(codes: Array) -> Array:
    return np.copysign(FP4[codes & 7], np.where(codes & 8, -1.0, 1.0))


def pack(codes: Array) -> Array:
    return codes[..., ::2] | codes[..., 1::2] << 4


def outer_scales(amax: Array) -> Array:
    """The smallest power of two in [2^-100, 2^116] whose 2688-fold is not below amax; 1 for 0."""
    powers = 2.0 ** np.arange(-100, 117)
    index = np.minimum(np.searchsorted(powers * FP4[-1] * FP8[-1], amax, side="left"), len(powers) - 1)
    return np.where(amax == 0, 1.0, powers[index])


def nvfp4(x: Array, by_row: bool) -> dict[str, Array]:
    wide = x.astype(np.float64)
    g = outer_scales(np.abs(wide).max(axis=1) if by_row else np.abs(wide).max().reshape(1))
    blocks = (wide / g[:, None]).reshape(len(x), -1, 16)
    scale = nearest(np.maximum(np.abs(blocks).max(axis=-1) / FP4[-1], SCALE_FLOOR), FP8)
    codes = fp4(blocks / FP8[scale][..., None]).reshape(x.shape)
    values = fp4_value(codes) * FP8[scale].repeat(16, axis=-1) * g[:, None]
    exact = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert np.array_equal(exact, values), "a power-of-two outer scale keeps the values exact in bfloat16"
    return {
        "x_bf16": x.view(np.uint16),
        "code": codes,
        "packed": pack(codes),
        "scale": scale,
        "outer": g.astype(np.float32),
        "dequant": values.astype(np.float32),
    }


def mxfp4(x: Array) -> dict[str, Array]:
    blocks = x.astype(np.float64).reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(axis=-1)
    exponent = np.where(amax == 0, -127, np.maximum(np.frexp(amax)[1] - 1 - 2, -127))
    codes = fp4(np.ldexp(blocks, -exponent[..., None])).reshape(x.shape)
    return {
        "x_bf16": x.view(np.uint16),
        "code": codes,
        "packed": pack(codes),
        "scale": (exponent + 127).astype(np.uint8),
    }


def guided(z: Array, q_rollout: Array) -> dict[str, Array]:
    at = np.clip(np.searchsorted(FP4_SIGNED, np.clip(z, -6, 6), side="right") - 1, 0, len(FP4_SIGNED) - 2)
    low, high = FP4_SIGNED[at], FP4_SIGNED[at + 1]

    def mantissa_bit(q: Array) -> Array:
        return np.searchsorted(FP4, np.abs(q)) % 2

    bit = mantissa_bit(q_rollout)
    return {
        "z": z.astype(np.float32),
        "q_rollout": q_rollout,
        "bit": bit.astype(np.uint8),
        "q_full": np.where(np.abs(low - q_rollout) <= np.abs(high - q_rollout), low, high),
        "q_bit": np.where(mantissa_bit(low) == bit, low, high),
    }


def rows(rng: np.random.Generator) -> Array:
    """bfloat16 [18, 128]: ordinary scales, heavy tails, zeros, outliers, subnormals, the top of the range, ties."""
    ordinary = [rng.standard_normal(WIDTH) * s for s in (1, 1e-3, 30, 1e4)]
    heavy = [rng.standard_t(3, WIDTH) * 0.02 for _ in range(4)]
    holes, outlier, large, largest, channels = (rng.standard_normal(WIDTH) for _ in range(5))
    holes[16:48] = 0
    outlier *= 1e-6
    outlier[5] = 100
    large[0], largest[7] = -6e37, 3.38e38
    channels[3::16] *= 50
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6])
    patterns = [
        np.tile(np.concatenate((ties, -ties)), WIDTH // 16) * FP8[-1],
        np.tile(np.arange(16) / 4, WIDTH // 16),
        np.where(np.arange(WIDTH) % 2, -0.0, 1e-3),
    ]
    zero, subnormal = np.zeros(WIDTH), np.full(WIDTH, 1e-40)
    table = [*ordinary, *heavy, zero, holes, outlier, subnormal, large, largest, *patterns, channels]
    return np.stack(table).astype(np.float32).astype(ml_dtypes.bfloat16)


def beside(points: Array) -> Array:
    """float32: the points and their neighbours on both sides."""
    points = points.astype(np.float32)
    return np.unique(
        np.concatenate([points, np.nextafter(points, np.float32(-1e9)), np.nextafter(points, np.float32(1e9))])
    )


def save(path: Path, arrays: dict[str, Array]) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]


def main(folder: Path, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    x = rows(rng)
    save(folder / "nvfp4_pow2_row.npz", nvfp4(x, by_row=True))
    save(folder / "nvfp4_pow2_tensor.npz", nvfp4(x[[0, 4, 5, 6, 7, 8, 9, 14, 15, 16]], by_row=False))
    save(folder / "mxfp4.npz", mxfp4(x[:11]))
    middle = (FP4_SIGNED[1:] + FP4_SIGNED[:-1]) / 2
    grid = np.unique(np.concatenate((np.linspace(-7, 7, 2241, dtype=np.float32), beside(FP4_SIGNED), beside(middle))))
    np.savez(folder / "e2m1.npz", x=grid, code=fp4(grid), decode=fp4_value(np.arange(16, dtype=np.uint8)))
    ends = np.array([448, 449, 464, 465, 480, 1e5, 1e-9])
    points = np.concatenate((beside(FP8[1:]), beside((FP8[1:] + FP8[:-1]) / 2), rng.uniform(0, 500, 500), ends))
    points = np.unique(points.astype(np.float32))
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.savez(folder / "e4m3.npz", x=points, byte=nearest(points.astype(np.float64), FP8), decode=every)
    z = np.concatenate((rng.uniform(-7, 7, 4000), FP4_SIGNED, middle, [0.0, -0.0])).astype(np.float32)
    near = fp4_value(fp4(np.clip(z + rng.normal(0, 0.1, z.size), -6, 6)))
    q_rollout = np.where(rng.random(z.size) < 0.8, near, rng.choice(FP4_SIGNED, z.size))
    save(folder / "guided.npz", guided(z.astype(np.float64), q_rollout))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
