"""What calls of any shape do to a compiled model: few graphs, no waiting for the device, and a limit that is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.tiny import VOCAB, prompts, qwen3, right_padded
from trace_compile import trace_compile
from trace_compile.errors import OperandError
from trace_compile.model import session_of
from trace_compile.ops import SWIGLU, W4A4_ROW, NvFp4MoEOperands
from trace_compile.ops.routing import route

SYNCS = ("aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select", "aten::_unique2")


@pytest.fixture(scope="module")
def guided() -> tuple[Any, Any, Any]:
    """A model, its twin, and a trace that can guide it, scales traced."""
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="trace")
    rollout = model.rollout()
    for _ in range(2):
        with model.trace() as trace:
            rollout(**prompts(), use_cache=False)
        rollout.refit()
    return model, rollout, trace


SHAPES = ((2, 6), (3, 5), (5, 9), (16, 33), (1, 7), (1, 40), (4, 1), (1, 1))


def test_any_batch_length_and_padding_share_a_few_graphs(guided: tuple[Any, Any, Any]) -> None:
    """One graph with gradients for two rows of two tokens and more, and one each for a batch of one, a length of one
    and both, with a mask and without."""
    model, _, _ = guided
    engine = session_of(model).engine
    torch._dynamo.utils.counters.clear()
    before = sum(engine.compile_counts.values())
    for batch, length in SHAPES:
        ids = torch.randint(2, VOCAB, (batch, length))
        assert model(input_ids=ids, use_cache=False).logits.shape == (batch, length, VOCAB)
    plain = sum(engine.compile_counts.values()) - before
    assert 1 <= plain <= 4
    for seed in range(3):
        left = prompts(batch=3 + seed, length=6 + seed, seed=seed)
        right = right_padded(left["input_ids"], left["attention_mask"])
        for side in (left, right, left):
            assert torch.isfinite(model(**side, use_cache=False).logits).all()
    assert sum(engine.compile_counts.values()) - before - plain <= 2
    assert not torch._dynamo.utils.counters["recompile_limit"]


def waits(run: Callable[[], Any]) -> Counter[tuple[str, ...]]:
    """Operations that read a value or a data-dependent size on the host, by the functions of ours that called them.

    The grouped GEMM that PyTorch has for CPUs reads the offsets itself; on a GPU it does not.
    """
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as recorded:
        run()
    found: Counter[tuple[str, ...]] = Counter()
    for event in recorded.events() or ():
        if event.name in SYNCS:
            callers, parent = [], event.cpu_parent
            while parent is not None:
                callers.append(parent.name)
                parent = parent.cpu_parent
            if not any("_grouped_mm" in name for name in callers):
                found[(event.name, *(name.rpartition(" ")[2] for name in callers if "trace_compile" in name))] += 1
    return found


def test_a_step_does_not_wait_for_the_device(guided: tuple[Any, Any, Any]) -> None:
    """Forward and backward with unchanged weights: no wait at all; guided, only while records are looked up."""
    model, rollout, trace = guided
    batch = prompts()

    def step() -> None:
        model(**batch, use_cache=False).logits.square().mean().backward()

    for guide in (None, trace):
        model.guide(guide)
        step()
        unexpected = [callers for callers in waits(step) if guide is None or "lookup" not in callers]
        assert not unexpected
    rollout(**batch, use_cache=False)
    assert not waits(lambda: rollout(**batch, use_cache=False))
    assert waits(lambda: torch.arange(3).sum().item())  # the detector sees what it is for
    model.guide(None)


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_gpu() -> None:
    model = trace_compile(qwen3(num_hidden_layers=1).to("cuda", torch.bfloat16), recipe="qat", compiler="aot_eager")
    rollout, batch = model.rollout(), {k: v.cuda() for k, v in prompts().items()}

    def step() -> None:
        model(**batch, use_cache=False).logits.square().mean().backward()

    for _ in range(2):
        step()
    rollout(**batch, use_cache=False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        rollout(**batch, use_cache=False)
        with pytest.raises(RuntimeError, match="synchroniz"):  # the detector sees what it is for
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_rows_than_int32_offsets_hold_are_refused_by_number() -> None:
    """Group ends are int32, as grouped GEMMs take them; below the limit sizes and addresses are 64-bit."""
    at_limit = torch.empty(2**30 - 1, 2, dtype=torch.int64, device="meta")
    assert route(at_limit, 8).offsets.shape == (8,)
    beyond = torch.empty(2**30, 2, dtype=torch.int64, device="meta")
    tiles_of = pytest.importorskip("trace_compile.kernels.dispatch").tiles_of
    for dispatch in (lambda: route(beyond, 8), lambda: tiles_of(beyond, 8, 16)):
        with pytest.raises(OperandError, match="1073741824 tokens with 2 experts each are 2147483648 rows.*2147483647"):
            dispatch()


def test_shapes_beyond_int32_are_counted_exactly() -> None:
    """The ops' shape functions on tensors of more than 2^31 elements, without memory."""
    tokens, hidden, width, experts = 400_000, 7168, 2048, 256
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(tokens, 8, dtype=torch.int64, device="meta")
    gates = torch.empty(tokens, 8, device="meta")

    def packed(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
        shapes = ((experts, rows, columns // 2), (experts, rows, columns // 16))
        bytes_ = (torch.empty(s, dtype=torch.uint8, device="meta") for s in shapes)
        return *bytes_, torch.empty(experts, device="meta")

    masters = (torch.empty(experts, n, k, device="meta") for n, k in ((2 * width, hidden), (hidden, width)))
    given: dict[str, Any] = dict(zip(("x", "expert_ids", "gates", "w13", "w2"), (x, ids, gates, *masters), strict=True))
    given |= zip(("c13", "s13", "g13", "c2", "s2", "g2"), (*packed(2 * width, hidden), *packed(hidden, width)))
    given |= {"scheme": W4A4_ROW.key, "activation": SWIGLU.key, "guidance": "none", "record": "none"}
    flags = {f.name: False if f.type == "bool" else None for f in fields(NvFp4MoEOperands)}
    out = torch.ops.trace_compile.nvfp4_moe(*(flags | given).values())
    assert x.numel() > 2**31 and out[0].shape == (tokens, hidden)
    assert max(t.numel() for t in out) == tokens * 8 * 2 * width > 2**33  # the pre-activation
