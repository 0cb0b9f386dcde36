"""Checkpoints back into live models: masters hold their values, graphs and exports their very bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.export.models import EXPERTS, build, dequantized, logits, pack_model, raw, tensors
from tests.tiny import qwen3
from trace_compile import trace_compile
from trace_compile.errors import ExportError, NonFiniteWeightError, UnknownFormatError
from trace_compile.export import export_checkpoint, reload
from trace_compile.export.writer import MARK
from trace_compile.state import origins

FORMATS = ("compressed-tensors", "modelopt")
SUFFIXES = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}


def foreign(path: Path, fmt: str, *, outers: Callable[[int], float], scales: tuple[int, int], inputs: bool) -> None:
    """Make an export look like another tool's: no block of this package, block scales drawn from the E4M3 bytes
    ``scales``, outer scales that are no powers of two, input scales of each expert's own."""
    file = path / "model.safetensors"
    found, generator = load_file(file), torch.Generator().manual_seed(3)
    codes, scale, outer, input_ = SUFFIXES[fmt]
    for name in list(found):
        if name.endswith(f".{scale}"):
            drawn = torch.randint(*scales, found[name].shape, generator=generator).to(torch.uint8)
            found[name] = drawn.view(torch.float8_e4m3fn)
            module, expert = name.removesuffix(f".{scale}"), int(name.split(".")[5])
            found[f"{module}.{codes}"] = torch.randint(
                256, found[f"{module}.{codes}"].shape, generator=generator, dtype=torch.uint8
            )
            found[f"{module}.{outer}"].fill_(outers(expert))
            if inputs:
                found[f"{module}.{input_}"].mul_(1.3 + expert / EXPERTS)
    save_file(found, file, metadata={"format": "pt"})
    content = json.loads((path / "config.json").read_text())
    del content[MARK]
    (path / "config.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def fresh() -> Callable[[], Any]:
    """A compiled model with weights of its own; one per module of tests, since compiling takes seconds."""
    model = trace_compile(build(seed=5), recipe="static")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def restore() -> Any:
        model.load_state_dict(state)
        return model

    return restore


@pytest.mark.parametrize("fmt", [*FORMATS, "bf16"])
def test_an_export_comes_back_as_masters_and_as_the_same_file(tmp_path: Path, fmt: str, fresh: Any) -> None:
    source = build()
    experts = pack_model(source)
    activations = fmt != "bf16"
    export_checkpoint(source, experts, tmp_path / "out", format=fmt, activations=activations)
    model = fresh()
    report = model.import_checkpoint(tmp_path / "out")
    for item in experts:
        for tensor in item.tensors().values():
            assert torch.equal(model.get_parameter(tensor.name), tensor.parameter()), tensor.name
    names = {t.name for item in experts for t in item.tensors().values()}
    assert {*report.packed} == (names if activations else set()) and {*report.dense} == names - {*report.packed}
    assert torch.equal(model.lm_head.weight, source.lm_head.weight) and not report.notes
    if activations:
        assert report.input_scales["model.layers.1.mlp.experts", "down"] == 2.0**-9
        model.export(tmp_path / "again", format=fmt)
        first, again = tensors(tmp_path / "out"), tensors(tmp_path / "again")
        assert first.keys() == again.keys() and all(torch.equal(raw(t), raw(again[n])) for n, t in first.items())


@pytest.mark.parametrize("fmt", FORMATS)
def test_foreign_bytes_are_kept_until_a_master_changes(
    tmp_path: Path, fmt: str, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero and subnormal scales, outer scales that are no powers of two: run, exported again byte for byte, trained."""
    monkeypatch.setattr(origins, "_TOGETHER", 3)  # the last experts are compared apart from the first
    source = build()
    path = tmp_path / "out"
    export_checkpoint(source, pack_model(source), path, format=fmt, activations=True)
    encode = (lambda e: 3.0 + e * 0.37) if fmt == "compressed-tensors" else (lambda e: 1 / (3.0 + e * 0.37))
    foreign(path, fmt, outers=encode, scales=(0, 0x40), inputs=True)
    model = fresh()
    report = model.import_checkpoint(path)
    assert len(report.packed) == 4 and any("zero or subnormal" in note for note in report.notes)
    assert any("became" in note for note in report.notes)  # input scales that are no powers of two
    twin = model.rollout()
    model.export(tmp_path / "model", format=fmt, activations=False)
    twin.export(tmp_path / "twin", format=fmt, activations=False)
    original = tensors(path)
    for copy in (tensors(tmp_path / "model"), tensors(tmp_path / "twin")):
        assert copy.keys() == {name for name in original if not name.endswith(SUFFIXES[fmt][3])}
        for name, tensor in copy.items():
            assert torch.equal(raw(tensor), raw(original[name])), name

    # The graphs compute with those bytes: as a plain model with the dequantized weights does, without activations.
    w4a16 = trace_compile(build(seed=6), recipe="w4a16")
    w4a16.import_checkpoint(path)
    assert torch.equal(w4a16.model.layers[0].mlp.experts.down_proj, model.model.layers[0].mlp.experts.down_proj)
    plain = build()
    plain.load_state_dict(w4a16.state_dict())
    expected, found = logits(plain), logits(w4a16.rollout())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))

    # One changed weight of one parameter: that one is packed anew, the other three stay the file's.
    name = "model.layers.0.mlp.experts.down_proj"
    with torch.no_grad():
        model.get_parameter(name)[-1, 0, 0] += 1
    model.export(tmp_path / "trained", format=fmt, activations=False)
    changed = tensors(tmp_path / "trained")
    differ = {n.rpartition(".")[0] for n in changed if not torch.equal(raw(changed[n]), raw(original[n]))}
    assert differ and all(".layers.0." in n and "down_proj" in n for n in differ)


def test_masters_in_bfloat16_are_exact(tmp_path: Path) -> None:
    source = qwen3().to(torch.bfloat16)
    experts = pack_model(source)
    export_checkpoint(source, experts, tmp_path / "out", format="modelopt", activations=False)
    model = trace_compile(qwen3(seed=1).to(torch.bfloat16), recipe="w4a16")
    model.import_checkpoint(tmp_path / "out")
    for item in experts:
        for tensor in item.tensors().values():
            master = model.get_parameter(tensor.name)
            assert master.dtype == torch.bfloat16 and torch.equal(master.float(), tensor.parameter())


def damage(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    found = load_file(path / "model.safetensors")
    change(found)
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})


def reconfigure(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((path / "config.json").read_text())
    change(content)
    (path / "config.json").write_text(json.dumps(content))


ONE = "model.layers.1.mlp.experts.7.up_proj"


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _widen(found: dict[str, Tensor], name: str) -> None:
    found[name] = torch.cat([found[name], found[name]])


DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "truncated": (_truncate, ExportError, r"model\.safetensors cannot be read"),
    "no file": (lambda p: (p / "model.safetensors").unlink(), ExportError, "holds no tensors"),
    "no configuration": (lambda p: (p / "config.json").unlink(), ExportError, r"config\.json cannot be read"),
    "configuration is a list": (lambda p: (p / "config.json").write_text("[]"), ExportError, "not a JSON object"),
    "missing scale": (lambda p: damage(p, lambda f: f.pop(f"{ONE}.weight_scale")), ExportError, f"{ONE}.*missing"),
    "missing expert": (
        lambda p: damage(p, lambda f: [f.pop(n) for n in list(f) if n.startswith(ONE)]),
        ExportError,
        "missing",
    ),
    "missing other": (lambda p: damage(p, lambda f: f.pop("model.norm.weight")), ExportError, r"model\.norm\.weight"),
    "wrong dtype": (
        lambda p: damage(p, lambda f: f.update({f"{ONE}.weight_scale": f[f"{ONE}.weight_scale"].float()})),
        ExportError,
        "F32, not F8_E4M3",
    ),
    "wrong shape": (
        lambda p: damage(p, lambda f: _widen(f, f"{ONE}.weight_scale")),
        ExportError,
        "describe different shapes",
    ),
    "other shape": (lambda p: damage(p, lambda f: _widen(f, "lm_head.weight")), ExportError, r"lm_head.*shape"),
    "NaN scale": (
        lambda p: damage(p, lambda f: f[f"{ONE}.weight_scale"].view(torch.uint8).fill_(0x7F)),
        ExportError,
        "NaN or negative",
    ),
    "NaN weight": (
        lambda p: damage(p, lambda f: f["lm_head.weight"].fill_(float("nan"))),
        NonFiniteWeightError,
        r"lm_head\.weight",
    ),
    "unknown tensor": (
        lambda p: damage(p, lambda f: f.update({"model.extra.weight": torch.ones(4, 4)})),
        ExportError,
        r"model\.extra",
    ),
    "unknown method": (
        lambda p: reconfigure(p, lambda c: (c.pop(MARK, None), c["quantization_config"].update(quant_method="awq"))),
        UnknownFormatError,
        "awq",
    ),
    "unknown algorithm": (
        lambda p: reconfigure(p, lambda c: (c.pop(MARK, None), c["quantization_config"].update(quant_algo="FP8"))),
        UnknownFormatError,
        "FP8",
    ),
    "unknown version": (
        lambda p: reconfigure(p, lambda c: c.update({MARK: {"version": 99}})),
        ExportError,
        "version 99",
    ),
}


@pytest.mark.parametrize("mine", [True, False], ids=["own", "foreign"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_model_stays(tmp_path: Path, kind: str, mine: bool, fresh: Any, request: Any) -> None:
    source = build()
    path = tmp_path / "out"
    export_checkpoint(source, pack_model(source), path, format="modelopt", activations=True)
    if not mine:
        reconfigure(path, lambda c: c.pop(MARK))
    change, error, match = DAMAGE[kind]
    change(path)
    model = fresh()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=match):
        model.import_checkpoint(path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, fresh: Any) -> None:
    source = build(num_hidden_layers=1)
    export_checkpoint(source, pack_model(source), tmp_path / "out", format="modelopt", activations=True)
    with pytest.raises(ExportError, match=r"layers\.1.*missing"):
        fresh().import_checkpoint(tmp_path / "out")


def test_a_foreign_checkpoint_reloads_with_transformers(tmp_path: Path) -> None:
    """Outside of this package's own files: names alone say what is packed, be it experts or attention."""
    source = build(num_hidden_layers=1)
    experts = pack_model(source)
    expected = logits(dequantized(build(num_hidden_layers=1), experts))
    for fmt in FORMATS:
        path = tmp_path / fmt
        export_checkpoint(source, experts, path, format=fmt, activations=False)
        reconfigure(path, lambda c: c.pop(MARK))
        assert torch.equal(logits(reload(path)), expected)
