"""Whole exports: names, types, declarations, refusals, and the same bytes every time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.export.models import EXPERTS, HIDDEN, LAYERS, WIDTH, build, logits, pack_model
from trace_compile.errors import ExportError, NonFiniteWeightError, UnknownFormatError
from trace_compile.export import ExpertWeights, export_checkpoint, verify_checkpoint, writer
from trace_compile.export import checkpoint as checkpoint_module
from trace_compile.export.writer import MARK
from trace_compile.ops.scheme import W4A16, MoEScheme, OperandScheme

# Per family: where the experts live, and what gate, up and down are called, in published checkpoints.
NAMES = {
    "Qwen3MoeForCausalLM": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "OlmoeForCausalLM": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2"),
}
# Suffix -> (dtype, shape of gate and up, shape of down), from the formats' descriptions.
PACKED = {
    "compressed-tensors": {
        "weight_packed": (torch.uint8, (WIDTH, HIDDEN // 2), (HIDDEN, WIDTH // 2)),
        "weight_scale": (torch.float8_e4m3fn, (WIDTH, HIDDEN // 16), (HIDDEN, WIDTH // 16)),
        "weight_global_scale": (torch.float32, (1,), (1,)),
        "input_global_scale": (torch.float32, (1,), (1,)),
    },
    "modelopt": {
        "weight": (torch.uint8, (WIDTH, HIDDEN // 2), (HIDDEN, WIDTH // 2)),
        "weight_scale": (torch.float8_e4m3fn, (WIDTH, HIDDEN // 16), (HIDDEN, WIDTH // 16)),
        "weight_scale_2": (torch.float32, (), ()),
        "input_scale": (torch.float32, (), ()),
    },
}
GATE_UP, DOWN = 2.0**-7, 2.0**-9


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def digest(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("family", NAMES)
def test_names_types_and_shapes_are_those_that_engines_read(
    tmp_path: Path, family: str, fmt: str, activations: bool
) -> None:
    model = build(family)
    report = export_checkpoint(model, pack_model(model), tmp_path / "out", format=fmt, activations=activations)
    block, gate, up, down = NAMES[family]
    fields = {k: v for k, v in PACKED[fmt].items() if activations or not k.startswith("input")}
    expected = {
        f"model.layers.{layer}.{block}.experts.{expert}.{projection}.{suffix}": (dtype, shapes[projection == down])
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for projection in (gate, up, down)
        for suffix, (dtype, *shapes) in fields.items()
    }
    found = tensors(report.path)
    model.save_pretrained(tmp_path / "plain")
    others = {n: (t.dtype, tuple(t.shape)) for n, t in tensors(tmp_path / "plain").items() if ".experts." not in n}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in found.items()} == expected | others
    assert report.tensors == len(found)
    assert report.files == tuple(sorted(p.name for p in report.path.iterdir()))
    assert report.bytes == sum(p.stat().st_size for p in report.path.iterdir())
    assert 4.5 < report.bits_per_expert_weight < 4.6


def test_low_nibble_first_and_scale_directions(tmp_path: Path) -> None:
    """One expert matrix whose bytes are known: 0.5 and 6 alternate, so codes are 1 and 7 and every scale is 1."""
    model = build(num_hidden_layers=1)
    experts = model.model.layers[0].mlp.experts
    row = torch.tensor([0.5, 6.0]).repeat(HIDDEN // 2)
    with torch.no_grad():
        experts.gate_up_proj[3] = row
        experts.gate_up_proj[3, 0, 0] = 2688.0  # 6 * 448: outer scale 1
        experts.gate_up_proj[4] = row * 2.0**-20
        experts.gate_up_proj[4, 0, 0] = 2688 * 2.0**-20
    for fmt in PACKED:
        export_checkpoint(model, pack_model(model), tmp_path / fmt, format=fmt, activations=True)
    compressed, modelopt = tensors(tmp_path / "compressed-tensors"), tensors(tmp_path / "modelopt")
    for expert, outer in ((3, 1.0), (4, 2.0**-20)):
        up = f"model.layers.0.mlp.experts.{expert}.up_proj"
        for codes, scales in (
            (compressed[f"{up}.weight_packed"], compressed[f"{up}.weight_scale"]),
            (modelopt[f"{up}.weight"], modelopt[f"{up}.weight_scale"]),
        ):
            assert (codes == 0x71).all()
            assert (scales.view(torch.uint8) == 0x38).all()
        assert compressed[f"{up}.weight_global_scale"].tolist() == [1 / outer]
        assert modelopt[f"{up}.weight_scale_2"].item() == outer
        assert compressed[f"{up}.input_global_scale"].tolist() == [1 / GATE_UP]
        assert modelopt[f"{up}.input_scale"].item() == GATE_UP
        down = f"model.layers.0.mlp.experts.{expert}.down_proj"
        assert modelopt[f"{down}.input_scale"].item() == DOWN


def test_an_independent_decoder_reads_the_training_graphs_weights(tmp_path: Path) -> None:
    model = build()
    experts = pack_model(model)
    export_checkpoint(model, experts, tmp_path / "out", format="compressed-tensors", activations=False)
    found = tensors(tmp_path / "out")
    for layer, item in enumerate(experts):
        gate_up, down = (t.packed.dequantize().numpy() for t in (item.gate_up, item.down))
        for expert in range(EXPERTS):
            expected = dict(zip(("gate_proj", "up_proj"), np.split(gate_up[expert], 2))) | {"down_proj": down[expert]}
            for projection, weight in expected.items():
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
                packed = found[f"{name}.weight_packed"].numpy()
                nibbles = np.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)
                values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
                scales = found[f"{name}.weight_scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
                values *= np.repeat(scales.astype(np.float32), 16, -1) / found[f"{name}.weight_global_scale"].numpy()
                assert values.tobytes() == np.ascontiguousarray(weight).tobytes(), name


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_gate_and_up_share_scales_however_different_they_are(tmp_path: Path, ratio: float) -> None:
    model = build(num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[:, WIDTH:] *= ratio
    experts = pack_model(model)
    export_checkpoint(model, experts, tmp_path / "out", format="modelopt", activations=True)
    found = tensors(tmp_path / "out")
    for expert in range(EXPERTS):
        gate, up = (f"model.layers.0.mlp.experts.{expert}.{p}_proj" for p in ("gate", "up"))
        for suffix in ("weight_scale_2", "input_scale"):
            assert found[f"{gate}.{suffix}"] == found[f"{up}.{suffix}"] > 0
    assert verify_checkpoint(tmp_path / "out", experts).compared == 3 * EXPERTS


@pytest.mark.parametrize("amax", [1e-8, 0.01, 1.0, 1e4])
def test_zero_blocks_rows_and_experts(tmp_path: Path, amax: float) -> None:
    model = build(num_hidden_layers=1)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    with torch.no_grad():
        weight *= amax / weight.abs().max()
        weight[0, 3, 16:32] = 0
        weight[1, 5] = 0
        weight[2] = 0
    experts = pack_model(model)
    for fmt in PACKED:
        export_checkpoint(model, experts, tmp_path / fmt, format=fmt, activations=True)
        found = tensors(tmp_path / fmt)
        for name, tensor in found.items():
            if name.endswith("weight_scale"):
                assert torch.isfinite(tensor.float()).all() and (tensor.float() > 0).all(), name
        assert verify_checkpoint(tmp_path / fmt, experts).compared == 3 * EXPERTS
    dense = experts[0].gate_up.packed.dequantize()
    assert not dense[0, 3, 16:32].any() and not dense[1, 5].any() and not dense[2].any()


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


@pytest.mark.parametrize("fmt, activations", [("compressed-tensors", True), ("modelopt", False), ("bf16", False)])
def test_the_same_model_gives_the_same_bytes(tmp_path: Path, fmt: str, activations: bool) -> None:
    """Twice, in another process' order of things (a new model), after generating, and with a swapped class."""
    model = build()

    def export(name: str, source: nn.Module) -> dict[str, str]:
        path = tmp_path / name
        experts = pack_model(source)
        export_checkpoint(source, experts, path, format=fmt, activations=activations, max_shard_bytes=50_000)
        return digest(path)

    first = export("first", model)
    assert len([name for name in first if name.endswith(".safetensors")]) > 2
    assert export("again", model) == first
    assert export("new", build()) == first
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)
    assert export("generated", model) == first
    model.__class__ = type("Compiled", (type(model),), {"__module__": "trace_compile.model"})
    assert export("swapped", model) == first


