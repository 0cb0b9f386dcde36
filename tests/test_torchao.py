"""torchao's side: ``quantize_`` with our configuration, and tensors that change class but not bytes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
from torchao import quantize_
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

from trace_compile.errors import BlockSizeError, OperandError, UnknownRecipeError
from trace_compile.numerics import QTensor, quantize
from trace_compile.ops import W4A16, WeightLayout, check_close, pack_experts
from trace_compile.torchao import QuantizedLinear, TraceCompileConfig, from_torchao, to_torchao


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def assert_same_bytes(a: QTensor, b: QTensor) -> None:
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)
    assert torch.equal(a.outer.reshape(-1), b.outer.reshape(-1))


@pytest.mark.parametrize(("shape", "outer"), [((40, 64), "tensor"), ((3, 48, 32), "expert")], ids=["matrix", "experts"])
def test_ours_there_and_back(shape: tuple[int, ...], outer: str) -> None:
    q = quantize(data(*shape), outer=outer)
    there = to_torchao(q, torch.float32)
    assert isinstance(there, NVFP4Tensor) and there.shape == shape
    assert torch.equal(there.dequantize(torch.float32), q.dequantize())  # exact: outer scales are powers of two
    assert_same_bytes(from_torchao(there, "pow2"), q)
    turned = there.t() if len(shape) == 2 else there.transpose(1, 2)
    assert_same_bytes(from_torchao(turned, "pow2"), q)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_torchaos_own_are_read(scaled: bool, swizzled: bool) -> None:
    x = data(130, 96, seed=1)
    per_tensor = per_tensor_amax_to_scale(x.abs().max()) if scaled else None
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor, is_swizzled_scales=swizzled)
    plain = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor)
    q = from_torchao(theirs)
    check_close(q.dequantize(), theirs.dequantize(torch.float32), k=1)
    back = to_torchao(q, torch.float32)
    assert torch.equal(back.qdata, plain.qdata.view(torch.uint8))
    assert torch.equal(back.scale.view(torch.uint8), plain.scale.view(torch.uint8).view_as(back.scale))
    if scaled:
        assert per_tensor is not None and torch.equal(back.per_tensor_scale, per_tensor)
        assert_same_bytes(q, quantize(x, outer="tensor", profile="torchao"))


def test_what_the_class_cannot_hold_is_refused() -> None:
    with pytest.raises(OperandError, match="one outer scale per matrix"):
        to_torchao(quantize(data(8, 32)))
    with pytest.raises(OperandError, match="mxfp4"):
        to_torchao(quantize(data(8, 32), "mxfp4"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.lm_head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(x + self.down(self.up(x).relu()))


@pytest.mark.parametrize("recipe", ["qat", "w4a16"])
def test_prepared_layers_train_their_masters(recipe: str) -> None:
    model, x = Model(), data(2, 5, 32, seed=2)
    masters = dict(model.named_parameters())
    quantize_(model, TraceCompileConfig(recipe), filter_fn=TraceCompileConfig.filter())
    assert isinstance(model.up, QuantizedLinear) and type(model.lm_head) is nn.Linear
    assert all(p is masters[name] for name, p in model.named_parameters())

    def q(t: Tensor, outer: str) -> Tensor:
        return quantize(t, outer=outer).dequantize() if outer == "tensor" or recipe == "qat" else t

    xq, wq = q(x.reshape(-1, 32), "row"), q(model.up.weight.detach(), "tensor")
    check_close(model.up(x).detach().reshape(-1, 64), xq.double() @ wq.double().T + model.up.bias.double(), k=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(12):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


def test_converted_weights_are_the_bytes_that_trained() -> None:
    model, x = Model(), data(7, 32, seed=3)
    config = TraceCompileConfig("w4a16")
    quantize_(model, config, filter_fn=TraceCompileConfig.filter())
    expected, packed = model(x).detach(), {name: getattr(model, name).packed() for name in ("up", "down")}
    quantize_(model, TraceCompileConfig("w4a16", step="convert"), filter_fn=TraceCompileConfig.filter(ignore=("down",)))
    assert isinstance(model.up.weight, NVFP4Tensor) and type(model.up) is nn.Linear
    assert isinstance(model.down, QuantizedLinear)
    assert torch.equal(model.up.weight.qdata, packed["up"].codes[0])
    assert torch.equal(model.up.weight.scale.view(torch.uint8), packed["up"].scales[0])
    check_close(model(x).detach(), expected, k=64, stages=4)
    plain = Model()
    quantize_(plain, TraceCompileConfig("qat", step="convert"))
    again = pack_experts(Model().down.weight, WeightLayout(experts=1), W4A16.weight)  # type: ignore[arg-type]
    assert torch.equal(plain.down.weight.qdata, again.codes[0])  # type: ignore[attr-defined]


def test_configurations_that_make_no_sense_are_refused() -> None:
    for recipe, step in (("bf16", "prepare"), ("naive", "prepare"), ("qat", "finish"), ("mxfp4", "prepare")):
        with pytest.raises(UnknownRecipeError):
            TraceCompileConfig(recipe, step)
    with pytest.raises(BlockSizeError, match="24 input features"):
        quantize_(nn.Sequential(nn.Linear(24, 8)), TraceCompileConfig())
    with pytest.raises(OperandError, match="Embedding"):
        quantize_(nn.Sequential(nn.Embedding(4, 16)), TraceCompileConfig(), filter_fn=lambda m, n: bool(n))
