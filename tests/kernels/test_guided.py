"""Guided rounding against ``ops.rows.guide_rows``, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trace_compile.kernels.guided import guide_rows
from trace_compile.kernels.quantize import quantize_rows
from trace_compile.ops import OperandScheme
from trace_compile.ops import rows as reference
from trace_compile.ops.rows import Guide, guide_bytes, record_rows

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")]
ACT = OperandScheme()


def rollout_and_trainer(dtype: torch.dtype, k: int) -> tuple[Tensor, Tensor]:
    """What a rollout saw and what a trainer sees: close, far, on codewords, zero, NaN, Inf, of other magnitudes."""
    g = torch.Generator().manual_seed(k)
    x = torch.randn(12, k, generator=g)
    y = x * (1 + 0.05 * torch.randn(12, k, generator=g))
    y[1], x[2], y[3] = -x[1], 0, 0
    x[4] = (x[4] * 4).round() / 4
    y[4] = x[4]
    y[5], x[6, 3], y[7, 5], y[8, 1] = y[5] * 100, torch.nan, torch.nan, torch.inf
    y[9], y[10] = -torch.zeros(k), y[10] * 1e-8
    return x.to(dtype), y.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["bit", "code"])
@pytest.mark.parametrize("k", [16, 80])
def test_guided_rows(k: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    x, y = rollout_and_trainer(dtype, k)
    every = torch.ones(len(x), dtype=torch.bool)
    seen = reference.quantize_rows(x, ACT, None, every)
    record = record_rows(seen, kind, ACT)[:, : guide_bytes(k, kind, ACT.fmt)]
    hit = torch.arange(len(x)) != 11
    guide = Guide.read(record, seen.outer, hit, kind, k, ACT.fmt)
    want = reference.guide_rows(y, reference.quantize_rows(y, ACT, None, every), guide)
    got = quantize_rows(y.to(device))
    told, scales, outer, hits = (t.to(device) for t in (guide.payload, guide.scales, guide.outer, guide.hit))
    guide_rows(y.to(device), got, Guide(told, scales, outer, hits, kind, None))
    assert torch.equal(got.outer.cpu(), want.outer)
    assert torch.equal(got.scales.cpu(), want.scales)
    assert torch.equal(got.packed.cpu(), want.packed)
    assert not torch.equal(got.packed[:1], quantize_rows(y[:1].to(device)).packed), "guidance must change something"
