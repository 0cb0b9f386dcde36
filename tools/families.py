"""A tiny random model of every mixture-of-experts family that the installed transformers has.

Families are found, not listed: every ``modeling_*.py`` that registers experts implementations, and the few others that
hold experts. One table of small sizes fits nearly all configurations, because their settings share names; ``CHANGES``
has what a family needs besides (its kinds of layers, settings that its validation asks for).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

VOCAB, PAD, EOS = 64, 0, 1
MODELS = Path(transformers.__file__).parent / "models"
WITHOUT_REGISTRY = ("aria", "dbrx", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "step3p7", "switch_transformers")
"""Families with experts that no implementation can be chosen for."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "out_hidden_size", "output_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    "num_decoder_layers": 2,
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    "decoder_attention_heads": 4,
    **dict.fromkeys(("num_key_value_heads", "depth"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "moe_topk"), 2),
    "top_k_experts": 2,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    "moe_num_shared_experts": 1,
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 0),
    **dict.fromkeys(("num_dense_layers", "decoder_sparse_step"), 1),
    "mlp_only_layers": [],
    **dict.fromkeys(("max_position_embeddings", "max_seq_len"), 256),
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "decoder_start_token_id": PAD,
    "initializer_range": 0.1,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "zero_expert_num": 0,
}
_LATENT = {"num_key_value_heads": 4}  # keys and values of latent attention are expanded to all heads
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    "deepseek_v3": _LATENT | {"n_group": 2},
    **dict.fromkeys(("glm_moe_dsa", "mistral4"), _LATENT),
    **dict.fromkeys(("granitemoehybrid", "qwen3_next", "qwen3_5_moe"), _HYBRID),
    "longcat_flash": _LATENT | {"head_dim": 8},  # that of the rotated part
    "kimi_linear": _LATENT | _HYBRID | {"mlp_layer_types": ["sparse", "sparse"]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "llama4": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [32, 32], "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}}
    },
    "glm5_next": {
        "text_config": _LATENT
        | _HYBRID
        | {"mlp_layer_types": ["sparse", "sparse"], "qk_rope_head_dim": 0, "index_kpool": 4}
    },
    "qwen4_exp": _HYBRID
    | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
    | {"indexer_compress_ratio": 4, "hc_lowrank": 16},
    "step3p7": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "qwen3_omni_moe": {"vision_start_token_id": 60, "vision_end_token_id": 61, "audio_end_token_id": 62},
    "diffusion_gemma": {"vision_config": {"model_type": "gemma4_vision"} | _VISION, "canvas_length": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},  # its attention looks for the base there
        "ffn_config": {"ffn_hidden_size": 32, "moe_top_k": 2},
        "rope_parameters": _ROPE,
    },
}
MODEL = {"qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration"}
"""Where the first causal model is not the one that holds the language model."""


OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"ignore": ["*.o_a_proj"]},  # attention's output in groups: stacked matrices, but no experts
    "inkling": {"ignore": ["*.shared_experts"]},  # every token takes all of them: nothing is routed
}
"""What ``trace_compile`` is to be told of a family."""


@dataclass(frozen=True)
class Family:
    """A family and the class that stands for it: its causal language model, where it has one.

    changes: settings of the configuration beside those of this file.
    """

    name: str
    module: str
    model: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for ``trace_compile``."""
        return OPTIONS.get(self.name, {})

    @property
    def model_class(self) -> Any:
        return getattr(importlib.import_module(self.module), self.model)

    def build(self, seed: int = 0) -> Any:
        """A float32 model of about 100 k parameters in eval mode, the same for the same seed.

        What is initialised to a constant (biases, norms, a router's correction bias) gets noise: a part that is zero
        could be lost without a difference.
        """
        torch.manual_seed(seed)
        cls = self.model_class
        model = cls(tiny_config(cls.config_class, CHANGES.get(self.name, {}) | self.changes)).eval()
        correction = [t for name, t in model.named_buffers() if name.endswith("e_score_correction_bias")]
        with torch.no_grad():
            for tensor in (*model.parameters(), *correction):
                if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
                    tensor += 0.05 * torch.randn_like(tensor)
            for name, table in model.named_buffers():
                if name.endswith("tid2eid"):  # experts by token id, which a checkpoint would bring
                    table.copy_(torch.stack([torch.randperm(_SIZES["num_experts"])[: table.shape[1]] for _ in table]))
        return model


def tiny_config(cls: type, changes: dict[str, Any]) -> Any:
    """A small configuration of ``cls``; the parts of a composite one are made small in the same way."""
    known = _settings(cls)
    wanted = {k: v for k, v in _SIZES.items() if k in known} | changes
    for name, part in (getattr(cls, "sub_configs", None) or {}).items():
        if isinstance(part, type) and part is not PreTrainedConfig and "Auto" not in part.__name__:
            wanted[name] = tiny_config(part, changes.get(name, {}))
    return cls(**wanted)


def _settings(cls: type) -> set[str]:
    names = set(inspect.signature(cls).parameters)
    return names.union(*(getattr(base, "__annotations__", {}) for base in cls.__mro__))


@functools.cache
def families() -> dict[str, Family]:
    """All families by name, in alphabetical order."""
    found = {}
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        name, text = file.parent.name, file.read_text()
        if "@use_experts_implementation" not in text and name not in WITHOUT_REGISTRY:
            continue
        classes = re.findall(r"^class (\w+(?:ForCausalLM|ForConditionalGeneration|ForBlockDiffusion))\(", text, re.M)
        classes += re.findall(r"^class (\w+ForTokenClassification)\(", text, re.M)
        model = MODEL.get(name) or next((c for c in classes if c.endswith("ForCausalLM")), classes[0])
        found[name] = Family(name, f"transformers.models.{name}.{file.stem}", model)
    return found
