"""Training over several GPUs of one host, measured and checked: FSDP2, expert parallelism, both.

    python tools/bench/distributed.py --ranks 1,2,4 --out results.json      # NCCL; on a CPU: --preset smoke (gloo)

Starts ``torch.distributed.run`` once per number of ranks and layout. Each run first trains one step alone on the data
of all ranks, then shards the same weights and compares: losses, gradients, ranges and scales on every rank. Then it
measures step time of W4A4 training with guidance against bf16 in the same layout (weak scaling: the batch is per rank),
memory, collectives per step, a step of reinforcement learning with the rollout on the same devices, and refits. At last
a checkpoint of two ranks is resumed by four, and a run whose rank is killed has to end by itself.

Each result says what was compared and with which bound; a check that fails is a row of the table, not an exception.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.layouts import PRESETS, reduce_gradients

LAYOUTS = ("fsdp", "ep", "both")
MAX_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Bound on the relative difference of gradients, by compute dtype. In float32 the order of sums differs; in bfloat16 a
last bit that differs by it moves some activations to the neighbouring 4-bit code."""


# --- one rank ---------------------------------------------------------------------------------------------------------


class Worker:
    """One rank of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.preset = PRESETS[args.preset]
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.results: dict[str, Any] = {"ranks": self.world, "layout": args.layout}

    def model(self, recipe: str, seed: int = 0) -> Any:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        from trace_compile import trace_compile

        p = self.preset
        config = Qwen3MoeConfig(
            vocab_size=p.vocab,
            hidden_size=p.hidden,
            intermediate_size=3 * p.width,
            moe_intermediate_size=p.width,
            num_hidden_layers=p.layers,
            num_attention_heads=p.heads,
            num_key_value_heads=max(p.heads // 8, 1),
            head_dim=p.hidden // p.heads * (2 if p.hidden >= 2048 else 1),
            num_experts=p.experts,
            num_experts_per_tok=p.top_k,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            initializer_range=0.05,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )
        torch.manual_seed(seed)
        with self.device:
            model = Qwen3MoeForCausalLM(config).to(p.dtype)
        return trace_compile(model, recipe=recipe, compiler=self.args.compiler).train()

    def shard(self, model: Any) -> Any:
        from tools.bench.layouts import shard

        return shard(model, self.args.layout, self.device.type)

    def batch(self, rank: int, seed: int = 0) -> dict[str, Tensor]:
        p, generator = self.preset, torch.Generator().manual_seed(1000 * seed + rank)
        ids = torch.randint(1, p.vocab, (p.rows, p.length), generator=generator).to(self.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def loss(self, model: Any, inputs: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Mean negative log-likelihood of the next tokens; times ``weights`` [rows] each."""
        logits = model(**inputs, use_cache=False).logits[:, :-1].float()
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), inputs["input_ids"][:, 1:], reduction="none")
        return nll.mean() if weights is None else (nll.mean(1) * weights).mean()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any], repeats: int) -> float:
        """Median milliseconds over the repeats of the slowest rank."""
        times = []
        for _ in range(repeats):
            dist.barrier()
            self.sync()
            start = time.perf_counter()
            work()
            self.sync()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(times, device=self.device, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return 1e3 * statistics.median(slowest.tolist())

    def everywhere(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def section(self, name: str, work: Callable[[], Any]) -> None:
        """A section that fails is reported; the others still run. All ranks fail together or the run is over."""
        start = time.perf_counter()
        try:
            found = work()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:2000], "trace": traceback.format_exc()[-3000:]}
        self.results[name] = found
        if self.rank == 0:
            seconds = time.perf_counter() - start
            print(f"[{self.args.layout} x{self.world}] {name} {seconds:.1f} s: {json.dumps(found)[:1500]}", flush=True)

    # --- sections -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.section("equality", self.equality)
        self.section("training", self.training)
        if self.rank == 0:
            Path(self.args.out).write_text(json.dumps(self.results, indent=1))
        dist.barrier()
        dist.destroy_process_group()

    def equality(self) -> dict[str, Any]:
        """One guided step of this layout against the same step alone, on the same weights and tokens."""
        from trace_compile.state.sharded import reshard, whole

        every = [self.batch(r) for r in range(self.world)]
        together = {k: torch.cat([b[k] for b in every]) for k in every[0]}
        model = self.model("trace")
        start = {n: p.detach().clone() for n, p in model.named_parameters()}

        def guided_step(inputs: dict[str, Tensor], **options: Any) -> tuple[float, dict[str, Tensor], Any]:
            rollout = model.rollout()
            with model.trace(**options) as trace, torch.no_grad():
                rollout(**inputs, use_cache=False)
            with torch.no_grad():
                model.get_parameter("model.embed_tokens.weight").mul_(1.02)
            model.guide(trace)
            loss = self.loss(model, inputs)
            loss.backward()
            if not options:
                reduce_gradients(model, self.args.layout)
            model.guide(None)
            reshard(model)
            grads = {n: whole(p.grad).clone() for n, p in model.named_parameters()}
            model.zero_grad(set_to_none=True)
            return float(loss.detach()), grads, trace.ranges

        loss_alone, alone, ranges_alone = guided_step(together, group=None)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])
        del start
        self.shard(model)
        loss, grads, ranges = guided_step(every[self.rank])
        losses = self.everywhere(loss)
        far = {n: float((grads[n].float() - g).norm() / g.float().norm().clamp_min(1e-30)) for n, g in alone.items()}
        del grads, alone
        worst = max(far, key=far.__getitem__)
        hashes = self.everywhere(ranges.outer_scales().tolist())
        bound = MAX_DIFFERENCE[self.preset.dtype]
        mean = sum(losses) / self.world
        return {
            "loss alone": loss_alone,
            "loss": mean,
            "loss difference": abs(mean - loss_alone) / abs(loss_alone),
            "largest gradient difference": far[worst],
            "at": worst,
            "bound": bound,
            "gradients equal": far[worst] <= bound,
            "ranges equal alone": ranges == ranges_alone,
            "scales equal alone": ranges.outer_scales().tolist() == ranges_alone.outer_scales().tolist(),
            "scales equal on all ranks": all(h == hashes[0] for h in hashes),
        }

    def training(self) -> dict[str, Any]:

        found: dict[str, Any] = {}
        for recipe in ("bf16", "trace"):
            self.free()
            model = self.shard(self.model(recipe))
            foreach = self.args.layout == "fsdp"  # the others mix meshes, which no fused update takes
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=foreach)
            inputs = self.batch(self.rank, 1)
            rollout = model.rollout() if recipe == "trace" else None
            if rollout is not None:
                with model.trace() as trace, torch.no_grad():
                    rollout(**inputs, use_cache=False)
                rollout.refit()
                model.guide(trace)

            def step(model: Any = model, optimizer: Any = optimizer, inputs: Any = inputs) -> None:
                self.loss(model, inputs).backward()
                reduce_gradients(model, self.args.layout)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            for _ in range(2):
                step()
            self.sync()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found[recipe] = {
                "step ms": self.timed(step, self.preset.steps),
                "collectives per step": self.collectives(step),
                "tokens per second": None,
            }
            found[recipe]["tokens per second"] = (
                1e3 * self.world * inputs["input_ids"].numel() / found[recipe]["step ms"]
            )
            if self.device.type == "cuda":
                found[recipe] |= {
                    "peak GB per rank": torch.cuda.max_memory_allocated() / 1e9,
                    "held GB per rank": torch.cuda.memory_allocated() / 1e9,
                }
            if rollout is not None:
                found["rl"] = self.reinforce(model, rollout, optimizer)
                if self.args.save:
                    found["saved"] = self.save(model, optimizer, inputs)
                if self.args.resume:
                    found["resumed"] = self.resume(model, optimizer, inputs)
            del model, optimizer, rollout, step
        found["times bf16"] = found["trace"]["step ms"] / found["bf16"]["step ms"]
        return found

    def reinforce(self, model: Any, rollout: Any, optimizer: Any) -> dict[str, Any]:
        """Generate, trace, guide, one policy-gradient step, refit; scales and versions on all ranks."""
        from trace_compile.model import session_of

        p, prompts = self.preset, self.batch(self.rank, 2)
        prompts = {k: v[:, :8] for k, v in prompts.items()}
        times: dict[str, float] = {}

        def lap(name: str, work: Callable[[], Any]) -> Any:
            self.sync()
            start = time.perf_counter()
            result = work()
            self.sync()
            times[name] = 1e3 * (time.perf_counter() - start)
            return result

        def generate() -> Any:
            with model.trace() as trace:
                ids = rollout.generate(**prompts, max_new_tokens=p.new_tokens, do_sample=True)
            return trace, ids

        def update() -> float:
            loss = self.loss(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, rewards)
            loss.backward()
            reduce_gradients(model, self.args.layout)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return float(loss.detach())

        model.guide(None)
        trace, ids = lap("rollout ms", generate)
        rewards = (ids[:, 8:] % 2 == 0).float().mean(1)
        rewards = rewards - rewards.mean()
        model.guide(trace)
        loss = lap("update ms", update)
        lap("refit ms", rollout.refit)
        model.guide(None)
        scales = {".".join(site): float(g) for site, g in session_of(model).outer.as_dict().items()}
        agreed = self.everywhere((scales, rollout.weights_version))
        packed = sum(t.nbytes for t in rollout.__dict__["_trace_compile_twin"].experts.values())
        return {
            **times,
            "loss": loss,
            "hit rate": trace.counters.hit_rate,
            "scales and versions equal on all ranks": all(a == agreed[0] for a in agreed),
            "twin's packed GB per rank": packed / 1e9,
        }

    def save(self, model: Any, optimizer: Any, inputs: Any) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "trace": model.trace_state}, checkpoint_id=self.args.save)
        return self.digest(model)

    def resume(self, model: Any, optimizer: Any, inputs: Any) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "trace": model.trace_state}
        dcp.load(state, checkpoint_id=self.args.resume)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        return self.digest(model)

    def digest(self, model: Any) -> dict[str, Any]:
        """Of all weights, their bits summed as integers, and of the scales: equal for equal models in any layout."""
        from trace_compile.model import session_of
        from trace_compile.state.sharded import reshard, whole

        reshard(model)
        total = 0
        for p in model.parameters():
            bits = whole(p.detach()).contiguous().view(torch.int16 if p.element_size() == 2 else torch.int32)
            weight = torch.arange(1, bits.numel() + 1, device=bits.device) % 65521
            total = (total * 31 + int((bits.flatten().long() * weight).sum())) % (1 << 61)
        return {"weights": total, "scales": sorted(float(g) for g in session_of(model).outer.as_dict().values())}

    def collectives(self, work: Callable[[], Any]) -> dict[str, int]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            work()
            self.sync()
        events = {e.key: e.count for e in profiled.key_averages()}
        own = {k: n for k, n in events.items() if k.startswith(("gloo:", "nccl:"))}
        return own or {k: n for k, n in events.items() if k.startswith("c10d::")}

    def free(self) -> None:
        import gc

        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def die(self) -> None:
        """Rank 1 is killed in the middle of training; the others wait for it in a collective."""
        model = self.shard(self.model("qat"))
        for number in range(1000):
            self.loss(model, self.batch(self.rank, number)).backward()
            if number == 1 and self.rank == min(1, self.world - 1):
                os.kill(os.getpid(), signal.SIGKILL)


