"""What an arm adds to the library: an optimizer that does not lose small steps of bfloat16 parameters."""

from __future__ import annotations

import torch
from torch import nn

from trace_compile.demo.arms import MasterAdamW


def _run(dtype: torch.dtype, steps: int, rate: float) -> torch.Tensor:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.full((8,), 0.02).bfloat16().to(dtype))
    optimizer = MasterAdamW([parameter], rate)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter) * 1e-3
        optimizer.step()
        assert parameter.grad is None
    return parameter.detach()


def test_bfloat16_parameters_follow_float32_masters() -> None:
    """0.02 - 1e-6 is 0.02 in bfloat16, but a hundred such steps are not lost."""
    exact = _run(torch.float32, 100, 1e-6)
    assert torch.equal(_run(torch.bfloat16, 100, 1e-6), exact.bfloat16())
    assert torch.equal(_run(torch.bfloat16, 1, 1e-6), torch.full((8,), 0.02).bfloat16())
    assert bool((exact.bfloat16() < torch.tensor(0.02).bfloat16()).all())


def test_float32_parameters_are_their_own_masters_and_norms_are_clipped() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = MasterAdamW([parameter], 0.1)
    parameter.grad = torch.full((4,), 50.0)
    gradient = parameter.grad
    optimizer.step()
    assert torch.linalg.vector_norm(gradient) <= 1.0 + 1e-6
    torch.testing.assert_close(parameter.detach(), torch.full((4,), -0.1))
