"""What may be passed in: dtypes, layouts, empty tensors, outer sources, non-finite values, and the errors for the
rest.
"""

from __future__ import annotations

import pytest
import torch

from tests.numerics.cases import adversarial, same_bits
from trace_compile.errors import BlockSizeError, OperandError, UnknownFormatError
from trace_compile.numerics import (
    FORMATS,
    QTensor,
    amax,
    decode_blocks,
    format_of,
    outer_scale,
    quantize,
    quantize_blocks,
    saturated,
)


def assert_same(a: QTensor, b: QTensor) -> None:
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)
    assert torch.equal(a.outer, b.outer)


@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_equal_values_give_equal_bytes_in_every_dtype(fmt: str, dtype: torch.dtype) -> None:
    x = adversarial().to(dtype)
    x = torch.where(x.float().isnan(), 0.5, x)  # a NaN's sign is not a value
    assert_same(quantize(x, fmt), quantize(x.float(), fmt))


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_views_give_the_bytes_of_their_copies(fmt: str) -> None:
    base = adversarial().nan_to_num(nan=1.0)
    square = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    for view in (base[::3], base.repeat(1, 2)[:, ::2], square.t(), square[:, None, :].expand(128, 2, 128), base[3]):
        before = view.clone()
        assert_same(quantize(view, fmt), quantize(view.contiguous(), fmt))
        assert same_bits(view.contiguous(), before.contiguous()), "the input is not written to"


@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize("shape", [(0, 128), (3, 0, 128), (4, 0), (0,)])
@pytest.mark.parametrize("outer", ["row", "tensor"])
def test_empty_tensors(fmt: str, shape: tuple[int, ...], outer: str) -> None:
    q = quantize(torch.empty(shape), fmt, outer=outer)
    assert q.codes.shape == shape
    assert q.dequantize().shape == shape
    assert q.packed.shape[:-1] == shape[:-1]


def test_outer_sources() -> None:
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    x[1] *= 100
    row, tensor, expert = (quantize(x, outer=o) for o in ("row", "tensor", "expert"))
    assert (row.outer.shape, tensor.outer.shape, expert.outer.shape) == ((3, 5), (1,), (3,))
    assert torch.equal(row.outer, outer_scale(x.abs().amax(-1)))
    assert torch.equal(tensor.outer, outer_scale(x.abs().amax()).reshape(1))
    assert torch.equal(expert.outer, outer_scale(x.abs().amax((1, 2))))
    for q in (row, tensor, expert):
        assert_same(quantize(x, outer=q.outer), q)
    for i in range(3):
        assert_same(quantize(x[i], outer="tensor"), quantize(x[i], outer=expert.outer[i : i + 1]))
        assert torch.equal(expert.codes[i], quantize(x[i], outer="tensor").codes)
    assert_same(quantize(x, outer=torch.tensor(2.0)), quantize(x, outer=torch.tensor([2.0])))


def test_expert_source_with_as_many_experts_as_rows() -> None:
    x = (
        torch.randn(4, 4, 32, generator=torch.Generator().manual_seed(2))
        * torch.tensor([1.0, 10, 100, 1000])[:, None, None]
    )
    q = quantize(x, outer="expert")
    assert torch.equal(q.outer, outer_scale(x.abs().amax((1, 2))))
    for i in range(4):
        assert torch.equal(q.codes[i], quantize(x[i], outer="tensor").codes)


def test_each_row_is_quantized_alone() -> None:
    x = adversarial()
    whole = quantize(x)
    for i in range(len(x)):
        assert_same(
            QTensor("nvfp4", "pow2", whole.codes[i : i + 1], whole.scales[i : i + 1], whole.outer[i : i + 1]),
            quantize(x[i : i + 1]),
        )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if not f.startswith("fp8")])
