"""What rewritten blocks compute: the op itself, the same under checkpointing, guided, replayed, by every compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backends import CHECKPOINTS, Compiled, GuideRows, RuntimeForTests, assert_equal, chain, gradients
from tests.passes.blocks import E, Grouped, H, K
from tests.passes.test_match import transformers_block
from trace_compile.errors import GuidanceError
from trace_compile.ops import W4A4_ROW, W4A4_TRACED, Activation
from trace_compile.ops.nvfp4_moe import Out
from trace_compile.passes import Mode


def test_a_quantized_block_is_the_op_on_the_routers_choice() -> None:
    block, x = Grouped(), torch.randn(9, H)
    compiled = Compiled(block, Mode(scheme=W4A4_TRACED))
    with torch.no_grad():
        found = compiled(x)
        gates, ids = block.router(x)
        (region,) = compiled.backend.reports[0].regions
        packed = [compiled.runtime.packed(region, w, p) for w, p in (("w13", block.w13), ("w2", block.w2))]
        weights = [t for p in packed for t in (p.codes, p.scales, p.outer)]
        outer = compiled.runtime.outer((("", ""), ("", "")))
        swiglu = Activation.build(True, [("silu", ("gate",)), ("mul", ("%0", "up"))]).key
        flags = (W4A4_TRACED.key, swiglu, "none", "none", False, False)
        expected = torch.ops.trace_compile.nvfp4_moe(
            x, ids, gates, None, None, None, None, *weights, outer, None, None, None, None, *flags
        )
    assert torch.equal(found, expected[Out.Y])


@pytest.mark.parametrize(
    ("kind", "compiler"),
    [*((kind, "eager") for kind in CHECKPOINTS), ("not reentrant", "aot_eager"), ("selective", "aot_eager")],
)
def test_checkpointing_changes_neither_results_nor_gradients_nor_records(kind: str, compiler: str) -> None:
    mode = Mode(scheme=W4A4_ROW, train=True, record="bit", routing=True)
    found = []
    for checkpointed in (False, kind):
        module = chain(checkpointed=checkpointed)
        compiled = Compiled(module, mode, compiler=compiler)
        torch.manual_seed(1)
        x = torch.randn(7, H, requires_grad=True)
        out = compiled(x)
        found.append([out.detach(), *gradients(module, out, x)])
        assert len(compiled.runtime.emitted) == 1  # the recomputation of the backward hands out nothing
        emitted = compiled.runtime.emitted[0]
        found[-1] += [emitted[kind][region] for kind in sorted(emitted) for region in sorted(emitted[kind])]
    assert_equal(found[1], found[0])


def test_training_steps_agree_with_and_without_checkpointing() -> None:
    """Recorded amax and counters, losses and parameters over five steps, with eval toggled in between."""
    mode = Mode(scheme=W4A4_ROW, train=True, record="ranges")
    runs = []
    for checkpointed in (False, True):
        module = chain(checkpointed=checkpointed)
        compiled = Compiled(module, mode)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        values = []
        for step in range(5):
            torch.manual_seed(step)
            loss = compiled(torch.randn(6, H)).square().mean()
            module.eval()
            loss.backward()
            module.train()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
        assert len(compiled.runtime.emitted) == 5
        records = [t for e in compiled.runtime.emitted for kind in sorted(e) for t in e[kind].values()]
        runs.append([*values, *(p.detach().clone() for p in module.parameters()), *records])
        assert not torch.equal(values[0], values[-1])
    assert_equal(runs[1], runs[0])


def test_what_was_recorded_guides_the_trainer_to_the_same_codes() -> None:
    module, x = chain(), torch.randn(8, H)
    recording = Compiled(module, Mode(scheme=W4A4_ROW, record="bit", recorded=frozenset({"blocks.1"})))
    with torch.no_grad():
        rollout = recording(x)
    record = recording.runtime.emitted[0]["record"]
    assert set(record) == {"blocks.1"} and set(recording.runtime.emitted[0]["amax"]) == {"blocks.0", "blocks.1"}
    rows = record["blocks.1"][:, : H // 8 + H // 16].contiguous()
    outer = recording.runtime.emitted[0]["record_outer"]["blocks.1"][:, None]
    hit = torch.arange(8) > 0
    mode = Mode(scheme=W4A4_ROW, train=True, guidance="bit", guided=frozenset({"blocks.1"}), diagnose=True)
    guided = Compiled(module, mode, RuntimeForTests(W4A4_ROW, GuideRows(rows, outer, hit)))
    assert torch.equal(guided(x).detach(), rollout)
    elements, before, after = guided.runtime.emitted[0]["diag"]["blocks.1"][0, :3].tolist()
    assert (elements, before, after) == (7 * H, 0, 0)  # the token without a record is not compared
    drifted = guided(x + 0.01 * torch.randn_like(x))
    elements, before, after = guided.runtime.emitted[1]["diag"]["blocks.1"][0, :3].tolist()
    assert elements == 7 * H and before > 0 and after < before
    assert drifted.requires_grad


@pytest.mark.parametrize("checkpointed", [False, True])
def test_replayed_routing_chooses_and_the_gates_stay_the_trainers_own(checkpointed: bool) -> None:
    module = chain(checkpointed=checkpointed)
    x = torch.randn(6, H, requires_grad=True)
    free = Compiled(module, Mode(scheme=None, routing=True))
    out = free(x)
    expected = [out.detach(), *gradients(module, out, x)]
    own = torch.cat([free.runtime.emitted[0]["routing"][f"blocks.{i}"] for i in range(2)], 1)

    replay = Compiled(module, Mode(scheme=None, replay=True, routing=True))
    for recorded in (own, torch.full_like(own, -1)):  # the model's own choice, given or not given
        replay.runtime.replayed = recorded
        out = replay(x)
        assert_equal([out.detach(), *gradients(module, out, x)], expected)

    other = (own + 1) % E
    other[0] = -1
    replay.runtime.replayed = other
    out = replay(x)
    chosen = torch.cat([replay.runtime.emitted[-1]["routing"][f"blocks.{i}"] for i in range(2)], 1)
    assert torch.equal(chosen[1:], other[1:]) and torch.equal(chosen[0], own[0])

    y = x
    for i, block in enumerate(module.blocks):
        probabilities = torch.nn.functional.linear(y, block.router.weight).softmax(-1)  # type: ignore[union-attr, arg-type]
        ids = chosen[:, i * K : (i + 1) * K]
        gates = probabilities.gather(-1, ids)
        y = y + reference(block, y, gates / gates.sum(-1, keepdim=True), ids)
    torch.testing.assert_close(out, y, rtol=1e-4, atol=1e-4)
    for a, b in zip(gradients(module, out, x), gradients(module, y, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def reference(block: Any, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
    """One token and one choice at a time."""
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros(H)
        for k in range(K):
            e = int(ids[t, k])
            row = row + gates[t, k] * (block.w2[e] @ block.act((block.w13[e] @ x[t])[None])[0])
        rows.append(row)
    return torch.stack(rows)


def test_guidance_of_another_shape_is_refused() -> None:
    runtime = RuntimeForTests(
        W4A4_ROW, GuideRows(torch.zeros(5, 12, dtype=torch.uint8), torch.ones(5, 1), torch.ones(5) > 0)
    )
    compiled = Compiled(chain(blocks=1), Mode(scheme=W4A4_ROW, guidance="bit"), runtime)
    with pytest.raises(GuidanceError, match="guidance has 5 rows of 12 bytes; this call runs 8 tokens"):
        compiled(torch.randn(8, H))


def test_masked_tokens_are_not_counted() -> None:
    runtime = RuntimeForTests(W4A4_ROW, masked=3)
    compiled = Compiled(chain(blocks=1), Mode(scheme=W4A4_ROW, record="ranges"), runtime)
    with torch.no_grad():
        compiled(torch.randn(8, H))
    assert int(runtime.emitted[0]["counts"]["blocks.0"].sum()) == (8 - 3) * K


def test_ranges_are_equal_for_every_implementation_of_the_experts() -> None:
    """The observer sits in the region, so however the model spells its GEMMs, it sees the same inputs."""
    amax = []
    x = torch.randn(2, 6, H)
    for implementation in ("grouped_mm", "batched_mm"):
        block = transformers_block("qwen3", implementation)
        compiled = Compiled(block, Mode(scheme=W4A4_ROW, record="ranges"))
        with torch.no_grad():
            compiled(x)
        emitted = compiled.runtime.emitted[0]
        amax.append([emitted[kind]["experts"] for kind in ("amax", "counts", "hist", "saturated")])
    assert_equal(amax[1], amax[0])
    assert bool((amax[0][0] > 0).any())


@pytest.mark.parametrize(
    ("compiler", "dtype"),
    [
        ("aot_eager", torch.bfloat16),
        pytest.param("inductor", torch.float32, marks=pytest.mark.slow),
        pytest.param("inductor", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_compilers_see_the_same_bits_in_front_of_the_quantizer(compiler: str, dtype: torch.dtype) -> None:
    """An elementwise chain right before the quantizer, and the activation between the GEMMs.

    No multiply-add in it: on a CPU Inductor drops the rounding in between in bfloat16, whatever it is told.
    """

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.scale = Grouped(), nn.Parameter(torch.rand(H) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            return self.block(torch.nn.functional.silu(y) * y)

    found = []
    torch.manual_seed(0)
    module, x = Scaled().to(dtype), torch.randn(9, H).to(dtype)
    for name in ("eager", compiler):
        compiled = Compiled(module, Mode(scheme=W4A4_ROW, record="code", inputs=dtype == torch.bfloat16), compiler=name)
        with torch.no_grad():
            out = compiled(x)
        emitted = compiled.runtime.emitted[0]
        found.append([emitted[kind]["block"] for kind in sorted(emitted)] + [out] * (name != "inductor"))
    for i, (a, b) in enumerate(zip(found[1], found[0], strict=False)):
        assert torch.equal(a, b), f"value {i} differs"


@pytest.mark.slow
def test_inductor_computes_the_same_codes() -> None:
    module, x = chain(checkpointed=True), torch.randn(7, H, requires_grad=True)
    mode = Mode(scheme=W4A4_ROW, train=True, record="code", routing=True)
    found = []
    for compiler in ("eager", "inductor"):
        compiled = Compiled(module, mode, compiler=compiler)
        out = compiled(x)
        emitted = compiled.runtime.emitted[0]
        found.append([emitted[kind]["blocks.0"] for kind in sorted(emitted)])
        found[-1] += [out.detach(), *gradients(module, out, x)]
    kinds = len(compiled.runtime.emitted[0])
    assert_equal(found[1][:kinds], found[0][:kinds])
    for a, b in zip(found[1][kinds:], found[0][kinds:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
