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
    """What a launch choice may depend on: compute capability (0 in the interpreter) and number of multiprocessors."""

    capability: int
    multiprocessors: int


INTERPRETER = Target(0, 1)


def target_of(device: torch.device) -> Target:
    """The target of a tensor's device; ``INTERPRETER`` on a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Target(10 * properties.major + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True)
class QuantizeLaunch:
    """``block_m`` rows by ``block_k`` elements at a time; a row's tiles are dealt to ``splits`` programs."""

    block_m: int
    block_k: int
    splits: int
    num_warps: int


def quantize_launch(rows: int, k: int, own_outer: bool, target: Target) -> QuantizeLaunch:
    """Configuration of ``quantize_rows`` for ``rows`` x ``k`` elements; both powers of two where Triton asks for them.

    A tile is at most 4096 elements, one row where rows are long. With too few rows to fill the device, a row is split:
    with its own outer scale each split then reads the whole row for the amax (from the cache) and quantizes its part.
    """
    if target == INTERPRETER:
        # The interpreter's time goes by operations, not by elements: large tiles.
        return QuantizeLaunch(block_m=64, block_k=1024, splits=1, num_warps=1)
    block_k = min(2048, max(16, 1 << (k - 1).bit_length()))
    block_m = max(1, min(8, 2048 // block_k))
    programs = -(-rows // block_m)
    tiles = -(-k // block_k)
    splits = 1 if programs >= target.multiprocessors else min(tiles, -(-target.multiprocessors // max(programs, 1)))
    if not own_outer:
        splits = tiles
    return QuantizeLaunch(block_m, block_k, splits, num_warps=4)
