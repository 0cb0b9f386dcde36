"""Programs that run without the model: .pt2 in a fresh process, ONNX in onnxruntime and in the reference evaluator.

Every comparison is with the twin that was exported, at lengths, batches and routings that exporting did not see.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny import VOCAB, prompts, qwen3
from trace_compile import trace_compile
from trace_compile.errors import ExportError, UnknownFormatError

pytestmark = pytest.mark.slow  # each program is captured, traced and translated: half a minute

Run = Callable[..., list[Tensor]]


@pytest.fixture(scope="module")
def twin() -> Any:
    model = trace_compile(qwen3(), recipe="static")
    rollout = model.rollout(copy=True)
    for _ in range(2):
        with model.trace(record="ranges"):
            rollout(**prompts())
        rollout.refit()
    return rollout


@pytest.fixture(scope="module")
def folder(twin: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin as programs of every form that compiles in seconds."""
    path = tmp_path_factory.mktemp("programs")
    twin.export(path / "fused", format="pt2", form="fused")
    twin.export(path / "portable", format="pt2")
    twin.export(path / "onnx", format="onnx")
    twin.export(path / "stacked", format="onnx", form="stacked")
    return path


def batch(size: int, length: int, seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Left-padded ids, mask and positions; row i has i % 3 padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, size):
        mask[row, : min(row % 3, length - 1)] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def check(run: Run, twin: Any, size: int, length: int, steps: int, tolerance: float, layers: int = 2) -> None:
    """Prefill of ``length`` tokens from an empty cache, then ``steps`` decodings one by one, against one forward."""
    ids, mask, positions = batch(size, length + steps)
    expected = twin(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    past = [torch.zeros(size, 2, 0, 16) for _ in range(2 * layers)]
    start = 0
    for end in range(length, length + steps + 1):
        logits, *past = run(ids[:, start:end], mask[:, :end], positions[:, start:end], *past)
        assert logits.shape == (size, end - start, VOCAB) and past[0].shape == (size, 2, end, 16)
        real = mask[:, start:end] == 1
        error = (logits - expected[:, start:end])[real].abs().max()
        assert error <= tolerance * expected.abs().max(), (size, start, end)
        start = end


SIZES = [(1, 1, 2), (1, 9, 1), (4, 5, 2), (2, 64, 1)]
"""(batch, prefill, decodings). The programs were traced at batch 3, 5 new tokens, 7 cached."""

FRESH = """
import sys, json, torch
{imports}
assert "{imports}" or "trace_compile" not in sys.modules
program = torch.export.load(sys.argv[1]).module()
arguments = torch.load(sys.argv[2])
torch.save(program(*arguments), sys.argv[3])
"""


@pytest.mark.parametrize("form, imports", [("fused", "import trace_compile.ops"), ("portable", "")])
def test_pt2_in_a_fresh_process(form: str, imports: str, twin: Any, folder: Path, tmp_path: Path) -> None:
    def run(*arguments: Tensor) -> list[Tensor]:
        torch.save(arguments, tmp_path / "in")
        script = FRESH.format(imports=imports)
        paths = [str(folder / form / "model.pt2"), str(tmp_path / "in"), str(tmp_path / "out")]
        done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        return list(torch.load(tmp_path / "out"))

    check(run, twin, 1, 4, 1, 1e-5)


def test_a_fused_program_without_its_ops_says_so(folder: Path) -> None:
    script = FRESH.format(imports="")
    paths = [str(folder / "fused" / "model.pt2"), "", ""]
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, timeout=200)
    assert done.returncode != 0 and "trace_compile" in done.stderr
    about = json.loads((folder / "fused" / "program.json").read_text())
    assert about["form"] == "fused" and about["imports"] == ["trace_compile.ops"]


@pytest.mark.parametrize("form", ["fused", "portable"])
def test_pt2_at_any_batch_and_length(form: str, twin: Any, folder: Path) -> None:
    exported = torch.export.load(folder / form / "model.pt2")
    program = exported.module()
    for size, length, steps in SIZES:
        check(lambda *a: list(program(*a)), twin, size, length, steps, 1e-5)
    # Packed weights alone: no constant has as many elements as an expert parameter, and codes are bytes.
    constants = {**exported.state_dict, **exported.constants}
    stacks = {name: t for name, t in constants.items() if isinstance(t, Tensor) and t.dim() == 3 and t.shape[0] == 8}
    assert len(stacks) == 8 and all(t.dtype == torch.uint8 for t in stacks.values())
    kinds = {str(node.target) for node in exported.graph.nodes if "trace_compile" in str(node.target)}
    assert bool(kinds) == (form == "fused")