def test_export_leaves_the_model_alone(tmp_path: Path) -> None:
    model = build().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    for fmt in ("compressed-tensors", "bf16"):
        export_checkpoint(model, pack_model(model), tmp_path / fmt, format=fmt, activations=False)
    assert model.training and type(model).__name__ == "Qwen3MoeForCausalLM"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: parameter._version for name, parameter in model.named_parameters()} == versions


def test_regions_are_packed_one_after_another(tmp_path: Path) -> None:
    """Experts that are packed on the fly: no more than the region at hand and the one before it are alive."""
    model = build(num_hidden_layers=6)
    alive: weakref.WeakSet[ExpertWeights] = weakref.WeakSet()
    most = 0

    class Lazy:
        def __iter__(self) -> Iterator[ExpertWeights]:
            nonlocal most
            for layer in range(6):
                (item,) = pack_model(model.model.layers[layer])
                item = dataclasses.replace(
                    item,
                    region=f"model.layers.{layer}.{item.region}",
                    gate_up=dataclasses.replace(item.gate_up, name=f"model.layers.{layer}.{item.gate_up.name}"),
                    down=dataclasses.replace(item.down, name=f"model.layers.{layer}.{item.down.name}"),
                )
                alive.add(item)
                most = max(most, len(alive))
                yield item

    export_checkpoint(model, Lazy(), tmp_path / "lazy", format="compressed-tensors", activations=True)
    assert most == 2
    export_checkpoint(model, pack_model(model), tmp_path / "list", format="compressed-tensors", activations=True)
    assert digest(tmp_path / "lazy") == digest(tmp_path / "list")


