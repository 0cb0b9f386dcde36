"""The drift table of TRACE's setting: what each way of rounding leaves of the train-rollout difference D.

Gaussian activations, one power-of-two outer scale per token, D = ||Q_train(Y) - Q_rollout(X)|| / ||Q_rollout(X)|| with
Y = X + drift * noise. Bounds are the published simulation's values plus or minus what another random draw moves them.
"""

from __future__ import annotations

import pytest
import torch

from tests.numerics.cases import element_codes
from trace_compile.numerics import decode_blocks, guided_blocks, quantize
from trace_compile.numerics.formats import E2M1

#        drift: own RNE, rollout scale + RNE, full, 1 bit, trainer unquantized
TABLE = {
    0.004: (0.0345, 0.0263, 0.0000, 0.0000, 0.0954),
    0.016: (0.0710, 0.0587, 0.0002, 0.0003, 0.0964),
    0.04: (0.1060, 0.0932, 0.0069, 0.0146, 0.1032),
    0.08: (0.1423, 0.1324, 0.0331, 0.0700, 0.1241),
    0.16: (0.2060, 0.1995, 0.0942, 0.1787, 0.1859),
}


@pytest.mark.parametrize("drift", TABLE)
def test_drift_table(drift: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 1024, generator=generator)
    y = x + drift * torch.randn(x.shape, generator=generator)
    q = quantize(x)
    target = q.dequantize()
    column = q.outer.unsqueeze(-1)

    def d(values: torch.Tensor) -> float:
        return ((values - target).norm() / target.norm()).item()

    own = quantize(y).dequantize()
    scale = decode_blocks(torch.full_like(q.codes, 2), q.scales) * column  # code 2 is 1.0
    rolled = decode_blocks(element_codes(y / scale, E2M1), q.scales) * column
    full = decode_blocks(guided_blocks(y, q.scales, q.outer, codes=q.codes), q.scales) * column
    bit = decode_blocks(guided_blocks(y, q.scales, q.outer, bits=q.codes & 1), q.scales) * column
    measured = (d(own), d(rolled), d(full), d(bit), d(y))
    for got, expected in zip(measured, TABLE[drift], strict=True):
        assert got == pytest.approx(expected, rel=0.13, abs=4e-4), (measured, TABLE[drift])
    assert measured[2] <= measured[3] <= measured[1] <= measured[0]