# --- all runs ---------------------------------------------------------------------------------------------------------


def launch(
    args: argparse.Namespace, ranks: int, layout: str, seconds: float, *more: str
) -> tuple[int | None, float, str]:
    """Exit code (None: had to be killed), seconds, last output of one run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    options = ["--preset", args.preset, "--compiler", args.compiler, "--layout", layout]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, __file__, *options, *more],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return code, time.monotonic() - start, output


def everything(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    results |= {"torch": torch.__version__, "preset": args.preset, "compiler": args.compiler, "runs": []}
    counts = [int(n) for n in args.ranks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for ranks in counts:
            for layout in args.layouts.split(",") if ranks > 1 else ["fsdp"]:
                out = Path(folder, f"{layout}{ranks}.json")
                more = ["--out", str(out)]
                if layout == "fsdp" and ranks == 2:
                    more += ["--save", f"{folder}/checkpoint"]
                if layout == "fsdp" and ranks == 4 and Path(folder, "checkpoint").exists():
                    more += ["--resume", f"{folder}/checkpoint"]
                code, seconds, output = launch(args, ranks, layout, args.seconds, *more)
                print("".join(line + "\n" for line in output.splitlines() if line.startswith("[")), flush=True)
                run = json.loads(out.read_text()) if out.exists() else {"ranks": ranks, "layout": layout}
                if code != 0:
                    run["failed"] = {"exit code": code, "output": output[-3000:]}
                    print(output[-3000:], flush=True)
                results["runs"].append(run | {"seconds": seconds})
                Path(args.out).write_text(json.dumps(results, indent=1))
        saved, resumed = (
            next((r["training"].get(k) for r in results["runs"] if k in r.get("training", {})), None)
            for k in ("saved", "resumed")
        )
        if resumed is not None:
            results["saved by 2, resumed by 4, equal"] = saved == resumed
        if max(counts) > 1:
            limit = PRESETS[args.preset].killed_within
            code, seconds, output = launch(args, max(c for c in counts if c <= 2), "fsdp", limit, "--die")
            named = next((line.strip() for line in output.splitlines() if "Signal 9" in line), "")
            results["killed rank"] = {"ended by itself": code not in (None, 0), "seconds": seconds, "error": named}
    Path(args.out).write_text(json.dumps(results, indent=1))
    return results


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| layout | ranks | bf16 step (ms) | W4A4 guided step (ms) | ratio | tokens/s | peak GB per rank (bf16 / W4A4) "
        "| collectives per step | gradients equal | scales equal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in results["runs"]:
        training, equality = run.get("training", {}), run.get("equality", {})
        if "bf16" not in training or "trace" not in training:
            lines.append(f"| {run['layout']} | {run['ranks']} | {json.dumps(run.get('failed') or training)[:200]} |")
            continue
        plain, ours = training["bf16"], training["trace"]
        gb = " / ".join(f"{r['peak GB per rank']:.1f}" if "peak GB per rank" in r else "-" for r in (plain, ours))
        counts = sum(ours["collectives per step"].values())
        equal = f"{equality.get('gradients equal')} ({equality.get('largest gradient difference', float('nan')):.1e})"
        lines.append(
            f"| {run['layout']} | {run['ranks']} | {plain['step ms']:.1f} | {ours['step ms']:.1f} | "
            f"{training['times bf16']:.2f} | {ours['tokens per second']:.0f} | {gb} | {counts} | {equal} | "
            f"{equality.get('scales equal on all ranks')} |"
        )
    lines += [
        "",
        *(f"{k}: {json.dumps(results[k])}" for k in ("saved by 2, resumed by 4, equal", "killed rank") if k in results),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, one run each")
    parser.add_argument("--layouts", default="fsdp,ep,both", help="for more than one rank")
    parser.add_argument("--preset", choices=list(PRESETS), default="qwen3")
    parser.add_argument("--compiler", default="eager", help="eager, aot_eager or inductor")
    parser.add_argument("--seconds", type=float, default=300, help="limit of one run")
    parser.add_argument("--out", default="distributed.json")
    parser.add_argument("--layout", choices=LAYOUTS, default="fsdp", help=argparse.SUPPRESS)
    parser.add_argument("--save", default="", help=argparse.SUPPRESS)
    parser.add_argument("--resume", default="", help=argparse.SUPPRESS)
    parser.add_argument("--die", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        print(table(everything(args)))
        return
    worker = Worker(args)
    if args.die:
        worker.die()
    else:
        worker.run()


if __name__ == "__main__":
    main()