def onnxruntime_run(path: Path) -> Run:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(*arguments: Tensor) -> list[Tensor]:
        found = session.run(None, dict(zip(names, (a.numpy() for a in arguments), strict=True)))
        return [torch.from_numpy(value) for value in found]

    return run


def test_onnxruntime_runs_the_whole_rollout(twin: Any, folder: Path) -> None:
    run = onnxruntime_run(folder / "onnx" / "model.onnx")
    for size, length, steps in SIZES:
        check(run, twin, size, length, steps, 2e-5)


def test_X05_onnx_types_opsets_and_weights(folder: Path) -> None:
    """All experts are there, as packed bytes; opset and IR version are those stated; only standard operations."""
    onnx = pytest.importorskip("onnx")
    for name, codes, scales, ir in (
        ("onnx", onnx.TensorProto.UINT8, onnx.TensorProto.UINT8, 10),
        ("stacked", onnx.TensorProto.FLOAT4E2M1, onnx.TensorProto.FLOAT8E4M3FN, 11),
    ):
        model = onnx.load(folder / name / "model.onnx", load_external_data=False)
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 23)] and model.ir_version == ir
        assert all(node.domain == "" for node in model.graph.node) and not model.functions
        experts = [t for t in model.graph.initializer if len(t.dims) == 3 and t.dims[0] == 8 and t.dims[1] > 1]
        stacks, types = [tuple(t.dims) for t in experts], Counter(t.data_type for t in experts)
        assert types == Counter([codes] * 4 + [scales] * 4)
        elements = 2 if name == "onnx" else 1
        assert sorted(stacks) == sorted(2 * [(8, 64, 64 // elements), (8, 64, 4), (8, 64, 32 // elements), (8, 64, 2)])
    pairs = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(pairs) == 8
    kinds, proto = {t.name: t.data_type for t in model.graph.initializer}, onnx.TensorProto
    for first, second in zip(pairs[::2], pairs[1::2]):
        assert [kinds[name] for name in first.input] == [proto.FLOAT8E4M3FN, proto.FLOAT]
        assert kinds[second.input[0]] == proto.FLOAT4E2M1 and second.input[1] == first.output[0]


def test_the_reference_evaluator_runs_two_level_dequantization(twin: Any, folder: Path) -> None:
    reference = pytest.importorskip("onnx.reference")
    evaluator = reference.ReferenceEvaluator(str(folder / "stacked" / "model.onnx"))
    names = evaluator.input_names

    def run(*arguments: Tensor) -> list[Tensor]:
        found = evaluator.run(None, dict(zip(names, (a.numpy() for a in arguments), strict=True)))
        return [torch.from_numpy(np.ascontiguousarray(value)) for value in found]

    check(run, twin, 2, 5, 1, 2e-5)


@pytest.mark.parametrize("form", ["onnx", "portable"])
def test_C01_X05_any_routing(form: str, twin: Any, folder: Path) -> None:
    """Exported with whatever routing zeros gave; run with routers that send every token to a chosen pair."""
    ids, mask, positions = batch(2, 6)
    past = [torch.zeros(2, 2, 0, 16) for _ in range(4)]
    run: Run
    if form == "onnx":
        run = onnxruntime_run(folder / "onnx" / "model.onnx")
    else:
        program = torch.export.load(folder / form / "model.pt2").module()
        run = lambda *a: list(program(*a))  # noqa: E731
    used = set()
    for seed in range(12):
        ids, _, _ = batch(2, 6, seed)
        out = twin(input_ids=ids, attention_mask=mask, position_ids=positions, output_router_logits=True)
        for logits in out.router_logits:
            used |= set(logits.topk(2).indices.flatten().tolist())
        found = run(ids, mask, positions, *past)[0]
        assert (found - out.logits)[mask == 1].abs().max() <= 2e-5 * out.logits.abs().max()
    assert used == set(range(8))


@pytest.mark.parametrize("recipe, fmt", [("w4a16", "onnx"), ("qat", "onnx"), ("qat", "pt2")])
def test_programs_of_other_recipes_and_of_the_trainer(recipe: str, fmt: str, tmp_path: Path) -> None:
    """Activations unquantized, or with scales of their own in each row; exported from the trained model itself."""
    model = trace_compile(qwen3(num_hidden_layers=1), recipe=recipe)
    report = model.export(tmp_path / "out", format=fmt)
    assert 4.5 <= report.bits_per_expert_weight < 4.6 and "config.json" in report.files
    if fmt == "onnx":
        run = onnxruntime_run(tmp_path / "out" / "model.onnx")
    else:
        program = torch.export.load(tmp_path / "out" / "model.pt2").module()
        run = lambda *a: list(program(*a))  # noqa: E731
    check(run, model.rollout(), 2, 5, 1, 2e-5, layers=1)


def test_X05_bfloat16_programs_are_clean(tmp_path: Path) -> None:
    """The checker, with full shape inference, runs in the export. onnxruntime's CPU has no bfloat16 GEMM to run it."""
    onnx = pytest.importorskip("onnx")
    model = trace_compile(qwen3(num_hidden_layers=1).to(torch.bfloat16), recipe="qat")
    model.export(tmp_path / "out", format="onnx")
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    assert graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    assert {t.data_type for t in graph.initializer if "codes" in t.name} == {onnx.TensorProto.UINT8}


def test_what_cannot_be_a_program_is_refused(twin: Any, tmp_path: Path) -> None:
    for options, match in (
        ({"format": "onnx", "form": "fused"}, "no fused experts"),
        ({"format": "pt2", "form": "stacked"}, "for ONNX"),
        ({"format": "pt2", "form": "exotic"}, "unknown form"),
    ):
        with pytest.raises(ExportError, match=match):
            twin.export(tmp_path / "out", **options)
    with pytest.raises(UnknownFormatError, match=r"modelopt, bf16, pt2, aoti, onnx"):
        twin.export(tmp_path / "out", format="gguf")
    untraced = trace_compile(qwen3(), recipe="static")
    with pytest.raises(ExportError, match="no input scales"):
        untraced.export(tmp_path / "out", format="pt2")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    with pytest.raises(ExportError, match="overwrite"):
        twin.export(tmp_path / "taken", format="pt2")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("form", ["fused", "portable"])
def test_aoti_package_on_a_gpu(form: str, tmp_path: Path) -> None:
    model = trace_compile(qwen3().to("cuda", torch.bfloat16), recipe="static", compiler="eager")
    rollout = model.rollout(copy=True)
    inputs = {name: tensor.cuda() for name, tensor in prompts().items()}
    with model.trace(record="ranges"):
        rollout(**inputs)
    rollout.refit()
    rollout.export(tmp_path / "out", format="aoti", form=form)
    program = torch._inductor.aoti_load_package(str(tmp_path / "out" / "model.pt2"))

    def run(*arguments: Tensor) -> list[Tensor]:
        past = [a.to(torch.bfloat16) for a in arguments[3:]]
        return [t.cpu() for t in program(*(a.cuda().contiguous() for a in (*arguments[:3], *past)))]

    def scored(**arguments: Any) -> Any:
        out = rollout(**{k: v.cuda() if isinstance(v, Tensor) else v for k, v in arguments.items()})
        out.logits = out.logits.cpu()
        return out

    for size, length, steps in SIZES:
        check(run, scored, size, length, steps, 0.05)


def test_aoti_package_on_a_cpu(twin: Any, tmp_path: Path) -> None:
    """Compiled once, run at sizes it was not traced at, the smallest included; outer scales are no literals in it."""
    twin.export(tmp_path / "out", format="aoti")
    program = torch._inductor.aoti_load_package(str(tmp_path / "out" / "model.pt2"))
    for size, length, steps in SIZES:
        check(lambda *a: list(program(*(t.contiguous() for t in a))), twin, size, length, steps, 1e-5)
    names = program.get_constant_fqns()
    assert sum("outer" in name for name in names) >= 4
