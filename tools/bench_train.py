"""Times training of one layer's experts in NVFP4 on a GPU, behind a check of results, beside bfloat16 in the same run.

    python -m tools.bench_train [--shape qwen3-30b-a3b] [--tokens 4096 16384] [--profile] [--json FILE]

Forward and backward of the whole expert FFN from routed ids: ``ours`` (weights packed beforehand), ``lean`` (grouped
bfloat16 GEMMs, rows sorted once, torch operations and a backward by hand around them), ``transformers`` (its own
experts in bfloat16).
Prints microseconds (median of CUDA-graph replays), the ratio to lean, what packing the weights adds when it is shared
by 1, 4 and 16 micro-batches, and the most memory one forward and backward take beyond operands and gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from tools.bench.timing import microseconds
from trace_compile.kernels import providers
from trace_compile.ops import SWIGLU, W4A4_ROW, W4A4_TRACED, MoEScheme, Out, WeightLayout, check_close
from trace_compile.ops.routing import route
from trace_compile.state.packed import PackedWeights

ops = torch.ops.trace_compile
assert providers


@dataclass(frozen=True)
class Shape:
    experts: int
    hidden: int
    width: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 2048, 768, 8),
    "mixtral-8x7b": Shape(8, 4096, 14336, 2),
    "tiny": Shape(8, 256, 128, 2),
}


@dataclass
class Layer:
    """One layer's operands; gradients are asked of x, gates and both weights."""

    shape: Shape
    x: Tensor
    ids: Tensor
    gates: Tensor
    w13: Tensor
    w2: Tensor
    dy: Tensor

    @classmethod
    def random(cls, shape: Shape, tokens: int) -> Layer:
        g = torch.Generator("cuda").manual_seed(0)

        def normal(*dims: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*dims, generator=g, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_()

        ids = torch.rand(tokens, shape.experts, generator=g, device="cuda").argsort(1)[:, : shape.top_k]
        gates = torch.softmax(torch.randn(tokens, shape.top_k, generator=g, device="cuda"), 1).bfloat16()
        w13 = normal(shape.experts, 2 * shape.width, shape.hidden, scale=shape.hidden**-0.5)
        w2 = normal(shape.experts, shape.hidden, shape.width, scale=shape.width**-0.5)
        x, dy = normal(tokens, shape.hidden), normal(tokens, shape.hidden).detach()
        return cls(shape, x, ids.contiguous(), gates.requires_grad_(), w13, w2, dy)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.gates, self.w13, self.w2]

    def step(self, forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        y = forward()
        return (y.detach(), *torch.autograd.grad(y, self.leaves, self.dy))

    def packs(self, cache: PackedWeights, scheme: MoEScheme) -> list[Tensor]:
        assert scheme.weight is not None
        packed = [cache.get(n, w, WeightLayout(), scheme.weight) for n, w in (("w13", self.w13), ("w2", self.w2))]
        return [t for p in packed for t in (p.codes, p.scales, p.outer)]

    def ours(self, scheme: MoEScheme, packs: list[Tensor], op: object = None, recompute: bool = False) -> Tensor:
        outer = torch.full((2,), 2.0**-8, device="cuda") if scheme == W4A4_TRACED else None
        rest = (outer, None, None, None, None, scheme.key, SWIGLU.key, "none", "none", False, recompute)
        op = op or ops.nvfp4_moe_trains
        return op(self.x, self.ids, self.gates, self.w13, self.w2, None, None, *packs, *rest)[Out.Y]  # type: ignore[operator]

    def lean(self) -> Tensor:
        return Lean.apply(self.x, self.ids, self.gates, self.w13, self.w2)

    def transformers(self) -> Callable[[], Tensor]:
        from transformers.models.qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            hidden_size=self.shape.hidden,
            moe_intermediate_size=self.shape.width,
            num_experts=self.shape.experts,
            num_experts_per_tok=self.shape.top_k,
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            module = Qwen3MoeExperts(config)
        module.gate_up_proj, module.down_proj = (torch.nn.Parameter(w.detach()) for w in (self.w13, self.w2))
        # The parameters share memory with the layer's weights; gradients are asked of the module's own.
        self.w13, self.w2 = module.gate_up_proj, module.down_proj
        return lambda: module(self.x, self.ids, self.gates)


class Lean(torch.autograd.Function):
    """The experts in bfloat16 with six grouped GEMMs and as little as eager torch can do around them: rows sorted once,
    a backward by hand that gathers where autograd would scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, gates: Tensor, w13: Tensor, w2: Tensor) -> Tensor:  # type: ignore[override]
        routing = route(ids, w13.shape[0])
        rows = x[routing.token]
        pre = torch._grouped_mm(rows, w13.transpose(1, 2), offs=routing.offsets)
        gate, up = pre.chunk(2, -1)
        h = F.silu(gate) * up
        out = torch._grouped_mm(h, w2.transpose(1, 2), offs=routing.offsets)
        ctx.save_for_backward(rows, pre, h, out, gates, w13, w2)
        ctx.routing = routing
        y = out[routing.inverse].view(*ids.shape, -1)
        return torch.bmm(gates.unsqueeze(1), y).squeeze(1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, pre, h, out, gates, w13, w2 = ctx.saved_tensors
        routing = ctx.routing
        dys = dy[routing.token]
        dgates = (dys * out).sum(-1)[routing.inverse].view(gates.shape)
        do = dys * gates.view(-1)[routing.order].unsqueeze(-1)
        dh = torch._grouped_mm(do, w2, offs=routing.offsets)
        dw2 = torch._grouped_mm(do.t(), h, offs=routing.offsets)
        gate, up = pre.chunk(2, -1)
        dpre = torch.empty_like(pre)
        torch.ops.aten.silu_backward.grad_input(dh * up, gate, grad_input=dpre[:, : h.shape[1]])
        torch.mul(dh, F.silu(gate), out=dpre[:, h.shape[1] :])
        dx = torch._grouped_mm(dpre, w13, offs=routing.offsets)
        dw13 = torch._grouped_mm(dpre.t(), rows, offs=routing.offsets)
        return dx[routing.inverse].view(*gates.shape, -1).sum(1), None, dgates, dw13, dw2


def extra_memory(work: Callable[[], tuple[Tensor, ...]]) -> int:
    """Bytes that ``work`` takes at its peak beyond what was there before and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in results)


