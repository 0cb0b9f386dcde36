"""The form that packed weights take inside kernels that unpack them to bfloat16: four codes a 16-bit word.

Why: where there are no FP4 tensor cores, what limits a GEMM from packed weights at few tokens is the number of
instructions a weight costs. Here one word holds the codes of columns m, m + 16, m + 32, m + 48 of a 64-column chunk.
A tile of words [N, 16] lies in registers as the tensor core wants its bfloat16 operand, so one shift and one mask turn
it into that operand for 16 columns, a *plane*: one block per row, with one scale. Planes follow each other in the
natural order of K, so sums have the order they have anywhere else.

    codes   int16 [E, K/64, N, 16]   word (e, c, n, m): the codes of k = 64 c + 16 p + m, plane p in 0..3
    scales  int32 [E, K/64, N]       byte p, least significant first: the E4M3 byte of block 4 c + p

A plane's sign and magnitude come out at bits 15 and 8..6: as bfloat16 that is the element times 2^-126, subnormals
included. Plane 3 takes the bits that the others leave and needs three shifts.

Invariants: ``from_quads(to_quads(x)) == x`` for every byte; as many bytes as the linear form; files never hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..numerics import pack_nibbles, unpack_nibbles
from ..numerics.formats import E4M3, FORMATS, PROFILES, Format, ScaleKind
from .scheme import MoEScheme, OperandScheme

BLOCK = FORMATS["nvfp4"].block
PLANES = 4
CHUNK = PLANES * BLOCK
"""Columns per word; K must be a multiple of it."""


@dataclass(frozen=True)
class Move:
    """``(word << left) & mask``, a right shift where ``left`` is negative: some of a plane's bits, at their places."""

    left: int
    mask: int


MOVES: tuple[tuple[Move, ...], ...] = (
    (Move(0, 0x81C0),),
    (Move(3, 0x81C0),),
    (Move(6, 0x81C0),),
    (Move(1, 0x8000), Move(-5, 0x0100), Move(-4, 0x00C0)),
)
"""By plane: the moves whose results, joined, are the plane's bfloat16 bits."""
_SIGN, _MAGNITUDE = 15, 6  # where those bits begin


def to_quads(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Linear packed ``codes u8 [E, N, K/2]`` and ``scales u8 [E, N, K/16]`` -> this form; K a multiple of 64."""
    experts, n, half = codes.shape
    plane = unpack_nibbles(codes).view(experts, n, 2 * half // CHUNK, PLANES, BLOCK).int()
    bits = ((plane >> 3) << _SIGN) | ((plane & 7) << _MAGNITUDE)
    word = torch.zeros_like(bits[..., 0, :])
    for p, moves in enumerate(MOVES):
        for move in moves:
            word |= _shifted(bits[..., p, :] & move.mask, -move.left)
    words = ((word ^ 0x8000) - 0x8000).to(torch.int16).transpose(1, 2).contiguous()
    quads = scales.view(experts, n, -1, PLANES).transpose(1, 2).contiguous().view(torch.int32).squeeze(-1)
    return words, quads


def from_quads(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`to_quads`."""
    experts, _, n, _ = codes.shape
    word = codes.transpose(1, 2).int()
    planes = []
    for moves in MOVES:
        bits = torch.zeros_like(word)
        for move in moves:
            bits |= _shifted(word, move.left) & move.mask
        planes.append(((bits >> _SIGN) << 3) | ((bits >> _MAGNITUDE) & 7))
    plane = torch.stack(planes, -2).to(torch.uint8).reshape(experts, n, -1)
    return pack_nibbles(plane), scales.unsqueeze(-1).view(torch.uint8).transpose(1, 2).reshape(experts, n, -1)


def in_quads(codes: Tensor) -> bool:
    """Whether packed ``codes`` have this form; the linear one is uint8 [E, N, K/2]."""
    return codes.dtype == torch.int16


def packed_shape(codes: Tensor) -> tuple[int, int, int]:
    """(E, N, K) of packed ``codes`` in either form."""
    if in_quads(codes):
        experts, chunks, n, _ = codes.shape
        return experts, n, chunks * CHUNK
    experts, n, half = codes.shape
    return experts, n, 2 * half


def part_shapes(
    shape: tuple[int, int, int], quads: bool, fmt: Format
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of codes, scales and outer scales of a weight ``[E, N, K]``."""
    experts, n, k = shape
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((experts, n, k // 2), torch.uint8),
        "scales": ((experts, n, fmt.scale_bytes(k)), torch.uint8),
        "outer": ((experts,), torch.float32),
    }
    if quads:
        chunks = k // CHUNK
        parts |= {"codes": ((experts, chunks, n, BLOCK), torch.int16), "scales": ((experts, chunks, n), torch.int32)}
    return parts


def refuses_quads(weight: OperandScheme | None, *widths: int) -> str | None:
    """Why weights of this scheme and these reduction lengths K have no such form, or None."""
    if weight is None:
        return "weights are not quantized"
    fmt, profile = FORMATS[weight.fmt], PROFILES[weight.profile]
    if fmt is not FORMATS["nvfp4"] or fmt.scale is not ScaleKind.E4M3 or profile.floor < E4M3.smallest_normal:
        return f"{weight.key} may hold block scales that are zero or subnormal"
    odd = [k for k in widths if k % CHUNK]
    return f"K = {odd[0]} is no multiple of {CHUNK}" if odd else None


def prefers_quads(scheme: MoEScheme, widths: tuple[int, ...], device: torch.device) -> bool:
    """Whether inference keeps a region's weights, with these K, in this form: on GPUs without FP4 tensor cores for the
    scheme."""
    if refuses_quads(scheme.weight, *widths) is not None or not torch.cuda.is_available() or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8 and (scheme.act is None or not has_fp4(device))


def has_fp4(device: torch.device) -> bool:
    """Whether tensor cores multiply E2M1 by E2M1 with a scale for every block (Blackwell)."""
    cuda = device.type == "cuda" and torch.cuda.is_available()
    return cuda and torch.cuda.get_device_capability(device)[0] >= 10


def _shifted(bits: Tensor, left: int) -> Tensor:
    return bits << left if left >= 0 else bits >> -left
