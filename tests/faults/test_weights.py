"""Faults N07, N10, L01, L02, L04, Q01, R01 on one trained model: what the training graph, the generation graph and the
exported files say about the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.faults.parts import assert_near, batch, dequantized, gradients, read_experts
from tests.tiny import VOCAB, qwen3
from trace_compile import trace_compile
from trace_compile.model import session_of

WIDTH = 32
FORMATS = ("compressed-tensors", "modelopt")
RATIOS = torch.tensor([0.1, 1.0, 10.0, 0.1, 1.0, 10.0, 0.1, 10.0])
"""Size of up against gate, per expert."""


@dataclass
class Trained:
    """A w4a16 model after three optimizer steps, its twin, its exports by format, and eager code on the export."""

    model: Any
    rollout: Any
    folders: dict[str, Path]
    eager: Any

    @property
    def experts(self) -> Any:
        return self.model.model.layers[0].mlp.experts

    def packed(self, which: str) -> Tensor:
        """Weights [E, N, K] as the training graph multiplies with them."""
        session = session_of(self.model)
        region = session.regions[0]
        return session._pack_live(region, which, region_parameter(self.model, region, which)).dequantize()


def region_parameter(model: Any, region: Any, which: str) -> Tensor:
    return model.get_parameter(region.weight(which)[0].name)


def put(eager: Any, folder: Path, *, swapped: bool = False) -> None:
    """Write the exported weights into a plain model."""
    gate, up, down = (dequantized(read_experts(folder, f"{p}_proj")) for p in ("gate", "up", "down"))
    experts = eager.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj.copy_(torch.cat([up, gate] if swapped else [gate, up], 1))
        experts.down_proj.copy_(down)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    plain = qwen3(num_hidden_layers=1)
    with torch.no_grad():  # the halves differ in size and in mean: gate ~ N(0, 1), up ~ N(3, 1)
        up = plain.model.layers[0].mlp.experts.gate_up_proj[:, WIDTH:]
        up.add_(0.3).mul_(RATIOS[:, None, None])
    model = trace_compile(plain, recipe="w4a16")
    rollout = model.rollout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        gradients(model, **batch(step))
        optimizer.step()
    rollout.refit()
    root = tmp_path_factory.mktemp("exports")
    folders = {fmt: root / fmt for fmt in FORMATS}
    for fmt, folder in folders.items():
        model.export(folder, format=fmt)
    eager = qwen3(num_hidden_layers=1)
    eager.set_experts_implementation("grouped_mm")
    eager.load_state_dict(model.state_dict())
    put(eager, folders["compressed-tensors"])
    return Trained(model, rollout, folders, eager)


def test_N07_codes_belong_to_the_scales_that_are_stored(trained: Trained) -> None:
    """Every code is the nearest to weight / (stored scales); with scales before their rounding, many would not be."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    moved = 0.0
    for which, projection in (("gate_up_proj", "gate_proj"), ("gate_up_proj", "up_proj"), ("down_proj", "down_proj")):
        read = read_experts(trained.folders["compressed-tensors"], projection)
        weight = getattr(trained.experts, which).detach().numpy()
        if which == "gate_up_proj":
            weight = weight[:, :WIDTH] if projection == "gate_proj" else weight[:, WIDTH:]
        blocks = weight.reshape(*read["scales"].shape, 16).astype(np.float64) / read["outer"][:, None, None, None]
        codes = read["codes"].reshape(blocks.shape)
        quotient = np.abs(blocks / np.maximum(read["scales"], 2.0**-9)[..., None])
        distance = np.abs(np.minimum(quotient, 6)[..., None] - grid).min(-1)
        assert np.array_equal(np.abs(np.minimum(quotient, 6) - np.abs(codes)), distance)
        unrounded = np.abs(blocks) / (np.abs(blocks).max(-1, keepdims=True) / 6)
        other = unrounded.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        moved = max(moved, float((other != np.abs(codes)).mean()))
    assert moved > 0.01


@pytest.mark.parametrize("fmt", FORMATS)
def test_N10_one_quantizer_for_training_generation_and_files(trained: Trained, fmt: str) -> None:
    folder = trained.folders[fmt]
    twin = trained.rollout.__dict__["_trace_compile_twin"]
    gate, up, down = (dequantized(read_experts(folder, f"{p}_proj")) for p in ("gate", "up", "down"))
    for which, stored in (("w13", torch.cat([gate, up], 1)), ("w2", down)):
        name = session_of(trained.model).regions[0].weight(which)[0].name
        assert torch.equal(stored, trained.packed(which))
        assert torch.equal(stored, twin.experts[name].dequantize())


