"""Generated activations against torch: random programs, their derivatives against autograd, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.ops.reference import ACTIVATIONS
from trace_compile.errors import LoweringError
from trace_compile.kernels import elementwise
from trace_compile.kernels.codegen import compile_activation, unsupported
from trace_compile.ops.activation import OPS, Activation, Argument

kernel_test = pytest.mark.kernel
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")
# Correctly rounded in every implementation: bits must be equal. The others are right to some units of float32.
EXACT = ("relu", "sqrt", "abs", "neg", "square", "pow", "clamp", "add", "sub", "mul", "div", "minimum", "maximum")
CASTS = ("float32", "bfloat16")
NUMBERS = (0.1, -0.7, 2, 3.3, -1)
SMOOTH = ("silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "softplus")


@triton.jit
def _elementwise_kernel(
    pre_ptr, dh_ptr, h_ptr, dpre_ptr, n, GATED: tl.constexpr, ACT: tl.constexpr, VJP: tl.constexpr, BLOCK: tl.constexpr
):
    """pre [n] or gate [n], up [n] one behind the other."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    gate = _widened(pre_ptr, i, here)
    up = _widened(pre_ptr + n, i, here) if GATED else gate
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    tl.store(h_ptr + i, elementwise.narrow(ACT(gate, up), dtype), mask=here)
    dgate, dup = VJP(gate, up, _widened(dh_ptr, i, here))
    tl.store(dpre_ptr + i, elementwise.narrow(dgate, dtype), mask=here)
    if GATED:
        tl.store(dpre_ptr + n + i, elementwise.narrow(dup, dtype), mask=here)


@triton.jit
def _widened(pointer, i, here):
    return tl.load(pointer + i, mask=here, other=0.0).to(tl.float32)


