"""The activation between the two expert GEMMs, kept as a tiny program instead of a name.

A program is a list of elementwise steps in single-assignment form. Its inputs are ``gate`` and ``up`` (gated experts:
the first and second half of the pre-activation's columns) or ``x`` (plain experts); step *i* defines ``%i``; the last
step is the result. Numbers are literals. Passes build programs from graphs, kernels translate them step by step, and
``evaluate`` is the reference: every step is the torch operation of the model's own graph, in the pre-activation's
dtype, so each step rounds exactly as the model rounds.

Derivatives are written down here because an opaque op's body runs below autograd. Each is the formula torch uses for
the same operation, in the order torch adds them up, so gradients have the bits autograd would give.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnknownActivationError

Scalar = int | float | None
Argument = str | Scalar  # "gate", "up", "x", "%3", or a literal
Step = tuple[str, tuple[Argument, ...]]
aten = torch.ops.aten


@dataclass(frozen=True)
class ElementwiseOp:
    """One row of the table: ``fn(*args)`` and ``vjp(grad, out, *args) -> one gradient per argument``.

    The first ``arity`` arguments may be values or literals, the remaining ``literals`` are literals only.
    """

    fn: Callable[..., Tensor]
    vjp: Callable[..., tuple[Tensor | None, ...]]
    arity: int = 1
    literals: int = 0


def _unary(fn: Callable[..., Tensor], grad: Callable[..., Tensor], literals: int = 0) -> ElementwiseOp:
    return ElementwiseOp(fn, lambda g, out, *args: (grad(g, out, *args),), 1, literals)


def _clamp_grad(g: Tensor, out: Tensor, x: Tensor, low: Scalar, high: Scalar) -> Tensor:
    inside = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    return torch.where(inside, g, torch.zeros_like(g))


def _pow_grad(g: Tensor, out: Tensor, x: Tensor, exponent: float) -> Tensor:
    return torch.zeros_like(x) if exponent == 0 else g * (exponent * x.pow(exponent - 1))


def _div_vjp(g: Tensor, out: Tensor, a: Any, b: Any) -> tuple[Tensor | None, Tensor | None]:
    if not isinstance(a, Tensor):  # torch computes number / tensor as number * reciprocal
        reciprocal = b.reciprocal()
        return None, (g * a) * -(reciprocal * reciprocal)
    return g / b, -g * ((a / b) / b)


def _select_vjp(loses: Callable[..., Tensor], g: Tensor, out: Tensor, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """minimum and maximum: the chosen argument gets the gradient, equal arguments get half of it each."""
    halved = torch.where(torch.as_tensor(a == b), g / 2, g)
    return halved.masked_fill(loses(a, b), 0), halved.masked_fill(loses(b, a), 0)


def _extremum(fn: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Tensor:
    like = a if isinstance(a, Tensor) else b
    return fn(*(v if isinstance(v, Tensor) else torch.full_like(like, v) for v in (a, b)))


OPS: dict[str, ElementwiseOp] = {
    "silu": _unary(F.silu, lambda g, out, x: aten.silu_backward(g, x)),
    "gelu": _unary(F.gelu, lambda g, out, x: aten.gelu_backward(g, x)),
    "gelu_tanh": _unary(
        partial(F.gelu, approximate="tanh"), lambda g, out, x: aten.gelu_backward(g, x, approximate="tanh")
    ),
    "relu": _unary(F.relu, lambda g, out, x: aten.threshold_backward(g, out, 0)),
    "sigmoid": _unary(torch.sigmoid, lambda g, out, x: aten.sigmoid_backward(g, out)),
    "tanh": _unary(torch.tanh, lambda g, out, x: aten.tanh_backward(g, out)),
    "softplus": _unary(F.softplus, lambda g, out, x: aten.softplus_backward(g, x, 1, 20)),
    "exp": _unary(torch.exp, lambda g, out, x: g * out),
    "log": _unary(torch.log, lambda g, out, x: g / x),
    "sqrt": _unary(torch.sqrt, lambda g, out, x: g / (2 * out)),
    "abs": _unary(torch.abs, lambda g, out, x: g * x.sgn()),
    "neg": _unary(torch.neg, lambda g, out, x: -g),
    "square": _unary(torch.square, lambda g, out, x: _pow_grad(g, out, x, 2)),
    "pow": _unary(torch.pow, _pow_grad, literals=1),
    "clamp": _unary(torch.clamp, _clamp_grad, literals=2),
    "float32": _unary(lambda x: x.float(), lambda g, out, x: g.to(x.dtype)),
    "bfloat16": _unary(lambda x: x.bfloat16(), lambda g, out, x: g.to(x.dtype)),
    "add": ElementwiseOp(operator.add, lambda g, out, a, b: (g, g), 2),
    "sub": ElementwiseOp(operator.sub, lambda g, out, a, b: (g, -g), 2),
    "mul": ElementwiseOp(operator.mul, lambda g, out, a, b: (g * b, g * a), 2),
    "div": ElementwiseOp(operator.truediv, _div_vjp, 2),
    "minimum": ElementwiseOp(partial(_extremum, torch.minimum), partial(_select_vjp, operator.gt), 2),
    "maximum": ElementwiseOp(partial(_extremum, torch.maximum), partial(_select_vjp, operator.lt), 2),
}


@dataclass(frozen=True)
class Activation:
    """A validated program. Build it with :meth:`build` or :meth:`parse`; equal programs compare and hash equal."""

    gated: bool
    steps: tuple[Step, ...]

    @classmethod
    def build(cls, gated: bool, steps: Sequence[tuple[str, Sequence[Argument]]]) -> Activation:
        """Checks and freezes ``steps``. Raises :class:`UnknownActivationError` naming the step that is wrong."""
        known = {"gate", "up"} if gated else {"x"}
        if not steps:
            raise UnknownActivationError("an activation needs at least one step")
        for i, (name, args) in enumerate(steps):
            spec = OPS.get(name)
            if spec is None:
                raise UnknownActivationError(f"step {i}: no elementwise op {name!r}; known: {', '.join(sorted(OPS))}")
            refs = [a for a in args if isinstance(a, str)]
            if (
                len(args) != spec.arity + spec.literals
                or not refs
                or any(isinstance(a, str) for a in args[spec.arity :])
            ):
                raise UnknownActivationError(
                    f"step {i}: {name}{tuple(args)!r} takes {spec.arity} value(s) and {spec.literals} literal(s)"
                )
            unknown = [r for r in refs if r not in known]
            if unknown:
                raise UnknownActivationError(f"step {i}: {unknown[0]!r} is not defined before it; have {sorted(known)}")
            known.add(f"%{i}")
        return cls(gated, tuple((name, tuple(args)) for name, args in steps))

    @property
    def key(self) -> str:
        """Compact JSON; the string that ops take as their ``activation`` argument."""
        return json.dumps([int(self.gated), [[name, *args] for name, args in self.steps]], separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(key: str) -> Activation:
        """The program of ``key``. Raises :class:`UnknownActivationError` when ``key`` is not one."""
        try:
            gated, steps = json.loads(key)
            steps = [(step[0], step[1:]) for step in steps]
        except (ValueError, TypeError, IndexError) as error:
            raise UnknownActivationError(f"activation key {key!r} cannot be read: {error}") from error
        return Activation.build(bool(gated), steps)

    def width(self, columns: int) -> int:
        """Columns of the result for ``columns`` of the pre-activation (N1 = 2I when gated, else I)."""
        return columns // 2 if self.gated else columns

    def evaluate(self, pre: Tensor) -> Tensor:
        """``pre [..., N1] -> [..., I]``, same dtype, every step rounded to that dtype as torch rounds it."""
        return self._run(pre)[f"%{len(self.steps) - 1}"].to(pre.dtype)

    def evaluate_and_vjp(self, pre: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """``(h, vjp)`` with ``vjp(dh [..., I]) -> dpre [..., N1]``: what ``autograd`` gives for :meth:`evaluate`."""
        values = self._run(pre)
        last = f"%{len(self.steps) - 1}"

        def vjp(grad: Tensor) -> Tensor:
            grads = {last: grad.to(values[last].dtype)}
            for i in range(len(self.steps) - 1, -1, -1):
                if f"%{i}" not in grads:
                    continue
                name, args = self.steps[i]
                operands = [values[a] if isinstance(a, str) else a for a in args]
                for arg, g in zip(args, OPS[name].vjp(grads[f"%{i}"], values[f"%{i}"], *operands), strict=False):
                    if isinstance(arg, str) and g is not None:
                        g = g.to(values[arg].dtype)
                        grads[arg] = grads[arg] + g if arg in grads else g
            inputs = ("gate", "up") if self.gated else ("x",)
            return torch.cat([grads[n] if n in grads else torch.zeros_like(values[n]) for n in inputs], -1)

        return values[last].to(pre.dtype), vjp

    def _run(self, pre: Tensor) -> dict[str, Tensor]:
        values = dict(zip(("gate", "up"), pre.chunk(2, -1), strict=True)) if self.gated else {"x": pre}
        for i, (name, args) in enumerate(self.steps):
            values[f"%{i}"] = OPS[name].fn(*(values[a] if isinstance(a, str) else a for a in args))
        return values


SWIGLU = Activation.build(True, [("silu", ("gate",)), ("mul", ("%0", "up"))])
