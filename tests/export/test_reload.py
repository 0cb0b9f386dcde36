"""Exported checkpoints through transformers' loader: the logits are those of the dequantized model, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.export.models import EXPERTS, LAYERS, build, dequantized, logits, pack_model
from trace_compile.errors import ExportError, FingerprintMismatchError
from trace_compile.export import export_checkpoint, reload
from trace_compile.ops.scheme import W4A4_ROW, W4A4_TRACED

FAMILIES = ["Qwen3MoeForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_format_gives_the_dequantized_models_logits(tmp_path: Path, family: str) -> None:
    model = build(family)
    experts = pack_model(model)
    plain = logits(model)
    for fmt, activations in (
        ("bf16", False),
        ("compressed-tensors", True),
        ("compressed-tensors", False),
        ("modelopt", True),
        ("modelopt", False),
    ):
        export_checkpoint(
            model,
            experts,
            tmp_path / f"{fmt}-{activations}",
            format=fmt,
            activations=activations,
            max_shard_bytes=50_000,
        )
    expected = logits(dequantized(model, experts))
    assert (expected - plain).abs().max() > 0.05  # quantization is visible, so equality below means something
    for path in sorted(tmp_path.iterdir()):
        assert torch.equal(logits(reload(path)), expected), path.name
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16-False", dtype=torch.float32)
    assert torch.equal(logits(twin.eval()), expected)


def test_partly_quantized_tied_and_dense_layers(tmp_path: Path) -> None:
    model = build(num_hidden_layers=4, mlp_only_layers=[1], tie_word_embeddings=True)
    experts = [item for item in pack_model(model) if ".2." not in item.region]
    for fmt in ("compressed-tensors", "modelopt", "bf16"):
        export_checkpoint(model, experts, tmp_path / fmt, format=fmt, activations=False)
    expected = logits(dequantized(model, experts))
    for path in tmp_path.iterdir():
        assert torch.equal(logits(reload(path)), expected), path.name


def test_in_bf16(tmp_path: Path) -> None:
    model = build()
    experts = pack_model(model)
    for fmt in ("compressed-tensors", "bf16"):
        export_checkpoint(model, experts, tmp_path / fmt, format=fmt, activations=False, dtype=torch.bfloat16)
    loaded = reload(tmp_path / "compressed-tensors", dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert twin.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(twin.eval()))


def test_transformers_loader_alone(tmp_path: Path) -> None:
    """Loaded without ``reload``, experts are right, or their outer scales are reported as left out (as 5.17 does)."""
    model = build()
    experts = pack_model(model)
    export_checkpoint(model, experts, tmp_path / "out", format="compressed-tensors", activations=False)
    loader: Any = transformers.AutoModelForCausalLM
    loaded, info = loader.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    left_out = {name for name in info["unexpected_keys"] if name.endswith("weight_global_scale")}
    for item in experts:
        for tensor in item.tensors().values():
            found, right = loaded.get_parameter(tensor.name).float(), tensor.parameter()
            factor = tensor.packed.outer[:, None, None] if left_out else 1.0
            assert torch.equal(found * factor, right)
    assert len(left_out) in (0, LAYERS * EXPERTS * 3)


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    model = build(num_hidden_layers=1)
    export_checkpoint(model, pack_model(model, W4A4_TRACED), tmp_path / "out", format="modelopt", activations=True)
    reload(tmp_path / "out", scheme=W4A4_TRACED)
    with pytest.raises(FingerprintMismatchError, match=r"a=nvfp4:pow2:traced, not .*a=nvfp4:pow2:row"):
        reload(tmp_path / "out", scheme=W4A4_ROW)


def test_damage_is_refused_before_loading(tmp_path: Path) -> None:
    model = build(num_hidden_layers=1)
    path = tmp_path / "out"
    export_checkpoint(model, pack_model(model), path, format="compressed-tensors", activations=True)
    file = path / "model.safetensors"
    found = load_file(file)
    name = "model.layers.0.mlp.experts.5.down_proj.input_global_scale"
    del found[name]
    save_file(found, file, metadata={"format": "pt"})
    with pytest.raises(ExportError, match=name.replace(".", r"\.")):
        reload(path)


def test_keys_that_the_model_lacks_or_wants_are_refused(tmp_path: Path) -> None:
    model = build(num_hidden_layers=1)
    path = tmp_path / "out"
    export_checkpoint(model, pack_model(model), path, format="bf16", activations=False)
    file = path / "model.safetensors"
    found = load_file(file)
    found["model.extra.weight"] = found.pop("model.norm.weight")
    save_file(found, file, metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"model\.norm\.weight.*model\.extra\.weight"):
        reload(path)


def test_a_module_without_a_transformers_class(tmp_path: Path) -> None:
    model = build(num_hidden_layers=1)
    path = tmp_path / "out"
    export_checkpoint(model, pack_model(model), path, format="bf16", activations=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Homemade"]}))
    with pytest.raises(ExportError, match="Homemade"):
        reload(path)
