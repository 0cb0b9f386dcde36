"""Shows what the passes do to a model's graph, pass by pass, on a tiny random model of a transformers type.

    python tools/dump_graph.py qwen3_moe --out graphs [--scheme "w=nvfp4:pow2:expert|a=nvfp4:pow2:row"]
    python tools/dump_graph.py mixtral --experts batched_mm --checkpointed --out graphs
    python tools/dump_graph.py gpt_oss --bisect

Writes the graph before the first and after each pass with the changes between them, and prints the report: regions,
what was left as it is and why, who runs each op. ``--bisect`` runs the graph after every pass instead and names the
first pass behind which the logits differ from the captured graph's by more than ``--tolerance`` (relative root mean
square; quantizing differs by some percent, so give a scheme its own tolerance).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from trace_compile.capture import Backend, PackOnUse, capturing
from trace_compile.ops import UNQUANTIZED, MoEScheme
from trace_compile.passes import PIPELINE, Mode, PassRunner
from trace_compile.passes.graph import clone

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


def call(model: Any, backend: Any, tokens: int) -> None:
    ids = torch.randint(1, SIZES["vocab_size"], (1, tokens))
    with capturing():
        torch.compile(model, backend=backend, dynamic=True, fullgraph=True)(input_ids=ids, use_cache=False)


def dump(model: Any, mode: Mode, tokens: int, out: Path | None) -> str:
    """Writes the graphs below ``out`` and returns the report."""
    backend = Backend(mode, PackOnUse(mode.scheme or UNQUANTIZED), dump_dir=out)
    call(model, backend, tokens)
    return "\n\n".join(map(str, backend.reports))


def bisect(model: Any, mode: Mode, tokens: int, tolerance: float) -> str | None:
    """Name of the first pass that changes the logits by more than ``tolerance``."""
    blamed: list[str | None] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        captured = clone(gm)

        def run(*args: Any) -> Any:
            expected = captured(*args)
            runtime = PackOnUse(mode.scheme or UNQUANTIZED)

            def good(changed: GraphModule) -> bool:
                return distance(run_with_feeds(changed, args, runtime), expected) <= tolerance

            blamed.append(PassRunner(PIPELINE).bisect(captured, example_inputs, config=mode, good=good))
            return expected

        return run

    with torch.no_grad():
        call(model, backend, tokens)
    return blamed[0]


def run_with_feeds(gm: GraphModule, args: tuple[Any, ...], runtime: PackOnUse) -> Any:
    """A graph between two passes, its packed weights resolved as the backend would."""
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    regions = {r.name: r for r in gm.meta.get("regions", ())}
    feeds = []
    for feed in gm.meta.get("feeds", ()):
        region = regions[feed.region]
        expert, _ = region.weight(feed.weight)
        param = expert.master({p.name: args[names.index(p.placeholder)] for p in expert.parameters})
        feeds.append(getattr(runtime.packed(region, feed.weight, param), feed.part))
    return gm(*args, *feeds)


def distance(found: Any, expected: Any) -> float:
    """Largest relative root mean square over the floating results."""
    pairs = [(a, b) for a, b in zip(found, expected) if isinstance(b, Tensor) and b.is_floating_point()]
    return max(float((a - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in pairs)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", help="transformers model type, e.g. qwen3_moe, mixtral, olmoe, gpt_oss")
    parser.add_argument("--out", type=Path, help="folder for the graphs")
    parser.add_argument("--scheme", default="none", help="scheme key; none stops at the float op")
    parser.add_argument("--experts", default="grouped_mm", choices=["grouped_mm", "batched_mm"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--checkpointed", action="store_true", help="activation checkpointing around each layer")
    parser.add_argument("--lenient", action="store_true", help="leave expert-shaped operations that are not understood")
    parser.add_argument("--bisect", action="store_true")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    options = parser.parse_args(arguments)

    model = tiny_model(options.kind, options.experts, options.layers)
    if options.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    scheme = None if options.scheme == "none" else MoEScheme.parse(options.scheme)
    mode = Mode(scheme=scheme, train=True, strict=not options.lenient)
    if options.bisect:
        blamed = bisect(model, mode, options.tokens, options.tolerance)
        print(f"first pass beyond {options.tolerance}: {blamed or 'none'}")
    else:
        print(dump(model, mode, options.tokens, options.out))


if __name__ == "__main__":
    main()