def check(layer: Layer, scheme: MoEScheme, packs: list[Tensor]) -> None:
    """The gate: outputs and gradients against the native op on the same operands."""
    got = layer.step(lambda: layer.ours(scheme, packs))
    want = layer.step(lambda: layer.ours(scheme, packs, ops.nvfp4_moe))
    k = max(layer.ids.numel(), layer.shape.hidden, 2 * layer.shape.width)
    for name, a, b in zip(("y", "x", "gates", "w13", "w2"), got, want, strict=True):
        check_close(a, b, k=k, dtype=torch.bfloat16, stages=8, name=name)


def bench(name: str, tokens: int, profile: bool, gate: bool) -> dict[str, Any]:
    shape = SHAPES[name]
    layer = Layer.random(shape, tokens)
    cache = PackedWeights()
    found: dict[str, tuple[float, int]] = {}

    def measure(label: str, work: Callable[[], Tensor]) -> None:
        def step() -> tuple[Tensor, ...]:
            return layer.step(work)

        step()
        found[label] = (microseconds([step]), extra_memory(step))

    measure("lean bf16", layer.lean)
    measure("transformers bf16", layer.transformers())
    packs = layer.packs(cache, W4A4_ROW)
    if gate:
        check(layer, W4A4_ROW, packs)
        print(f"{name} {tokens} tokens: results and gradients are those of the native op")
    measure("ours, rows' own scales", lambda: layer.ours(W4A4_ROW, packs))
    measure("ours, traced scales", lambda: layer.ours(W4A4_TRACED, packs))
    measure("ours, traced, recompute", lambda: layer.ours(W4A4_TRACED, packs, recompute=True))
    base = found["lean bf16"][0]
    for label, (time, memory) in found.items():
        ratio, mebibytes = time / base, memory / 2**20
        print(f"{name} {tokens:6d} tokens  {label:26s} {time:9.1f} us  {ratio:5.3f}x lean  {mebibytes:8.0f} MiB")
    packing = print_packing(layer, found["ours, traced scales"][0], base)
    if profile:
        print_profile(lambda: layer.step(lambda: layer.ours(W4A4_TRACED, packs)))
    results = {label: {"us": time, "extra_bytes": memory} for label, (time, memory) in found.items()}
    return {"shape": name, "tokens": tokens, "results": results, "packing_us": packing}


def print_packing(layer: Layer, ours: float, base: float) -> float:
    """Microseconds to pack both weights again, as after an optimizer's step."""
    cache = PackedWeights()
    times = []
    for _ in range(6):
        cache.refresh() if len(cache) else None
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        layer.packs(cache, W4A4_ROW)
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    packing = statistics.median(times[1:])
    shared = "  ".join(f"/{n}: {(ours + packing / n) / base:5.3f}x" for n in (1, 4, 16))
    print(f"packing both weights {packing:9.1f} us; with it shared by micro-batches, to lean: {shared}")
    return packing


def print_profile(work: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
    rows = sorted(run.key_averages(), key=lambda e: -e.self_device_time_total)[:28]
    for event in rows:
        calls = event.count / 3
        print(f"  {event.self_device_time_total / 3:9.1f} us {calls:5.1f} calls  {event.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--profile", action="store_true", help="time of each kernel of ours")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--no-gate", action="store_true", help="skip the check of results")
    arguments = parser.parse_args()
    device, versions = torch.cuda.get_device_name(), {"torch": torch.__version__, "triton": triton.__version__}
    print(f"{device}, {versions}, bfloat16")
    runs = [bench(arguments.shape, tokens, arguments.profile, not arguments.no_gate) for tokens in arguments.tokens]
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": device, **versions, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
