"""The ops as compilers see them: schemas, fake implementations, autograd under tracing, equality with eager."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.reference import SQUARED_RELU, Case, make_case, ops
from trace_compile.ops import UNQUANTIZED, W4A4_ROW, W4A4_TRACED, W4A16, MoEScheme, OperandScheme, Out, check_close

ACT_ONLY = MoEScheme(None, OperandScheme())
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
STATIC_CHECKS = CHECKS[:-1]
TRACED = torch.tensor([2.0**-9, 2.0**-8])


def guided(case: Case, kind: str) -> dict[str, Any]:
    """Options of a guided, recorded, diagnosed call whose guide is a slice of wider rows, as in a trace."""
    tokens = case.x.shape[0]
    outer_in = TRACED if case.scheme.act and case.scheme.act.outer == "traced" else None
    rollout = case.run(record=kind, outer_in=outer_in)
    width = rollout[Out.RECORD].shape[1] - (1 if outer_in is None else 0)
    wide = torch.cat([torch.zeros(tokens, 3, dtype=torch.uint8), rollout[Out.RECORD], rollout[Out.RECORD]], 1)
    return {
        "guide": wide[:, 3 : 3 + width],
        "guide_outer": torch.stack([rollout[Out.RECORD_OUTER]] * 2, 1)[:, 1],
        "hit": torch.arange(tokens) % 3 > 0,
        "valid": torch.arange(tokens) % 5 > 0,
        "guidance": kind,
        "record": kind,
        "diagnose": True,
        "outer_in": outer_in,
    }


VARIANTS: dict[str, Callable[[], tuple[Case, dict[str, Any]]]] = {
    "row": lambda: (make_case(W4A4_ROW), {}),
    "recompute": lambda: (make_case(W4A4_ROW, bias=False), {"recompute": True}),
    "traced-ranges": lambda: (make_case(W4A4_TRACED), {"outer_in": TRACED, "record": "ranges"}),
    "w4a16": lambda: (make_case(W4A16), {"record": "ranges"}),
    "unquantized": lambda: (make_case(UNQUANTIZED), {}),
    "act-only": lambda: (make_case(ACT_ONLY, activation=SQUARED_RELU), {"record": "bit"}),
    "inference": lambda: (make_case(W4A4_ROW, grad=False), {"w13": None, "w2": None, "record": "code"}),
    "guided-bit": lambda: (case := make_case(W4A4_ROW), guided(case, "bit")),
    "guided-code": lambda: (case := make_case(W4A4_TRACED), guided(case, "code")),
    "one-token": lambda: (make_case(W4A4_ROW, tokens=1), {"record": "bit"}),
    "no-token": lambda: (make_case(W4A4_ROW, tokens=0), {"record": "bit"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_opcheck_nvfp4_moe(name: str) -> None:
    case, options = VARIANTS[name]()
    torch.library.opcheck(ops.nvfp4_moe.default, case.operands(**options), test_utils=CHECKS)


@pytest.mark.parametrize("name", ["row", "recompute", "w4a16", "unquantized", "act-only"])
def test_opcheck_backward(name: str) -> None:
    case, options = VARIANTS[name]()
    with torch.no_grad():
        operands = backward_operands(case, case.run(**options), bool(options.get("recompute")), [True] * 6)
        torch.library.opcheck(ops.nvfp4_moe_backward.default, operands, test_utils=CHECKS)
        partial = backward_operands(case, case.run(**options), bool(options.get("recompute")), [False, True] * 3)
        torch.library.opcheck(ops.nvfp4_moe_backward.default, partial, test_utils=STATIC_CHECKS)


def backward_operands(case: Case, out: tuple[Tensor, ...], recompute: bool, needs: list[bool]) -> tuple[Any, ...]:
    weight, act = case.scheme.weight, case.scheme.act
    whole = (case.x if act is None else None, case.gates, *((None, None) if weight else (case.w13, case.w2)))
    tensors = (*whole, case.b13, case.b2, *case.packed(), *out[Out.X_CODES :])
    tensors = tuple(t.detach() if t is not None else None for t in tensors)
    return (torch.randn(case.x.shape), *tensors, case.scheme.key, case.activation.key, recompute, *needs)


@pytest.mark.parametrize("weight_input", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_opcheck_moe_float(tokens: int, weight_input: bool) -> None:
    case = make_case(UNQUANTIZED, tokens=tokens, bias=weight_input)
    torch.library.opcheck(ops.moe_float.default, case.float_operands(weight_input), test_utils=CHECKS)
    with torch.no_grad():
        still = make_case(UNQUANTIZED, tokens=tokens, bias=weight_input, grad=False)
        for save in (True, False):
            saving = (*still.float_operands(weight_input), save)
            torch.library.opcheck(ops.moe_float_saving.default, saving, test_utils=STATIC_CHECKS)
        *operands, activation, _ = still.float_operands(weight_input)
        saved = ops.moe_float_saving(*operands, activation, weight_input, True)[1:]
        for needs in ((True, True, True), (False, True, False)):
            everything = (torch.randn(tokens, 48), *operands, *saved, activation, weight_input, *needs)
            torch.library.opcheck(ops.moe_float_backward.default, everything, test_utils=STATIC_CHECKS)


def views(t: Tensor) -> list[Tensor]:
    """The same values in other strides: transposed storage, a slice of wider rows, every second row, a stride of 0."""
    wide = torch.cat([t, t], -1)
    spread = torch.stack([t, t], 1).flatten(0, 1)
    result = [t.transpose(0, -1).contiguous().transpose(0, -1), wide[..., : t.shape[-1]], spread[::2]]
    return result if t.dim() != 2 else [*result, t[:1].expand_as(t)]


@pytest.mark.parametrize("name", ["row", "guided-bit", "unquantized", "act-only", "no-token"])
def test_fake_agrees_with_real_for_odd_views(name: str) -> None:
    """Shape, dtype, stride and device, whatever the strides of the operands; values do not depend on strides."""
    case, options = VARIANTS[name]()
    operands = [t.detach() if isinstance(t, Tensor) else t for t in case.operands(**options)]
    expected = ops.nvfp4_moe(*operands)
    for i, operand in enumerate(operands):
        if not isinstance(operand, Tensor) or operand.dim() == 0 or operand.numel() == 0:
            continue
        for view in views(operand):
            changed = [*operands[:i], view, *operands[i + 1 :]]
            real = ops.nvfp4_moe(*changed)
            if torch.equal(view, operand):
                assert all(torch.equal(a, b) for a, b in zip(real, expected, strict=True)), i
            with FakeTensorMode() as mode:
                fake = ops.nvfp4_moe(*(mode.from_tensor(o) if isinstance(o, Tensor) else o for o in changed))
            for j, (f, r) in enumerate(zip(fake, real, strict=True)):
                assert (f.shape, f.dtype, f.stride(), f.device) == (r.shape, r.dtype, r.stride(), r.device), (i, Out(j))


def test_gradients_of_broadcast_and_transposed_outputs() -> None:
    """Incoming gradients with a stride of 0 or in column order: the fallbacks of grouped GEMMs trip over those."""
    case = make_case(W4A4_ROW, grad=True)
    for run in (lambda: case.run()[Out.Y], lambda: ops.moe_float(*case.float_operands())):
        dy = torch.randn(13, 48, generator=torch.Generator().manual_seed(0))
        expected = case.grads(run(), dy)
        for a, b in zip(case.grads(run(), dy.t().contiguous().t()), expected, strict=True):
            assert torch.equal(a, b)
        ones = case.grads(run(), torch.ones(13, 48))
        for a, b in zip(case.grads(run(), torch.ones(()).expand(13, 48)), ones, strict=True):
            assert torch.equal(a, b)


def region(case: Case, options: dict[str, Any]) -> Callable[..., Any]:
    """A function of the leaves and the tokens' operands, with work on both sides of the op."""

    scheme, activation = case.scheme.key, case.activation.key
    observed = [int(i) for i in (Out.RECORD, Out.AMAX, Out.HIST, Out.SATURATED)]

    def run(x: Tensor, ids: Tensor, gates: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor, packed, feeds):
        out = ops.nvfp4_moe(
            x * 1.5, ids, gates.softmax(-1), w13, w2, b13, b2, *packed, *feeds, scheme, activation, *options
        )
        return out[0] + x, *(out[i] for i in observed)

    return run


