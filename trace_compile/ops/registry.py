"""The table of ops: what each is, and who can run it. Passes and kernels meet here and nowhere else.

Every op has the ``native`` provider: torch operations on any device. Kernels add providers of their own, each a custom
op with the same schema; lowering asks :func:`provider_for` with fake arguments and puts the answer's ``target`` into
the graph. The choice is a pure function of shapes, dtypes, devices and options: no device is needed to make it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import LoweringError
from .moe_float import MoEFloatOperands, moe_float
from .nvfp4_linear import LinearBackwardOperands, NvFp4LinearOperands
from .nvfp4_linear import backward_fake as linear_backward_fake
from .nvfp4_linear import backward_native as linear_backward_native
from .nvfp4_linear import fake as linear_fake
from .nvfp4_linear import native as linear_native
from .nvfp4_moe import NvFp4MoEOperands
from .nvfp4_moe import fake as nvfp4_fake
from .nvfp4_moe import native as nvfp4_native
from .nvfp4_moe_backward import BackwardOperands
from .nvfp4_moe_backward import fake as backward_fake
from .nvfp4_moe_backward import native as backward_native

NATIVE = "native"
Refusal = str | None


@dataclass(frozen=True)
class Provider:
    """Someone who can run an op. ``refuses(operands)`` gives the reason why not, or None; ``reason`` says why it was
    chosen, once it was. Providers registered later are asked first."""

    name: str
    target: Any  # the op to call, same schema as the op it stands for
    refuses: Callable[[Any], Refusal] = lambda operands: None
    reason: str = ""


@dataclass
class OpSpec:
    """One op. ``operands`` is the dataclass of its schema; ``native`` and ``fake`` take one such object; ``autograd``
    names the op its backward runs; ``tolerance`` takes operands and gives keywords of ``tolerance.check_close``."""

    name: str
    operands: type
    native: Callable[[Any], Any]
    fake: Callable[[Any], Any]
    autograd: str | None
    tolerance: Callable[[Any], dict[str, Any]]
    providers: list[Provider] = field(default_factory=list)

    @property
    def target(self) -> Any:
        """The op itself, as it stands in graphs."""
        return getattr(torch.ops.trace_compile, self.name).default


def _float_tolerance(o: Any) -> dict[str, Any]:
    return {"k": max(o.x.shape[1], o.w2.shape[2]), "dtype": o.w13.dtype, "stages": 4}


def _quantized_tolerance(o: Any) -> dict[str, Any]:
    return {"k": max(o.x.shape[1], o.width), "dtype": o.x.dtype, "stages": 4}


def _backward_tolerance(o: Any) -> dict[str, Any]:
    return {"k": max(o.dy.shape[1], o.shape13[1], o.order.shape[0]), "dtype": o.dy.dtype, "stages": 6}


OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        OpSpec(
            "moe_float",
            MoEFloatOperands,
            lambda o: moe_float(*vars(o).values()),
            lambda o: o.x.new_empty(o.x.shape),
            "moe_float_backward",
            _float_tolerance,
        ),
        OpSpec(
            "nvfp4_moe",
            NvFp4MoEOperands,
            nvfp4_native,
            nvfp4_fake,
            "nvfp4_moe_backward",
            _quantized_tolerance,
        ),
        OpSpec(
            "nvfp4_moe_backward",
            BackwardOperands,
            backward_native,
            backward_fake,
            None,
            _backward_tolerance,
        ),
        OpSpec(
            "nvfp4_linear",
            NvFp4LinearOperands,
            linear_native,
            linear_fake,
            "nvfp4_linear_backward",
            lambda o: {"k": o.x.shape[1], "dtype": o.x.dtype, "stages": 2},
        ),
        OpSpec(
            "nvfp4_linear_backward",
            LinearBackwardOperands,
            linear_backward_native,
            linear_backward_fake,
            None,
            lambda o: {"k": max(*o.dy.shape, o.extents[1]), "dtype": o.dy.dtype, "stages": 2},
        ),
    )
}
for _spec in OPS.values():
    _spec.providers.append(Provider(NATIVE, _spec.target))


def register_provider(op: str, provider: Provider) -> None:
    """Adds ``provider`` in front of those that ``op`` has. Raises :class:`LoweringError` for an unknown op or a name
    that is taken."""
    spec = _spec_of(op)
    if any(p.name == provider.name for p in spec.providers):
        raise LoweringError(f"{op} already has a provider {provider.name!r}: give the new one another name")
    spec.providers.insert(0, provider)


def provider_for(op: Any, args: Sequence[Any], *, only: str | None = None) -> Provider:
    """The first provider that does not refuse ``args`` (fake or real, in schema order), with the reason filled in.

    ``op`` is a name or an overload. ``only`` restricts the choice to one provider, for tests and benchmarks. Raises
    :class:`LoweringError` with every refusal when nobody is left.
    """
    spec = _spec_of(op)
    operands, refusals = spec.operands(*args), list[str]()
    for provider in spec.providers:
        if only not in (None, provider.name):
            continue
        refusal = provider.refuses(operands)
        if refusal is None:
            return replace(provider, reason="; ".join(refusals) or "first choice")
        refusals.append(f"{provider.name}: {refusal}")
    known = [p.name for p in spec.providers]
    raise LoweringError(f"nobody runs {spec.name}: {'; '.join(refusals) or f'no provider {only!r}'} (known: {known})")


def _spec_of(op: Any) -> OpSpec:
    if isinstance(op, torch._ops.OpOverload):
        op = op._schema.name
    name = str(op).replace("::", ".").removeprefix("trace_compile.")
    if name not in OPS:
        raise LoweringError(f"{name!r} is not an op of this package; known: {', '.join(OPS)}")
    return OPS[name]
