"""nvfp4_moe, forward and backward, against the float64 reference; its behaviour at the edges."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.ops.reference import (
    ACTIVATIONS,
    GPT_OSS,
    SQUARED_RELU,
    TARGETS,
    Case,
    check_against_reference,
    compare_gradients,
    in_range,
    make_case,
    needs_gpu,
    ops,
    poison,
    quantized_operands,
    reference,
    slots,
)
from trace_compile.errors import BlockSizeError, DeviceMismatchError, TraceCompileError, UnknownFormatError
from trace_compile.ops import (
    SWIGLU,
    UNQUANTIZED,
    W4A4_ROW,
    W4A4_TRACED,
    W4A16,
    Activation,
    MoEScheme,
    OperandScheme,
    Out,
    check_close,
)

EXPERT, ROW = OperandScheme(outer="expert"), OperandScheme(outer="row")
SCHEMES = {
    "row": W4A4_ROW,
    "traced": W4A4_TRACED,
    "tensor": MoEScheme(OperandScheme(outer="tensor"), OperandScheme(outer="tensor")),
    "w4a16": W4A16,
    "a4": MoEScheme(None, ROW),
    "unquantized": UNQUANTIZED,
    "fp32-profile": MoEScheme(OperandScheme(profile="fp32", outer="expert"), OperandScheme(profile="fp32")),
    "mxfp4": MoEScheme(OperandScheme("mxfp4", outer="expert"), OperandScheme("mxfp4")),
}
TRACED = torch.tensor([2.0**-9, 2.0**-8])


def dy_of(case: Case, seed: int = 1) -> Tensor:
    dy = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(seed))
    return dy.to(case.x.device, case.x.dtype)


@pytest.mark.parametrize(("device", "dtype"), TARGETS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_forward_and_every_gradient(name: str, bias: bool, device: str, dtype: torch.dtype) -> None:
    hidden, width = (64, 32) if name == "mxfp4" else (80, 48)
    case = make_case(SCHEMES[name], tokens=29, hidden=hidden, width=width, bias=bias, device=device, dtype=dtype)
    if "tensor" in name:  # a tensor's maximum is taken over routed tokens only: the simple quantizer sees all of them
        case = case.with_leaves(expert_ids=case.expert_ids.clamp(0, case.experts - 1))
    check_against_reference(case, dy_of(case), outer_in=TRACED.to(device) if name == "traced" else None)


@pytest.mark.parametrize("width", [16, 48, 80, 96, 112, 144])
@pytest.mark.parametrize("hidden", [16, 48, 80, 96, 112, 144])
def test_every_multiple_of_the_block(hidden: int, width: int) -> None:
    case = make_case(W4A4_ROW, hidden=hidden, width=width, seed=hidden + width)
    check_against_reference(case, dy_of(case))


@pytest.mark.parametrize(("device", "dtype"), TARGETS)
@pytest.mark.parametrize(("hidden", "width"), [(2880, 16), (16, 2880)])
def test_wide(hidden: int, width: int, device: str, dtype: torch.dtype) -> None:
    case = make_case(W4A4_ROW, tokens=5, hidden=hidden, width=width, device=device, dtype=dtype)
    check_against_reference(case, dy_of(case))


@pytest.mark.parametrize(("device", "dtype"), TARGETS)
@pytest.mark.parametrize("activation", [GPT_OSS, SQUARED_RELU])
def test_other_activations_with_values_beyond_the_clamp(
    activation: Activation, device: str, dtype: torch.dtype
) -> None:
    case = make_case(W4A4_ROW, activation=activation, device=device, dtype=dtype, tokens=20)
    case = case.with_leaves(x=case.x * 8)
    out = check_against_reference(case, dy_of(case))
    assert (out[Out.PRE].abs() > 7).any()


def test_swapped_halves_are_noticed() -> None:
    """The comparison must fail for a mutant that takes up for gate: otherwise it shows nothing."""
    case = make_case(W4A4_ROW)
    ref = reference(case, dy_of(case), *quantized_operands(case, case.run(), None))
    swapped = case.with_leaves(w13=case.w13.roll(case.w2.shape[2], dims=1))
    out = swapped.run()
    for actual, expected in ((slots(case, out[Out.PRE], out), ref.pre), (out[Out.Y], ref.y)):
        with pytest.raises(AssertionError, match="relative RMS"):
            check_close(actual, expected, k=64, stages=4)
    with pytest.raises(AssertionError, match="relative RMS"):
        compare_gradients(case, swapped.grads(out[Out.Y], dy_of(case)), ref.grads)


def test_unquantized_scheme_is_the_float_op_bit_for_bit() -> None:
    case = make_case(UNQUANTIZED, tokens=40, hidden=64)
    ids = case.expert_ids.clamp(0, 2)  # at most 16 rows: stable and unstable sorting agree
    case = case.with_leaves(expert_ids=ids[:8], x=case.x[:8], gates=case.gates[:8])
    assert torch.equal(case.run()[Out.Y], ops.moe_float(*case.float_operands()))


@pytest.mark.parametrize("scheme", [W4A4_ROW, W4A16, MoEScheme(None, ROW)])
def test_recompute_changes_no_bit_and_saves_no_preactivation(scheme: MoEScheme) -> None:
    case = make_case(scheme)
    kept, again = case.run(), case.run(recompute=True)
    assert torch.equal(kept[Out.Y], again[Out.Y])
    assert again[Out.PRE].numel() == 0 < kept[Out.PRE].numel()
    for a, b in zip(case.grads(kept[Out.Y], dy_of(case)), case.grads(again[Out.Y], dy_of(case)), strict=True):
        assert torch.equal(a, b)


def test_saved_operands_take_four_and_a_half_bits() -> None:
    tokens, top_k, experts, hidden, width = 64, 4, 8, 128, 64
    case = make_case(W4A4_ROW, tokens=tokens, top_k=top_k, experts=experts, hidden=hidden, width=width)
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        case.run(recompute=True)
    given = {t.data_ptr() for t in case.operands() if isinstance(t, Tensor) and t.numel()}
    shared = [case.gates, case.b13, case.b2]
    sizes = [t.nbytes for t in saved if t.data_ptr() not in given and not any(t is s for s in shared)]
    slots = tokens * top_k
    operands = (tokens * hidden + slots * width) * 9 // 16 + 4 * (tokens + slots)  # 4.5 bits, one float32 per row
    weights = sum(t.nbytes for t in case.packed())  # the caller's packed buffers, not copies: made anew in this test
    assert sum(sizes) == operands + weights + 8 * slots + 4 * experts
    assert not any(t.is_floating_point() and t.numel() >= case.w2.numel() for t in saved)


@pytest.mark.parametrize(("device", "dtype"), TARGETS)
@pytest.mark.parametrize("empty", [(1, 4), (0,), (5,), (0, 1, 2, 4, 5)])
def test_experts_without_tokens_get_exact_zeros(empty: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    used = torch.tensor([e for e in range(6) if e not in empty])
    ids = used[torch.randint(0, len(used), (33, 2), generator=torch.Generator().manual_seed(0))]
    case = make_case(W4A4_ROW, experts=6, ids=ids, tokens=33, device=device, dtype=dtype)
    poison()
    out = check_against_reference(case, dy_of(case))
    poison()
    _, _, *params = case.grads(out[Out.Y], dy_of(case))
    for grad in params:
        assert (grad[list(empty)] == 0).all()
        assert (grad[used] != 0).flatten(1).any(1).all()


def test_gradients_accumulate_over_two_uses_of_a_layer() -> None:
    case = make_case(W4A4_ROW)
    dy = dy_of(case)
    once = case.grads(case.run()[Out.Y], dy)
    twice = case.grads(case.run()[Out.Y] + case.run()[Out.Y], dy)
    for a, b in zip(once, twice, strict=True):
        assert torch.equal(2 * a, b)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("scheme", [W4A4_ROW, SCHEMES["tensor"], W4A16])
@pytest.mark.parametrize(("device", "dtype"), TARGETS)
def test_no_token_and_one_token(scheme: MoEScheme, tokens: int, device: str, dtype: torch.dtype) -> None:
    case = make_case(scheme, tokens=tokens, device=device, dtype=dtype)
    out = case.run(record="ranges")
    assert out[Out.Y].shape == (tokens, 48)
    for leaf, grad in zip(case.leaves, case.grads(out[Out.Y], dy_of(case)), strict=True):
        assert grad.shape == leaf.shape and grad.isfinite().all()
        assert tokens or (grad == 0).all()
    if tokens:
        check_against_reference(case, dy_of(case)) if scheme is not SCHEMES["tensor"] else None


def test_routes_out_of_range_contribute_nothing() -> None:
    case = make_case(W4A4_ROW, tokens=20)
    ids = case.expert_ids.clone()
    ids[3], ids[7] = torch.tensor([-1, -5]), torch.tensor([3, 2**40])
    loud = case.x.detach().clone()
    loud[3] = torch.nan
    gates = case.gates.detach().clone()
    gates[7] = torch.inf
    case = case.with_leaves(expert_ids=ids, x=loud, gates=gates)
    out = case.run(record="ranges")
    grads = case.grads(out[Out.Y], dy_of(case))
    assert (out[Out.Y][[3, 7]] == 0).all() and (grads[0][[3, 7]] == 0).all() and (grads[1][[3, 7]] == 0).all()
    assert all(g.isfinite().all() for g in grads)
    quiet = case.with_leaves(x=torch.where(loud.isnan(), 0, loud), gates=gates.nan_to_num(posinf=1))
    for a, b in zip(case.run(record="ranges"), quiet.run(record="ranges"), strict=True):
        if a.shape[0] in (3, 2, 20) and a.dtype != torch.uint8:
            assert torch.equal(a, b)


@pytest.mark.parametrize("poisoned", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", [W4A4_ROW, SCHEMES["tensor"], W4A16])
def test_a_poisoned_token_spoils_itself_only(scheme: MoEScheme, poisoned: float) -> None:
    ids = torch.randint(0, 3, (9, 2), generator=torch.Generator().manual_seed(5))
    case = make_case(scheme, ids=ids, tokens=9)
    x = case.x.detach().clone()
    x[4] = 0  # so that the whole-tensor maximum is the same with and without it
    clean = case.with_leaves(x=x).run()[Out.Y]
    x[4, 7] = poisoned
    y = case.with_leaves(x=x).run()[Out.Y]
    others = torch.arange(9) != 4
    assert torch.equal(y[others], clean[others])
    assert y[4].isnan().all() if scheme is not W4A16 else not y[4].isfinite().any()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("experts", [6, 8, 60])
def test_expert_parallel_ranks_add_up(experts: int, ranks: int) -> None:
    """Each rank holds a slice of the experts and sees local ids; others' routes are -1 or beyond its last expert."""
    ids = torch.rand(17, experts, generator=torch.Generator().manual_seed(experts)).argsort(1)[:, :3]
    case = make_case(W4A4_ROW, experts=experts, ids=ids, tokens=17)
    scale = 10.0 ** (torch.arange(experts) % 3 - 1)[:, None, None]
    case = case.with_leaves(w13=case.w13 * scale)
    dy = dy_of(case)
    y = case.run()[Out.Y]
    whole = case.grads(y, dy)
    edges = [experts * r // ranks for r in range(ranks + 1)]
    outputs, grads = [], []
    for low, high in pairwise(edges):
        local = ids - low
        local = torch.where(local < 0, torch.where(ids % 2 == 0, -1, high - low), local)
        part = case.with_leaves(expert_ids=local, **{k: getattr(case, k)[low:high] for k in ("w13", "w2", "b13", "b2")})
        outputs.append(part.run()[Out.Y])
        grads.append(part.grads(outputs[-1], dy))
    check_close(torch.stack(outputs).sum(0), y, k=ranks)
    check_close(torch.stack([g[0] for g in grads]).sum(0), whole[0], k=ranks, name="dx")
    check_close(torch.stack([g[1] for g in grads]).sum(0), whole[1], k=ranks, name="dgates")
    for i in range(2, 6):
        assert torch.equal(torch.cat([g[i] for g in grads]), whole[i])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_rule(dtype: torch.dtype, master: torch.dtype, compiled: bool, autocast: bool) -> None:
    """x's dtype decides, autocast does not; gradients have their operand's dtype."""
    case = make_case(W4A4_ROW, tokens=4, dtype=dtype, master=master)
    # the reference: the same weights, so the same codes, in a plain float32 or bfloat16 call
    expected = case.run()
    operands = case.operands()
    run = torch.compile(ops.nvfp4_moe, backend="aot_eager", fullgraph=True) if compiled else ops.nvfp4_moe
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = run(*operands)
    assert out[Out.Y].dtype == dtype and out[Out.PRE].dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    for leaf, grad in zip(case.leaves, case.grads(out[Out.Y], dy_of(case), again=False), strict=True):
        assert grad.dtype == leaf.dtype


def test_gates_may_be_wider_than_x() -> None:
    case = make_case(W4A4_ROW, tokens=8, dtype=torch.bfloat16)
    case = case.with_leaves(gates=case.gates.float())
    out = case.run()
    assert out[Out.Y].dtype == torch.bfloat16
    assert case.grads(out[Out.Y], dy_of(case))[1].dtype == torch.float32


def test_straight_through_for_saturated_elements() -> None:
    """A traced scale that is far too small saturates nearly everything; the gradient still is the identity's."""
    case = make_case(W4A4_TRACED, tokens=20)
    tiny = torch.full((2,), 2.0**-18)
    out = check_against_reference(case, dy_of(case), outer_in=tiny, record="ranges")
    assert out[Out.SATURATED].min() > 100
    assert (case.grads(out[Out.Y], dy_of(case))[0][in_range(case).any(1)] != 0).all()


def test_operands_are_not_changed_and_calls_repeat() -> None:
    case = make_case(W4A4_ROW, tokens=50)
    operands = case.operands(record="code")
    before = [t.detach().clone() if isinstance(t, Tensor) else t for t in operands]
    first, second = ops.nvfp4_moe(*operands), ops.nvfp4_moe(*operands)
    for a, b in zip(before, operands, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for a, b in zip(case.grads(first[0], dy_of(case)), case.grads(second[0], dy_of(case)), strict=True):
        assert torch.equal(a, b)


def test_inference_form_gives_the_same_output_and_saves_nothing() -> None:
    case = make_case(W4A4_ROW)
    out = case.run(w13=None, w2=None)
    assert torch.equal(out[Out.Y], case.run()[Out.Y])
    assert all(t.numel() == 0 for t in out[Out.RECORD :])
    with pytest.raises(TraceCompileError, match="inference form"):
        out[Out.Y].sum().backward()


def test_only_wanted_gradients_are_computed() -> None:
    case = make_case(W4A4_ROW)
    for wanted in range(6):
        for leaf in case.leaves:
            leaf.requires_grad_(False)
        case.leaves[wanted].requires_grad_(True)
        (alone,) = torch.autograd.grad(case.run()[Out.Y], case.leaves[wanted], dy_of(case))
        for leaf in case.leaves:
            leaf.requires_grad_(True)
        assert torch.equal(alone, case.grads(case.run()[Out.Y], dy_of(case))[wanted])


@pytest.mark.parametrize(("hidden", "width", "wrong"), [(72, 48, 72), (48, 40, 40)])
def test_widths_that_are_no_whole_blocks_are_refused(hidden: int, width: int, wrong: int) -> None:
    case = make_case(UNQUANTIZED, hidden=hidden, width=width)
    operands = list(case.operands())
    operands[18] = MoEScheme(None, ROW).key
    with pytest.raises(BlockSizeError, match=str(wrong)):
        ops.nvfp4_moe(*operands)


def test_devices_must_agree() -> None:
    case = make_case(W4A4_ROW, grad=False)
    for moved, name in ((1, "expert_ids"), (8, "s13"), (12, "g2")):
        operands = list(case.operands())
        operands[moved] = operands[moved].to("meta")
        with pytest.raises(DeviceMismatchError, match=f"cpu.*{name}.*meta"):
            ops.nvfp4_moe(*operands)
    floats = list(case.float_operands())
    floats[4] = floats[4].to("meta")
    with pytest.raises(DeviceMismatchError, match=r"cpu.*w2.*meta"):
        ops.moe_float(*floats)


def test_unusable_operands_are_named() -> None:
    half = make_case(W4A4_ROW, dtype=torch.float16, grad=False)
    with pytest.raises(UnknownFormatError, match="float16"):
        half.run()
    with pytest.raises(UnknownFormatError, match="outer_in"):
        make_case(W4A4_TRACED).run()
    with pytest.raises(TraceCompileError, match="w13 or w2 is None"):
        make_case(UNQUANTIZED).run(w13=None, w2=None)
    with pytest.raises(UnknownFormatError, match="mxfp8_e4m3"):
        make_case(MoEScheme(None, OperandScheme("mxfp8_e4m3")), hidden=64, width=64).run()


@pytest.mark.gpu
@needs_gpu
def test_forward_and_backward_never_wait_for_the_host_and_can_be_captured() -> None:
    case = make_case(W4A4_ROW, tokens=64, hidden=128, width=64, experts=8, device="cuda", dtype=torch.bfloat16)
    operands, dy = case.operands(record="bit"), dy_of(case)

    def step() -> list[Tensor]:
        y = ops.nvfp4_moe(*operands)[Out.Y]
        return [y, *torch.autograd.grad(y, case.leaves, dy)]

    stream = torch.cuda.Stream()  # autograd runs a leaf's gradient on the stream it was first used on: all on this one
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


assert set(ACTIVATIONS) == {SWIGLU, GPT_OSS, SQUARED_RELU}
