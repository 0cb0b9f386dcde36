"""Activation programs as device code: each becomes two ``@triton.jit`` functions that kernels take as constexprs.

    code = compile_activation(activation, torch.bfloat16)
    _some_kernel[grid](..., ACT=code.forward, VJP=code.derivative)

and inside a kernel, on float32 tensors of any shape:

    h = ACT(gate, up)                        # plain experts: ACT(x, x), the second argument is not looked at
    dgate, dup = VJP(gate, up, dh)           # plain experts: the first result is dx

Arguments are rounded to the compute dtype first, and results have its values, in float32: so a GEMM's epilogue may pass
its accumulators. Each step rounds as ``Activation.evaluate`` and its derivative round, operation by operation.

Why generated: a kernel that knows three activations by name refuses the fourth model; a program covers them all, fused.
``unsupported`` names what has no device form; such programs run as torch operations beside the kernels.

Invariant: the source is a function of (program, dtype) alone, so Triton's cache of compiled kernels holds across
processes.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from trace_compile.errors import LoweringError
from trace_compile.kernels import elementwise
from trace_compile.ops.activation import OPS, Activation, Argument

_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_CASTS = ("bfloat16", "float32")
_POWERS = (2, 3)

Rounding = Callable[[str], str]


@dataclass(frozen=True)
class ActivationCode:
    """Device functions of one program in one compute dtype, and the text they were compiled from."""

    forward: Any  # JITFunction (gate, up) -> h
    derivative: Any  # JITFunction (gate, up, dh) -> (dgate, dup)
    source: str


@dataclass(frozen=True)
class _Value:
    name: str
    dtype: str


def unsupported(activation: Activation, dtype: torch.dtype) -> str | None:
    """Why the program has no device form in this compute dtype, naming the step; None if it has one."""
    if dtype not in _DTYPES:
        return f"activations are compiled for bfloat16 and float32, not for {dtype}"
    for i, (name, args) in enumerate(activation.steps):
        if name not in _CASTS and name not in _FORWARD:
            return f"activation step {i}: {name} has no device form"
        if name == "pow" and args[1] not in _POWERS:
            return f"activation step {i}: pow with exponent {args[1]}; {' and '.join(map(str, _POWERS))} are compiled"
        if name == "div" and args[1] == 0:
            return f"activation step {i}: division by the number 0"
        for number in args:
            if isinstance(number, int | float) and not _is_plain(float(number)):
                return f"activation step {i}: {number} is no normal number of float32"
    return None


@lru_cache(maxsize=256)
def compile_activation(activation: Activation, dtype: torch.dtype) -> ActivationCode:
    """The program's device functions. Raises ``LoweringError`` with the reason that ``unsupported`` gives."""
    reason = unsupported(activation, dtype)
    if reason is not None:
        raise LoweringError(reason)
    writer = _Writer(activation, _DTYPES[dtype])
    forward, derivative = writer.forward(), writer.derivative()
    return ActivationCode(
        _compiled("activation", forward), _compiled("activation_vjp", derivative), forward + "\n" + derivative
    )


