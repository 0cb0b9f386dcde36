"""Residual compensation: the quantization error of an operand, quantized in turn and sent through the same GEMM.

    Y = q(X) Wq^T + gain * S(q(X - q(X))) Wq^T

QUADS (arXiv 2607.15810) gathers the channels of the largest residual energy and quantizes them on their own, so that
the GEMM only gets a longer K: ``[q(X) | q(R[:, S])] . [Wq | Wq[:, S]]^T``. Rollout-ResQ (2607.26515) quantizes the
whole residual and then keeps channels, two of every four, or blocks of it. MXFP4's residual fallback (2605.20402) adds
half of all of it. Here each is that augmented GEMM.

The residual shares its row's outer scale, so products stay exact and one scaling follows the sum; E4M3 block scales
have the room. Rows that go to no expert, and rows with NaN or Inf, have no say in what is kept. Energies are sums of
float64 squares; among equals the lower index is kept. What is kept depends on all rows of a call: batch-invariant only
for ``dense`` and ``2of4``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..numerics import FORMATS, decode_blocks, quantize_blocks
from .rows import Rows
from .scheme import OperandScheme, Residual

BLOCK_ROWS, BLOCK_CHANNELS = 32, 64
_GROUP, _KEPT = 4, 2


@dataclass(frozen=True)
class Extra:
    """More columns of a GEMM's rows: ``values f32 [M, K']`` without outer scales, to be multiplied with the weights'
    columns ``channels i64 [K']`` (None: all K, in order)."""

    values: Tensor
    channels: Tensor | None

    def beside(self, values: Tensor) -> Tensor:
        """``[M, K + K']`` in the dtype of ``values [M, K]``; exact in bfloat16 where the format is."""
        return torch.cat([values, self.values.to(values.dtype)], -1)

    def onto(self, values: Tensor) -> Tensor:
        """``values f32 [M, K]`` plus these columns at their places: what the rows stand for, without outer scales."""
        if self.channels is None:
            return values + self.values
        return values.index_add(-1, self.channels, self.values)


def residual_of(x: Tensor, rows: Rows, scheme: OperandScheme, routed: Tensor) -> Extra | None:
    """What ``scheme`` keeps of ``x - rows``. ``x [M, K]``; ``routed bool [M]``. None where it keeps nothing."""
    kept = scheme.residual
    if kept is None:
        return None
    x = x.float()
    error = x - rows.dequantize(torch.float32)
    counted = (routed & x.isfinite().all(-1)).unsqueeze(-1)
    channels = None
    if kept.select == "gathered":
        block = FORMATS[scheme.fmt].block
        count = max(1, round(kept.keep * x.shape[-1] / block)) * block
        channels = _largest(_energy(error, counted).sum(0), count).sort().values
        error = error[:, channels]
    codes, scales = quantize_blocks(error, rows.outer, scheme.fmt, scheme.profile)
    values = decode_blocks(codes, scales, scheme.fmt)
    keep = _mask(values, rows.outer, counted, kept)
    if keep is not None:
        values = torch.where(keep, values, 0.0)
    return Extra(values * kept.gain, channels)


def operand(
    quantized: Rows | None, plain: Tensor | None, dtype: torch.dtype, extra: Extra | None = None
) -> tuple[Tensor, Tensor | None]:
    """What a GEMM multiplies, ``[M, K]`` or ``[M, K + K']``, and the outer scales ``f32 [M]`` for after it; ``plain``
    if not quantized."""
    if quantized is not None:
        values = quantized.values(dtype)
        return values if extra is None else extra.beside(values), quantized.outer
    assert plain is not None
    return plain, None


def dequantized(rows: Rows, extra: Extra | None, dtype: torch.dtype) -> Tensor:
    """``[M, K]``: what the GEMM multiplied, as one tensor. Rounded once where there is a residual."""
    if extra is None:
        return rows.dequantize(dtype)
    return (extra.onto(rows.values(torch.float32)) * rows.outer.unsqueeze(-1)).to(dtype)


def _mask(values: Tensor, outer: Tensor, counted: Tensor, kept: Residual) -> Tensor | None:
    """bool, broadcastable to ``values``: what is kept of the quantized residual; None for everything."""
    if kept.select == "2of4":
        groups = values.abs().nan_to_num(0.0).unflatten(-1, (values.shape[-1] // _GROUP, _GROUP))
        order = torch.sort(groups, dim=-1, descending=True, stable=True).indices[..., :_KEPT]
        return torch.zeros_like(groups, dtype=torch.bool).scatter(-1, order, True).flatten(-2)
    if kept.select not in ("channels", "blocks"):
        return None
    energy = _energy(values * outer.unsqueeze(-1), counted)
    if kept.select == "channels":
        channels = energy.sum(0)
        return _chosen(channels, max(1, round(kept.keep * channels.shape[0])))
    (rows, k), size = energy.shape, (BLOCK_ROWS, BLOCK_CHANNELS)
    tall, wide = -(-rows // size[0]), -(-k // size[1])
    padded = F.pad(energy, (0, wide * size[1] - k, 0, tall * size[0] - rows))
    blocks = padded.view(tall, size[0], wide, size[1]).sum((1, 3))
    chosen = _chosen(blocks.flatten(), round(kept.keep * blocks.numel())).view(tall, wide)
    return chosen.repeat_interleave(size[0], 0)[:rows].repeat_interleave(size[1], 1)[:, :k]


def _energy(values: Tensor, counted: Tensor) -> Tensor:
    """float64 squares of the counted rows, 0 elsewhere."""
    return torch.where(counted, values, 0.0).double().square()


def _largest(energy: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest of ``energy [n]``; among equals the lower index."""
    return torch.sort(energy, descending=True, stable=True).indices[:count]


def _chosen(energy: Tensor, count: int) -> Tensor:
    return torch.zeros_like(energy, dtype=torch.bool).index_fill(0, _largest(energy, count), True)
