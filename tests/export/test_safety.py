"""Exports that change nothing else: the same bytes every time, the model untouched, refusals before any file."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.export.models import EXPERTS, build, digest, logits, pack_model, tensors
from trace_compile.clone import subclass
from trace_compile.errors import ExportError, NonFiniteWeightError, UnknownFormatError
from trace_compile.export import ExpertWeights, export_checkpoint, verify_checkpoint, writer
from trace_compile.export import checkpoint as checkpoint_module
from trace_compile.ops import weights
from trace_compile.ops.scheme import W4A16, MoEScheme, OperandScheme


@pytest.mark.parametrize("fmt, activations", [("compressed-tensors", True), ("modelopt", False), ("bf16", False)])
def test_the_same_model_gives_the_same_bytes(tmp_path: Path, fmt: str, activations: bool) -> None:
    """Twice, in another process' order of things (a new model), after generating, and with a swapped class."""
    model = build()

    def export(name: str, source: nn.Module) -> dict[str, str]:
        path = tmp_path / name
        experts = pack_model(source)
        export_checkpoint(source, experts, path, format=fmt, activations=activations, max_shard_bytes=50_000)
        return digest(path)

    class Mixin(nn.Module):
        pass

    first = export("first", model)
    assert len([name for name in first if name.endswith(".safetensors")]) > 2
    assert export("again", model) == first
    assert export("new", build()) == first
    compiled: Any = model
    compiled.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)
    assert export("generated", model) == first
    compiled.__class__ = subclass(type(model), Mixin)  # as trace_compile() does
    assert export("swapped", compiled) == first


def test_export_leaves_the_model_alone(tmp_path: Path) -> None:
    model = build().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    for fmt in ("compressed-tensors", "bf16"):
        export_checkpoint(model, pack_model(model), tmp_path / fmt, format=fmt, activations=False)
    assert model.training and type(model).__name__ == "Qwen3MoeForCausalLM"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: parameter._version for name, parameter in model.named_parameters()} == versions


class PackedOnTheFly:
    """Experts of a model, packed region by region at each iteration."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __iter__(self) -> Iterator[ExpertWeights]:
        for layer, block in enumerate(self.model.model.layers):
            (item,) = pack_model(block)
            prefix = f"model.layers.{layer}."
            yield dataclasses.replace(
                item,
                region=prefix + item.region,
                gate_up=dataclasses.replace(item.gate_up, name=prefix + item.gate_up.name),
                down=dataclasses.replace(item.down, name=prefix + item.down.name),
            )


def test_regions_are_packed_one_after_another(tmp_path: Path) -> None:
    """Experts that are packed on the fly: no more than the region at hand and the one before it are alive."""
    model = build(num_hidden_layers=6)
    alive: weakref.WeakSet[ExpertWeights] = weakref.WeakSet()
    most = 0

    class Lazy(PackedOnTheFly):
        def __iter__(self) -> Iterator[ExpertWeights]:
            nonlocal most
            for item in super().__iter__():
                alive.add(item)
                most = max(most, len(alive))
                yield item

    export_checkpoint(model, Lazy(model), tmp_path / "lazy", format="compressed-tensors", activations=True)
    assert most == 2
    export_checkpoint(model, pack_model(model), tmp_path / "list", format="compressed-tensors", activations=True)
    assert digest(tmp_path / "lazy") == digest(tmp_path / "list")


class Live(TorchDispatchMode):
    """The most bytes that were alive at once in tensors made while it is on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in model.state_dict().values()}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            if tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


@pytest.mark.parametrize("fmt, layers_of_memory", [("compressed-tensors", 1.0), ("modelopt", 1.0), ("bf16", 2.0)])
def test_memory_beside_the_model_is_that_of_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: str, layers_of_memory: float
) -> None:
    """Packing, writing and verifying, whatever the number of layers; a bf16 layer is the unit. A dense checkpoint needs
    a second one, since transformers copies where it splits a stacked parameter."""
    monkeypatch.setattr(weights, "CHUNK", 4096)  # two experts of this model
    peaks = []
    for layers in (2, 5):
        model = build(num_hidden_layers=layers, num_experts=32).to(torch.bfloat16)
        live = Live(model)
        with live:
            export_checkpoint(model, PackedOnTheFly(model), tmp_path / f"{layers}", format=fmt, activations=False)
        peaks.append(live.peak)
    layer = sum(p.nbytes for p in model.model.layers[0].mlp.experts.parameters())
    assert peaks[0] == peaks[1] <= layers_of_memory * layer


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
    with pytest.raises(ExportError, match="not exact in bfloat16"):
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
    with pytest.raises(ExportError, match=r"disk full\); the folder there is as it was"):
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