@pytest.mark.parametrize("fmt", PACKED)
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
    for fmt in PACKED:
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


def test_a_plain_module_without_configuration(tmp_path: Path) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(3, 32, 48))
            self.down_proj = nn.Parameter(torch.randn(3, 48, 16))

    stem = nn.Linear(48, 48)
    model = nn.ModuleDict({"stem": stem, "experts": Experts()})
    experts = pack_model(model)
    export_checkpoint(model, experts, tmp_path / "out", format="modelopt", activations=True)
    found = tensors(tmp_path / "out")
    assert found["experts.2.up_proj.weight"].shape == (16, 24) and found["stem.weight"].equal(stem.weight)
    assert set(config(tmp_path / "out")) == {MARK, "quantization_config"}
    assert verify_checkpoint(tmp_path / "out", experts).compared == 9


def test_names_inside_a_multimodal_wrapper(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.ModuleDict({"language_model": build().model, "visual": nn.Linear(4, 4)})

    wrapper = Wrapper()
    export_checkpoint(wrapper, pack_model(wrapper), tmp_path / "out", format="compressed-tensors", activations=False)
    found = {name for name in tensors(tmp_path / "out") if ".experts." in name}
    assert found == {
        f"model.language_model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.{suffix}"
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for projection in ("gate", "up", "down")
        for suffix in ("weight_packed", "weight_scale", "weight_global_scale")
    }


def test_tokenizer_is_saved_beside(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "tokenizer.json").write_text("{}")

    model = build(num_hidden_layers=1)
    report = export_checkpoint(
        model, pack_model(model), tmp_path / "out", format="bf16", activations=False, tokenizer=Tokenizer()
    )
    assert "tokenizer.json" in report.files and (tmp_path / "out" / "tokenizer.json").exists()


def test_refusals_come_before_any_file(tmp_path: Path) -> None:
    model = build(num_hidden_layers=1)
    path = tmp_path / "out"
    experts = pack_model(model)

    def refused(error: type[Exception], match: str, items: Any = experts, **options: Any) -> None:
        arguments: dict[str, Any] = {"format": "compressed-tensors", "activations": True} | options
        with pytest.raises(error, match=match):
            export_checkpoint(model, items, path, **arguments)
        assert not list(tmp_path.iterdir())

    refused(UnknownFormatError, "known: compressed-tensors, modelopt, bf16", format="gguf")
    refused(ExportError, r"Trace first .* or export W4A16", pack_model(model, inputs=None))
    refused(ExportError, "activations=False", pack_model(model, scheme=W4A16))
    refused(ExportError, "not a power of two", pack_model(model, inputs=(0.3, 0.5)))
    refused(ExportError, "not a power of two", pack_model(model, inputs=(float("inf"), 0.5)))
    refused(ExportError, "activations=False", format="bf16")
    refused(ExportError, "iterator", iter(experts))
    refused(ExportError, "no packed experts", [])
    item = experts[0]
    renamed = dataclasses.replace(item, down=dataclasses.replace(item.down, name="model.nowhere"))
    refused(ExportError, "no parameter model.nowhere", [renamed])
    swapped = dataclasses.replace(item, down=dataclasses.replace(item.gate_up, name=item.down.name))
    refused(ExportError, "refit", [swapped])

    # Packing refuses NaN itself; here it comes from a damaged cache, and from a parameter that is not packed.
    scales = item.down.packed.scales.clone()
    scales[5, 0, 0] = 0x7F
    damaged = dataclasses.replace(item.down, packed=dataclasses.replace(item.down.packed, scales=scales))
    refused(NonFiniteWeightError, r"down_proj: experts \[5\]", [dataclasses.replace(item, down=damaged)])
    scales[5, 0, 0] = 0x07
    refused(ExportError, r"experts \[5\] have zero, negative or subnormal", [dataclasses.replace(item, down=damaged)])
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteWeightError, match=r"mlp\.gate\.weight"):
        export_checkpoint(model, experts, path, format="bf16", activations=False)
    assert not list(tmp_path.iterdir())


