"""Activation programs: what they compute, the bits of their derivatives, and their keys."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from tests.ops.reference import ACTIVATIONS, GPT_OSS
from trace_compile.errors import UnknownActivationError
from trace_compile.ops import SWIGLU, Activation
from trace_compile.ops.activation import OPS

LITERALS = {"pow": (3.0,), "clamp": (-0.5, 0.75)}
GEGLU = Activation.build(True, [("gelu_tanh", ("gate",)), ("mul", ("up", "%0"))])
MIXED = Activation.build(
    True,
    [
        ("mul", ("gate", "gate")),
        ("float32", ("%0",)),
        ("sub", (1.0, "%1")),
        ("minimum", ("%2", "up")),
        ("maximum", ("%3", -0.5)),
        ("add", ("%4", "%0")),
        ("bfloat16", ("%5",)),
        ("div", ("%6", "gate")),
        ("add", ("%7", "gate")),
    ],
)


def grid(columns: int = 24) -> Tensor:
    x = torch.randn(13, columns, generator=torch.Generator().manual_seed(0))
    x[0, :6] = torch.tensor([0.0, -0.0, 0.75, -0.5, 20.0, -20.0])
    return x


def autograd(activation: Activation, pre: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    pre = pre.clone().requires_grad_()
    out = activation.evaluate(pre)
    return out.detach(), torch.autograd.grad(out, pre, grad)[0]


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPS)
def test_every_op_has_the_derivative_that_autograd_has(name: str, dtype: torch.dtype) -> None:
    spec = OPS[name]
    programs = [("x",)] if spec.arity == 1 else [("x", "%0"), ("%0", "x"), ("x", "x"), ("x", 0.5), (0.5, "x")]
    for args in programs:
        activation = Activation.build(
            False, [("sigmoid", ("x",)), (name, (*args, *LITERALS.get(name, ()))), ("add", ("%0", "%1"))]
        )
        pre = grid().to(dtype)
        expected, gradient = autograd(activation, pre, torch.ones_like(pre) / 3)
        out, vjp = activation.evaluate_and_vjp(pre)
        assert_same_bits(out, expected)
        assert_same_bits(vjp(torch.ones_like(pre) / 3), gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS, GEGLU, MIXED], ids=["swiglu", "gpt-oss", "geglu", "mixed"])
def test_programs_have_the_bits_of_autograd(activation: Activation, dtype: torch.dtype) -> None:
    pre = grid().to(dtype) * 5
    grad = torch.randn(13, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, gradient = autograd(activation, pre, grad)
    out, vjp = activation.evaluate_and_vjp(pre)
    assert out.dtype == dtype and out.shape == (13, 12) == activation.evaluate(pre).shape
    assert_same_bits(out, expected)
    assert_same_bits(vjp(grad), gradient)


@pytest.mark.parametrize("activation", list(ACTIVATIONS), ids=["swiglu", "gpt-oss", "squared-relu"])
def test_programs_are_the_formulas(activation: Activation) -> None:
    pre = grid() * 5
    assert torch.equal(activation.evaluate(pre), ACTIVATIONS[activation](pre))
    assert torch.autograd.gradcheck(activation.evaluate, ((grid(8) + 0.01).double().requires_grad_(),))


def test_gate_is_the_first_half() -> None:
    pre = torch.tensor([[2.0, -1.0]])
    assert torch.equal(SWIGLU.evaluate(pre), torch.nn.functional.silu(pre[:, :1]) * pre[:, 1:])


@pytest.mark.parametrize("activation", [*ACTIVATIONS, GEGLU, MIXED])
def test_keys_are_compact_json_and_round_trip(activation: Activation) -> None:
    assert Activation.parse(activation.key) == activation
    assert hash(Activation.parse(activation.key)) == hash(activation)
    assert " " not in activation.key and json.loads(activation.key)
    assert activation.width(24) == (12 if activation.gated else 24)


def test_keys_tell_programs_apart() -> None:
    other = Activation.build(True, [("silu", ("up",)), ("mul", ("%0", "gate"))])
    assert other.key != SWIGLU.key
    assert not torch.equal(other.evaluate(grid()), SWIGLU.evaluate(grid()))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "at least one step"),
        ([("swish", ("gate",))], "no elementwise op 'swish'"),
        ([("silu", ("x",))], "'x' is not defined"),
        ([("mul", ("gate", "%0"))], "'%0' is not defined"),
        ([("silu", ("gate", "up"))], "takes 1 value"),
        ([("clamp", ("gate", "up", 1.0))], "2 literal"),
        ([("add", (1.0, 2.0))], "takes 2 value"),
    ],
)
def test_wrong_programs_are_refused(steps: list, message: str) -> None:
    with pytest.raises(UnknownActivationError, match=message):
        Activation.build(True, steps)


@pytest.mark.parametrize("key", ["", "silu", "[1]", "3", '[1,[["swish","gate"]]]'])
def test_unreadable_keys_are_refused(key: str) -> None:
    with pytest.raises(UnknownActivationError):
        Activation.parse(key)