def device_results(activation: Activation, pre: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """``pre [n]`` or ``[2, n]``, ``dh [n]`` -> h and dpre by the generated functions."""
    code = compile_activation(activation, pre.dtype)
    h, dpre, n = torch.empty_like(dh), torch.empty_like(pre), dh.numel()
    _elementwise_kernel[(triton.cdiv(n, 512),)](
        pre, dh, h, dpre, n, GATED=activation.gated, ACT=code.forward, VJP=code.derivative, BLOCK=512
    )
    return h, dpre


def torch_results(activation: Activation, pre: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """The same by autograd through ``evaluate``."""
    leaf = pre.detach().requires_grad_()
    flat = leaf.t() if activation.gated else leaf.unsqueeze(-1)
    h = activation.evaluate(flat.contiguous()).squeeze(-1)
    grad = torch.autograd.grad(h, leaf, dh, allow_unused=True)[0]
    return h.detach(), torch.zeros_like(pre) if grad is None else grad


def random_program(seed: int, names: tuple[str, ...], numbers: tuple[float, ...] = NUMBERS) -> Activation:
    """Up to seven steps that use the inputs, each other and numbers."""
    rng = random.Random(seed)
    gated = rng.random() < 0.7
    values = ["gate", "up"] if gated else ["x"]
    steps: list[tuple[str, list[Argument]]] = []
    for i in range(rng.randint(1, 7)):
        name = rng.choice(names)
        args: list[Argument] = [rng.choice(values[-3:]) for _ in range(OPS[name].arity)]
        if len(args) == 2 and rng.random() < 0.4:
            args[rng.randint(0, 1)] = rng.choice(numbers)
        if name == "clamp":
            args += rng.choice([[None, 0.9], [-0.8, None], [-0.3, 0.7]])
        if name == "pow":
            args.append(rng.choice([2, 3]))
        steps.append((name, args))
        values.append(f"%{i}")
    return Activation.build(gated, steps)


def operands(activation: Activation, dtype: torch.dtype, device: torch.device, n: int = 700) -> tuple[Tensor, Tensor]:
    """Random values with ties, zeros and limits among them."""
    generator = torch.Generator().manual_seed(n)
    pre = torch.randn((2, n) if activation.gated else (n,), generator=generator) * 2
    pre[..., ::7] = (pre[..., ::7] * 4).round() / 4
    pre[..., 5:9] = torch.tensor([0.0, -0.0, 0.7, -0.3])
    return pre.to(dtype).to(device), torch.randn(n, generator=generator).to(dtype).to(device)


def assert_equal(got: Tensor, want: Tensor, program: Activation) -> None:
    """Bits, but for the signs of zeros and of what becomes of them: torch's devices differ there too."""
    same = (got == want) | (~got.isfinite() & ~want.isfinite())
    assert bool(same.all()), f"{program.key}: {got[~same][:4]} instead of {want[~same][:4]}"


@kernel_test
@pytest.mark.parametrize("seed", range(24))
def test_exact_programs_in_bfloat16(seed: int, device: torch.device) -> None:
    """Every step rounds as torch rounds it, forward and backward, numbers and mixed dtypes included."""
    # Numbers that bfloat16 has: whether the one in a sum is rounded to it first differs between torch's own devices.
    program = random_program(seed, (*EXACT, *CASTS), (0.125, -0.75, 2, 3.25, -1))
    pre, dh = operands(program, torch.bfloat16, device)
    for got, want in zip(device_results(program, pre, dh), torch_results(program, pre, dh), strict=True):
        assert_equal(got, want, program)


@kernel_test
@pytest.mark.parametrize("seed", range(24))
def test_random_programs_against_autograd(seed: int, device: torch.device) -> None:
    """All functions in float32. Where a program is ill-conditioned, float64 says how far two right answers may lie."""
    program = random_program(
        100 + seed, (*SMOOTH, "exp", "log", "add", "sub", "mul", "div", "clamp", "maximum", "square")
    )
    pre, dh = operands(program, torch.float32, device)
    wanted, precise = torch_results(program, pre, dh), torch_results(program, pre.double(), dh.double())
    for got, want, exact in zip(device_results(program, pre, dh), wanted, precise, strict=True):
        usable = exact.isfinite() & (exact.abs() < 1e30) & want.isfinite()
        allowed = 64 * (want.double() - exact).abs() + 1e-5 * exact.abs() + 1e-5
        wrong = usable & ((got.double() - exact).abs() > allowed)
        assert not bool(wrong.any()), f"{program.key}: {got[wrong][:4]} instead of {exact[wrong][:4]}"


@kernel_test
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["swiglu", "gpt_oss", "squared_relu"])
def test_activations_of_models(activation: Activation, device: torch.device) -> None:
    """In bfloat16: nearly always to the bit, and else a neighbour."""
    pre, dh = operands(activation, torch.bfloat16, device, n=4000)
    for got, want in zip(device_results(activation, pre, dh), torch_results(activation, pre, dh), strict=True):
        error = (got.double() - want.double()).abs() / (want.double().abs() + 1)
        assert float(error.max()) <= 4 * torch.finfo(torch.bfloat16).eps
        assert float((got != want).double().mean()) < 5e-3


@kernel_test
def test_not_a_number_passes_through(device: torch.device) -> None:
    for activation in ACTIVATIONS:
        pre, dh = operands(activation, torch.bfloat16, device)
        pre[..., 3] = torch.nan
        h, dpre = device_results(activation, pre, dh)
        assert bool(h[3].isnan()) and int(h.isnan().sum()) == 1
        assert bool(dpre.reshape(-1)[3].isnan()) or activation.steps[0][0] == "relu" or "clamp" in activation.key


def test_every_op_of_the_table_has_a_device_form() -> None:
    for name, op in OPS.items():
        literals: list[Argument] = [2.0] if name == "pow" else [-1.0, 1.0]
        program = Activation.build(False, [(name, ["x"] * op.arity + literals[: op.literals])])
        assert unsupported(program, torch.bfloat16) is None, name
        assert compile_activation(program, torch.bfloat16) is compile_activation(program, torch.bfloat16)


@pytest.mark.parametrize(
    ("step", "dtype", "reason"),
    [
        (("pow", ("x", 2.5)), torch.bfloat16, "pow with exponent 2.5"),
        (("mul", ("x", 1e-42)), torch.bfloat16, "no normal number"),
        (("mul", ("x", 1e60)), torch.bfloat16, "no normal number"),
        (("div", ("x", 0)), torch.float32, "division by the number 0"),
        (("relu", ("x",)), torch.float16, "float16"),
    ],
)
def test_what_has_no_device_form_is_named(step, dtype: torch.dtype, reason: str) -> None:
    program = Activation.build(False, [step])
    assert reason in (unsupported(program, dtype) or "")
    with pytest.raises(LoweringError, match=reason.split()[0]):
        compile_activation(program, dtype)
