"""Every experts class of the installed transformers, in both forms that a compiler can capture."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.passes.blocks import E, H, I, K
from tests.passes.test_match import assert_same_function, rewrite

transformers = pytest.importorskip("transformers")
MODELS = Path(transformers.__file__).parent / "models"


def experts_classes() -> list[tuple[str, str]]:
    """(module, class) of each class that can change its implementation."""
    found = []
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        for name in re.findall(r"@use_experts_implementation(?:\([^)]*\))?\s*class (\w+)", file.read_text()):
            found.append((f"transformers.models.{file.parent.name}.{file.stem}", name))
    return found


def config(implementation: str) -> Any:
    """What any of those classes may ask its configuration for."""
    sizes = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E)
    sizes |= dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), I
    )
    names = dict.fromkeys(("hidden_act", "activation_function"), "silu")
    return SimpleNamespace(
        **sizes,
        **names,
        hidden_size=H,
        num_experts_per_tok=K,
        hidden_activation="gelu_pytorch_tanh",
        mlp_hidden_act="relu2",
        moe_latent_size=None,
        mlp_bias=False,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        zero_expert_num=0,
        _experts_implementation=implementation,
    )


class Routed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(H, E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x).softmax(-1).topk(K)
        return self.experts(x, ids, gates)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("module", "name"), experts_classes(), ids=lambda v: v.rpartition(".")[2])
def test_every_experts_class_is_matched(module: str, name: str, implementation: str) -> None:
    torch.manual_seed(0)
    experts = getattr(importlib.import_module(module), name)(config(implementation))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    region, before, after = rewrite(Routed(experts), torch.randn(10, H))
    assert (region.name, region.num_experts, region.top_k, region.hidden, region.width) == ("experts", E, K, H, I)
    assert_same_function(before, after)


def test_the_list_of_classes_is_not_empty() -> None:
    names = [name for _, name in experts_classes()]
    assert {"Qwen3MoeExperts", "MixtralExperts", "OlmoeExperts", "GptOssExperts", "DeepseekV3Experts"} <= set(names)
