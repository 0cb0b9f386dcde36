"""The exported bytes in the hands of other libraries: torchao's tensor class, ModelOpt's dequantizer, safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.export.models import EXPERTS, build, pack_model, tensors
from trace_compile.export import ExpertWeights, export_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """One model in both formats, and its matrices by module as the training graph multiplies with them."""
    model = build()
    experts: list[ExpertWeights] = pack_model(model)
    path = tmp_path_factory.mktemp("readers")
    for fmt in ("compressed-tensors", "modelopt"):
        export_checkpoint(model, experts, path / fmt, format=fmt, activations=True)
    right = {}
    for layer, item in enumerate(experts):
        for projection, (tensor, rows) in item.projections().items():
            values = tensor.packed.dequantize()
            for expert in range(EXPERTS):
                right[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"] = values[expert, rows]
    return path, right


def test_torchao_reads_the_same_bytes(folder: tuple[Path, dict[str, torch.Tensor]]) -> None:
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    path, right = folder
    found = tensors(path / "modelopt")
    for module, expected in right.items():
        tensor = torchao.NVFP4Tensor(
            found[f"{module}.weight"],
            found[f"{module}.weight_scale"],
            16,
            torch.float32,
            per_tensor_scale=found[f"{module}.weight_scale_2"],
        )
        assert tensor.shape == expected.shape
        assert torch.equal(tensor.dequantize(torch.float32), expected), module
        assert torch.equal(tensor.dequantize(torch.bfloat16).float(), expected), module


@pytest.mark.slow  # importing ModelOpt takes ten seconds
def test_modelopt_reads_its_own_format(folder: tuple[Path, dict[str, torch.Tensor]]) -> None:
    modelopt = pytest.importorskip("modelopt.torch.quantization.qtensor")
    path, right = folder
    found = tensors(path / "modelopt")
    for module, expected in right.items():
        tensor = modelopt.NVFP4QTensor(expected.shape, torch.float32, found[f"{module}.weight"])
        values = tensor.dequantize(
            dtype=torch.float32,
            scale=found[f"{module}.weight_scale"],
            double_scale=found[f"{module}.weight_scale_2"],
            block_sizes={-1: 16},
        )
        assert torch.equal(values, expected), module


def test_compressed_tensors_decompresses_its_own_format(folder: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """The library alone, with the scheme read from the file's configuration as its loader reads it."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    import json

    path, right = folder
    declared = json.loads((path / "compressed-tensors" / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(declared)
    (group,) = config.config_groups.values()
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    found = tensors(path / "compressed-tensors")
    for module, expected in right.items():
        state = {s: found[f"{module}.{s}"] for s in ("weight_packed", "weight_scale", "weight_global_scale")}
        assert torch.equal(compressor.decompress(state, group)["weight"].float(), expected), module
