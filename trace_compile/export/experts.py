"""What every export format is made from: the packed weights of one region.

A mixture-of-experts region holds two stacked parameters, gate/up and down, each with its packed form in canonical
layout (gate rows first); linear layers that read one input hold one, with the rows of all of them. Formats differ only
in how they name and file these bytes, so nothing is quantized here: the codes and scales that the training and
generation graphs compute with are the ones that are written.

Invariants, checked by ``check_experts`` before a file is made:
 - matrices with one input (gate and up) are rows of one packed tensor, so they share outer and input scales;
 - every outer scale is finite and positive; every block scale is a positive normal E4M3 number (engines flush
   subnormals), unless the bytes are foreign;
 - for W4A4, both input scales are powers of two (engines take a maximum over experts: lossless only then).

Shapes: E experts, N rows (2 I or I for gate/up, H for down), K columns; I expert width, H hidden.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from trace_compile.errors import ExportError, NonFiniteWeightError
from trace_compile.ops.scheme import MoEScheme, OperandScheme
from trace_compile.ops.weights import Packed, WeightLayout

FORMAT = "nvfp4"
"""The numeric format that checkpoints hold, a row of ``numerics.FORMATS``."""

_SIGN, _EXPONENT, _NAN = 0x80, 0x78, 0x7F  # fields of an E4M3 byte


@dataclass(frozen=True)
class ExpertTensor:
    """One stacked expert parameter.

    Args:
        name: dotted name of the parameter in the model's state dict.
        layout: how the parameter stores the canonical ``[E, N, K]``.
        packed: codes uint8 [E, N, K/2], scales uint8 (E4M3 bytes) [E, N, K/16], outer float32 [E].
        input_outer: outer scale of the activations that multiply this weight, a power of two, or None if not traced.
        foreign: another tool may have made the bytes: zero and subnormal scales are kept.
        inverse: float32 [E], the reciprocals of ``outer`` as that file holds them, or None if it holds none.
    """

    name: str
    layout: WeightLayout
    packed: Packed
    input_outer: float | None = None
    foreign: bool = False
    inverse: Tensor | None = None

    @property
    def flushable(self) -> bool:
        """Whether a block scale is zero or subnormal, as no packing here makes it and some engines flush it."""
        return bool(((self.packed.scales & _EXPONENT) == 0).any())

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the parameter (or the joined parameters) that was packed."""
        experts, rows, half = self.packed.codes.shape
        if self.layout.experts is not None:
            return experts * rows, 2 * half
        return (experts, 2 * half, rows) if self.layout.transposed else (experts, rows, 2 * half)

    def expert(self, index: int) -> Tensor:
        """Float32 canonical [N, K] of one expert: the values that the training graph's forward multiplies with."""
        part = slice(index, index + 1)
        packed = Packed(self.packed.codes[part], self.packed.scales[part], self.packed.outer[part])
        return packed.dequantize(fmt=FORMAT)[0]

    def parameter(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All experts in the parameter's own layout, filled one by one.

        Raises ExportError where a value is not exact in ``dtype``.
        """
        found = torch.empty(self.parameter_shape, dtype=dtype, device=self.packed.codes.device)
        experts, layout = self.packed.codes.shape[0], replace(self.layout, experts=None)
        targets = found if self.layout.experts is None else found.unflatten(0, (experts, -1))
        for index, target in enumerate(targets):
            values = layout.parameter(self.expert(index)[None])[0]
            target.copy_(values)
            if not torch.equal(target.float(), values):
                name = str(dtype).removeprefix("torch.")
                raise ExportError(f"{self.name}: dequantized values are not exact in {name}; pack with profile pow2")
        return found

    def cpu(self) -> ExpertTensor:
        """The same on the CPU; nothing is copied if it is there."""
        packed = self.packed
        return replace(self, packed=Packed(packed.codes.cpu(), packed.scales.cpu(), packed.outer.cpu()))


@dataclass(frozen=True)
class RegionWeights(ABC):
    """Packed weights of one region.

    Args:
        region: its name, as in ``model.layers.0.mlp.experts``.
        scheme: how weights were packed and how activations are quantized in training (None: they are not).
    """

    region: str
    scheme: MoEScheme

    @abstractmethod
    def tensors(self) -> dict[str, ExpertTensor]:
        """The packed tensors, each by the projection that multiplies by it."""

    @abstractmethod
    def with_tensors(self, tensors: dict[str, ExpertTensor]) -> Self:
        """The same region with other bytes."""

    @abstractmethod
    def projections(self) -> dict[str, tuple[ExpertTensor, slice]]:
        """Name of each matrix of an expert -> (packed tensor, its rows), in the order in which engines stack them."""

    def split(self, tensor: ExpertTensor, value: Tensor) -> dict[str, Tensor]:
        """The model's parameters by name, from ``value`` for the parameter (or the joined ones) of ``tensor``."""
        return {tensor.name: value}

    def parameters(self) -> dict[str, Tensor]:
        """Float32 by name: the values that the training graph's forward multiplies with."""
        return {name: value for t in self.tensors().values() for name, value in self.split(t, t.parameter()).items()}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that were packed, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for tensor in self.tensors().values():
            whole = torch.empty(tensor.parameter_shape, device="meta")
            shapes |= {name: tuple(value.shape) for name, value in self.split(tensor, whole).items()}
        return shapes

    @property
    def weight_scheme(self) -> OperandScheme:
        """How the weights were packed. Raises ExportError where the region is not quantized."""
        if self.scheme.weight is None:
            raise ExportError(f"{self.region}: scheme {self.scheme.key} does not quantize weights; nothing to export")
        return self.scheme.weight

    @property
    def num_experts(self) -> int:
        return next(iter(self.tensors().values())).packed.codes.shape[0]

    def cpu(self) -> Self:
        """The same on the CPU; nothing is copied if it is there."""
        return self.with_tensors({key: tensor.cpu() for key, tensor in self.tensors().items()})


@dataclass(frozen=True)
class ExpertWeights(RegionWeights):
    """Packed experts.

    Args:
        gate_up: gate rows above up rows, or up alone where ``gated`` is false.
        down: the projection back to the hidden size.
        gated: whether gate_up holds two matrices per expert.
    """

    gate_up: ExpertTensor
    down: ExpertTensor
    gated: bool = True

    def tensors(self) -> dict[str, ExpertTensor]:
        return {"gate_up": self.gate_up, "down": self.down}

    def with_tensors(self, tensors: dict[str, ExpertTensor]) -> ExpertWeights:
        return replace(self, gate_up=tensors["gate_up"], down=tensors["down"])

    def projections(self) -> dict[str, tuple[ExpertTensor, slice]]:
        rows = self.gate_up.packed.codes.shape[1]
        if not self.gated:
            return {
                "up": (self.gate_up, slice(0, rows)),
                "down": (self.down, slice(0, self.down.packed.codes.shape[1])),
            }
        half = rows // 2
        return {
            "gate": (self.gate_up, slice(0, half)),
            "up": (self.gate_up, slice(half, rows)),
            "down": (self.down, slice(0, self.down.packed.codes.shape[1])),
        }


@dataclass(frozen=True)
class LinearWeights(RegionWeights):
    """Linear layers that read one input: one packed tensor, as that of one expert, with the rows of all.

    Args:
        weight: named after all their parameters.
        modules: dotted path of each layer. rows: output features of each.
    """

    weight: ExpertTensor
    modules: tuple[str, ...]
    rows: tuple[int, ...]

    def tensors(self) -> dict[str, ExpertTensor]:
        return {"input": self.weight}

    def with_tensors(self, tensors: dict[str, ExpertTensor]) -> LinearWeights:
        return replace(self, weight=tensors["input"])

    def projections(self) -> dict[str, tuple[ExpertTensor, slice]]:
        ends = tuple(accumulate(self.rows))
        spans = (slice(end - n, end) for end, n in zip(ends, self.rows, strict=True))
        return {
            module.rpartition(".")[2]: (self.weight, span) for module, span in zip(self.modules, spans, strict=True)
        }

    def split(self, tensor: ExpertTensor, value: Tensor) -> dict[str, Tensor]:
        return {f"{module}.weight": part for module, part in zip(self.modules, value.split(self.rows), strict=True)}


@dataclass(frozen=True)
class Matrix:
    """One projection of one expert: codes uint8 [N, K/2], scales uint8 [N, K/16], outer float32 [], its inverse too if
    that is known to more than its own bits."""

    expert: int
    projection: str
    codes: Tensor
    scales: Tensor
    outer: Tensor
    input_outer: float | None
    inverse: Tensor | None = None


def matrices(item: RegionWeights) -> Iterator[Matrix]:
    """Every per-expert matrix of a region, expert by expert. Views; nothing is copied."""
    projections = item.projections()
    for expert in range(item.num_experts):
        for name, (tensor, rows) in projections.items():
            packed = tensor.packed
            yield Matrix(
                expert,
                name,
                packed.codes[expert, rows],
                packed.scales[expert, rows],
                packed.outer[expert],
                tensor.input_outer,
                None if tensor.inverse is None else tensor.inverse[expert],
            )


def check_experts(item: RegionWeights, *, activations: bool) -> None:
    """Refuse a region that no engine could load or that would load as something else.

    Raises:
        NonFiniteWeightError: a block scale is NaN or an outer scale is not finite.
        ExportError: a scale is zero, negative or subnormal, the format is not NVFP4, or W4A4 is asked for without
            ranges.
    """
    fmt = item.weight_scheme.fmt
    if fmt != FORMAT:
        raise ExportError(
            f"{item.region}: weights are {fmt}; checkpoints hold {FORMAT}. Train with that weight format."
        )
    for tensor in item.tensors().values():
        _check_scales(tensor)
        if activations:
            _check_input(item, tensor)


def _check_scales(tensor: ExpertTensor) -> None:
    scales, outer = tensor.packed.scales, tensor.packed.outer
    nan = ((scales & _NAN) == _NAN).flatten(1).any(1) | ~torch.isfinite(outer)
    if bool(nan.any()):
        experts = nan.nonzero().flatten().tolist()
        raise NonFiniteWeightError(
            f"{tensor.name}: experts {experts} hold NaN or Inf; restore the weights, then export"
        )
    bad = (scales & _SIGN) != 0
    if not tensor.foreign:
        bad |= (scales & _EXPONENT) == 0
    bad_experts = bad.flatten(1).any(1) | (outer <= 0)
    if bool(bad_experts.any()):
        experts = bad_experts.nonzero().flatten().tolist()
        raise ExportError(
            f"{tensor.name}: experts {experts} have zero, negative or subnormal scales, which engines flush; "
            "pack with profile pow2, whose block scales have a floor"
        )


def _check_input(item: RegionWeights, tensor: ExpertTensor) -> None:
    if item.scheme.act is None:
        raise ExportError(
            f"{item.region}: scheme {item.scheme.key} does not quantize activations; export W4A16 (activations=False)"
        )
    outer = tensor.input_outer
    if outer is None:
        raise ExportError(
            f"{tensor.name}: no input scale. Trace first (model.trace() while generating), "
            "or export W4A16 (activations=False)"
        )
    if not (math.isfinite(outer) and outer > 0 and math.frexp(outer)[0] == 0.5):
        raise ExportError(
            f"{tensor.name}: input scale {outer!r} is not a power of two; use the scales of traced ranges"
        )
