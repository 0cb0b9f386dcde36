"""Operator schemas from frozen dataclasses: one list of operands per op, shared by its body, fake and autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_SCHEMA_TYPES = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "str": "str", "bool": "bool"}


def schema_of(operands: type, outputs: int) -> str:
    """``(Tensor x, ..., bool flag) -> (Tensor, ...)`` for the fields of the dataclass ``operands``, in order; a single
    output has no parentheses."""
    listed = ", ".join(f"{_SCHEMA_TYPES[str(f.type)]} {f.name}" for f in fields(operands))
    results = ", ".join(["Tensor"] * outputs)
    return f"({listed}) -> " + (results if outputs == 1 else f"({results})")


def custom_op(name: str, operands: type, outputs: int, body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Registers ``trace_compile::name``; ``body`` and ``fake`` take one ``operands`` object and return tensors.

    The op is functional and opaque: compilers neither look inside nor reorder its arithmetic, so eager and compiled
    graphs see the same bits. Results are contiguous, whatever the strides of the operands.
    """
    op = torch.library.custom_op(
        f"trace_compile::{name}",
        lambda *args: tuple(_contiguous(t) for t in body(operands(*args))),
        mutates_args=(),
        schema=schema_of(operands, outputs),
    )
    op.register_fake(lambda *args: fake(operands(*args)))
    return op


def _contiguous(t: Tensor) -> Tensor:
    """``t`` with the strides that a new tensor of its shape has, along dimensions of size 1 too."""
    strides = tuple(accumulate((max(n, 1) for n in t.shape[:0:-1]), lambda a, b: a * b, initial=1))[::-1]
    return t if t.stride() == strides or t.dim() == 0 else t.new_empty(t.shape).copy_(t)
