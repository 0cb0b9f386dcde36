"""Weights to live engines: the names and bytes of a file, all or nothing, the same twice, addresses that stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.export.models import EXPERTS, LAYERS, build, digest, logits, raw, tensors
from tests.tiny import prompts
from trace_compile import trace_compile
from trace_compile.engines import refit_sglang, refit_vllm
from trace_compile.errors import ExportError, NonFiniteWeightError, RefitError
from trace_compile.model import session_of
from trace_compile.rollout import ATTRIBUTE

FORMATS = ("compressed-tensors", "modelopt")


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    """A trained model, its twin, and the twin of another model of the same shape, which stands for one elsewhere."""
    model = trace_compile(build(), recipe="static")
    twin = model.rollout(copy=True)
    with model.trace(record="ranges"):
        twin(**prompts())
    twin.refit()
    other = trace_compile(build(seed=9), recipe="static")
    return model, twin, other.rollout(copy=True)


def packed_bytes(twin: Any) -> dict[str, bytes]:
    return {
        f"{name}.{part.name}": raw(getattr(packed, part.name)).numpy().tobytes()
        for name, packed in twin.__dict__[ATTRIBUTE].experts.items()
        for part in fields(packed)
    }


def addresses(twin: Any) -> dict[str, int]:
    found = {name: tensor.data_ptr() for name, tensor in twin.named_parameters()}
    for name, packed in twin.__dict__[ATTRIBUTE].experts.items():
        found |= {f"{name}.{part.name}": getattr(packed, part.name).data_ptr() for part in fields(packed)}
    return found


@pytest.mark.parametrize("fmt", [*FORMATS, "bf16"])
def test_a_stream_is_the_file(tmp_path: Path, fmt: str, pair: Any) -> None:
    model, twin, _ = pair
    model.export(tmp_path / "out", format=fmt)
    expected = tensors(tmp_path / "out")
    for source in (model, twin):
        for _ in range(2):
            sent = dict(source.stream_weights(format=fmt))
            assert sent.keys() == expected.keys()
            assert all(
                torch.equal(raw(sent[name]), raw(t)) and sent[name].shape == t.shape for name, t in expected.items()
            )
    experts = dict(model.stream_weights(format=fmt, others=False))
    assert experts.keys() == {name for name in expected if ".experts." in name}
    assert all(
        t.dim() == 2 for name, t in experts.items() if name.endswith(("weight_packed", "weight_scale", ".weight"))
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_twin_elsewhere_becomes_this_one_and_stays_it(fmt: str, pair: Any) -> None:
    _, twin, other = pair
    before = addresses(other)
    expected = logits(twin)
    for _ in range(2):  # idempotent
        version = other.weights_version
        assert other.load_weights(reversed(list(twin.stream_weights(format=fmt))), format=fmt) == version + 1
        assert packed_bytes(other) == packed_bytes(twin) and addresses(other) == before
        assert torch.equal(logits(other), expected)
    other.refit()
    assert packed_bytes(other) != packed_bytes(twin)


def _without(stream: Any, end: str) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, tensor) for name, tensor in stream if not name.endswith(end))


ONE = f"model.layers.{LAYERS - 1}.mlp.experts.{EXPERTS - 1}.up_proj"


def _changed(stream: Any, end: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, tensor if name.endswith(end) else old) for name, old in stream)


def test_half_a_stream_changes_nothing(pair: Any) -> None:
    model, twin, other = pair
    stream = twin.stream_weights(format="modelopt")
    before, scales = packed_bytes(other), session_of(model).outer.as_dict()
    dense = {name: t.clone() for name, t in other.state_dict().items()}
    nan = torch.full((64, 2), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield from list(stream)[:-5]
        raise OSError("connection lost")

    attempts: list[tuple[Any, type[Exception], str]] = [
        (_without(stream, f"{ONE}.weight_scale"), RefitError, f"{ONE}.weight_scale is missing"),
        (_without(stream, "lm_head.weight"), RefitError, r"lm_head\.weight is missing"),
        (_changed(stream, f"{ONE}.weight", torch.zeros(3, 3, dtype=torch.uint8)), ExportError, rf"{ONE}\.weight is"),
        (_changed(stream, "1.down_proj.weight_scale", nan), NonFiniteWeightError, "down_proj"),
        (_changed(stream, f"{ONE}.weight_scale_2", torch.tensor(3.0)), ExportError, "differ"),
        (_changed(stream, "lm_head.weight", torch.zeros(2, 2)), RefitError, r"lm_head\.weight is \[2, 2\]"),
        ([*stream, ("model.extra", torch.ones(1))], RefitError, r"model\.extra is no tensor"),
        ([*stream, *stream], RefitError, "comes twice"),
        (interrupted(), OSError, "connection lost"),
    ]
    for weights, error, match in attempts:
        with pytest.raises(error, match=match):
            other.load_weights(weights, format="modelopt")
        assert packed_bytes(other) == before and session_of(model).outer.as_dict() == scales
        assert all(torch.equal(t, dense[name]) for name, t in other.state_dict().items())
    with pytest.raises(RefitError, match="shares all but its experts"):
        model.rollout().load_weights(stream, format="modelopt")
    with pytest.raises(RefitError, match="dense"):
        other.load_weights(stream, format="bf16")


class Vllm:
    """The documented hook of vLLM's workers, with a loader that insists on knowing every tensor."""

    def __init__(self, expected: dict[str, Tensor]) -> None:
        self.held = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        self.calls = 0

    def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        self.calls += 1
        self._load(kwargs["weights_iterator"])

    def update_weights_from_tensor(self, named_tensors: list[tuple[str, Tensor]], *, flush_cache: bool) -> Any:
        self.calls += 1
        self._load(named_tensors)
        self.flushed = flush_cache
        return True, "done"

    def _load(self, weights: Any) -> None:
        for name, tensor in weights:
            assert self.held[name].shape == tensor.shape and self.held[name].dtype == tensor.dtype
            self.held[name].copy_(tensor)