class _Writer:
    """Writes a program's source, one assignment a step."""

    def __init__(self, activation: Activation, dtype: str) -> None:
        self.activation = activation
        self.dtype = dtype
        self.inputs = ("gate", "up") if activation.gated else ("x",)
        self.values = {name: _Value(name, dtype) for name in self.inputs}
        self.steps: list[str] = [f"{name} = {_rounding(dtype)(name)}" for name in self.inputs]
        for i, (name, args) in enumerate(activation.steps):
            out = self._dtype_of(name, args)
            operands = [self._operand(name, a) for a in args]
            text = operands[0] if name in _CASTS else _FORWARD[name](_rounding(out), *operands)
            self.values[f"%{i}"] = _Value(f"v{i}", out)
            self.steps.append(f"v{i} = {_rounding(out)(text)}")
        self.last = self.values[f"%{len(activation.steps) - 1}"]

    def forward(self) -> str:
        parameters = ", ".join(self.inputs if self.activation.gated else ("x", "unused"))
        return _function("activation", parameters, [*self.steps, f"return {_rounding(self.dtype)(self.last.name)}"])

    def derivative(self) -> str:
        lines = [*self.steps, f"g{len(self.activation.steps) - 1} = {_rounding(self.last.dtype)('grad')}"]
        grads = {f"%{len(self.activation.steps) - 1}"}
        for i in range(len(self.activation.steps) - 1, -1, -1):
            if f"%{i}" not in grads:
                continue
            name, args = self.activation.steps[i]
            out = self.values[f"%{i}"]
            operands = [self._operand(name, a) for a in args]
            if name in _CASTS:
                pieces: tuple[str | None, ...] = (f"g{i}",)
            else:
                pieces = _DERIVATIVE[name](_rounding(out.dtype), f"g{i}", out.name, *operands)
            for arg, piece in zip(args, pieces, strict=False):
                if not isinstance(arg, str) or piece is None:
                    continue
                grad, rounded = self._grad(arg), _rounding(self.values[arg].dtype)
                term = rounded(_rounding(out.dtype)(piece))
                lines.append(f"{grad} = {rounded(f'{grad} + {term}') if arg in grads else term}")
                grads.add(arg)
        found = [self._grad(n) if n in grads else f"{n} * 0.0" for n in self.inputs]
        lines.append(f"return {found[0]}, {found[-1]}")
        parameters = ", ".join((*self.inputs, "grad") if self.activation.gated else ("x", "unused", "grad"))
        return _function("activation_vjp", parameters, lines)

    def _grad(self, arg: str) -> str:
        return f"g{arg[1:]}" if arg.startswith("%") else f"d{arg}"

    def _dtype_of(self, name: str, args: tuple[Argument, ...]) -> str:
        if name in _CASTS:
            return name
        dtypes = {self.values[a].dtype for a in args[: OPS[name].arity] if isinstance(a, str)}
        return "float32" if "float32" in dtypes else "bfloat16"

    def _operand(self, name: str, arg: Argument) -> str:
        """A value's name, or a number: rounded to the compute dtype where torch makes a tensor or a limit of it."""
        if isinstance(arg, str):
            return self.values[arg].name
        return "None" if arg is None else _number(float(arg))


def _rounding(dtype: str) -> Rounding:
    """Text of a value -> text of that value in ``dtype``."""
    return (lambda text: f"bfloat16({text})") if dtype == "bfloat16" else (lambda text: text)


def _float32(number: float) -> float:
    return struct.unpack("<f", struct.pack("<f", number))[0]


def _is_plain(number: float) -> bool:
    try:
        rounded = abs(_float32(number))
    except OverflowError:
        return False
    return rounded == 0 or torch.finfo(torch.float32).tiny <= rounded < math.inf


def _number(number: float) -> str:
    return repr(_float32(number))


def _clamp(r: Rounding, x: str, low: str, high: str) -> str:
    text = x
    if low != "None":
        text = f"maximum({text}, {_side(r, low, x)})"
    if high != "None":
        text = f"minimum({text}, {_side(r, high, x)})"
    return text


def _limit(r: Rounding, number: str) -> str:
    """Limits and the numbers of minimum and maximum are values of the tensor's dtype."""
    if r("") == "":
        return number
    return repr(float(torch.tensor(float(number)).bfloat16()))


def _clamp_vjp(r: Rounding, g: str, out: str, x: str, low: str, high: str) -> tuple[str | None, ...]:
    limits = ((">=", low), ("<=", high))
    inside = [f"({x} {comparison} {_limit(r, limit)})" for comparison, limit in limits if limit != "None"]
    return (f"tl.where({' & '.join(inside)}, {g}, 0.0)" if inside else g,)


def _divide(r: Rounding, a: str, b: str) -> str:
    if _is_number(a):
        return f"{r(f'reciprocal({b})')} * {a}"
    if _is_number(b):
        return f"divide_by_number({a}, {b}, {_number(1 / float(b))})"
    return f"divide({a}, {b})"


def _divide_vjp(r: Rounding, g: str, out: str, a: str, b: str) -> tuple[str | None, ...]:
    if _is_number(a):
        inverse = r(f"reciprocal({b})")
        scaled, squared = r(f"({g} * {a})"), r(f"({inverse} * {inverse})")
        return None, f"{scaled} * -{squared}"
    if _is_number(b):
        return _divide(r, g, b), None
    quotient = r(f"divide({a}, {b})")
    return f"divide({g}, {b})", f"-{g} * {r(f'divide({quotient}, {b})')}"


