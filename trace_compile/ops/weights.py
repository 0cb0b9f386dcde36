"""Expert weights: from the layouts models keep to one canonical layout, and from there to 4-bit codes.

Canonical is ``[E, N, K]``: one row per output, the reduction dimension last, gate rows before up rows. Gate and up
share one outer scale per expert because engines fuse the pair; one vectorised quantization covers all experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NonFiniteWeightError, UnknownFormatError
from ..numerics import amax, decode_blocks, format_of, outer_scale, pack_nibbles, quantize_blocks, unpack_nibbles
from .checks import whole_blocks
from .quads import from_quads, in_quads, packed_shape, to_quads
from .schema import custom_op
from .scheme import OperandScheme

Master = Tensor | tuple[Tensor, ...]
"""What a weight is packed from: a parameter, or several whose rows follow one another."""


def joined(master: Master) -> Tensor:
    """The master as one tensor."""
    return torch.cat(master) if isinstance(master, tuple) else master


CHUNK = 1 << 25
"""Elements that are quantized together."""


@dataclass(frozen=True)
class WeightLayout:
    """How a model stores an expert parameter: ``transposed`` is ``[E, K, N]``, ``interleaved`` alternates gate and up
    along N (gate first). ``experts``: it is no stack but a matrix ``[E * N, K]``, expert after expert (one for a
    linear layer). ``split``: two stacks one after the other, the gate's ``[E, I, K]`` and the up projection's."""

    transposed: bool = False
    interleaved: bool = False
    experts: int | None = None
    split: bool = False

    def canonical(self, param: Tensor) -> Tensor:
        """``[E, N, K]``, differentiable; a view unless gate and up are interleaved or split."""
        if self.experts is not None:
            param = param.unflatten(0, (self.experts, -1))
        weight = param.transpose(-2, -1) if self.transposed else param
        if self.split:
            weight = weight.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)
        return _halves(weight, 1) if self.interleaved else weight

    def parameter(self, weight: Tensor) -> Tensor:
        """The inverse of ``canonical``: ``[E, N, K]`` in the parameter's own layout."""
        if self.interleaved:
            gate, up = weight.chunk(2, dim=1)
            weight = torch.stack((gate, up), dim=2).flatten(1, 2)
        if self.split:
            weight = weight.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)
        weight = weight.transpose(-2, -1) if self.transposed else weight
        return weight if self.experts is None else weight.flatten(0, 1)

    def canonical_bias(self, bias: Tensor) -> Tensor:
        """``[E, N]`` with the gate's entries first, differentiable."""
        return _halves(bias, 1) if self.interleaved else bias


@dataclass(frozen=True)
class Packed:
    """A quantized expert parameter. Invariant: ``weight[e] = decode(codes[e], scales[e]) * outer[e]``, all finite.

    In the linear form as below, or in the form of :mod:`.quads`, of the same size.
    """

    codes: Tensor  # u8 [E, N, K/2], even element in the low nibble
    scales: Tensor  # u8 [E, N, Format.scale_bytes(K)], raw bytes
    outer: Tensor  # f32 [E]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        return packed_shape(self.codes)

    @property
    def linear(self) -> Packed:
        """The same weights in the linear form; itself where it has that."""
        return Packed(*from_quads(self.codes, self.scales), self.outer) if in_quads(self.codes) else self

    @property
    def quads(self) -> Packed:
        """The same weights in the form of :mod:`.quads`; itself where it has that."""
        return self if in_quads(self.codes) else Packed(*to_quads(self.codes, self.scales), self.outer)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.outer))

    @property
    def bits_per_value(self) -> float:
        """Payload and block scales, without the outer scales: 4.5 for NVFP4."""
        return 8 * (self.codes.nbytes + self.scales.nbytes) / math.prod(self.shape)

    def values(self, dtype: torch.dtype, fmt: str = "nvfp4") -> Tensor:
        """``[E, N, K]`` without the outer scales; exact in float32, and in bfloat16 for nvfp4, mxfp4 and hif4."""
        linear = self.linear
        return decode_blocks(unpack_nibbles(linear.codes), linear.scales, fmt, dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32, fmt: str = "nvfp4") -> Tensor:
        """``[E, N, K]`` weights; exact in bfloat16 too where the outer scales are powers of two."""
        return (self.values(torch.float32, fmt) * self.outer[:, None, None]).to(dtype)


