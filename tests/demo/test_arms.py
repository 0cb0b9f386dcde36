"""What an arm adds to the library: a fresh start at given weights, and an optimizer that loses no small steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trace_compile.demo import sft
from trace_compile.demo.arms import Arm
from trace_compile.demo.optimizer import MasterAdamW
from trace_compile.demo.presets import PRESETS


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


@pytest.mark.slow
def test_a_restart_brings_the_scales_of_its_weights() -> None:
    """Traced scales of other weights would saturate: the arm is built around a model with a quarter of the norms."""
    preset = PRESETS["micro"]
    weights = {name: tensor.clone() for name, tensor in sft.build_model(preset, 0).state_dict().items()}
    larger = {name: tensor * 4 if "norm" in name else tensor for name, tensor in weights.items()}
    arm = Arm("trace", sft.build_model(preset, 0), preset)
    for start in (weights, larger):
        arm.restart(start)
        ranges = arm.generate(preset.task.problems("rl", 0, 0, 8), 0).trace.ranges  # type: ignore[union-attr]
        assert ranges.sites and all(int(site.saturated) == 0 for site in ranges.sites.values())