@pytest.mark.parametrize("fmt", FORMATS)
def test_engines_get_every_tensor_through_their_hooks(fmt: str, pair: Any) -> None:
    model, _, _ = pair
    stream = model.stream_weights(format=fmt)
    expected = dict(stream)
    engine = Vllm(expected)
    assert refit_vllm(engine, stream) == len(expected) and engine.calls == 1
    assert all(torch.equal(raw(engine.held[name]), raw(t)) for name, t in expected.items())
    engine = Vllm(expected)
    assert refit_sglang(engine, stream, bucket_bytes=20_000) == len(expected)
    assert engine.calls > 3 and engine.flushed
    assert all(torch.equal(raw(engine.held[name]), raw(t)) for name, t in expected.items())


def test_an_engine_never_sees_half_of_a_bad_stream(pair: Any) -> None:
    model, twin, _ = pair
    engine = Vllm(dict(model.stream_weights()))
    stream = model.stream_weights()
    with pytest.raises(RefitError, match="only once"):
        refit_vllm(engine, iter(stream))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    try:
        for refit in (refit_vllm, refit_sglang):
            with pytest.raises(NonFiniteWeightError, match=r"lm_head\.weight"):
                refit(engine, stream)
    finally:
        with torch.no_grad():
            model.lm_head.weight.copy_(twin.lm_head.weight)
    assert engine.calls == 0

    class Refusing(Vllm):
        def update_weights_from_tensor(self, *arguments: Any, **options: Any) -> Any:
            return False, "no such parameter"

    with pytest.raises(RefitError, match="no such parameter"):
        refit_sglang(Refusing({}), stream)


def test_a_twin_exports_what_it_generates_with(tmp_path: Path, pair: Any) -> None:
    """Before and after generating, and while the trainer is ahead; the trainer's tensors are not mixed in."""
    model, twin, _ = pair
    twin.refit()
    twin.export(tmp_path / "before", format="modelopt")
    model.export(tmp_path / "model", format="modelopt")
    assert digest(tmp_path / "before") == digest(tmp_path / "model")
    twin.generate(**prompts(), max_new_tokens=3, do_sample=False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        twin.export(tmp_path / "after", format="modelopt")
        assert digest(tmp_path / "after") == digest(tmp_path / "before")
        model.export(tmp_path / "ahead", format="modelopt")
        assert digest(tmp_path / "ahead") != digest(tmp_path / "before")
    finally:
        model.load_state_dict(state)
    with pytest.raises(ExportError, match="would mix its tensors"):
        twin.save_pretrained(tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()
