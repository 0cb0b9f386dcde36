"""What quantized and observed graphs read from and hand to the runtime, through checkpoints too; and who runs them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from tests.passes.blocks import Captured, E, Grouped, H, I, K, capture
from trace_compile.errors import GuidanceError, LoweringError
from trace_compile.ops import UNQUANTIZED, W4A4_ROW, W4A4_TRACED, W4A16
from trace_compile.ops.registry import OPS, Provider
from trace_compile.passes import PIPELINE, Mode, PassRunner
from trace_compile.passes.feeds import operand, region_ops
from trace_compile.passes.graph import placeholders, scopes

T = 10


class Two(nn.Module):
    """Two blocks, each under a checkpoint or not."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Grouped(), Grouped()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x


@cache
def captured(checkpointed: bool) -> Captured:
    torch.manual_seed(0)
    return capture(Two(checkpointed), torch.randn(T, H))


def passed(mode: Mode, checkpointed: bool = False) -> GraphModule:
    found = captured(checkpointed)
    return PassRunner(PIPELINE).run(found.graph(), found.inputs, config=mode)


def feeds(gm: GraphModule) -> list[tuple[str, ...]]:
    return [tuple(p for p in (f.kind, f.region, f.weight, f.part) if p) for f in gm.meta.get("feeds", ())]


def emits(gm: GraphModule) -> list[tuple[str, str]]:
    return [(e.kind, e.region) for e in gm.meta.get("emits", ())]


PACKED = [
    ("packed", region, weight, part)
    for region in ("blocks.0", "blocks.1")
    for weight in ("w13", "w2")
    for part in ("codes", "scales", "outer")
]
RANGES = ["amax", "counts", "hist", "saturated"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_identity_needs_nothing(checkpointed: bool) -> None:
    gm = passed(Mode(scheme=None), checkpointed)
    assert feeds(gm) == [] and emits(gm) == []


@pytest.mark.parametrize("checkpointed", [False, True])
def test_packed_weights_are_fed(checkpointed: bool) -> None:
    gm = passed(Mode(scheme=W4A4_ROW), checkpointed)
    assert feeds(gm) == PACKED and emits(gm) == []
    shapes = [tuple(n.meta["example_value"].shape) for n in placeholders(gm.graph)[-6:]]
    assert shapes == [(E, 2 * I, H // 2), (E, 2 * I, H // 16), (E,), (E, H, I // 2), (E, H, I // 16), (E,)]


def test_masters_are_operands_only_where_gradients_are_wanted() -> None:
    for mode, given in (
        (Mode(scheme=W4A4_ROW), False),
        (Mode(scheme=W4A4_ROW, train=True), True),
        (Mode(scheme=UNQUANTIZED), True),
        (Mode(scheme=W4A16), False),
    ):
        ops = list(region_ops(passed(mode), "nvfp4_moe"))
        assert len(ops) == 2
        assert all((operand(node, "w13") is not None) == given for _, node, _ in ops)
    assert feeds(passed(Mode(scheme=UNQUANTIZED))) == []


@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_region_reads_its_own_traced_scales(checkpointed: bool) -> None:
    gm = passed(Mode(scheme=W4A4_TRACED), checkpointed)
    assert feeds(gm).count(("outer",)) == 1
    (outer,) = [n for n in placeholders(gm.graph) if n.name.startswith("feed_outer")]
    assert tuple(outer.meta["example_value"].shape) == (4,)
    assert [user.args[1] for user in outer.users] == [slice(0, 2), slice(2, 4)]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_guidance_is_cut_into_the_guided_regions_columns(checkpointed: bool) -> None:
    both = passed(Mode(scheme=W4A4_ROW, guidance="bit"), checkpointed)
    assert [f for f in feeds(both) if f[0] != "packed"] == [("guide",), ("guide_outer",), ("hit",)]
    (guide,) = [n for n in placeholders(both.graph) if n.name == "feed_guide"]
    width = H // 8 + H // 16
    assert tuple(guide.meta["example_value"].shape)[1] == 2 * width
    assert [u.args[1][1] for u in guide.users] == [slice(0, width), slice(width, 2 * width)]  # type: ignore[index]
    last = passed(Mode(scheme=W4A4_ROW, guidance="code", guided=frozenset({"blocks.1"})), checkpointed)
    (guide,) = [n for n in placeholders(last.graph) if n.name == "feed_guide"]
    assert tuple(guide.meta["example_value"].shape)[1] == H // 2 + H // 16
    kinds = {region.name: operand(node, "guidance") for _, node, region in region_ops(last, "nvfp4_moe")}
    assert kinds == {"blocks.0": "none", "blocks.1": "code"}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_records_come_out_in_order(checkpointed: bool) -> None:
    mode = Mode(scheme=W4A4_ROW, record="bit", recorded=frozenset({"blocks.1"}), routing=True, inputs=True)
    gm = passed(mode, checkpointed)
    assert feeds(gm) == [*PACKED, ("valid",)]
    assert emits(gm) == [
        *((kind, "blocks.0") for kind in RANGES),
        *((kind, "blocks.1") for kind in ("record", "record_outer", *RANGES)),
        ("routing", "blocks.0"),
        ("routing", "blocks.1"),
        ("input", "blocks.1"),
    ]


def test_a_float_graph_can_hand_out_routing() -> None:
    gm = passed(Mode(scheme=None, routing=True), checkpointed=True)
    assert emits(gm) == [("routing", "blocks.0"), ("routing", "blocks.1")]
    found = captured(True)
    results = gm(*found.args)
    assert len(results) == 3 and all(tuple(r.shape) == (T, K) and r.dtype == torch.int64 for r in results[1:])


def test_regions_over_different_tokens_cannot_share_records() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Grouped(), Grouped()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).view(-1, 2, H).sum(1))

    found = capture(Pooled(), torch.randn(T, H))
    run = PassRunner(PIPELINE).run
    assert len(run(found.graph(), found.inputs, config=Mode(scheme=W4A4_ROW)).meta["regions"]) == 2
    with pytest.raises(GuidanceError, match="first runs on .* tokens and second on"):
        run(found.graph(), found.inputs, config=Mode(scheme=W4A4_ROW, record="ranges"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": None, "guidance": "bit"}, "guidance 'bit' needs quantized activations"),
        ({"scheme": W4A16, "record": "code"}, "record 'code' needs quantized activations"),
        ({"scheme": None, "record": "ranges"}, "use the scheme UNQUANTIZED"),
        ({"scheme": W4A4_ROW, "diagnose": True}, "diagnose compares quantized activations"),
    ],
)
def test_modes_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GuidanceError, match=message):
        Mode(**changes)


