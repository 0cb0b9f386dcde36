"""Versions name states of the weights, however often and by whom they are looked at."""

from __future__ import annotations

import pytest
import torch

from trace_compile.errors import RefitError
from trace_compile.state.packed import WeightsVersion


def test_a_version_is_a_state_of_the_weights():
    weights = {"a": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.ones(2))}
    versions = WeightsVersion()
    assert [versions.observe(weights) for _ in range(3)] == [1, 1, 1]
    with torch.no_grad():
        weights["b"].mul_(2)
        weights["b"].mul_(2)
    assert versions.observe(weights) == versions.observe(weights) == 2
    optimizer = torch.optim.SGD([weights["a"]], lr=0.1)
    weights["a"].grad = torch.ones(3)
    optimizer.step()
    assert versions.observe(weights) == 3
    weights["a"].data = torch.zeros(3)
    assert versions.observe(weights) == 4
    weights["a"].data.add_(1)  # a hidden write
    assert versions.observe(weights) == 4
    versions.refresh()
    assert versions.observe(weights) == 5
    assert versions.observe(weights, 40) == 40 and versions.observe(weights) == 40
    with pytest.raises(RefitError, match="39 is older than the last one, 40"):
        versions.observe(weights, 39)
    with torch.no_grad():
        weights["a"].add_(1)
    assert versions.observe(weights) == 41


def test_a_step_of_another_models_optimizer_is_no_change():
    ours, theirs = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    versions = WeightsVersion()
    assert versions.observe({"w": ours}) == 1
    theirs.grad = torch.ones(3)
    torch.optim.SGD([theirs], lr=0.1).step()
    assert versions.observe({"w": ours}) == 1
