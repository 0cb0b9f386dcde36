"""What config.json declares: formats, activations, ignored modules, and every option that changes a code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.export.models import EXPERTS, build, config, pack_model, tensors
from trace_compile.export import export_checkpoint, verify_checkpoint
from trace_compile.export.writer import MARK
from trace_compile.ops.scheme import MoEScheme, OperandScheme


def test_declarations_of_compressed_tensors(tmp_path: Path) -> None:
    model = build()
    for name, activations in (("w4a4", True), ("w4a16", False)):
        export_checkpoint(
            model, pack_model(model), tmp_path / name, format="compressed-tensors", activations=activations
        )
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16}
    weights |= {"strategy": "tensor_group", "dynamic": False}
    for name, inputs in (("w4a4", {**weights, "dynamic": "local"}), ("w4a16", None)):
        quantization = config(tmp_path / name)["quantization_config"]
        ignore = quantization.pop("ignore")
        assert quantization == {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": inputs,
                    "output_activations": None,
                    "format": "nvfp4-pack-quantized",
                }
            },
        }
        assert {"lm_head", "model.embed_tokens", "model.norm", r"re:.*\.mlp\.gate$"} <= set(ignore)
        assert any("self_attn" in pattern for pattern in ignore) and any("layernorm" in pattern for pattern in ignore)


@pytest.mark.parametrize("activations", [True, False])
def test_declarations_of_modelopt(tmp_path: Path, activations: bool) -> None:
    model = build()
    path = tmp_path / "out"
    export_checkpoint(model, pack_model(model), path, format="modelopt", activations=activations)
    inner, outer = config(path)["quantization_config"], json.loads((path / "hf_quant_config.json").read_text())
    assert outer["producer"]["name"] == inner["producer"]["name"] == inner["quant_method"] == "modelopt"
    quantization = outer["quantization"]
    assert quantization["quant_algo"] == inner["quant_algo"] == ("NVFP4" if activations else "W4A16_NVFP4")
    assert quantization["exclude_modules"] == inner["ignore"]
    assert {"lm_head", "model.embed_tokens", "*.mlp.gate", "*.self_attn.*"} <= set(inner["ignore"])
    assert quantization["group_size"] == inner["group_size"] == 16
    assert quantization["kv_cache_quant_algo"] is None
    assert (inner["config_groups"]["group_0"]["input_activations"] is not None) == activations


def test_every_quantizer_option_is_declared(tmp_path: Path) -> None:
    """Change each field of each operand's scheme: the exported configuration must change, and nothing else of it."""
    model = build(num_hidden_layers=1)
    experts = pack_model(model)
    weight, act = OperandScheme(outer="expert"), OperandScheme(outer="traced")
    base = MoEScheme(weight, act)
    changed = [
        MoEScheme(dataclasses.replace(weight, outer="tensor"), act),
        MoEScheme(dataclasses.replace(weight, profile="torchao"), act),
        MoEScheme(weight, dataclasses.replace(act, outer="row")),
        MoEScheme(weight, dataclasses.replace(act, profile="fp32")),
        MoEScheme(weight, None),
    ]
    seen = []
    for index, scheme in enumerate([base, *changed]):
        items = [dataclasses.replace(item, scheme=scheme) for item in experts]
        path = tmp_path / str(index)
        export_checkpoint(model, items, path, format="compressed-tensors", activations=False)
        block = config(path).pop(MARK)
        seen.append(block)
        assert [MoEScheme.parse(entry["scheme"]) for entry in block["regions"].values()] == [scheme]
    assert len({json.dumps(block) for block in seen}) == len(seen)
    export_checkpoint(model, experts, tmp_path / "served", format="compressed-tensors", activations=True)
    assert config(tmp_path / "served")[MARK] != seen[0]


def test_config_keeps_the_models_settings_and_both_names_of_renamed_ones(tmp_path: Path) -> None:
    model = build()
    export_checkpoint(model, pack_model(model), tmp_path / "out", format="bf16", activations=False)
    found = config(tmp_path / "out")
    assert found["num_experts"] == found["num_local_experts"] == EXPERTS
    assert found["architectures"] == ["Qwen3MoeForCausalLM"] and found["dtype"] == "float32"
    assert "quantization_config" not in found
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 2
    assert model.config.architectures is None  # the model's own configuration is not touched


@pytest.mark.parametrize("fmt", ["compressed-tensors", "modelopt"])
def test_a_layer_that_is_not_quantized_is_ignored_whole(tmp_path: Path, fmt: str) -> None:
    model = build(num_hidden_layers=11)
    experts = [item for item in pack_model(model) if item.region != "model.layers.1.mlp.experts"]
    report = export_checkpoint(model, experts, tmp_path / "out", format=fmt, activations=True)
    found = tensors(tmp_path / "out")
    assert found["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float32
    ignore = config(tmp_path / "out")["quantization_config"]["ignore"]
    about = [pattern for pattern in ignore if "experts" in pattern]
    assert about and all("layers.1." in pattern.replace("\\", "") for pattern in about)
    assert verify_checkpoint(tmp_path / "out", experts).compared == 10 * 3 * EXPERTS
    assert report.bits_per_expert_weight < 4.6


def test_dense_layers_and_tied_embeddings(tmp_path: Path) -> None:
    model = build(mlp_only_layers=[0], tie_word_embeddings=True)
    for fmt in ("compressed-tensors", "modelopt"):
        export_checkpoint(model, pack_model(model), tmp_path / fmt, format=fmt, activations=True)
        found = tensors(tmp_path / fmt)
        assert "lm_head.weight" not in found and "model.embed_tokens.weight" in found
        assert found["model.layers.0.mlp.gate_proj.weight"].dtype == torch.float32
        ignore = config(tmp_path / fmt)["quantization_config"]["ignore"]
        assert "lm_head" in ignore
        # ModelOpt's readers look for the parts of a fused projection by exact name.
        assert fmt != "modelopt" or {f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up")} <= set(ignore)


def test_unquantized_tensors_can_be_cast(tmp_path: Path) -> None:
    model = build()
    path = tmp_path / "out"
    export_checkpoint(
        model, pack_model(model), path, format="compressed-tensors", activations=False, dtype=torch.bfloat16
    )
    found = tensors(path)
    assert found["lm_head.weight"].equal(model.lm_head.weight.to(torch.bfloat16))
    assert found["model.layers.0.mlp.experts.0.up_proj.weight_global_scale"].dtype == torch.float32
    assert config(path)["dtype"] == "bfloat16"
