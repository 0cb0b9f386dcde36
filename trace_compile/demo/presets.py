"""Sizes of the demo: ``cpu`` (five minutes on two cores), ``h200`` (one large GPU), ``micro`` (tests; shows nothing).

A preset fixes everything that a run depends on apart from its seeds. Model sizes are multiples of NVFP4's block of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trace_compile.demo.task import BEGIN, END, PAD, VOCABULARY, ChainSums
from trace_compile.errors import TraceCompileError

ARMS = ("bf16", "naive", "qat", "trace")
"""Recipes that the demo compares, in the order of the table. ``bf16`` computes in the preset's dtype."""


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3-MoE: ``layers`` blocks of attention and ``experts`` experts of width ``width``, ``top_k`` per token."""

    layers: int
    hidden: int
    experts: int
    top_k: int
    width: int
    heads: int = 4
    kv_heads: int = 2

    def config(self, positions: int) -> Any:
        """The transformers configuration (``Qwen3MoeConfig``) for sequences of up to ``positions`` tokens."""
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=self.hidden,
            intermediate_size=self.hidden,
            moe_intermediate_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
            tie_word_embeddings=True,
            max_position_embeddings=positions,
            pad_token_id=PAD,
            bos_token_id=BEGIN,
            eos_token_id=END,
        )


@dataclass(frozen=True)
class Supervision:
    """Supervised warm start: AdamW, cosine decay to a tenth, gradient norm 1."""

    steps: int
    batch: int
    learning_rate: float
    seed: int = 0


@dataclass(frozen=True)
class Reinforcement:
    """GRPO: each step samples ``group_size`` responses to each of ``groups`` problems and takes one optimizer step.

    ``refit_every``: the rollout twin is refitted after every so many steps, and each batch is generated one step ahead,
    so batches are 1 to ``refit_every`` versions stale, as in asynchronous training. ``microbatches``: parts of a batch,
    shuffled and padded on the other side, that the trainer sees one by one. ``clip``: half width of the clipping range
    of pi_new/pi_old. ``truncate``: upper bound of the importance weight pi_old/pi_rollout.
    """

    steps: int
    groups: int
    group_size: int
    microbatches: int
    learning_rate: float
    refit_every: int = 3
    clip: float = 0.2
    truncate: float = 5.0


@dataclass(frozen=True)
class Preset:
    """Everything that a run depends on apart from its seeds.

    ``sweep``: optimizer steps between rollout and trainer at which the sweep scores its tokens; 0 is among them.
    ``held_out``: problems on which the rollout is evaluated before and after training.
    ``warm_start``: a checkpoint of this shape is committed, so supervision is skipped unless asked for.
    ``compiler``: what runs the rewritten graphs; Inductor's minute per graph is more than runs this short earn back.
    """

    name: str
    device: str
    dtype: torch.dtype
    task: ChainSums
    shape: ModelShape
    sft: Supervision
    rl: Reinforcement
    sweep: tuple[int, ...]
    held_out: int
    warm_start: bool
    compiler: str = "eager"

    @property
    def positions(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.task.prompt_length + self.task.response_length


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="cpu",
            device="cpu",
            dtype=torch.float32,
            task=ChainSums(terms=(3, 4), digits=(1, 2)),
            shape=ModelShape(layers=6, hidden=96, experts=16, top_k=4, width=48),
            sft=Supervision(steps=700, batch=64, learning_rate=2e-3),
            rl=Reinforcement(steps=32, groups=8, group_size=8, microbatches=2, learning_rate=1e-5),
            sweep=(0, 1, 2, 4, 8),
            held_out=256,
            warm_start=True,
        ),
        Preset(
            name="h200",
            device="cuda",
            dtype=torch.bfloat16,
            task=ChainSums(terms=(8, 12), digits=(1, 2)),
            shape=ModelShape(layers=8, hidden=192, experts=32, top_k=4, width=64),
            sft=Supervision(steps=700, batch=256, learning_rate=1e-3),
            rl=Reinforcement(steps=40, groups=32, group_size=8, microbatches=2, learning_rate=1e-5),
            sweep=(0, 1, 2, 4, 8, 16),
            held_out=1024,
            warm_start=False,
        ),
        Preset(
            name="micro",
            device="cpu",
            dtype=torch.float32,
            task=ChainSums(terms=(2, 2), digits=(1, 1)),
            shape=ModelShape(layers=2, hidden=32, experts=4, top_k=2, width=16),
            sft=Supervision(steps=4, batch=8, learning_rate=2e-3),
            rl=Reinforcement(steps=2, groups=2, group_size=2, microbatches=2, learning_rate=1e-4),
            sweep=(0, 1),
            held_out=4,
            warm_start=False,
        ),
    )
}


def get_preset(name: str) -> Preset:
    """Look a preset up by name. Raises ``TraceCompileError`` for an unknown one, or one whose device is missing."""
    if name not in PRESETS:
        raise TraceCompileError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    if preset.device == "cuda" and not torch.cuda.is_available():
        raise TraceCompileError(f"preset {name!r} needs a CUDA device and torch sees none; use --preset cpu")
    return preset
