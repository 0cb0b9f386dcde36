"""Times ``kernels.quantize`` on a GPU, behind a check of its bytes, beside a copy of the same tensor in the same run.

    python tools/bench_quantize.py [--sweep]

Prints one line a shape: microseconds (median of CUDA-graph replays over rotated buffers, larger than the L2 cache but
for the smallest shape), bytes read and written per second, and that as a fraction of what a copy of the same tensor
moves. ``--sweep`` times other launch choices too.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from trace_compile import numerics
from trace_compile.kernels.launch import QuantizeLaunch, quantize_launch, target_of
from trace_compile.kernels.quantize import quantize_rows

SHAPES = [
    (8, 2048),
    (256, 2048),
    (4096, 2048),
    (32768, 768),
    (32768, 2048),
    (196608, 2048),
    (16384, 2880),
    (4096, 14336),
]
L2_BYTES = 64 * 2**20


def microseconds(work: Callable[[Tensor], object], buffers: list[Tensor], repeats: int = 20) -> float:
    """Median time of ``work`` on one buffer; each replay of the graph runs it once on every buffer."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for buffer in buffers:
            work(buffer)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [work(buffer) for buffer in buffers]
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(kept))
    return statistics.median(times)


def check(x: Tensor, outer: Tensor | None, launch: QuantizeLaunch | None = None) -> None:
    """The correctness gate: the first and the last rows of x, byte for byte."""
    got = quantize_rows(x, outer, launch=launch)
    for part in (slice(0, 64), slice(-64, None)):
        want = numerics.quantize(x[part].cpu(), outer="row" if outer is None else outer.cpu())
        assert torch.equal(got.packed[part].cpu(), want.packed) and torch.equal(got.scales[part].cpu(), want.scales)


def bench(rows: int, k: int, own: bool, sweep: bool) -> None:
    size = rows * k * 2
    buffers = [
        torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") for _ in range(max(1, min(64, 2 * L2_BYTES // size)))
    ]
    outer = None if own else torch.tensor([2.0**-8], device="cuda")
    moved = rows * k * (2 + 0.5 + 1 / 16) + 4 * rows * own
    copied = microseconds(torch.clone, buffers)
    copy_speed = 2 * size / copied
    chosen = quantize_launch(rows, k, own, target_of(buffers[0].device))
    launches = {chosen}
    if sweep:
        for block_m, block_k, warps in itertools.product((1, 2, 4, 8), (256, 512, 1024, 2048), (2, 4, 8)):
            if block_m * block_k in (2048, 4096) and block_k < 2 * k:
                launches |= {QuantizeLaunch(block_m, block_k, splits, warps) for splits in {1, -(-k // block_k)}}
    results = []
    for launch in launches:
        check(buffers[0], outer, launch)
        results.append((microseconds(partial(quantize_rows, outer=outer, launch=launch), buffers), launch))
    results.sort(key=lambda pair: pair[0])
    for time, launch in [pair for pair in results if pair[1] == chosen] + (results[:3] if sweep else []):
        mark = "chosen" if launch == chosen else "      "
        print(
            f"{rows:7d} x {k:5d} {'own  ' if own else 'given'} {time:8.1f} us  {moved / time / 1e6:5.2f} TB/s "
            f"{moved / time / copy_speed:5.0%} of copy ({copied:.1f} us)  {mark} "
            f"m{launch.block_m} k{launch.block_k} s{launch.splits} w{launch.num_warps}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time other launch choices and show the best three")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16")
    for (rows, k), own in itertools.product(SHAPES, (True, False)):
        bench(rows, k, own, arguments.sweep and k in (768, 2048))


if __name__ == "__main__":
    main()
