"""Inputs that the numerics tests share: ordinary rows next to every kind of row that quantizers got wrong, and byte
equality.

All values are float32; rows are 128 long, so that every format's block divides them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VECTORS = Path(__file__).parent / "vectors"
WIDTH = 128
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]


def adversarial(seed: int = 0) -> Tensor:
    """float32 [22, 128]: scales from 1e-40 to 3e38, zeros, ties, outliers, signed zeros, NaN and both Infs."""
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(WIDTH, generator=g)

    zero_blocks, outlier, huge, top, channels = (normal() for _ in range(5))
    zero_blocks[16:48] = 0
    outlier = outlier * 1e-6
    outlier[5] = 100.0
    huge[0] = -6e37
    top[7] = 3.38e38
    channels[3::16] *= 50
    poisoned = [normal() for _ in range(3)]
    for row, (at, value) in zip(poisoned, ((3, torch.nan), (40, torch.inf), (70, -torch.inf)), strict=True):
        row[at] = value
    ties = torch.tensor([*TIES, *(-t for t in TIES)]).repeat(WIDTH // 16)
    rows = [normal() * s for s in (1.0, 1e-3, 30.0, 1e4, 1e-37)]
    rows += [torch.zeros(WIDTH), zero_blocks, outlier, huge, top, channels, *poisoned]
    rows += [torch.full((WIDTH,), 1e-40), ties * 448, torch.arange(16.0).repeat(WIDTH // 16) / 4]
    rows += [torch.where(torch.arange(WIDTH) % 2 == 1, -0.0, 1e-3), normal() * torch.logspace(-30, 30, WIDTH)]
    rows += [torch.randint(-3000, 3000, (WIDTH,), generator=g) / 4, normal().bfloat16().float(), normal().exp() ** 3]
    return torch.stack(rows)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits: NaN equals itself, -0.0 does not equal 0.0. NaN payloads are not compared."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    nan = a.isnan()
    return (
        torch.equal(nan, b.isnan())
        and torch.equal(torch.where(nan, 0.0, a), torch.where(nan, 0.0, b))
        and torch.equal(a.signbit() & ~nan, b.signbit() & ~nan)
    )


def vectors(name: str) -> dict[str, np.ndarray]:
    """The golden vectors of that name (made by tools/make_vectors.py)."""
    with np.load(VECTORS / f"{name}.npz") as file:
        return dict(file)


def from_bfloat16_bits(bits: np.ndarray) -> Tensor:
    """uint16 bit patterns -> bfloat16 tensor."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def every_bfloat16() -> Tensor:
    """All 65536 bfloat16 values, NaNs included."""
    return from_bfloat16_bits(np.arange(1 << 16, dtype=np.uint32).astype(np.uint16))


def element_codes(x: Tensor, element) -> Tensor:  # type: ignore[no-untyped-def]
    """x rounded to the element with no scale at all."""
    from trace_compile.numerics import codec

    x = x.float()
    return codec.join_sign(codec.encode_magnitude(x.abs(), element), codec.sign_code(x, element), element)
