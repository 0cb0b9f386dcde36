"""Reading a checkpoint back, with no help from the code that wrote it.

The readers below know each format only from its description: they name the tensors themselves, decode E2M1 from its
bits, and apply the outer scale in the direction the format stores it. What they read must equal, bit for bit, what
the training graph multiplies with. The inventory check says whether an engine would load it as that: every tensor
there and of the right type, every scale one an engine keeps, gate and up tied, and every tensor either packed or in
the ignore list.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_compile.errors import ExportError
from trace_compile.export.checks import find_problems
from trace_compile.export.experts import RegionWeights
from trace_compile.export.opened import Checkpoint

_SHOWN = 10


@dataclass(frozen=True)
class VerifyReport:
    """What was checked: tensors in the files, packed matrices among them, matrices compared with the training graph's
    values, and the input scale of each (region, projection), empty for weight-only checkpoints."""

    format: str
    tensors: int
    matrices: int
    compared: int
    input_scales: dict[tuple[str, str], float]


Reader = Callable[[Checkpoint, str], Tensor]


def _e2m1(packed: Tensor) -> Tensor:
    """uint8 [N, K/2] -> float32 [N, K]: low nibble first; a nibble is sign, two exponent bits, one mantissa bit."""
    codes = torch.stack((packed % 16, packed // 16), dim=-1).flatten(-2).int()
    exponent, mantissa = (codes // 2) % 4, (codes % 2) / 2
    magnitude = torch.where(exponent == 0, mantissa, torch.ldexp(1 + mantissa, exponent - 1))
    return torch.where(codes >= 8, -magnitude, magnitude)


def _scaled(values: Tensor, scales: Tensor, outer: Tensor) -> Tensor:
    blocks = values.unflatten(-1, (scales.shape[-1], -1)) * scales.float()[..., None]
    return blocks.flatten(-2) * outer


def read_compressed_tensors(checkpoint: Checkpoint, module: str) -> Tensor:
    """Float32 [N, K] of one matrix. Outer scales are stored as what a weight is multiplied with before quantizing."""
    values = _e2m1(checkpoint.tensor(f"{module}.weight_packed"))
    encode = checkpoint.tensor(f"{module}.weight_global_scale")
    return _scaled(values, checkpoint.tensor(f"{module}.weight_scale"), 1.0 / encode)


def read_modelopt(checkpoint: Checkpoint, module: str) -> Tensor:
    """Float32 [N, K] of one matrix. Outer scales are stored as what a quantized weight is multiplied with."""
    values = _e2m1(checkpoint.tensor(f"{module}.weight"))
    return _scaled(values, checkpoint.tensor(f"{module}.weight_scale"), checkpoint.tensor(f"{module}.weight_scale_2"))


def read_bf16(checkpoint: Checkpoint, module: str) -> Tensor:
    """Float32 [N, K] of one matrix."""
    return checkpoint.tensor(f"{module}.weight").float()


READERS: dict[str, Reader] = {
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "bf16": read_bf16,
}


def verify_checkpoint(path: str | os.PathLike[str], experts: Iterable[RegionWeights] = ()) -> VerifyReport:
    """Check an exported folder, and compare it bit for bit with the packed ``experts`` where they are given.

    Raises ExportError that lists what is wrong: missing, unknown, doubled or mistyped tensors, scales that are not
    finite, positive and normal, untied gate and up, tensors neither packed nor ignored (or both), and different values.
    """
    checkpoint = Checkpoint(path)
    found, scales = find_problems(checkpoint)
    problems = [finding.text for finding in found if finding.severity == "error"]
    compared = 0
    for item in experts:
        if problems:
            break
        compared += _compare(checkpoint, item.cpu(), problems)
    refuse(checkpoint, problems)
    matrices = len(checkpoint.modules) if checkpoint.format.packed else 0
    return VerifyReport(checkpoint.format.name, len(checkpoint.names), matrices, compared, scales)


def refuse(checkpoint: Checkpoint, problems: list[str]) -> None:
    """Raises ExportError that lists ``problems``, if there are any."""
    if problems:
        more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ExportError(f"{checkpoint.path} would not load as exported:\n" + "\n".join(problems[:_SHOWN]) + more)


def _compare(checkpoint: Checkpoint, item: RegionWeights, problems: list[str]) -> int:
    """Compare one region with the training graph's values; the number of matrices compared."""
    if checkpoint.foreign:
        problems.append("made by another tool, it does not say how its codes were made; import it instead")
        return 0
    entry = checkpoint.block["regions"].get(item.region)
    if entry is None or entry["experts"] != item.num_experts or entry["scheme"] != item.scheme.key:
        problems.append(f"{item.region}: exported as {entry}, compared with {item.num_experts} of {item.scheme.key}")
        return 0
    stacked = entry["stacked"] if not checkpoint.format.packed else {}
    compared = 0
    for key, tensor in item.tensors().items():
        projections = {p: rows for p, (owner, rows) in item.projections().items() if owner is tensor}
        stack = checkpoint.tensor(stacked[key]) if key in stacked else None
        if stack is not None and tuple(stack.shape) != tensor.parameter_shape:
            stack = stack.transpose(1, 2)  # families differ in which way round they store stacked experts
        for expert in range(item.num_experts):
            right = tensor.expert(expert)
            compared += len(projections)
            if stack is not None:
                if not _same_bits(stack[expert].float(), tensor.layout.parameter(right[None])[0]):
                    problems.append(f"{stacked[key]}: expert {expert} differs from the training graph's values")
                continue
            for projection, rows in projections.items():
                module = entry["modules"][projection].format(expert)
                read, expected = READERS[checkpoint.format.name](checkpoint, module), right[rows]
                if not _same_bits(read, expected):
                    cause = _likely_cause(read, expected)
                    problems.append(f"{module} differs from the training graph's values{cause}")
    return compared


def swap_pairs(weight: Tensor) -> Tensor:
    """``weight [..., K]`` as it reads when its nibbles are taken in the other order: neighbours change places."""
    return weight.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _likely_cause(read: Tensor, right: Tensor) -> str:
    if read.shape == right.shape and _same_bits(swap_pairs(read), right):
        return "; its nibbles are swapped (the first element belongs into the low one)"
    return ""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of float32 bit patterns: zeros of different sign differ."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
