"""Row operands of the expert GEMMs: quantized from activations, guided by a rollout's record, and written as records.

One quantization per row (a token for gate/up, a routed row for down). A record row and a guide row are the same bytes:

    payload (1 bit per element, the code's lowest; or all 4 bits) | block scales | outer scale where each row has one

The outer bytes are one exponent byte for powers of two, four bytes of float32 otherwise, none for a traced scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import GuidanceError
from ..numerics import (
    FORMATS,
    PROFILES,
    amax,
    decode_blocks,
    encode_exponent,
    finite_scales,
    guided_blocks,
    outer_scale,
    pack_bits,
    pack_nibbles,
    poison_scales,
    quantize_blocks,
    unpack_bits,
    unpack_nibbles,
)
from .scheme import OperandScheme

_ELEMENTS_PER_BYTE = {"bit": 8, "code": 2}


@dataclass(frozen=True)
class Rows:
    """``M`` rows of ``K``. Invariant: ``row[m] = decode(codes[m], scales[m]) * outer[m]``."""

    codes: Tensor  # u8 [M, K], one code per byte
    scales: Tensor  # u8 [M, Format.scale_bytes(K)]
    outer: Tensor  # f32 [M]
    fmt: str

    @classmethod
    def unpack(cls, packed: Tensor, scales: Tensor, outer: Tensor, fmt: str) -> Rows:
        return cls(unpack_nibbles(packed), scales, outer, fmt)

    @property
    def packed(self) -> Tensor:
        return pack_nibbles(self.codes)

    def values(self, dtype: torch.dtype) -> Tensor:
        """``[M, K]`` without the outer scale; exact in float32, and in bfloat16 for nvfp4, mxfp4 and hif4."""
        return decode_blocks(self.codes, self.scales, self.fmt, dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """``[M, K]``; exact in bfloat16 too where the outer scale is a power of two."""
        return (self.values(torch.float32) * self.outer.unsqueeze(-1)).to(dtype)


def quantize_rows(x: Tensor, scheme: OperandScheme, traced: Tensor | None, counted: Tensor) -> Rows:
    """Own scale, round to nearest even. ``x [M, K]``; ``traced f32 []`` is the outer scale of traced schemes;
    ``counted bool [M]`` says which rows take part in a whole-tensor maximum."""
    x, rows = x.float(), x.shape[0]
    if not FORMATS[scheme.fmt].outer:
        outer = x.new_ones(rows)
    elif scheme.outer == "traced":
        assert traced is not None
        outer = traced.float().repeat(rows)
    else:
        largest = amax(x, -1)
        if scheme.outer == "tensor" and rows:
            largest = torch.where(counted, largest, 0).amax().expand(rows)
        outer = outer_scale(largest, scheme.fmt, scheme.profile).contiguous()
    return Rows(*quantize_blocks(x, outer, scheme.fmt, scheme.profile), outer, scheme.fmt)


@dataclass(frozen=True)
class Guide:
    """What a rollout recorded for these rows, and how it applies: its scales, and codes or mantissa bits."""

    payload: Tensor  # u8 [M, K]: codes, or bits
    scales: Tensor  # u8 [M, Format.scale_bytes(K)]
    outer: Tensor  # f32 [M]
    hit: Tensor  # bool [M]: there is a record, and not that of a NaN token
    kind: str  # "bit" or "code": what the payload is
    codes: Tensor | None  # u8 [M, K]: the rollout's codes, where the record has them

    @classmethod
    def read(
        cls, guide: Tensor, outer: Tensor, hit: Tensor | None, kind: str, width: int, fmt: str, use: str | None = None
    ) -> Guide:
        """Splits guide rows ``u8 [M, payload + scales]`` of ``kind``; ``outer f32 [M]``; without ``hit`` every row has
        a record. ``use="bit"`` takes the mantissa bits of codes."""
        payload, scales = guide.tensor_split([width // _ELEMENTS_PER_BYTE[kind]], dim=1)
        codes = None if kind == "bit" else unpack_nibbles(payload)
        use = use or kind
        if codes is None:
            payload = unpack_bits(payload)
        else:
            payload = codes & 1 if use == "bit" else codes
        recorded = finite_scales(scales, fmt)
        return cls(payload, scales, outer.float(), recorded if hit is None else hit & recorded, use, codes)


def guide_rows(x: Tensor, own: Rows, guide: Guide) -> Rows:
    """Rounds ``x`` toward the rollout's outcome where there is a record; other rows stay ``own``.

    A block of ``x`` with NaN or Inf gets the NaN scale, so the token's output is NaN as it is without guidance.
    """
    told = {"bits": guide.payload} if guide.kind == "bit" else {"codes": guide.payload}
    codes = guided_blocks(x.float(), guide.scales, guide.outer, fmt=own.fmt, **told)
    scales = poison_scales(x, guide.scales, own.fmt)
    hit = guide.hit.unsqueeze(-1)
    return Rows(
        torch.where(hit, codes, own.codes),
        torch.where(hit, scales, own.scales),
        torch.where(guide.hit, guide.outer, own.outer),
        own.fmt,
    )


def outer_bytes(scheme: OperandScheme) -> Literal[0, 1, 4]:
    """Bytes of a record row that hold the row's outer scale: 0 traced or none, 1 a power of two, else 4."""
    if scheme.outer == "traced" or not FORMATS[scheme.fmt].outer:
        return 0
    return 1 if PROFILES[scheme.profile].power_of_two else 4


def guide_bytes(width: int, kind: str, fmt: str) -> int:
    """Bytes of one guide row: payload and block scales."""
    if kind not in _ELEMENTS_PER_BYTE:
        raise GuidanceError(f"guidance kind {kind!r}: use 'bit' or 'code'")
    return width // _ELEMENTS_PER_BYTE[kind] + FORMATS[fmt].scale_bytes(width)


def record_bytes(width: int, kind: str, scheme: OperandScheme) -> int:
    """Bytes of one record row: a guide row and the outer scale."""
    return guide_bytes(width, kind, scheme.fmt) + outer_bytes(scheme)


def record_rows(rows: Rows, kind: str, scheme: OperandScheme) -> Tensor:
    """``u8 [M, record_bytes]``: what these rows were rounded to."""
    payload = pack_bits(rows.codes) if kind == "bit" else rows.packed
    parts = [payload, rows.scales]
    if outer_bytes(scheme) == 1:
        parts.append(encode_exponent(rows.outer).unsqueeze(-1))
    elif outer_bytes(scheme) == 4:
        parts.append(rows.outer.contiguous().view(torch.uint8).view(-1, 4))
    return torch.cat(parts, -1)
