"""Tiny mixture-of-experts models for tests: real transformers classes with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 64
PAD, EOS = 0, 1


def qwen3(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    """Hidden 64, expert width 32, 8 experts, top-2, 2 layers, float32; weights large enough for routing to vary."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes)))


def prompts(batch: int = 4, length: int = 6, seed: int = 1) -> dict[str, torch.Tensor]:
    """Left-padded prompts without EOS: ids and mask int64 [batch, length]; row i has i % 3 padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : row % 3] = 0
    return {"input_ids": torch.where(mask == 1, ids, PAD), "attention_mask": mask}


def right_padded(sequences: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same sequences moved to the left edge, as trainers lay them out."""
    order = torch.argsort(mask, dim=1, descending=True, stable=True)
    ids, mask = sequences.gather(1, order), mask.gather(1, order)
    return {"input_ids": torch.where(mask == 1, ids, PAD), "attention_mask": mask}
