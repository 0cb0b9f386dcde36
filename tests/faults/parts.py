"""What the tests of faults share: batches, routers that are forced, gradients, and an independent checkpoint reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.tiny import prompts

EXPERTS = "model.layers.0.mlp.experts"


def generate(rollout: Any, new: int = 3, **options: Any) -> Tensor:
    """Sampled token ids [4, 6 + new] after the tiny prompts, always the same ones for the same weights."""
    torch.manual_seed(0)
    return rollout.generate(**prompts(), max_new_tokens=new, do_sample=True, **options)


def batch(seed: int = 1, rows: int = 4, length: int = 6) -> dict[str, Any]:
    """A padded batch with labels, no cache."""
    found = prompts(rows, length, seed)
    return {**found, "labels": found["input_ids"], "use_cache": False}


def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """The loss and every gradient by name."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == {name for name, _ in model.named_parameters()}
    return {"loss": loss.detach(), **found}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    """Relative to the norm of each tensor; what is zero must be exactly zero."""
    assert found.keys() == expected.keys()
    far = {n: float((found[n] - expected[n]).norm()) for n in found}
    assert {n: d for n, d in far.items() if d > tolerance * float(expected[n].norm())} == {}


@torch.no_grad()
def route(model: Any, first: int, second: int) -> None:
    """Send every token of a tiny Qwen3-MoE to two experts: one channel of the router's input is positive for all."""
    model.model.embed_tokens.weight[:, 0] = 20.0
    for layer in model.model.layers:
        layer.mlp.gate.weight.zero_()
        layer.mlp.gate.weight[first, 0], layer.mlp.gate.weight[second, 0] = 2.0, 1.0


def read_experts(folder: Path, projection: str, experts: int = 8, layer: int = 0) -> dict[str, np.ndarray]:
    """An independent reader of both packed formats: codes, block scales and outer scales of one projection.

    codes as values float32 [E, N, K], scales float32 [E, N, K/16], outer float32 [E] (multiplied, not divided by).
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    codes, scales, outer = [], [], []
    for expert in range(experts):
        name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
        compressed = f"{name}.weight_packed" in tensors
        packed = tensors[f"{name}.weight_packed" if compressed else f"{name}.weight"].numpy()
        nibbles = np.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)
        codes.append(nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
        raw = tensors[f"{name}.weight_scale"].view(torch.uint8).numpy()
        scales.append(raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
        if compressed:
            outer.append(1 / tensors[f"{name}.weight_global_scale"].numpy().reshape(()))
        else:
            outer.append(tensors[f"{name}.weight_scale_2"].numpy().reshape(()))
    return {"codes": np.stack(codes), "scales": np.stack(scales), "outer": np.stack(outer)}


def dequantized(read: dict[str, np.ndarray]) -> Tensor:
    """float32 [E, N, K] weights of what ``read_experts`` found."""
    values = read["codes"] * np.repeat(read["scales"], 16, -1) * read["outer"][:, None, None]
    return torch.from_numpy(values)