def _power_vjp(r: Rounding, g: str, out: str, x: str, exponent: str) -> tuple[str | None, ...]:
    below = x if float(exponent) == 2 else r(f"({x} * {x})")
    slope = r(f"({below} * {exponent})")
    return (f"{g} * {slope}",)


def _extremum(function: str) -> Callable[..., str]:
    return lambda r, a, b: f"{function}({_side(r, a, b)}, {_side(r, b, a)})"


def _side(r: Rounding, own: str, other: str) -> str:
    return f"tl.full({other}.shape, {_limit(r, own)}, tl.float32)" if _is_number(own) else own


def _extremum_vjp(loses: str) -> Callable[..., tuple[str | None, ...]]:
    def vjp(r: Rounding, g: str, out: str, a: str, b: str) -> tuple[str | None, ...]:
        a, b = (_limit(r, v) if _is_number(v) else v for v in (a, b))
        halved = f"tl.where({a} == {b}, {g} * 0.5, {g})"
        return f"unless({a} {loses} {b}, {halved})", f"unless({b} {loses} {a}, {halved})"

    return vjp


def _is_number(text: str) -> bool:
    return text[0].isdigit() or text[0] == "-"


def _call(function: str) -> Callable[..., str]:
    return lambda r, *args: f"{function}({', '.join(args)})"


def _vjp_of_input(function: str) -> Callable[..., tuple[str | None, ...]]:
    return lambda r, g, out, x: (f"{function}_vjp({g}, {x})",)


def _vjp_of_output(function: str) -> Callable[..., tuple[str | None, ...]]:
    return lambda r, g, out, x: (f"{function}_vjp({g}, {out})",)


_FORWARD: dict[str, Callable[..., str]] = {
    **{n: _call(n) for n in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "softplus", "exp", "log", "sqrt")},
    "abs": _call("tl.abs"),
    "neg": lambda r, x: f"-{x}",
    "square": lambda r, x: f"{x} * {x}",
    "pow": lambda r, x, e: f"{x} * {x}" if float(e) == 2 else f"{r(f'({x} * {x})')} * {x}",
    "clamp": _clamp,
    "add": lambda r, a, b: f"{a} + {b}",
    "sub": lambda r, a, b: f"{a} - {b}",
    "mul": lambda r, a, b: f"{a} * {b}",
    "div": _divide,
    "minimum": _extremum("minimum"),
    "maximum": _extremum("maximum"),
}
_DERIVATIVE: dict[str, Callable[..., tuple[str | None, ...]]] = {
    **{name: _vjp_of_input(name) for name in ("silu", "gelu", "gelu_tanh", "softplus")},
    **{name: _vjp_of_output(name) for name in ("relu", "sigmoid", "tanh")},
    "exp": lambda r, g, out, x: (f"{g} * {out}",),
    "log": lambda r, g, out, x: (f"divide({g}, {x})",),
    "sqrt": lambda r, g, out, x: (f"divide({g}, {out} * 2.0)",),
    "abs": lambda r, g, out, x: (f"{g} * sign({x})",),
    "neg": lambda r, g, out, x: (f"-{g}",),
    "square": lambda r, g, out, x: _power_vjp(r, g, out, x, "2.0"),
    "pow": _power_vjp,
    "clamp": _clamp_vjp,
    "add": lambda r, g, out, a, b: (g, g),
    "sub": lambda r, g, out, a, b: (g, f"-{g}"),
    "mul": lambda r, g, out, a, b: (f"{g} * {b}", f"{g} * {a}"),
    "div": _divide_vjp,
    "minimum": _extremum_vjp(">"),
    "maximum": _extremum_vjp("<"),
}


def _function(name: str, parameters: str, lines: list[str]) -> str:
    return f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in lines)


def _compiled(name: str, source: str) -> Any:
    """``source`` as a JIT function. Triton reads a function's text through ``linecache``, so it is left there."""
    file = f"<{name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    helpers = {n: f for n, f in vars(elementwise).items() if n in _HELPERS}
    namespace: dict[str, Any] = {"tl": tl, "__name__": __name__, **helpers}
    exec(compile(source, file, "exec"), namespace)
    return triton.jit(namespace[name])


_HELPERS = frozenset(n for n, f in vars(elementwise).items() if not n.startswith("_") and hasattr(f, "fn"))
