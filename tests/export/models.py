"""Tiny models and their packed experts, as the API hands them to the exporter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from trace_compile.export import ExpertTensor, ExpertWeights
from trace_compile.ops.scheme import W4A4_TRACED, MoEScheme
from trace_compile.ops.weights import WeightLayout, pack_experts

HIDDEN, WIDTH, EXPERTS, LAYERS, VOCABULARY = 64, 32, 8, 2, 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FAMILIES = {
    "Qwen3MoeForCausalLM": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": 48,
        "head_dim": 32,
    },
    "MixtralForCausalLM": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH},
    "OlmoeForCausalLM": {"num_experts": EXPERTS, "intermediate_size": WIDTH},
    "GptOssForCausalLM": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH, "head_dim": 32},
}


def build(family: str = "Qwen3MoeForCausalLM", seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    """A random float32 model in eval mode."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, family)
    model = model_class(model_class.config_class(**{**_SIZES, **_FAMILIES[family], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # the default initialisation is too flat to tell a wrong scale from a right one
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


def pack_model(
    model: nn.Module, scheme: MoEScheme = W4A4_TRACED, inputs: tuple[float, float] | None = (2.0**-7, 2.0**-9)
) -> list[ExpertWeights]:
    """Packed experts of every module that holds a ``gate_up_proj`` and a ``down_proj``."""
    assert scheme.weight is not None
    found = []
    for region, module in model.named_modules():
        if not isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            continue
        layout = WeightLayout(transposed=bool(getattr(module, "transposed", "GptOss" in type(module).__name__)))
        layouts = (WeightLayout(layout.transposed, interleaved=layout.transposed), layout)
        tensors = [
            ExpertTensor(
                name=f"{region}.{leaf}",
                layout=leaf_layout,
                packed=pack_experts(getattr(module, leaf), leaf_layout, scheme.weight),
                input_outer=outer,
            )
            for leaf, leaf_layout, outer in zip(("gate_up_proj", "down_proj"), layouts, inputs or (None, None))
        ]
        found.append(ExpertWeights(region, scheme, tensors[0], tensors[1]))
    return found


@torch.no_grad()
def dequantized(model: transformers.PreTrainedModel, experts: Sequence[ExpertWeights]) -> transformers.PreTrainedModel:
    """The same model object with its expert weights replaced by what the packed ones stand for."""
    for item in experts:
        for tensor in item.tensors().values():
            model.get_parameter(tensor.name).copy_(tensor.parameter())
    return model


def logits(model: nn.Module) -> torch.Tensor:
    """float32 [4, 12, vocabulary] of fixed random tokens."""
    tokens = torch.randint(3, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(tokens).logits


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, read by the safetensors package."""
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, uint8 [n]."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def digest(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}
