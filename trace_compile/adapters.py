"""PEFT's adapters on stacked expert parameters, in a form that a compiler can capture.

``target_parameters=["mlp.experts.gate_up_proj", ...]`` wraps the experts in a module whose forward registers a
parametrization, runs, and removes it: no graph can hold that. While a compiled model runs, such a wrapper calls the
experts with the sum of weight and adapters instead: the same function, whose weights the passes find as computed ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def capturable_adapters() -> Iterator[None]:
    """Inside, PEFT's wrappers of parameters run as described above. Nothing happens where PEFT was not imported."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    wrapper: Any = getattr(layers, "ParamWrapper", None)
    if wrapper is None or wrapper.forward is _forward:
        yield
        return
    before, wrapper.forward = wrapper.forward, _forward
    try:
        yield
    finally:
        wrapper.forward = before


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    inner, path = self.base_layer, self.parameter_name
    if self.disable_adapters or self.merged:
        return inner(x, *args, **kwargs)
    weight = getattr(self.get_base_layer(), self.parameter_name)
    for adapter in self.active_adapters:
        if adapter in self.lora_A:
            weight = weight + self.get_delta_weight(adapter)
    module: nn.Module = inner
    while isinstance(module, type(self)):  # one wrapper for each parameter
        module, path = module.base_layer, f"base_layer.{path}"
    return torch.func.functional_call(inner, {path: weight}, (x, *args), kwargs)
