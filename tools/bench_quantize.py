"""Times ``kernels.quantize`` on a GPU, behind a check of its bytes, beside a copy of the same tensor in the same run.

    python -m tools.bench_quantize [--sweep]

Prints one line a shape: microseconds (median of CUDA-graph replays over rotated buffers, larger than the L2 cache but
for the smallest shape), bytes read and written per second, and that as a fraction of what a copy of the same tensor
moves; to packed codes, and to values in bfloat16. ``--sweep`` times other launch choices too.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from tools.bench.timing import microseconds
from trace_compile import numerics
from trace_compile.kernels.launch import WordsLaunch
from trace_compile.kernels.quantize import quantize_words

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


def check(x: Tensor, outer: Tensor | None, run: Callable[[Tensor], Any], values: bool) -> None:
    """The correctness gate: the first and the last rows of x, byte for byte."""
    got = run(x)
    for part in (slice(0, 64), slice(-64, None)):
        want = numerics.quantize(x[part].cpu(), outer="row" if outer is None else outer.cpu())
        if values:
            assert torch.equal(got[part].cpu(), want.dequantize().bfloat16())
        else:
            assert torch.equal(got[0][part].cpu(), want.packed) and torch.equal(got[1][part].cpu(), want.scales)


def runner(x: Tensor, outer: Tensor | None, values: bool, plan: WordsLaunch | None) -> Callable[[Tensor], Any]:
    """Quantizes into tensors of its own: codes and scales, or values."""
    rows, k = x.shape
    own = torch.empty(rows, device="cuda") if outer is None else outer
    target = torch.empty_like(x)
    packed = tuple(torch.empty(rows, k // n, dtype=torch.uint8, device="cuda") for n in (2, 16))

    def run(x: Tensor) -> Any:
        if values:
            quantize_words(x, own, 0 if own is outer else 1, own is not outer, None, target, plan=plan)
            return target
        quantize_words(x, own, 0 if own is outer else 1, own is not outer, packed, None, plan=plan)  # type: ignore[arg-type]
        return packed

    return run


def bench(rows: int, k: int, own: bool, values: bool, sweep: bool) -> None:
    size = rows * k * 2
    buffers = [
        torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") for _ in range(max(1, min(64, 2 * L2_BYTES // size)))
    ]
    outer = None if own else torch.tensor([2.0**-8], device="cuda")
    moved = rows * k * (4 if values else 2 + 0.5 + 1 / 16) + 4 * rows * own
    target = torch.empty_like(buffers[0])
    copied = microseconds([partial(target.copy_, buffer) for buffer in buffers])
    copy_speed = 2 * size / copied
    plans: list[WordsLaunch | None] = [None]
    if sweep:
        sizes = itertools.product((1, 2, 4, 8), (16, 32, 64, 128), (1, 2, 4, 8))
        plans += [WordsLaunch(m, b, w) for m, b, w in sizes if 1 <= m * b // (32 * w) <= 4 and b < 2 * k // 16]
    results: list[tuple[float, WordsLaunch | None]] = []
    for plan in plans:
        run = runner(buffers[0], outer, values, plan)
        check(buffers[0], outer, run, values)
        results.append((microseconds([partial(run, buffer) for buffer in buffers]), plan))
    results[1:] = sorted(results[1:], key=lambda pair: pair[0])[:3]
    for time, plan in results:
        print(
            f"{rows:7d} x {k:5d} {'own  ' if own else 'given'} {'values' if values else 'packed'} {time:8.1f} us "
            f"{moved / time / 1e6:5.2f} TB/s {moved / time / copy_speed:5.0%} of copy ({copied:.1f} us)  {plan or ''}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time other launch choices and show the best three")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16")
    for (rows, k), own, values in itertools.product(SHAPES, (True, False), (False, True)):
        bench(rows, k, own, values, arguments.sweep and k in (768, 2048))


if __name__ == "__main__":
    main()
