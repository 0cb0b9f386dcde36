"""What training codes do around a model, with a compiled one: accumulate, autocast, wrap, adapt, copy, load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import prompts, qwen3
from trace_compile import trace_compile
from trace_compile.errors import ExportError
from trace_compile.model import session_of

BATCH = {**prompts(), "use_cache": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return trace_compile(qwen3(num_hidden_layers=1), recipe="qat")


def loss_of(model: Any, rows: slice = slice(None)) -> torch.Tensor:
    given = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in BATCH.items()}
    return model(**given, labels=given["input_ids"]).loss


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_gradients_accumulate_and_weights_are_packed_once(model: Any) -> None:
    """Two micro-batches: the sum of their gradients, exactly, from one packing of the weights."""
    parts = []
    for rows in (slice(0, 2), slice(2, 4)):
        model.zero_grad()
        loss_of(model, rows).backward()
        parts.append(gradients(model))
    session_of(model).weights.refresh()
    packs = session_of(model).weights.pack_count
    model.zero_grad()
    for rows in (slice(0, 2), slice(2, 4)):
        loss_of(model, rows).backward()
    for name, grad in gradients(model).items():
        assert torch.equal(grad, parts[0][name] + parts[1][name]), name
    assert session_of(model).weights.pack_count - packs == 2  # w13 and w2 of the one layer
    model.zero_grad()


def test_autocast_on_float32_masters(model: Any) -> None:
    """The loss stays near, gradients come in the masters' dtype, and the experts' weights are packed from them."""
    plain = loss_of(model).item()
    packs = session_of(model).weights.pack_count
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    assert abs(loss.item() - plain) < 0.05 * plain
    found = gradients(model)
    assert {g.dtype for g in found.values()} == {torch.float32} and len(found) == len(list(model.parameters()))
    assert session_of(model).weights.pack_count == packs
    model.zero_grad()


@pytest.mark.parametrize("name", ["capture_scalar_outputs", "capture_dynamic_output_shape_ops"])
def test_the_users_dynamo_settings_change_nothing_and_stay(model: Any, name: str) -> None:
    with torch.no_grad():
        expected = model(**BATCH).logits
        graphs = sum(session_of(model).engine.compile_counts.values())
        for value in (False, True):
            with torch._dynamo.config.patch(name, value):
                assert torch.equal(model(**BATCH).logits, expected)
                assert getattr(torch._dynamo.config, name) is value
    assert sum(session_of(model).engine.compile_counts.values()) == graphs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_inside_torch_compile_runs_its_own_graphs(model: Any, backend: str) -> None:
    with torch.no_grad():
        expected = model(**BATCH).logits
        graphs = sum(session_of(model).engine.compile_counts.values())
        assert torch.equal(torch.compile(model, backend=backend)(**BATCH).logits, expected)
    assert sum(session_of(model).engine.compile_counts.values()) == graphs


def test_training_only_adapters_leaves_the_experts_packed_as_they_are() -> None:
    """LoRA on attention: gradients only there, no weight gradient of an expert is computed, nothing is packed again."""
    peft = pytest.importorskip("peft")
    base = trace_compile(qwen3(num_hidden_layers=1), recipe="qat")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = loss_of(adapted)
        loss.backward()
        losses.append(loss.item())
        packs = session_of(base).weights.pack_count
        optimizer.step()
        assert {n for n, p in adapted.named_parameters() if p.grad is not None} == {
            n for n, p in adapted.named_parameters() if "lora_" in n
        }
        optimizer.zero_grad()
    assert losses[-1] < losses[0] and session_of(base).weights.pack_count == packs


def on_experts(base: Any) -> Any:
    """PEFT's adapters on both stacked expert parameters."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(target_modules=[], target_parameters=names, r=2, init_lora_weights=False)
    return peft.get_peft_model(base, config)


def test_adapters_on_experts_are_packed_with_what_they_adapt(tmp_path: Path) -> None:
    """Logits of the merged model, gradients that the chain rule gives from its own, a twin that follows at refit."""
    plain = on_experts(qwen3(num_hidden_layers=1)).merge_and_unload().requires_grad_(True)
    merged = trace_compile(plain, recipe="qat")
    base = trace_compile(qwen3(num_hidden_layers=1), recipe="qat")
    rollout = base.rollout(copy=True)
    adapted = on_experts(base)
    loss, expected = loss_of(adapted), loss_of(merged)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 4 and all(
        "lora_" in n and p.grad is not None and p.grad.norm() > 0 for n, p in trained.items()
    )
    assert all(p.grad is None for n, p in adapted.named_parameters() if n not in trained)
    experts = merged.model.layers[0].mlp.experts
    for wrapper in (m for m in adapted.modules() if type(m).__name__ == "ParamWrapper"):
        factors = [wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight]
        whole = getattr(experts, wrapper.parameter_name).grad
        wanted = torch.autograd.grad(wrapper.get_delta_weight("default"), factors, whole)
        for factor, grad in zip(factors, wanted, strict=True):
            torch.testing.assert_close(factor.grad, grad)

    (region,) = base.explain().regions
    assert region.w13.computed and region.w2.computed and region.fed == ()
    with torch.no_grad():
        assert not torch.equal(rollout(**BATCH).logits, adapted(**BATCH).logits)
        rollout.refit()
        assert torch.equal(rollout(**BATCH).logits, adapted(**BATCH).logits)
    with pytest.raises(ExportError, match="computed from several parameters; merge adapters first"):
        base.export(tmp_path / "out")


def test_state_dicts_are_the_untouched_models(model: Any) -> None:
    """Same keys, order and values; each loads into the other."""
    plain = qwen3(num_hidden_layers=1)
    fresh = trace_compile(qwen3(num_hidden_layers=1), recipe="qat")
    ours, theirs = fresh.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert plain.load_state_dict(model.state_dict()) is not None
    fresh.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh(**BATCH).logits, model(**BATCH).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["inductor", "reduce-overhead", "max-autotune"])
def test_compile_modes_on_a_gpu(compiler: str) -> None:
    batch = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in BATCH.items()}
    model = trace_compile(qwen3(num_hidden_layers=1).to("cuda", torch.bfloat16), recipe="qat", compiler=compiler)
    eager = trace_compile(qwen3(num_hidden_layers=1).to("cuda", torch.bfloat16), recipe="qat", compiler="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(3):
        loss = model(**batch, labels=batch["input_ids"]).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first = eager(**batch, labels=batch["input_ids"]).loss.item()
    assert abs(losses[0] - first) < 0.02 * first and losses[-1] < losses[0]
