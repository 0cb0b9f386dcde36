"""The quantized linear layer: its definition by ``numerics.quantize``, its gradients, and records that the expert op
would write of the same rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.reference import make_case, ops
from trace_compile.errors import BlockSizeError, GuidanceError, TraceCompileError, UnknownFormatError
from trace_compile.numerics import quantize
from trace_compile.ops import (
    UNQUANTIZED,
    W4A4_ROW,
    W4A4_TRACED,
    W4A16,
    MoEScheme,
    OperandScheme,
    Out,
    WeightLayout,
    check_close,
)
from trace_compile.ops.nvfp4_linear import LinearOut, NvFp4LinearOperands
from trace_compile.ops.scheme import Residual
from trace_compile.ops.weights import pack_experts

T, K, N = 11, 48, 40
TWICE = replace(W4A4_ROW, act=OperandScheme(residual=Residual()))
SCHEMES = [W4A4_ROW, W4A4_TRACED, W4A16, UNQUANTIZED, TWICE]


def operands(
    scheme: MoEScheme, *, dtype: torch.dtype = torch.float32, tokens: int = T, **changes: Any
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    w = (torch.randn(N, K, generator=g) * K**-0.5).to(dtype)
    empty = [torch.empty(0, dtype=t) for t in (torch.uint8, torch.uint8, torch.float32)]
    packed = empty
    if scheme.weight is not None:
        found = pack_experts(w, WeightLayout(experts=1), scheme.weight)
        packed = [found.codes, found.scales, found.outer]
    traced = scheme.act is not None and scheme.act.outer == "traced"
    values = dict.fromkeys(f for f in NvFp4LinearOperands.__dataclass_fields__)
    values |= {"x": torch.randn(tokens, K, generator=g).to(dtype), "w": w, "b": torch.randn(N, generator=g).to(dtype)}
    values |= dict(zip("csg", packed)) | {"outer_in": torch.tensor([2.0**-8]) if traced else None}
    return values | {"scheme": scheme.key, "guidance": "none", "record": "none", "diagnose": False} | changes


def run(values: dict[str, Any]) -> tuple[Tensor, ...]:
    return ops.nvfp4_linear(*values.values())


def definition(values: dict[str, Any], scheme: MoEScheme) -> tuple[Tensor, Tensor]:
    """The quantized operands: x ``[T, K]`` and w ``[N, K]``, float32."""
    x, w = values["x"].float(), values["w"].float()
    if scheme.act is not None:
        outer = values["outer_in"].expand(len(x)) if values["outer_in"] is not None else "row"
        xq = quantize(x, outer=outer)
        x, rest = xq.dequantize(), x - xq.dequantize()
        if scheme.act.residual is not None:  # all of it
            x = x + quantize(rest, outer=xq.outer).dequantize()
    if scheme.weight is not None:
        w = quantize(w[None], outer="expert").dequantize()[0]
    return x, w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.key)
def test_definition_and_gradients(scheme: MoEScheme, dtype: torch.dtype) -> None:
    values = operands(scheme, dtype=dtype)
    for name in ("x", "w", "b"):
        values[name].requires_grad_()
    x, w = definition(values, scheme)
    y = run(values)[LinearOut.Y]
    check_close(y, x.double() @ w.double().T + values["b"].double(), k=K, stages=2)
    dy = torch.randn(T, N, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(dy)
    check_close(values["x"].grad, dy.double() @ w.double(), k=N, stages=2)
    check_close(values["w"].grad, dy.double().T @ x.double(), k=T, stages=2)
    check_close(values["b"].grad, dy.double().sum(0), k=T, stages=2)


def test_layers_joined_along_rows_are_the_layers() -> None:
    """Rows of the weight do not know each other."""
    values = operands(W4A4_ROW)
    whole = run(values)[0]
    for rows in (slice(0, 16), slice(16, N)):
        part = values | {"w": values["w"][rows], "b": values["b"][rows]}
        part |= {"c": values["c"][:, rows], "s": values["s"][:, rows]}
        check_close(run(part)[0], whole[:, rows], k=K)


@pytest.mark.parametrize("kind", ["bit", "code"])
def test_records_are_those_of_the_expert_op_and_guide_it(kind: str) -> None:
    case = make_case(W4A4_ROW)
    x = case.x.detach()
    w = torch.randn(32, x.shape[1], generator=torch.Generator().manual_seed(2))
    packed = pack_experts(w, WeightLayout(experts=1), W4A4_ROW.weight)  # type: ignore[arg-type]
    masked = torch.arange(len(x)) > 0
    values = operands(W4A4_ROW) | {"x": x, "w": w, "b": None, "record": kind, "valid": masked}
    values |= {"c": packed.codes, "s": packed.scales, "g": packed.outer}
    found = run(values)
    experts = ops.nvfp4_moe(*case.operands(record=kind, valid=masked))
    assert torch.equal(found[LinearOut.RECORD], experts[Out.RECORD])
    assert torch.equal(found[LinearOut.RECORD_OUTER], experts[Out.RECORD_OUTER])
    assert torch.equal(found[LinearOut.HIST][0], experts[Out.HIST][0])
    assert float(found[LinearOut.AMAX]) == float(x[1:].abs().max()) and int(found[LinearOut.COUNTS]) == len(x) - 1

    drifted = values | {"x": x + 0.02 * torch.randn_like(x), "record": "none", "valid": None, "diagnose": True}
    guide = found[LinearOut.RECORD][:, :-1].contiguous()
    guided = run(drifted | {"guidance": kind, "guide": guide, "guide_outer": found[LinearOut.RECORD_OUTER]})
    plain, rollout = run(drifted)[0], found[0]
    before, after = (float((y - rollout).norm()) for y in (plain, guided[0]))
    assert after < 0.5 * before
    assert int(guided[LinearOut.DIAG][0, 2]) == 0 if kind == "code" else int(guided[LinearOut.DIAG][0, 1]) > 0
    missed = run(
        drifted | {"guidance": kind, "guide": guide, "guide_outer": found[2], "hit": torch.zeros(len(x)).bool()}
    )
    assert torch.equal(missed[0], plain)


@pytest.mark.parametrize("scheme", [W4A4_ROW, W4A16], ids=lambda s: s.key)
def test_the_op_keeps_its_contract(scheme: MoEScheme) -> None:
    record = "bit" if scheme.act else "ranges"
    for tokens in (T, 0):
        values = operands(scheme, tokens=tokens, record=record)
        values["x"].requires_grad_()
        torch.library.opcheck(ops.nvfp4_linear.default, tuple(values.values()))
    inference = operands(scheme) | {"w": None}
    trained = operands(scheme)
    assert torch.equal(run(inference)[0], run(trained)[0])  # the generator's bits are the trainer's
    inference["x"].requires_grad_()
    with pytest.raises(TraceCompileError, match="inference form"):
        run(inference)[0].sum().backward()


def test_no_token_and_nan_tokens() -> None:
    values = operands(W4A4_ROW, tokens=0, record="ranges")
    for name in ("x", "w", "b"):
        values[name].requires_grad_()
    y, *_ = found = run(values)
    y.sum().backward()
    assert y.shape == (0, N) and not values["w"].grad.any() and int(found[LinearOut.COUNTS]) == 0
    values = operands(W4A4_ROW)
    clean = run(values)[0]
    values["x"][3, 5] = torch.nan
    poisoned = run(values)[0]
    assert poisoned[3].isnan().all()
    assert torch.equal(torch.cat([poisoned[:3], poisoned[4:]]), torch.cat([clean[:3], clean[4:]]))


def test_operands_that_do_not_fit_are_named() -> None:
    with pytest.raises(UnknownFormatError, match="float16"):
        run(operands(W4A4_ROW, dtype=torch.float16))
    with pytest.raises(UnknownFormatError, match="traced"):
        run(operands(W4A4_TRACED) | {"outer_in": None})
    with pytest.raises(BlockSizeError, match="input is 40"):
        run(operands(W4A4_ROW) | {"x": torch.zeros(2, 40)})
    with pytest.raises(GuidanceError, match="guide rows"):
        run(operands(W4A4_ROW, guidance="bit"))
    with pytest.raises(TraceCompileError, match="w is None"):
        run(operands(UNQUANTIZED) | {"w": None})
