"""Whole exports: names, types, shapes and values, read by other means than those that wrote them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from tests.export.models import EXPERTS, HIDDEN, LAYERS, WIDTH, build, config, pack_model, tensors
from trace_compile.export import export_checkpoint, verify_checkpoint
from trace_compile.export.writer import MARK

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


class Experts(nn.Module):
    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width))


@pytest.mark.parametrize("fmt, activations", [("compressed-tensors", True), ("modelopt", False), ("bf16", False)])
def test_many_shapes_and_magnitudes(tmp_path: Path, fmt: str, activations: bool) -> None:
    """The file always holds what the training graph multiplies with: ``export_checkpoint`` compares every matrix."""
    generator = torch.Generator().manual_seed(3)
    for seed in range(25):
        torch.manual_seed(seed)
        experts, hidden, width, low, high = (
            int(torch.randint(*bounds, (), generator=generator))
            for bounds in ((1, 5), (1, 10), (1, 10), (-120, 10), (11, 110))
        )
        model = nn.ModuleDict({"experts": Experts(experts, 16 * hidden, 16 * width)})
        with torch.no_grad():
            for parameter in model.parameters():
                # float32 magnitudes from the smallest outer scales to the largest, some blocks far below the others
                parameter.mul_(2.0 ** torch.randint(low, high, (experts, 1, 1), generator=generator).float())
                parameter[..., :16] *= 2.0**-12
        items = pack_model(model)
        path = tmp_path / str(seed)
        export_checkpoint(model, items, path, format=fmt, activations=activations)
        assert verify_checkpoint(path, items).compared == 3 * experts


def test_a_plain_module_without_configuration(tmp_path: Path) -> None:
    stem = nn.Linear(48, 48)
    model = nn.ModuleDict({"stem": stem, "experts": Experts(3, 48, 16)})
    experts = pack_model(model)
    export_checkpoint(model, experts, tmp_path / "out", format="modelopt", activations=True)
    found = tensors(tmp_path / "out")
    assert found["experts.2.up_proj.weight"].shape == (16, 24) and found["stem.weight"].equal(stem.weight)
    assert set(config(tmp_path / "out")) == {MARK, "quantization_config"}
    assert verify_checkpoint(tmp_path / "out", experts).compared == 9


def test_experts_without_a_gate(tmp_path: Path) -> None:
    model = nn.ModuleDict({"experts": Experts(3, 48, 16)})
    experts = [dataclasses.replace(item, gated=False) for item in pack_model(model)]
    for fmt in ("compressed-tensors", "modelopt", "bf16"):
        export_checkpoint(model, experts, tmp_path / fmt, format=fmt, activations=fmt != "bf16")
        assert verify_checkpoint(tmp_path / fmt, experts).compared == 6
    found = tensors(tmp_path / "modelopt")
    assert found["experts.2.up_proj.weight"].shape == (32, 24)
    assert {name.split(".")[2] for name in found} == {"up_proj", "down_proj"}


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