# --- lowering ---------------------------------------------------------------------------------------------------------


def test_the_first_provider_that_does_not_refuse_runs_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = OPS["nvfp4_moe"]
    native = next(p for p in spec.providers if p.name == "native")
    narrow = Provider("narrow", object(), refuses=lambda o: "only for hidden 32" if o.x.shape[1] != 32 else None)
    fast = Provider("fast", torch.ops.trace_compile.nvfp4_moe.default)
    monkeypatch.setattr(spec, "providers", [narrow, fast, native])
    gm = passed(Mode(scheme=W4A4_ROW), checkpointed=True)
    assert [(c.region, c.op, c.provider, c.reason) for c in gm.meta["choices"]] == [
        (region, "nvfp4_moe", "fast", "narrow: only for hidden 32") for region in ("blocks.0", "blocks.1")
    ]


def test_an_op_that_nobody_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = OPS["moe_float"]
    refusing = [replace(p, refuses=lambda o: "not today") for p in spec.providers]
    monkeypatch.setattr(spec, "providers", refusing)
    with pytest.raises(LoweringError, match="nobody runs moe_float: .*not today"):
        passed(Mode(scheme=None))


def test_no_op_is_left_without_a_provider() -> None:
    for mode in (Mode(scheme=None), Mode(scheme=W4A4_ROW, train=True)):
        gm = passed(mode, checkpointed=True)
        ops = [n for scope in scopes(gm) for n in scope.graph.nodes if "region" in n.meta]
        assert len(ops) == 2 and all(n.meta["provider"] == "native" for n in ops)
