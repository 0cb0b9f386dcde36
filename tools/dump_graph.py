"""Shows what the passes do to a model's graph, pass by pass, on a tiny random model of a transformers type.

    python tools/dump_graph.py qwen3_moe --out graphs [--scheme "w=nvfp4:pow2:expert|a=nvfp4:pow2:row"]
    python tools/dump_graph.py mixtral --experts batched_mm --checkpointed --out graphs
    python tools/dump_graph.py my_package.my_module:make --out graphs

Writes the graph before the first and after each pass with the changes between them, and prints the report: regions,
what was left as it is and why, who runs each op. Instead of a transformers type it takes ``module:function``, whose
function returns a module and the keyword arguments of one call.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch

from trace_compile.capture import Backend, PackOnUse, capturing
from trace_compile.ops import UNQUANTIZED, MoEScheme
from trace_compile.passes import Mode

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    # latent attention of the DeepSeek family
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}


def tiny_model(kind: str, experts: str, layers: int) -> Any:
    """A random model of a transformers type. Sizes that the type does not know are ignored by it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | {"num_hidden_layers": layers}))
    model = AutoModelForCausalLM.from_config(config)
    model.config._experts_implementation = experts
    return model


def call(model: Any, backend: Any, inputs: dict[str, Any]) -> None:
    with capturing():
        torch.compile(model, backend=backend, dynamic=True, fullgraph=True)(**inputs)


def dump(model: Any, mode: Mode, inputs: dict[str, Any], out: Path | None) -> str:
    """Writes the graphs below ``out`` and returns the report."""
    backend = Backend(mode, PackOnUse(mode.scheme or UNQUANTIZED), dump_dir=out)
    call(model, backend, inputs)
    return "\n\n".join(map(str, backend.reports))


def arguments(parser: argparse.ArgumentParser) -> None:
    """What says which model, and for which mode."""
    parser.add_argument("model", help="transformers type (qwen3_moe, mixtral, gpt_oss, ...), or module:function")
    parser.add_argument("--scheme", default="none", help="scheme key; none stops at the float op")
    parser.add_argument("--experts", default="grouped_mm", choices=["grouped_mm", "batched_mm"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--checkpointed", action="store_true", help="activation checkpointing around each layer")
    parser.add_argument("--lenient", action="store_true", help="leave expert-shaped operations that are not understood")


def load(options: argparse.Namespace) -> tuple[Any, dict[str, Any], Mode]:
    """The model, the arguments of one call, and the mode."""
    if ":" in options.model:
        module, _, function = options.model.partition(":")
        model, inputs = getattr(importlib.import_module(module), function)()
    else:
        model = tiny_model(options.model, options.experts, options.layers)
        ids = torch.randint(1, SIZES["vocab_size"], (1, options.tokens))
        inputs = {"input_ids": ids, "use_cache": False}
    if options.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    scheme = None if options.scheme == "none" else MoEScheme.parse(options.scheme)
    return model, inputs, Mode(scheme=scheme, train=True, strict=not options.lenient)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    parser.add_argument("--out", type=Path, help="folder for the graphs")
    options = parser.parse_args(words)
    model, inputs, mode = load(options)
    print(dump(model, mode, inputs, options.out))


if __name__ == "__main__":
    main()