@pytest.mark.parametrize("scheme", [W4A4_ROW, W4A4_TRACED, W4A16])
def test_compiled_equals_eager_bit_for_bit(scheme: MoEScheme) -> None:
    """One dynamic graph and one for a single token serve every length; outputs, records and gradients are eager's."""
    options = ("none", "ranges" if scheme is W4A16 else "bit", False, False)
    graphs = 0

    def count(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    torch._dynamo.reset()
    compiled = None
    for tokens in (7, 33, 1, 16, 0, 100):
        case = make_case(scheme, tokens=tokens, seed=tokens)
        eager = region(case, options)  # type: ignore[arg-type]
        compiled = compiled or torch.compile(eager, backend=count, fullgraph=True, dynamic=True)
        feeds = (TRACED if scheme is W4A4_TRACED else None, None, None, None, torch.arange(tokens) % 4 > 0)
        operands = (case.x, case.expert_ids, case.gates, case.w13, case.w2, case.b13, case.b2, case.packed(), feeds)
        expected, actual = eager(*operands), compiled(*operands)
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
        dy = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(2))
        for a, b in zip(case.grads(expected[0], dy), case.grads(actual[0], dy, again=False), strict=True):
            assert torch.equal(a, b)
    assert graphs <= 3


def test_exported_program_serves_any_routing() -> None:
    class Experts(torch.nn.Module):
        def __init__(self, case: Case) -> None:
            super().__init__()
            self.key = case.activation.key
            for name in ("w13", "w2", "b13", "b2"):
                self.register_parameter(name, torch.nn.Parameter(getattr(case, name).detach()))

        def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            return ops.moe_float(x, ids, gates, self.w13, self.w2, self.b13, self.b2, self.key, False)

    case = make_case(UNQUANTIZED, tokens=9, grad=False)
    module = Experts(case)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    hot = torch.zeros_like(case.expert_ids)
    with torch.no_grad():
        program = torch.export.export(module, (case.x, hot, case.gates), dynamic_shapes=({0: tokens},) * 3)
        assert torch.equal(
            program.module()(case.x, case.expert_ids, case.gates), module(case.x, case.expert_ids, case.gates)
        )
        more = make_case(UNQUANTIZED, tokens=21, grad=False)
        assert torch.equal(
            program.module()(more.x, more.expert_ids, more.gates), module(more.x, more.expert_ids, more.gates)
        )


