"""``quantize`` and its result: a tensor as codes, scale bytes and outer scales, with the equations it satisfies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_compile.errors import OperandError, UnknownFormatError
from trace_compile.numerics.blocks import decode_blocks, quantize_blocks
from trace_compile.numerics.codec import pack_nibbles
from trace_compile.numerics.formats import format_of, profile_of
from trace_compile.numerics.scales import amax, outer_scale


@dataclass(frozen=True)
class QTensor:
    """A quantized tensor of shape [..., K].

    Invariants: codes.shape == [..., K]; scales.shape == [..., K / block * bytes per scale]; values() == element * block
    scale, exactly; dequantize() == values() * outer, rounded once to float32, then to the dtype. ``outer`` is float32:
    [...] one per row, [E] one per expert (leading dimension of a 3-D tensor), [1] for the whole tensor (also, with
    value 1, in formats without an outer scale).
    """

    fmt: str
    profile: str
    codes: Tensor
    scales: Tensor
    outer: Tensor

    def __post_init__(self) -> None:
        f = format_of(self.fmt)
        profile_of(self.profile)
        *lead, k = self.codes.shape
        expected = (*lead, k // f.block * f.scale.bytes)
        if self.scales.shape != expected:
            raise OperandError(
                f"{self.fmt} codes {tuple(self.codes.shape)} need scales {expected}, got {tuple(self.scales.shape)}"
            )
        for name, tensor, dtype in (
            ("codes", self.codes, torch.uint8),
            ("scales", self.scales, torch.uint8),
            ("outer", self.outer, torch.float32),
        ):
            if tensor.dtype != dtype:
                raise OperandError(f"{name} of a quantized tensor must be {dtype}, got {tensor.dtype}")
        outer_rows(self.outer, self.codes.shape[:-1])

    @property
    def packed(self) -> Tensor:
        """uint8 [..., K/2], low nibble = even element; formats of 8-bit elements: the codes themselves."""
        return pack_nibbles(self.codes) if format_of(self.fmt).element.bits == 4 else self.codes

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Element * block scale [..., K], without the outer scale. Exact in float32; E2M1 formats: in bfloat16 too."""
        return decode_blocks(self.codes, self.scales, self.fmt, dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The represented values [..., K]."""
        outer = outer_rows(self.outer, self.codes.shape[:-1])
        return (self.values() * outer.unsqueeze(-1)).to(dtype)


def outer_rows(outer: Tensor, lead: torch.Size) -> Tensor:
    """outer ([...] row, [E] expert, [1] or [] tensor) as a view that broadcasts to ``lead`` = shape[:-1]."""
    if outer.shape == lead or outer.numel() == 1:
        return outer.reshape(()) if outer.numel() == 1 else outer
    if outer.dim() == 1 and len(lead) == 2 and outer.shape[0] == lead[0]:
        return outer.unsqueeze(-1)
    raise OperandError(
        f"an outer scale for a tensor of leading shape {tuple(lead)} has that shape (row), [E] (expert, 3-D tensors) "
        f"or [1] (tensor), got {tuple(outer.shape)}"
    )


def quantize(x: Tensor, fmt: str = "nvfp4", *, outer: str | Tensor = "row", profile: str = "pow2") -> QTensor:
    """Quantize float x [..., K] along its last dimension with its own block scales, round to nearest even (numerics 1).

    outer: "row" (one scale per row), "tensor", "expert" (per leading index of a 3-D tensor), or a float32 tensor of
    scales to use as they are. Ignored by formats without an outer scale. NaN and Inf poison their block only: its scale
    byte is NaN. Raises ``UnknownFormatError``, ``BlockSizeError``, ``OperandError``.
    """
    f = format_of(fmt)
    profile_of(profile)
    if x.dim() == 0 or not x.dtype.is_floating_point:
        raise OperandError(f"quantize takes a floating-point tensor [..., K], got {x.dtype} {tuple(x.shape)}")
    if not f.outer:
        g = torch.ones(1, dtype=torch.float32, device=x.device)
    elif isinstance(outer, Tensor):
        g = outer.float() if outer.dim() else outer.float().reshape(1)
    else:
        g = outer_scale(_amax_of(x, outer), fmt, profile)
    codes, scales = quantize_blocks(x, outer_rows(g, x.shape[:-1]), fmt, profile)
    return QTensor(fmt, profile, codes, scales, g)


def _amax_of(x: Tensor, source: str) -> Tensor:
    if source == "row":
        return amax(x, -1)
    if source == "tensor":
        return amax(x, tuple(range(x.dim()))).reshape(1)
    if source == "expert":
        if x.dim() != 3:
            raise OperandError(f"outer='expert' takes a 3-D tensor [E, N, K], got shape {tuple(x.shape)}")
        return amax(x, (1, 2))
    raise UnknownFormatError(f"unknown outer source {source!r}: use 'row', 'tensor', 'expert' or a float32 tensor")