Packer = Callable[[Tensor, OperandScheme], Packed | None]
PACKERS: list[Packer] = []
"""Kernels that pack a canonical weight, asked in order before the reference does; None leaves it to the next."""


def pack_experts(param: Tensor, layout: WeightLayout, scheme: OperandScheme, *, name: str = "weight") -> Packed:
    """Quantizes a whole expert parameter from its own dtype (widened to float32, which loses nothing).

    Some experts at a time: beyond the result it takes a few float32 copies of at most ``CHUNK`` elements (or of one
    expert). ``name`` is the parameter's, for messages. Raises :class:`NonFiniteWeightError` (name, first expert, how
    many) and :class:`BlockSizeError`, both before anything is written.
    """
    weight = layout.canonical(param.detach())
    for packer in PACKERS:
        packed = packer(weight, scheme)
        if packed is not None:
            return packed
    fmt = format_of(scheme.fmt)
    if fmt.element.bits != 4:
        raise UnknownFormatError(f"experts can be packed in 4-bit formats, not {scheme.fmt!r}")
    whole_blocks(fmt.block, **{f"{name}'s reduction dimension": weight.shape[-1]})
    finite = torch.cat([torch.isfinite(part).flatten(1).all(1) for part in _some(weight)])
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0, 0])
        raise NonFiniteWeightError(
            f"{name}: expert {first} holds {int((~torch.isfinite(weight[first])).sum())} NaN or Inf values;"
            f" {int((~finite).sum())} expert(s) hold some and nothing was packed. Restore the parameter first"
        )
    return _pack(weight, scheme)


def _some(weight: Tensor) -> tuple[Tensor, ...]:
    """``weight [E, N, K]`` a few experts at a time."""
    return weight.split(max(1, CHUNK // max(math.prod(weight.shape[1:]), 1)))


def _pack(weight: Tensor, scheme: OperandScheme) -> Packed:
    """Of canonical ``[E, N, K]``. A block with NaN or Inf gets the NaN scale."""
    fmt = format_of(scheme.fmt)
    parts = _some(weight)
    largest = torch.cat([amax(part.flatten(1), -1) for part in parts])
    if scheme.outer == "tensor":
        largest = largest.amax().expand_as(largest)
    outer = outer_scale(largest, scheme.fmt, scheme.profile) if fmt.outer else torch.ones_like(largest)
    found = []
    for part, scale in zip(parts, outer.split(len(parts[0]))):
        codes, scales = quantize_blocks(part.float().contiguous(), scale[:, None], scheme.fmt, scheme.profile)
        found.append((pack_nibbles(codes), scales))
    codes, scales = (torch.cat(list(t)) if len(found) > 1 else t[0] for t in zip(*found))
    return Packed(codes, scales, outer)


@dataclass(frozen=True)
class PackOperands:
    """A canonical weight ``[E, N, K]`` and the key of an ``OperandScheme``."""

    weight: Tensor
    scheme: str


def _packed_fake(o: PackOperands) -> tuple[Tensor, Tensor, Tensor]:
    experts, n, k = o.weight.shape
    fmt = format_of(OperandScheme.parse(o.scheme).fmt)
    columns = (k // 2, fmt.scale_bytes(k))
    codes, scales = (o.weight.new_empty((experts, n, c), dtype=torch.uint8) for c in columns)
    return codes, scales, o.weight.new_empty((experts,), dtype=torch.float32)


def _packed_body(o: PackOperands) -> tuple[Tensor, Tensor, Tensor]:
    packed = _pack(o.weight, OperandScheme.parse(o.scheme))
    return packed.codes, packed.scales, packed.outer


pack_weight = custom_op("pack_weight", PackOperands, 3, _packed_body, _packed_fake)
"""Packing inside a graph, for weights that are computed there. Waits for nothing: NaN and Inf become NaN scales."""


def _halves(t: Tensor, dim: int) -> Tensor:
    """Even then odd entries along ``dim``."""
    pairs = t.unflatten(dim, (-1, 2))
    return torch.cat([pairs.select(dim + 1, 0), pairs.select(dim + 1, 1)], dim)