def checkpointed(case: Case, use: bool) -> Callable[[], Tensor]:
    operands = case.operands()

    def run(x: Tensor, gates: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor) -> Tensor:
        y = ops.nvfp4_moe(x, operands[1], gates, w13, w2, b13, b2, *operands[7:])[0]
        return y + ops.moe_float(y, operands[1], gates, w13, w2, b13, b2, activation, False)

    activation = case.activation.key
    leaves = case.leaves
    return lambda: torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False) if use else run(*leaves)


@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing_changes_no_bit(compiled: bool) -> None:
    case = make_case(W4A4_ROW)
    expected = checkpointed(case, False)()
    run = checkpointed(case, True)
    actual = torch.compile(run, backend="aot_eager", fullgraph=True)() if compiled else run()
    assert torch.equal(actual, expected)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    for a, b in zip(case.grads(actual, dy, again=False), case.grads(expected, dy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_inductor_sees_the_same_bits() -> None:
    """The op is a barrier: what stands before the quantizer is stored and read, so codes cannot depend on fusion."""
    torch._dynamo.reset()
    case = make_case(W4A4_ROW, tokens=19)
    options = ("none", "code", False, False)
    eager = region(case, options)  # type: ignore[arg-type]
    feeds = (None, None, None, None, None)
    operands = (case.x, case.expert_ids, case.gates, case.w13, case.w2, case.b13, case.b2, case.packed(), feeds)
    expected = eager(*operands)
    actual = torch.compile(eager, backend="inductor", fullgraph=True, dynamic=True)(*operands)
    for a, b in zip(actual[1:], expected[1:], strict=True):
        assert torch.equal(a, b)
    check_close(actual[0], expected[0], k=1)
    dy = torch.ones_like(expected[0])
    for a, b in zip(case.grads(actual[0], dy, again=False), case.grads(expected[0], dy), strict=True):
        check_close(a, b, k=64, stages=2)
