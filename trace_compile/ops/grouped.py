"""Grouped GEMMs over rows sorted by expert: forward, gradient of the rows, gradient of the weights, bias gradient.

One call for all experts. ``torch._grouped_mm`` leaves rows behind the last group uninitialised and, on some devices,
the weight gradient of empty groups too; both are exact zeros here, always, so no garbage can reach a sum (0 * NaN is
NaN). bfloat16 on CUDA runs without a host sync; other dtypes there take torch's own fallback, which reads the offsets
on the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .routing import Routing

_ALIGNMENT = 16  # bytes; what the CUDA kernel asks of every stride


def grouped_mm(rows: Tensor, weight: Tensor, routing: Routing) -> Tensor:
    """``out[s] = weight[expert of s] @ rows[s]``: ``rows [S, K]``, ``weight [E, N, K]`` of one dtype -> ``[S, N]``."""
    if rows.shape[0] == 0:
        return rows.new_zeros(0, weight.shape[1])
    n, step = weight.shape[1], _row_step(rows)
    rows, weight = _padded(rows.contiguous(), 1, step), _dense(_padded(_padded(weight, 2, step), 1, step), step)
    out = torch._grouped_mm(rows, weight.transpose(-2, -1), offs=routing.offsets)
    return out[:, :n].masked_fill(routing.dropped, 0)


def grouped_wgrad(grad: Tensor, rows: Tensor, routing: Routing) -> Tensor:
    """``out[e] = sum over rows s of expert e of grad[s] rows[s]^T``: ``[S, N]``, ``[S, K]`` -> ``[E, N, K]``.

    Experts without rows get exact zeros.
    """
    experts, n, k = routing.offsets.shape[0], grad.shape[1], rows.shape[1]
    if rows.shape[0] == 0:
        return grad.new_zeros(experts, n, k)
    step = _row_step(rows)
    grad, rows = _padded(grad.contiguous(), 1, step), _padded(rows.contiguous(), 1, step)
    out = torch._grouped_mm(grad.t(), rows, offs=routing.offsets)[:, :n, :k]
    if out.device.type == "cpu":
        return out
    return out.masked_fill_((routing.counts == 0).view(-1, 1, 1), 0)


def grouped_sum(rows: Tensor, routing: Routing) -> Tensor:
    """``out[e] = sum of the rows of expert e``, added row after row in float32: ``[S, N] -> [E, N]``."""
    experts = routing.offsets.shape[0]
    if rows.numel() == 0:
        return rows.new_zeros(experts, rows.shape[1])
    total = torch.segment_reduce(rows.float().contiguous(), "sum", offsets=routing.bounds, axis=0, unsafe=True)
    return total.to(rows.dtype)


def _row_step(rows: Tensor) -> int:
    """Elements that every GEMM extent has to be a multiple of on this device."""
    return 1 if rows.device.type == "cpu" else _ALIGNMENT // rows.element_size()


def _dense(weight: Tensor, step: int) -> Tensor:
    """``weight [E, N, K]`` itself if N or K is its unit stride and the others suit the kernel, else a copy."""
    _, n, k = weight.shape
    outer, rows, columns = weight.stride()
    matrix = (columns == 1 and rows >= k and rows % step == 0) or (rows == 1 and columns >= n and columns % step == 0)
    aligned = step == 1 or (outer % step == 0 and weight.data_ptr() % _ALIGNMENT == 0)
    return weight if matrix and aligned and outer >= n * k else weight.contiguous()


def _padded(x: Tensor, dim: int, step: int) -> Tensor:
    """``x`` with ``dim`` filled up with zeros to a multiple of ``step``, which changes no sum."""
    missing = -x.shape[dim] % step
    return x if missing == 0 else F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))