@pytest.mark.slow
def test_N10_activations_are_those_of_the_quantizer() -> None:
    """The operands of the training graph and of the rollout are the same values on the same tokens."""
    model = trace_compile(qwen3(num_hidden_layers=1), recipe="qat")
    rollout = model.rollout()
    tokens = {k: v for k, v in batch().items() if k != "labels"}
    with model.trace(record="code", inputs=True) as trace:
        rollout(**tokens)
    (report,) = model.diagnose(trace, **tokens)
    assert report.tokens == int(tokens["attention_mask"].sum())
    assert (report.mismatch_before, report.d_before, report.drift) == (0, 0, 0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_L01_gate_and_up_share_one_outer_scale(trained: Trained, fmt: str) -> None:
    gate, up = (read_experts(trained.folders[fmt], f"{p}_proj") for p in ("gate", "up"))
    assert np.array_equal(gate["outer"], up["outer"])
    weight = trained.experts.gate_up_proj.detach()
    apart = weight[:, :WIDTH].abs().amax((1, 2)) / weight[:, WIDTH:].abs().amax((1, 2))
    assert apart.max() > 2 and apart.min() < 0.5  # or sharing would be no question
    assert torch.equal(torch.cat([dequantized(gate), dequantized(up)], 1), trained.packed("w13"))


def test_L02_each_format_has_its_own_convention_and_the_same_weights(trained: Trained) -> None:
    from safetensors.torch import load_file

    for projection in ("gate_proj", "up_proj", "down_proj"):
        compressed, modelopt = (read_experts(trained.folders[fmt], projection) for fmt in FORMATS)
        for part in ("codes", "scales", "outer"):
            assert np.array_equal(compressed[part], modelopt[part])
        assert np.isfinite(compressed["outer"]).all() and (compressed["outer"] > 0).all()
        assert not np.isin(compressed["outer"], [1.0]).any()  # at 1 both conventions would look alike
    for fmt, suffix in zip(FORMATS, ("weight_global_scale", "weight_scale_2"), strict=True):
        for file in trained.folders[fmt].glob("*.safetensors"):
            stored = [t for name, t in load_file(file).items() if name.endswith(suffix)]
            assert all(bool((t > 1).all()) == (fmt == "compressed-tensors") for t in stored) and stored


def test_L04_halves_are_not_swapped_forward_backward_or_in_files(trained: Trained) -> None:
    found, expected = gradients(trained.model, **batch(7)), gradients(trained.eager, **batch(7))
    assert_near(found, expected)
    put(trained.eager, trained.folders["compressed-tensors"], swapped=True)
    mutant = gradients(trained.eager, **batch(7))
    put(trained.eager, trained.folders["compressed-tensors"])
    with pytest.raises(AssertionError):
        assert_near(found, mutant, 0.1)


def test_Q01_saturated_weights_get_their_whole_gradient(trained: Trained) -> None:
    """Elements beyond 6 * scale, a few percent of all, have the gradient of the dequantized weight like any other."""
    name = "model.layers.0.mlp.experts.down_proj"
    read = read_experts(trained.folders["compressed-tensors"], "down_proj")
    reach = 6 * np.repeat(read["scales"], 16, -1) * read["outer"][:, None, None]
    beyond = trained.experts.down_proj.detach().abs() > torch.from_numpy(reach)
    assert 0.01 < beyond.float().mean() < 0.1
    found, expected = (gradients(m, **batch(3, 16))[name] for m in (trained.model, trained.eager))
    used = expected.abs().sum(-1, keepdim=True) > 0
    assert (found[beyond & used] != 0).float().mean() > 0.99
    assert (found - expected)[beyond].norm() <= 1e-4 * expected[beyond].norm()


def test_R01_three_graphs_score_tokens_alike_after_updates(trained: Trained) -> None:
    """64 sequences, after three steps of a fused optimizer: the part of the gap due to quantization is zero."""
    ids = torch.randint(2, VOCAB, (64, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        scores = [
            m(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
            for m in (trained.model, trained.rollout, trained.eager)
        ]
    assert torch.equal(scores[0], scores[1])
    assert float((scores[0] - scores[2]).abs().max()) < 1e-5