def test_non_finite_values_poison_their_block_only(fmt: str, bad: float) -> None:
    block = format_of(fmt).block
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3))
    x[1, 5] = 0.0  # the value that is replaced is not its row's amax
    y = x.clone()
    y[1, 5] = bad
    clean, dirty = quantize(x, fmt), quantize(y, fmt)
    assert torch.equal(clean.outer, dirty.outer)
    poisoned = torch.zeros(3, 256, dtype=torch.bool)
    poisoned[1, :block] = True
    values = dirty.dequantize()
    assert torch.equal(values.isnan(), poisoned)
    assert torch.equal(values[~poisoned], clean.dequantize()[~poisoned])
    if fmt == "nvfp4":
        assert dirty.scales[1, 0] == 0x7F and not (dirty.scales == 0x7F)[:, 1:].any()


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_non_finite_values_poison_themselves_where_there_is_no_block_scale(fmt: str) -> None:
    x = torch.tensor([[1.0, torch.nan, torch.inf, 3.0]])
    assert quantize(x, fmt).dequantize().isnan().tolist() == [[False, True, True, False]]


def test_amax_ignores_non_finite_values() -> None:
    x = torch.tensor([[1.0, -7.0, torch.nan], [torch.inf, -torch.inf, torch.nan]], dtype=torch.bfloat16)
    assert amax(x, -1).tolist() == [7.0, 0.0]
    assert amax(x, (0, 1)).item() == 7.0
    assert amax(torch.empty(3, 0), -1).tolist() == [0.0] * 3


def test_saturation_is_what_the_format_cannot_reach() -> None:
    g = torch.tensor([1.0, 0.5])
    x = torch.tensor([2688.0, torch.nextafter(torch.tensor(2688.0), torch.tensor(3000.0)).item(), -2689.0, 1344.0] * 4)
    assert saturated(x.expand(2, 16), g).tolist() == [[False, True, True, False] * 4, [True, True, True, False] * 4]
    top = quantize(torch.full((1, 16), 1e30), outer=torch.ones(1))
    assert (top.scales.item(), set(top.codes.flatten().tolist())) == (0x7E, {7})


def test_named_errors() -> None:
    x = torch.randn(4, 32)
    with pytest.raises(BlockSizeError, match="24"):
        quantize(torch.randn(4, 24))
    with pytest.raises(UnknownFormatError, match="nvfp5.*nvfp4"):
        quantize(x, "nvfp5")
    with pytest.raises(UnknownFormatError, match="pow3.*pow2"):
        quantize(x, profile="pow3")
    with pytest.raises(UnknownFormatError, match="column"):
        quantize(x, outer="column")
    with pytest.raises(OperandError, match="int64"):
        quantize(torch.arange(16))
    with pytest.raises(OperandError, match="int8"):
        quantize_blocks(torch.ones(16, dtype=torch.int8), torch.ones(()))
    with pytest.raises(OperandError, match="\\(\\)"):
        quantize(torch.tensor(1.0))
    with pytest.raises(OperandError, match="3-D"):
        quantize(x, outer="expert")
    with pytest.raises(OperandError, match="\\(3,\\)"):
        quantize(x, outer=torch.ones(3))
    with pytest.raises(OperandError, match="\\(3,\\)"):
        quantize_blocks(x, torch.ones(3))
    with pytest.raises(OperandError, match="float64"):
        quantize_blocks(x, torch.ones(4, dtype=torch.float64))
    with pytest.raises(OperandError, match="outer scale"):
        quantize_blocks(x, None)
    q = quantize(x)
    with pytest.raises(OperandError, match="scales"):
        QTensor("nvfp4", "pow2", q.codes, q.scales[:, :1], q.outer)
    with pytest.raises(OperandError, match="float64"):
        QTensor("nvfp4", "pow2", q.codes, q.scales, q.outer.double())


def test_decode_in_bfloat16_is_exact() -> None:
    q = quantize(adversarial().nan_to_num(nan=1.0, posinf=1.0, neginf=1.0))
    assert torch.equal(q.values(torch.bfloat16).float(), q.values())
    assert torch.equal(decode_blocks(q.codes, q.scales, dtype=torch.bfloat16), q.values(torch.bfloat16))
    assert torch.equal(q.values() * q.outer[:, None], q.dequantize())