def test_profiles_whose_scales_a_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = build(num_hidden_layers=1)
    scheme = MoEScheme(OperandScheme(profile="fp32", outer="expert"), None)
    experts = pack_model(model, scheme, inputs=None)
    with pytest.raises(ExportError, match="not exact in bf16"):
        export_checkpoint(model, experts, tmp_path / "bf16", format="bf16", activations=False)
    # Where the outer scale is stored as it is, any scale goes.
    export_checkpoint(model, experts, tmp_path / "modelopt", format="modelopt", activations=False)
    assert verify_checkpoint(tmp_path / "modelopt", experts).compared == 3 * EXPERTS


@pytest.mark.parametrize("step", ["tensor", "last tensor", "json", "tokenizer", "verify", "rename"])
def test_a_failed_export_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    model = build(num_hidden_layers=1)
    path = tmp_path / "out"
    export_checkpoint(model, pack_model(model), path, format="compressed-tensors", activations=True)
    before = digest(path)
    with torch.no_grad():
        model.lm_head.weight.neg_()

    def fail(*arguments: object, **options: object) -> None:
        raise OSError("disk full")

    class Tokenizer:
        save_pretrained = staticmethod(fail)

    def fail_at(count: int) -> Any:
        calls = iter(range(10**6))
        real = writer._write
        return lambda *arguments: fail() if next(calls) == count else real(*arguments)

    tokenizer = None
    if step == "tensor":
        monkeypatch.setattr(writer, "_write", fail_at(20))
    elif step == "last tensor":
        monkeypatch.setattr(writer, "_write", fail_at(len(tensors(path))))
    elif step == "json":
        monkeypatch.setattr(writer, "_write", fail_at(len(tensors(path)) + 2))
    elif step == "tokenizer":
        tokenizer = Tokenizer()
    elif step == "verify":
        monkeypatch.setattr(checkpoint_module, "verify_checkpoint", fail)
    else:
        monkeypatch.setattr(writer.os, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        export_checkpoint(
            model,
            pack_model(model),
            path,
            format="compressed-tensors",
            activations=True,
            overwrite=True,
            tokenizer=tokenizer,
        )
    assert digest(path) == before and [p.name for p in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    export_checkpoint(model, pack_model(model), path, format="compressed-tensors", activations=True, overwrite=True)
    assert digest(path) != before and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_training_continues_as_if_nothing_was_exported(tmp_path: Path) -> None:
    def train(export: bool) -> torch.Tensor:
        model = build(num_hidden_layers=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            tokens = torch.arange(12).reshape(1, 12) + 3 * step
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if export:
                export_checkpoint(
                    model, pack_model(model), tmp_path / "out", format="bf16", activations=False, overwrite=True
                )
        return logits(model)

    assert torch.equal(train(export=True), train(export=False))
