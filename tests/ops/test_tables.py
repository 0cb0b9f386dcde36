"""Scheme keys, the op registry and the tolerance table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.reference import make_case, ops
from trace_compile.errors import LoweringError, UnknownFormatError
from trace_compile.ops import (
    OPS,
    UNQUANTIZED,
    W4A4_ROW,
    W4A4_TRACED,
    W4A16,
    MoEScheme,
    OperandScheme,
    Provider,
    check_close,
    provider_for,
    register_provider,
)
from trace_compile.ops.tolerance import relative_rms


def test_keys_are_stable_and_round_trip() -> None:
    assert W4A4_ROW.key == "w=nvfp4:pow2:expert|a=nvfp4:pow2:row"
    assert W4A4_TRACED.key == "w=nvfp4:pow2:expert|a=nvfp4:pow2:traced"
    assert W4A16.key == "w=nvfp4:pow2:expert|a=none"
    assert UNQUANTIZED.key == "w=none|a=none"
    weights = [
        None,
        *(OperandScheme(f, p, o) for f in ("nvfp4", "mxfp4") for p in ("pow2", "fp32") for o in ("expert", "tensor")),
    ]
    acts = [None, *(OperandScheme("nvfp4", "pow2", o) for o in ("row", "tensor", "traced"))]
    schemes = [MoEScheme(w, a) for w, a in itertools.product(weights, acts)]
    assert len({s.key for s in schemes}) == len(schemes)
    assert all(MoEScheme.parse(s.key) == s for s in schemes)


@pytest.mark.parametrize(
    "key", ["", "w=none", "a=none|w=none", "w=nvfp4|a=none", "w=nvfp4:pow2:expert:x|a=none", "w=::|a=none"]
)
def test_malformed_keys_are_refused(key: str) -> None:
    with pytest.raises(UnknownFormatError):
        MoEScheme.parse(key)


def test_outer_sources_fit_their_operand() -> None:
    for make in (
        lambda: OperandScheme(outer="column"),
        lambda: MoEScheme(OperandScheme(outer="row"), None),
        lambda: MoEScheme(OperandScheme(outer="traced"), None),
        lambda: MoEScheme(None, OperandScheme(outer="expert")),
    ):
        with pytest.raises(UnknownFormatError, match="outer scale source"):
            make()


@pytest.fixture
def spare_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in OPS.values():
        monkeypatch.setattr(spec, "providers", list(spec.providers))


@pytest.mark.parametrize("name", OPS)
def test_every_op_is_complete(name: str) -> None:
    spec = OPS[name]
    assert spec.target is getattr(ops, name).default
    assert spec.providers[-1].name == "native" and spec.providers[-1].target is spec.target
    assert spec.autograd is None or hasattr(ops, spec.autograd)


def test_native_runs_everything_and_fake_arguments_suffice() -> None:
    case = make_case(W4A4_ROW)
    for op, args in (("nvfp4_moe", case.operands()), (ops.moe_float.default, case.float_operands())):
        with FakeTensorMode() as mode:
            chosen = provider_for(op, [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args])
        assert chosen.name == "native" and chosen.reason


def test_registered_providers_come_first_and_refusals_are_reported(spare_providers: None) -> None:
    def small_only(operands: Any) -> str | None:
        return None if operands.x.shape[0] <= 8 else f"{operands.x.shape[0]} tokens are more than 8"

    register_provider("nvfp4_moe", Provider("tiny", ops.nvfp4_moe.default, small_only))
    assert provider_for("nvfp4_moe", make_case(W4A4_ROW, tokens=8).operands()).name == "tiny"
    large = make_case(W4A4_ROW, tokens=9).operands()
    chosen = provider_for("nvfp4_moe", large)
    assert chosen.name == "native" and chosen.reason.split("; ")[0] == "tiny: 9 tokens are more than 8"
    with pytest.raises(LoweringError, match="tiny: 9 tokens"):
        provider_for("nvfp4_moe", large, only="tiny")
    with pytest.raises(LoweringError, match="already has"):
        register_provider("nvfp4_moe", Provider("tiny", None))
    with pytest.raises(LoweringError, match="no provider 'absent'"):
        provider_for("nvfp4_moe", large, only="absent")


def test_unknown_ops_are_named() -> None:
    with pytest.raises(LoweringError, match="conv2d"):
        provider_for("conv2d", ())
    with pytest.raises(LoweringError, match="aten"):
        provider_for(torch.ops.aten.mm.default, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 64, 2048])
def test_a_rounded_gemm_is_close_and_a_wrong_one_is_not(k: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(k)
    a, b = (torch.randn(64, k, generator=g).to(dtype).double() for _ in range(2))
    exact = a @ b.T / k**0.5
    check_close((a.float() @ b.float().T / k**0.5).to(dtype), exact, k=k)
    wrong = exact.clone()
    wrong[3, 5] += 100 * relative_rms(k=k, dtype=dtype)
    with pytest.raises(AssertionError, match=r"\(3, 5\)"):
        check_close(wrong.to(dtype), exact, k=k)
    with pytest.raises(AssertionError, match="relative RMS"):
        check_close((exact * (1 + 20 * relative_rms(k=k, dtype=dtype))).to(dtype), exact, k=k)


def test_patterns_shapes_and_zeros_are_exact() -> None:
    e = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    check_close(e.clone(), e, k=1)
    for i, v in ((0, torch.nan), (1, 0.0), (2, -torch.inf), (3, torch.nan)):
        a = e.clone()
        a[i] = v
        with pytest.raises(AssertionError, match="NaN/Inf"):
            check_close(a, e, k=1)
    with pytest.raises(AssertionError, match="shape"):
        check_close(e[:3], e, k=1)
    with pytest.raises(AssertionError, match="allowed 0"):
        check_close(torch.full((3,), 1e-30), torch.zeros(3), k=1)
    check_close(torch.zeros(3), torch.zeros(3), k=1)


def test_bounds_grow_with_length_and_roundoff() -> None:
    assert relative_rms(k=1, dtype=torch.float32) < relative_rms(k=4096, dtype=torch.float32) < 2e-5
    assert relative_rms(k=1, dtype=torch.float32) < relative_rms(k=1, dtype=torch.bfloat16) < 1e-2
    assert relative_rms(k=1, dtype=torch.float32, stages=4) > relative_rms(k=1, dtype=torch.float32)
