"""moe_float is transformers' grouped_mm experts bit for bit, and right where those are not defined."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.reference import (
    ACTIVATIONS,
    SQUARED_RELU,
    TARGETS,
    Case,
    compare_gradients,
    make_case,
    needs_gpu,
    ops,
    poison,
    reference,
)
from trace_compile.ops import SWIGLU, UNQUANTIZED, check_close

moe = pytest.importorskip("transformers.integrations.moe")


def transformers_forward(case: Case, transposed: bool = False) -> Tensor:
    """Their function on a stand-in for an experts module."""
    w13, w2 = (w.transpose(1, 2).contiguous() if transposed else w for w in (case.w13, case.w2))
    gated = case.activation.gated
    experts = types.SimpleNamespace(
        num_experts=case.experts,
        has_gate=gated,
        has_bias=case.b13 is not None,
        is_transposed=transposed,
        act_fn=F.silu if gated else ACTIVATIONS[case.activation],
        down_proj=w2,
        down_proj_bias=case.b2,
        **(
            {"gate_up_proj": w13, "gate_up_proj_bias": case.b13}
            if gated
            else {"up_proj": w13, "up_proj_bias": case.b13}
        ),
    )
    experts._apply_gate = lambda out: moe._default_apply_gate(experts, out)
    return moe.grouped_mm_experts_forward(experts, case.x, case.expert_ids, case.gates)


def random_ids(tokens: int, top_k: int, experts: int, sentinels: bool) -> Tensor:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k]
    return torch.where(torch.rand(ids.shape, generator=g) < 0.3, experts, ids) if sentinels else ids


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("sentinels", [False, True])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden", "width", "bias"),
    [(33, 2, 8, 64, 32, True), (257, 4, 6, 80, 48, True), (1, 2, 6, 80, 48, False), (700, 8, 60, 24, 20, False)],
)
def test_bitwise_equal_to_transformers(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    width: int,
    bias: bool,
    sentinels: bool,
    fallback: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fallback:
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    ids = random_ids(tokens, top_k, experts, sentinels)
    case = make_case(UNQUANTIZED, ids=ids, tokens=tokens, experts=experts, hidden=hidden, width=width, bias=bias)
    expected, actual = transformers_forward(case), ops.moe_float(*case.float_operands())
    assert torch.equal(actual, expected)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for name, a, e in zip(
        ("x", "gates", "w13", "w2", "b13", "b2"), case.grads(actual, dy), case.grads(expected, dy), strict=False
    ):
        assert torch.equal(a, e), name


@pytest.mark.parametrize("transposed", [False, True])
def test_bitwise_equal_for_transposed_and_plain_experts(transposed: bool) -> None:
    ids = random_ids(65, 4, 8, True)
    case = make_case(UNQUANTIZED, ids=ids, tokens=65, experts=8, activation=SQUARED_RELU)
    expected, actual = transformers_forward(case, transposed), ops.moe_float(*case.float_operands())
    assert torch.equal(actual, expected)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for a, e in zip(case.grads(actual, dy), case.grads(expected, dy), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize(("device", "dtype"), TARGETS)
@pytest.mark.parametrize("weight_input", [False, True])
@pytest.mark.parametrize("activation", list(ACTIVATIONS), ids=["swiglu", "gpt-oss", "squared-relu"])
def test_against_the_float64_formula(activation, weight_input: bool, device: str, dtype: torch.dtype) -> None:
    """Also for gates on the inputs, -1 ids, and widths that no kernel likes."""
    case = make_case(
        UNQUANTIZED, activation=activation, hidden=44, width=20, tokens=40, device=device, dtype=dtype, bias=True
    )
    poison()
    y = ops.moe_float(*case.float_operands(weight_input))
    dy = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    if weight_input:
        expected, grads = gates_on_inputs(case, dy)
    else:
        ref = reference(case, dy, None, None)
        expected, grads = ref.y, ref.grads
    check_close(y, expected, k=44, dtype=dtype, stages=4)
    compare_gradients(case, case.grads(y, dy), grads)


def gates_on_inputs(case: Case, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Llama-4's rule, by slots: the expert sees gate * x."""
    x, gates, w13, w2, b13, b2 = (t.detach().double().requires_grad_() for t in case.leaves)
    y = torch.zeros_like(x)
    for t in range(case.expert_ids.shape[0]):
        for k in range(case.expert_ids.shape[1]):
            e = int(case.expert_ids[t, k])
            if 0 <= e < case.experts:
                h = ACTIVATIONS[case.activation](w13[e] @ (x[t] * gates[t, k]) + b13[e])
                y = y.index_add(0, torch.tensor([t], device=x.device), (w2[e] @ h + b2[e])[None])
    return y.detach(), list(torch.autograd.grad(y, (x, gates, w13, w2, b13, b2), dy.double()))


@pytest.mark.parametrize(("device", "dtype"), TARGETS)
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(tokens: int, device: str, dtype: torch.dtype) -> None:
    case = make_case(UNQUANTIZED, tokens=tokens, device=device, dtype=dtype)
    y = ops.moe_float(*case.float_operands())
    assert y.shape == (tokens, 48)
    for leaf, grad in zip(case.leaves, case.grads(y, torch.ones_like(y)), strict=True):
        assert grad.shape == leaf.shape and grad.isfinite().all() and (tokens or (grad == 0).all())


@pytest.mark.parametrize(("device", "dtype"), TARGETS)
@pytest.mark.parametrize("empty", [(1, 4), (0,), (5,), (0, 1, 2, 4, 5)])
def test_experts_without_tokens_get_exact_zeros(empty: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    used = torch.tensor([e for e in range(6) if e not in empty])
    ids = used[torch.randint(0, len(used), (33, 2), generator=torch.Generator().manual_seed(0))]
    case = make_case(UNQUANTIZED, experts=6, ids=ids, tokens=33, device=device, dtype=dtype)
    poison()
    y = ops.moe_float(*case.float_operands())
    poison()
    for grad in case.grads(y, torch.ones_like(y))[2:]:
        assert (grad[list(empty)] == 0).all() and (grad[used] != 0).flatten(1).any(1).all()


def test_negative_ids_count_as_not_routed() -> None:
    case = make_case(UNQUANTIZED, tokens=12)
    ids = case.expert_ids.clone()
    ids[3], ids[5, 0] = -1, -7
    y = ops.moe_float(*case.with_leaves(expert_ids=ids).float_operands())
    beyond = torch.where(ids < 0, case.experts, ids)
    assert torch.equal(y, ops.moe_float(*case.with_leaves(expert_ids=beyond).float_operands()))
    assert (y[3] == 0).all()


def test_nothing_is_saved_without_grad() -> None:
    case = make_case(UNQUANTIZED, grad=False)
    operands = (*case.float_operands(), False)
    y, *saved = ops.moe_float_saving(*operands)
    assert torch.equal(y, ops.moe_float(*case.float_operands())) and all(t.numel() == 0 for t in saved)


@pytest.mark.gpu
@needs_gpu
def test_equal_to_transformers_on_cuda() -> None:
    ids = random_ids(257, 4, 8, False)
    case = make_case(
        UNQUANTIZED,
        ids=ids,
        tokens=257,
        experts=8,
        hidden=128,
        width=64,
        bias=False,
        device="cuda",
        dtype=torch.bfloat16,
    )
    expected, actual = transformers_forward(case), ops.moe_float(*case.float_operands())
    assert torch.equal(actual, expected)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    for a, e in zip(case.grads(actual, dy), case.grads(expected, dy), strict=True):
        check_close(a, e, k=512, stages=4)


assert SWIGLU in ACTIVATIONS
