"""Elementwise arithmetic on float32 in device code, each function the float32 operation of torch's CUDA kernels.

Why: torch computes a bfloat16 operation in float32 and rounds the result once. Triton's own ``exp``, ``log`` and ``/``
are approximate, so the accurate ones are named here, and rounding is a function of its own. Triton's interpreter knows
no libdevice and rounds to bfloat16 wrongly; what it does instead is written beside each function and is right to a few
units in the last place of float32.

Invariant: arguments and results are float32; ``bfloat16(x)`` is the float32 that has x's bfloat16 value.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETING = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def bfloat16(x):
    """Nearest bfloat16, ties to even, as float32; NaN stays NaN."""
    if INTERPRETING:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) & -65536
        return tl.where(x == x, rounded, bits | 0x400000).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """The float32 that has x's value in ``dtype``, bfloat16 or float32."""
    return bfloat16(x) if dtype == tl.bfloat16 else x


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 -> ``dtype`` (bfloat16 or float32) for a store."""
    if dtype == tl.float32:
        return x
    elif INTERPRETING:
        return (bfloat16(x).to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def exp(x):
    return tl.exp(x) if INTERPRETING else libdevice.exp(x)


@triton.jit
def log(x):
    return tl.log(x) if INTERPRETING else libdevice.log(x)


@triton.jit
def divide(a, b):
    return tl.div_rn(a, b)


@triton.jit
def divide_by_number(a, number: tl.constexpr, reciprocal: tl.constexpr):
    """torch divides by a number exactly on a CPU and multiplies by its float32 reciprocal on a GPU."""
    return tl.div_rn(a, tl.full(a.shape, number, tl.float32)) if INTERPRETING else a * reciprocal


@triton.jit
def reciprocal(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def sqrt(x):
    return tl.sqrt_rn(x)


@triton.jit
def sigmoid(x):
    return reciprocal(exp(-x) + 1.0)


@triton.jit
def sigmoid_vjp(g, out):
    return g * (1.0 - out) * out


@triton.jit
def silu(x):
    return divide(x, exp(-x) + 1.0)


@triton.jit
def silu_vjp(g, x):
    s = sigmoid(x)
    return g * s * (x * (1.0 - s) + 1.0)


@triton.jit
def tanh(x):
    return sigmoid(x * 2.0) * 2.0 - 1.0 if INTERPRETING else libdevice.tanh(x)


@triton.jit
def tanh_vjp(g, out):
    return g * (1.0 - out * out)


@triton.jit
def softplus(x):
    soft = tl.log(tl.exp(x) + 1.0) if INTERPRETING else libdevice.log1p(libdevice.exp(x))
    return tl.where(x > 20.0, x, soft)


@triton.jit
def softplus_vjp(g, x):
    z = exp(x)
    return tl.where(x > 20.0, g, divide(g * z, z + 1.0))


@triton.jit
def gelu(x):
    return x * 0.5 * (tl.erf(x * 0.7071067811865476) + 1.0)


@triton.jit
def gelu_vjp(g, x):
    cdf = (tl.erf(x * 0.7071067811865476) + 1.0) * 0.5
    density = exp(x * x * -0.5) * 0.3989422804014327
    return g * (cdf + x * density)


@triton.jit
def gelu_tanh(x):
    inner = (x + x * x * x * 0.044715) * 0.7978845608028654
    return x * 0.5 * (tanh(inner) + 1.0)


@triton.jit
def gelu_tanh_vjp(g, x):
    t = tanh((x + x * x * x * 0.044715) * 0.7978845608028654)
    slope = (x * x * (3 * 0.044715) + 1.0) * 0.7978845608028654
    return g * ((t + 1.0) * 0.5 + x * 0.5 * ((1.0 - t * t) * slope))


@triton.jit
def relu(x):
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def relu_vjp(g, out):
    return tl.where(out <= 0.0, 0.0, g)


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def minimum(a, b):
    """NaN where either is."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def maximum(a, b):
    """NaN where either is."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def unless(condition, g):
    """The gradient, or zero where the condition holds."""
    return tl.where(condition, 0.0, g)
