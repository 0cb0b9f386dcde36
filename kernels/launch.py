"""Launch choices: pure functions from shape and target to a configuration.

Why apart from the kernels: a choice can then be tested without a device, overridden in a test, and replaced by measured
values, and device code holds no policy. Nothing here touches a device or a clock, so no kernel is ever tuned by running
it on live buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """What a launch choice may depend on: compute capability (0 in the interpreter), number of multiprocessors, and the
    device's name, under which measured launches are kept."""

    capability: int
    multiprocessors: int
    name: str = ""


INTERPRETER = Target(0, 1)
TILE = 2048  # elements
PADDING = 1.08  # padded length of a row that is accepted for wider tiles, over the least there is


def target_of(device: torch.device) -> Target:
    """The target of a tensor's device; ``INTERPRETER`` on a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Target(10 * properties.major + properties.minor, properties.multi_processor_count, properties.name)


def unsuited(x: torch.Tensor, gates: torch.Tensor) -> str | None:
    """Why no kernel of expert layers takes these operands, or None."""
    if x.device.type != "cuda":
        return f"needs a GPU, x is on {x.device.type}"
    if x.dtype != torch.bfloat16:
        return f"multiplies in bfloat16, x is {x.dtype}"
    return "gates are float64" if gates.dtype == torch.float64 else None


@dataclass(frozen=True)
class QuantizeLaunch:
    """``block_m`` rows by ``block_k`` elements at a time; a row's tiles are dealt to ``splits`` programs."""

    block_m: int
    block_k: int
    splits: int
    num_warps: int


def quantize_launch(rows: int, k: int, own_outer: bool, target: Target) -> QuantizeLaunch:
    """Configuration of ``quantize_rows`` for ``rows`` x ``k`` elements; blocks are powers of two, as Triton asks.

    Measured on an H200: tiles of 2048 elements, 32 a thread, are best where memory bounds the kernel; padding costs
    more than narrower tiles do. With too few rows to fill the device a row's tiles are dealt to several programs: with
    its own outer scale, each of them reads the whole row for the amax (from the cache) and quantizes its part.
    """
    if target == INTERPRETER:
        # The interpreter's time goes by operations, not by elements: large tiles.
        return QuantizeLaunch(block_m=64, block_k=1024, splits=1, num_warps=1)
    widths = [1 << bit for bit in range(4, 12) if 1 << bit < 2 * k]
    padded = {width: -(-k // width) * width for width in widths}
    block_k = max(width for width in widths if padded[width] <= min(padded.values()) * PADDING)
    block_m = TILE // block_k
    programs = -(-rows // block_m)
    tiles = -(-k // block_k)
    splits = min(tiles, -(-target.multiprocessors // max(programs, 1))) if own_outer else tiles
    one_wave = programs * splits <= 8 * target.multiprocessors
    return QuantizeLaunch(block_m, block_k, splits, num_warps=4 if one_wave else 2)


@dataclass(frozen=True)
class RowsLaunch:
    """``block_m`` rows by ``block_k`` words of eight elements."""

    block_m: int
    block_k: int
    num_warps: int


def rows_launch(words: int) -> RowsLaunch:
    """Tiles of rows that are only moved and unpacked: about 1024 words, up to 256 of them in a row."""
    block_k = min(256, 1 << (words - 1).bit_length())
    return RowsLaunch(1024 // block_k, block_k, 4)


@dataclass(frozen=True)
class WordsLaunch:
    """``block_m`` rows by ``block_b`` blocks of 16 elements at a time."""

    block_m: int
    block_b: int
    num_warps: int


def words_launch(rows: int, blocks: int, own_outer: bool, target: Target) -> WordsLaunch:
    """Configuration for rows of ``blocks`` blocks: a block a thread, two where there are many rows.

    Rows with their own outer scale stay in registers up to 1024 blocks; with a given one, tiles follow a row's length.
    """
    block_b = min(1024, 1 << (blocks - 1).bit_length())
    if target == INTERPRETER:
        return WordsLaunch(64, block_b, 1)
    if not own_outer:
        while block_b > 16 and -(-blocks // (block_b // 2)) * (block_b // 2) < -(-blocks // block_b) * block_b:
            block_b //= 2
    threads = max(32, min(block_b, 256))
    many = rows * blocks >= 256 * threads * target.multiprocessors
    block_m = max(1, (2 if many else 1) * threads // block_b)
    return WordsLaunch(block_m, block_b, threads // 32)


def activate_launch(blocks: int, own_outer: bool, target: Target) -> WordsLaunch:
    """Configuration of the activation with quantization for rows of ``blocks`` blocks: a block a thread, for each takes
    some eighty registers; a row's own outer scale needs all of it in one program."""
    if target == INTERPRETER:
        return WordsLaunch(32, 1 << (blocks - 1).bit_length(), 1)
    plan = words_launch(0, blocks, own_outer, target)
    block_b = 1 << (blocks - 1).bit_length() if own_outer else plan.block_b
    warps = max(1, min(16, block_b // 32))
    return WordsLaunch(max(1, 128 // block_b), block_b, max(4, warps))
