"""The checkpoint formats that serving engines load, as data.

All of them hold the same bytes: E2M1 codes two to a byte (low nibble first), linear E4M3 block scales, and float32
outer scales. A format says what each of these is called, in which direction outer scales are stored (the value
multiplied with, or its reciprocal), and what the configuration declares.

| | compressed-tensors | modelopt | bf16 |
|---|---|---|---|
| codes [N, K/2] | weight_packed | weight | dequantized ``weight`` [N, K] |
| block scales [N, K/16] | weight_scale | weight_scale | |
| outer g | weight_global_scale = 1/g, [1] | weight_scale_2 = g, [] | |
| input outer g (W4A4) | input_global_scale = 1/g, [1] | input_scale = g, [] | |

``bf16`` is the lossless twin: with power-of-two outer scales every dequantized value is exact in bf16, and any loader
reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trace_compile.errors import ExportError, UnknownFormatError
from trace_compile.export.experts import FORMAT, Matrix
from trace_compile.export.ignore import REGEX, WILDCARD, IgnoreStyle
from trace_compile.numerics import FORMATS as NUMERIC_FORMATS

Config = dict[str, Any]
Role = Literal["codes", "scales", "outer", "input"]


@dataclass(frozen=True)
class Field:
    """One tensor of a packed matrix. ``reciprocal``: 1/g is stored. ``shape``: of a scalar."""

    suffix: str
    role: Role
    reciprocal: bool = False
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckpointFormat:
    """A row of ``FORMATS``.

    Args:
        name: what users pass as ``format``.
        fields: tensors of one packed matrix; none: weights are written dequantized, as the model family stores them.
        ignore: pattern language of the list of modules that are not quantized.
        quantization_config: (activations quantized?, ignore list) -> that entry of config.json.
        extra_files: the same arguments -> further JSON files by name.
    """

    name: str
    fields: tuple[Field, ...] = ()
    ignore: IgnoreStyle | None = None
    quantization_config: Callable[[bool, list[str]], Config] | None = None
    extra_files: Callable[[bool, list[str]], dict[str, Config]] = lambda activations, ignore: {}

    @property
    def packed(self) -> bool:
        return bool(self.fields)

    def fields_for(self, activations: bool) -> tuple[Field, ...]:
        """The fields of a matrix, with or without its input scale."""
        return tuple(field for field in self.fields if activations or field.role != "input")

    def tensors(self, prefix: str, matrix: Matrix, *, activations: bool) -> Iterator[tuple[str, Tensor]]:
        """The named tensors of one matrix. Raises ExportError if a reciprocal would not give the scale back."""
        for field in self.fields_for(activations):
            name = f"{prefix}.{field.suffix}"
            if field.role == "codes":
                yield name, matrix.codes
            elif field.role == "scales":
                yield name, matrix.scales.view(torch.float8_e4m3fn)
            else:
                if field.role == "outer" and field.reciprocal and matrix.inverse is not None:
                    yield name, matrix.inverse.reshape(field.shape)
                    continue
                outer = matrix.outer if field.role == "outer" else matrix.input_outer
                yield name, _stored_scale(name, outer, field)


def _stored_scale(name: str, outer: Tensor | float | None, field: Field) -> Tensor:
    scale = torch.as_tensor(outer, dtype=torch.float32)
    if field.reciprocal:
        inverse = 1.0 / scale
        if not torch.equal(1.0 / inverse, scale):
            raise ExportError(
                f"{name}: the reciprocal of {float(scale)!r} is not exact; pack with profile pow2, or export modelopt"
            )
        scale = inverse
    return scale.reshape(field.shape)


def checkpoint_format(name: str) -> CheckpointFormat:
    """The format of that name. Raises UnknownFormatError, which lists the known ones."""
    if name not in FORMATS:
        raise UnknownFormatError(f"unknown export format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


BITS, GROUP = NUMERIC_FORMATS[FORMAT].element.bits, NUMERIC_FORMATS[FORMAT].block


def _compressed_tensors_config(activations: bool, ignore: list[str]) -> Config:
    # "tensor_group" is this format's name for block scales under one outer scale, and "local" for block scales that are
    # computed at run time under a stored outer scale.
    weights = {
        "num_bits": BITS,
        "type": "float",
        "symmetric": True,
        "group_size": GROUP,
        "strategy": "tensor_group",
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {**weights, "dynamic": "local"} if activations else None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


# The version of the producer whose layout this is; engines read the producer's name.
_MODELOPT = {"name": "modelopt", "version": "0.47.0"}


def _modelopt_algorithm(activations: bool) -> str:
    return "NVFP4" if activations else "W4A16_NVFP4"


def _modelopt_config(activations: bool, ignore: list[str]) -> Config:
    operand = {"num_bits": BITS, "type": "float", "group_size": GROUP, "dynamic": False}
    group = {"targets": ["Linear"], "weights": operand, "input_activations": operand if activations else None}
    return {
        "quant_method": "modelopt",
        "quant_algo": _modelopt_algorithm(activations),
        "kv_cache_quant_algo": None,
        "group_size": GROUP,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "producer": _MODELOPT,
    }


def _modelopt_files(activations: bool, ignore: list[str]) -> dict[str, Config]:
    quantization = {
        "quant_algo": _modelopt_algorithm(activations),
        "kv_cache_quant_algo": None,
        "group_size": GROUP,
        "exclude_modules": ignore,
    }
    return {"hf_quant_config.json": {"producer": _MODELOPT, "quantization": quantization}}


FORMATS: dict[str, CheckpointFormat] = {
    fmt.name: fmt
    for fmt in (
        CheckpointFormat(
            name="compressed-tensors",
            fields=(
                Field("weight_packed", "codes"),
                Field("weight_scale", "scales"),
                Field("weight_global_scale", "outer", reciprocal=True, shape=(1,)),
                Field("input_global_scale", "input", reciprocal=True, shape=(1,)),
            ),
            ignore=REGEX,
            quantization_config=_compressed_tensors_config,
        ),
        CheckpointFormat(
            name="modelopt",
            fields=(
                Field("weight", "codes"),
                Field("weight_scale", "scales"),
                Field("weight_scale_2", "outer"),
                Field("input_scale", "input"),
            ),
            ignore=WILDCARD,
            quantization_config=_modelopt_config,
            extra_files=_modelopt_files,
        ),
        CheckpointFormat(name="bf16"),
    )
}
