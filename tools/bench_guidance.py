"""What guidance costs on this GPU: recording in a rollout, replay in a training step, looking records up.

    python -m tools.bench_guidance [--shape small|qwen3-30b-a3b] [--json out.json]

A rollout is ``rollout.sample()`` of one batch (prefill and decode loop, see ``decode``), a training step a forward and
a backward over what it generated. Both are measured with and without: the share that recording or replay adds is the
figure. Bytes per token are those of the layout, guidance and routing apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trace_compile import trace_compile
from trace_compile.model import session_of


@dataclass(frozen=True)
class Shape:
    """A model of eight layers, and the batch: sequences, prompt and new tokens, sequences of a training step."""

    hidden: int
    width: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    batch: int = 256
    prompt: int = 64
    new: int = 65
    train: int = 64
    layers: int = 8

    def model(self, device: str, dtype: torch.dtype) -> Qwen3MoeForCausalLM:
        config = Qwen3MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            moe_intermediate_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
            tie_word_embeddings=True,
            initializer_range=self.hidden**-0.5,
        )
        torch.manual_seed(0)
        with torch.device(device):
            return Qwen3MoeForCausalLM(config).to(dtype)


SHAPES = {
    "small": Shape(192, 96, 32, 4, 6, 2, 32, 64, prompt=32),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, 32, 4, 128, 4096),
    "tiny": Shape(64, 32, 8, 2, 4, 2, 16, 64, batch=4, prompt=6, new=4, train=4, layers=2),
}


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The fastest of ``repeats`` runs after one to warm up."""
    best = float("inf")
    for turn in range(repeats + 1):
        _wait()
        start = time.perf_counter()
        run()
        _wait()
        best = min(best, time.perf_counter() - start) if turn else best
    return best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(name: str, repeats: int = 2, compiler: str = "eager") -> list[dict[str, Any]]:
    """One record per measurement; times in milliseconds, ``cost`` relative to the same without guidance."""
    shape, on_gpu = SHAPES[name], torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    model = trace_compile(shape.model(device, dtype), recipe="trace", compiler=compiler)
    twin = model.rollout()
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.prompt), device=device)

    def rollout(record: str | None, new: int = shape.new) -> tuple[Any, Any]:
        options: dict[str, Any] = {"max_new_tokens": new, "eos_token_id": (), "generator": torch.Generator()}
        options["generator"].manual_seed(0)
        if record is None:
            return twin.sample(ids, **options), None
        with model.trace(record=record) as trace:
            return twin.sample(ids, **options), trace

    rollout("ranges", 2)
    twin.refit()  # scales are traced ones from here on
    found: list[dict[str, Any]] = []
    base: dict[str, float] = {}
    for record in (None, "ranges", "bit"):
        whole, first = (seconds(lambda r=record, n=n: rollout(r, n), repeats) for n in (shape.new, 1))  # type: ignore[misc]
        step = (whole - first) / (shape.new - 1)
        base = base or {"rollout": whole, "step": step}
        found.append(
            {"what": "rollout", "record": record, "ms": 1e3 * whole, "cost": whole / base["rollout"] - 1}
            | {"decode_ms": 1e3 * step, "decode_cost": step / base["step"] - 1}
        )
    sample, trace = rollout("bit")
    assert trace is not None
    layout = trace.layout
    found.append(
        {"what": "bytes per token", "guidance": layout.guidance_bytes, "routing": layout.routing_bytes, "key": 8}
        | {"rows": len(trace), **asdict(trace.counters)}
    )
    rows = slice(0, shape.train)
    batch = {"input_ids": sample.ids[rows, :-1], "attention_mask": sample.attention[rows, :-1], "use_cache": False}

    def train() -> None:
        logits = model(**batch).logits.float()
        (-logits.log_softmax(-1).gather(-1, sample.ids[rows, 1:, None]).mean()).backward()
        model.zero_grad()

    model.guide(None)
    plain = seconds(train, repeats)
    model.guide(trace)
    guided = seconds(train, repeats)
    found.append({"what": "training step", "ms": 1e3 * plain, "guided_ms": 1e3 * guided, "cost": guided / plain - 1})
    session = session_of(model)
    tokens = session.tracker.begin(batch, None)
    for where in ("device", "host"):
        trace.device_bytes = trace.device_bytes if where == "device" else 0
        took = seconds(lambda: trace.lookup(tokens.keys, session.version, 3, valid=tokens.valid), repeats)
        found.append({"what": "lookup", "where": where, "ms": 1e3 * took, "per_second": len(tokens.keys) / took})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--compiler", default="eager")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.shape, options.repeats, options.compiler)
    for record in found:
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()})
    if options.json is not None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        about = {"device": device, "torch": torch.__version__, "shape": asdict(SHAPES[options.shape])}
        options.json.write_text(json.dumps(about | {"measurements": found}, indent=1))


if __name__ == "__main__":
    main()
