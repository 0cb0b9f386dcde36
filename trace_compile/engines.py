"""Live engines: hand a stream of weights to a running vLLM or SGLang through the hook that each documents.

    from trace_compile.engines import refit_vllm
    refit_vllm(llm, model.stream_weights(format="compressed-tensors"))

The engine must have been started from a checkpoint that ``export`` wrote in the same ``format`` with the same
``activations``: its parameters are then of the packed kinds that the stream fills, expert by expert as 2-D matrices
under the family's checkpoint names. Both engines load such a stream as they load files, into the tensors that they
have, so CUDA graphs stay valid.

Invariants: a stream is read through once before an engine sees its first tensor, so NaN, a missing trace, or a name
that comes twice are errors here and change nothing there; sending the same stream again is the same as once. What an
engine does with an error of its own half-way is its affair: send the stream again. Do not train meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from trace_compile.errors import RefitError

Weights = Iterable[tuple[str, Tensor]]
"""Can be iterated more than once, as a ``ModelStream`` can."""

DEFAULT_BUCKET_BYTES = 512 * 2**20


class VllmEngine(Protocol):
    """``vllm.LLM`` with its worker in this process, or any object that calls a worker's method for you."""

    def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> Any: ...


class SglangEngine(Protocol):
    """``sglang.Engine``."""

    def update_weights_from_tensor(self, named_tensors: list[tuple[str, Tensor]], *, flush_cache: bool) -> Any: ...


def refit_vllm(llm: VllmEngine, weights: Weights, *, device: torch.device | str | None = None) -> int:
    """Load ``weights`` into ``llm``; the number of tensors sent.

    Uses the worker method ``reload_weights(weights_iterator=...)`` (vLLM 0.22: it restores the layout that weights
    have before they are repacked for kernels, loads, repacks, and copies into the old addresses). A worker in another
    process cannot take an iterator: start vLLM with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, or call ``load_weights`` from
    a worker extension that receives the tensors in a way of your own. ``device``: move tensors there first.

    The stream must be whole (``others=True``): vLLM counts what a layer has loaded.
    """
    count = check_stream(weights)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": _moved(weights, device)})
    return count


def refit_sglang(
    engine: SglangEngine,
    weights: Weights,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    device: torch.device | str | None = None,
) -> int:
    """Load ``weights`` into ``engine`` by ``update_weights_from_tensor``; the number of tensors sent.

    They go in buckets of about ``bucket_bytes``, and the cache is flushed with the last. Raises ``RefitError`` if the
    engine answers that it failed.
    """
    count = check_stream(weights)
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for sent, (name, tensor) in enumerate(_moved(weights, device), 1):
        bucket.append((name, tensor))
        size += tensor.nbytes
        if size >= bucket_bytes or sent == count:
            answer = engine.update_weights_from_tensor(bucket, flush_cache=sent == count)
            if isinstance(answer, tuple) and not answer[0]:
                raise RefitError(f"SGLang refused weights up to {name}: {answer[1]}; send the whole stream again")
            bucket, size = [], 0
    return count


def check_stream(weights: Weights) -> int:
    """Read a stream to its end; the number of its tensors. Raises what the stream raises, and ``RefitError`` for a
    name that comes twice or a stream that can be read only once."""
    if iter(weights) is weights:
        raise RefitError(
            "the stream can be read only once; pass model.stream_weights() itself, not an iterator over it"
        )
    names: set[str] = set()
    for name, _ in weights:
        if name in names:
            raise RefitError(f"{name} comes twice")
        names.add(name)
    return len(names)


def _moved(weights: Weights, device: torch.device | str | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        yield name, tensor if device is None else tensor.to(device)
