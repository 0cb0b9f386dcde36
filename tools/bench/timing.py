"""The one timer of the benchmarks: CUDA graphs, so that launches cost nothing, and medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

_WARM_UP = 3


def microseconds(work: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median time of one of ``work``, which run one after the other in a CUDA graph.

    Several are the same work on rotated operands, which together should exceed the L2 cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            for one in work:
                one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [one() for one in work]
    times = []
    for _ in range(_WARM_UP + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(kept))
    return statistics.median(times[_WARM_UP:])
