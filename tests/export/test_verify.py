"""Damaged checkpoints: whatever is wrong is named, and nothing wrong passes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.export.models import EXPERTS, LAYERS, build, pack_model
from trace_compile.errors import ExportError
from trace_compile.export import FORMATS, ExpertWeights, export_checkpoint, verify_checkpoint
from trace_compile.export.verify import READERS
from trace_compile.export.writer import MARK

MODULE = "model.layers.1.mlp.experts.3.up_proj"
SCALE = {"compressed-tensors": "weight_global_scale", "modelopt": "weight_scale_2"}
INPUT = {"compressed-tensors": "input_global_scale", "modelopt": "input_scale"}
CODES = {"compressed-tensors": "weight_packed", "modelopt": "weight"}
Exported = tuple[Path, list[ExpertWeights], str]


@pytest.fixture(scope="module", params=["compressed-tensors", "modelopt"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    model = build()
    experts = pack_model(model)
    path = tmp_path_factory.mktemp("whole") / "out"
    export_checkpoint(model, experts, path, format=request.param, activations=True)
    return path, experts, request.param


@pytest.fixture
def exported(whole: Exported, tmp_path: Path) -> Exported:
    """A copy to damage."""
    path, experts, fmt = whole
    return Path(shutil.copytree(path, tmp_path / "out")), experts, fmt


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = path / "model.safetensors"
    found = load_file(file)
    change(found)
    save_file(found, file, metadata={"format": "pt"})


def edit_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((path / "config.json").read_text())
    change(content)
    (path / "config.json").write_text(json.dumps(content))


def set_ignore(path: Path, patterns: list[str]) -> None:
    edit_config(path, lambda content: content["quantization_config"].update(ignore=patterns))


def flip(path: Path, name: str, bit: int) -> None:
    """Flip one bit of the first byte of a tensor."""
    edit(path, lambda found: found[name].view(torch.uint8).flatten()[:1].bitwise_xor_(bit))


def scale(path: Path, name: str, factor: float) -> None:
    edit(path, lambda found: found[name].mul_(factor))


def problems(path: Path, experts: list[ExpertWeights] | None = None) -> str:
    with pytest.raises(ExportError) as caught:
        verify_checkpoint(path, experts or [])
    return str(caught.value)


def test_a_whole_checkpoint_passes(exported: Exported) -> None:
    path, experts, fmt = exported
    report = verify_checkpoint(path, experts)
    assert report.format == fmt
    assert report.matrices == report.compared == LAYERS * EXPERTS * 3
    assert report.input_scales == {
        (item.region, projection): 2.0**-9 if projection == "down" else 2.0**-7
        for item in experts
        for projection in ("gate", "up", "down")
    }


def test_there_is_a_reader_for_every_format() -> None:
    assert READERS.keys() == FORMATS.keys()


@pytest.mark.parametrize("field", range(4))
def test_a_missing_tensor_is_named(exported: Exported, field: int) -> None:
    path, _, fmt = exported
    name = f"{MODULE}.{FORMATS[fmt].fields[field].suffix}"
    edit(path, lambda found: found.pop(name))
    assert f"{name} is missing" in problems(path)


def test_a_tensor_too_many_is_named(exported: Exported) -> None:
    path, _, _ = exported
    edit(path, lambda found: found.update({f"{MODULE}.weight_zero_point": torch.zeros(1)}))
    assert f"{MODULE}.weight_zero_point belongs to a packed matrix" in problems(path)


@pytest.mark.parametrize(
    "value, match", [(0.0, "not finite and positive"), (-1.0, "positive"), (float("nan"), "nan"), (float("inf"), "inf")]
)
@pytest.mark.parametrize("which", [SCALE, INPUT])
def test_outer_scales_must_be_finite_and_positive(
    exported: Exported, which: dict[str, str], value: float, match: str
) -> None:
    path, _, fmt = exported
    edit(path, lambda found: found[f"{MODULE}.{which[fmt]}"].fill_(value))
    message = problems(path)
    assert f"{MODULE}.{which[fmt]}" in message and match in message


@pytest.mark.parametrize("byte", [0x00, 0x07, 0x7F, 0xFF, 0x80, 0xB8])
def test_block_scales_must_be_positive_and_normal(exported: Exported, byte: int) -> None:
    path, _, _ = exported
    edit(path, lambda found: found[f"{MODULE}.weight_scale"].view(torch.uint8)[2].fill_(byte))
    assert f"{MODULE}.weight_scale holds" in problems(path)


@pytest.mark.parametrize("byte", [0x08, 0x7E])
def test_the_smallest_and_largest_block_scales_pass(exported: Exported, byte: int) -> None:
    path, _, _ = exported
    edit(path, lambda found: found[f"{MODULE}.weight_scale"].view(torch.uint8)[2].fill_(byte))
    verify_checkpoint(path)


def test_gate_and_up_must_be_tied(exported: Exported) -> None:
    path, _, fmt = exported
    scale(path, f"{MODULE}.{SCALE[fmt]}", 2)
    assert "outer scales of gate and up of expert 3 differ" in problems(path)


def test_input_scales_must_be_the_same_for_all_experts(exported: Exported) -> None:
    path, _, fmt = exported
    scale(path, f"{MODULE}.{INPUT[fmt]}", 2)
    assert "input scales differ between experts" in problems(path)

    def whole_layer(found: dict[str, Tensor]) -> None:
        found[f"{MODULE}.{INPUT[fmt]}"].div_(2)
        for expert in range(EXPERTS):
            found[f"model.layers.0.mlp.experts.{expert}.gate_proj.{INPUT[fmt]}"].mul_(2)

    edit(path, whole_layer)
    assert "input scales of gate and up differ" in problems(path)


def test_wrong_types_and_shapes_are_named(exported: Exported) -> None:
    path, _, fmt = exported
    codes, outer = f"{MODULE}.{CODES[fmt]}", f"{MODULE}.{SCALE[fmt]}"

    def change(found: dict[str, Tensor]) -> None:
        found[codes] = found[codes].view(torch.int8)
        found[outer] = found[outer].reshape(1, 1)
        found[f"{MODULE}.weight_scale"] = found[f"{MODULE}.weight_scale"][:, :2].contiguous()

    edit(path, change)
    message = problems(path)
    assert f"{codes} is I8, not U8" in message
    assert f"{outer} has shape (1, 1)" in message
    assert f"{MODULE}: codes and block scales describe different shapes" in message


def test_packed_xor_ignored(exported: Exported) -> None:
    path, _, _ = exported
    edit_config(path, lambda c: c["quantization_config"]["ignore"].append(MODULE))
    assert f"{MODULE} is packed and matched" in problems(path)
    edit_config(path, lambda c: c["quantization_config"]["ignore"].pop())
    verify_checkpoint(path)
    for forgotten, module in (("mlp", "model.layers.0.mlp.gate"), ("lm_head", "lm_head"), ("self_attn", "q_proj")):
        kept = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
        fewer = [pattern for pattern in kept if forgotten not in pattern]
        set_ignore(path, fewer)
        message = problems(path)
        assert module in message and "neither packed nor matched" in message
        set_ignore(path, kept)


def test_declared_activations_must_fit_the_tensors(exported: Exported) -> None:
    path, _, _ = exported
    group = "group_0"
    edit_config(path, lambda c: c["quantization_config"]["config_groups"][group].update(input_activations=None))
    assert "activation quantization: declared False, exported True" in problems(path)
    edit_config(path, lambda c: c[MARK].update(activations=False))
    assert f"{INPUT[exported[2]]} belongs to a packed matrix" in problems(path)


def test_one_changed_code_or_scale_is_found(exported: Exported) -> None:
    path, experts, fmt = exported
    flip(path, f"{MODULE}.{CODES[fmt]}", 0x80)
    assert f"{MODULE} differs from the training graph's values" in problems(path, experts)
    flip(path, f"{MODULE}.{CODES[fmt]}", 0x80)
    verify_checkpoint(path, experts)
    for projection in ("gate", "up"):
        scale(path, f"{MODULE.replace('up', projection)}.{SCALE[fmt]}", 0.5)
    assert f"{MODULE} differs" in problems(path, experts)


def test_swapped_halves_are_found(exported: Exported) -> None:
    path, experts, fmt = exported

    def swap(found: dict[str, Tensor]) -> None:
        gate, up = MODULE.replace("up_proj", "gate_proj"), MODULE
        for suffix in (CODES[fmt], "weight_scale"):
            a, b = f"{gate}.{suffix}", f"{up}.{suffix}"
            found[a], found[b] = found[b], found[a]

    edit(path, swap)
    assert "differs from the training graph's values" in problems(path, experts)


def test_other_weights_or_another_recipe_are_found(exported: Exported) -> None:
    path, _, _ = exported
    assert "differs" in problems(path, pack_model(build(seed=1)))
    assert "exported as" in problems(path, pack_model(build(num_experts=4)))


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"])
def test_the_dense_twin_is_compared_too(tmp_path: Path, name: str) -> None:
    for family in ("Qwen3MoeForCausalLM", "GptOssForCausalLM"):
        model = build(family)
        experts = pack_model(model)
        path = tmp_path / family
        export_checkpoint(model, experts, path, format="bf16", activations=False)
        assert verify_checkpoint(path, experts).compared > 0
        stored = name if family.startswith("Gpt") else "model.layers.0.mlp.experts.0.up_proj.weight"
        flip(path, stored, 1)
        which = f"{stored}: expert 0" if family.startswith("Gpt") else stored.removesuffix(".weight")
        assert f"{which} differs" in problems(path, experts)


def test_files_that_cannot_be_read(exported: Exported) -> None:
    path, _, _ = exported
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "model.safetensors cannot be read" in problems(path)
    file.write_bytes(whole)
    (path / "extra.safetensors").write_bytes(whole)
    assert "is in two files" in problems(path)
    (path / "extra.safetensors").unlink()
    edit_config(path, lambda c: c[MARK].update(version=99))
    assert "version 99" in problems(path)
    edit_config(path, lambda c: c[MARK].pop("version"))
    assert "version None" in problems(path)
    (path / "config.json").unlink()
    assert "config.json cannot be read" in problems(path)


def test_a_shard_that_is_missing_or_not_indexed(tmp_path: Path) -> None:
    model = build()
    path = tmp_path / "out"
    export_checkpoint(model, pack_model(model), path, format="modelopt", activations=False, max_shard_bytes=60_000)
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2
    content = shards[0].read_bytes()
    shards[0].unlink()
    assert "in the index or in a file, not in both" in problems(path)
    shards[0].write_bytes(content)
    verify_checkpoint(path)
