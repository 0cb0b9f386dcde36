"""The op written in standard operations: the bytes of ``nvfp4_moe``, the sums in another order.

In eager mode a scan compiles its body anew for every shape, so cases are few and hold everything at once.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.reference import GPT_OSS, SQUARED_RELU, make_case
from trace_compile.errors import GuidanceError, UnknownFormatError
from trace_compile.ops import (
    SWIGLU,
    W4A4_ROW,
    W4A4_TRACED,
    W4A16,
    Activation,
    MoEScheme,
    OperandScheme,
    Out,
    check_close,
)
from trace_compile.ops.portable import portable_moe, stacked_moe

OUTER = torch.tensor([2.0**-9, 2.0**-8])


@pytest.mark.parametrize("body", [portable_moe, stacked_moe])
@pytest.mark.parametrize(
    "scheme, activation, bias",
    [(W4A16, SWIGLU, True), (W4A4_ROW, GPT_OSS, True), (W4A4_TRACED, SQUARED_RELU, False)],
    ids=["w4a16", "row", "traced"],
)
def test_equals_the_op(body: object, scheme: MoEScheme, activation: Activation, bias: bool) -> None:
    """Routes out of range, huge, tiny and empty rows and blocks, saturation; a NaN and an Inf poison their tokens."""
    case = make_case(scheme, activation=activation, bias=bias, tokens=23, experts=5, grad=False)
    x = case.x
    x[1] *= 1e-30
    x[2] *= 1e4
    x[3] = 0
    x[4, 16:32] = 0
    x[5, 0], x[6, 3] = torch.nan, -torch.inf
    x[7, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * 2.0**-3  # ties, under scale 2^-3
    outer = OUTER if scheme is W4A4_TRACED else None
    arguments = case.operands(outer_in=outer, w13=None, w2=None)
    expected = torch.ops.trace_compile.nvfp4_moe(*arguments)[Out.Y]
    (found,) = portable_moe(*arguments) if body is portable_moe else stacked_moe(*arguments)
    bad = torch.tensor([5, 6])
    routed = ((case.expert_ids >= 0) & (case.expert_ids < 5)).any(1)
    poisoned = found.isnan().any(1)
    assert torch.equal(poisoned, expected.isnan().any(1)) and torch.equal(poisoned[bad], routed[bad])
    keep = ~poisoned
    assert int(keep.sum()) >= 21 and (expected[~routed] == 0).all() and (found[~routed] == 0).all()
    # Rows differ in magnitude by many decades: each is compared on its own scale.
    unit = expected[keep].abs().amax(1, keepdim=True).clamp(min=1e-35)
    check_close(found[keep] / unit, expected[keep] / unit, k=48, dtype=torch.float32, stages=4)


def test_no_token_and_one() -> None:
    for tokens in (0, 1):
        case = make_case(W4A4_ROW, tokens=tokens, grad=False)
        arguments = case.operands(w13=None, w2=None)
        expected = torch.ops.trace_compile.nvfp4_moe(*arguments)[Out.Y]
        for (found,) in (portable_moe(*arguments), stacked_moe(*arguments)):
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_schemes_that_are_not_written_down_are_refused() -> None:
    expert = OperandScheme(outer="expert")
    schemes = [
        MoEScheme(expert, OperandScheme(profile="torchao")),
        MoEScheme(expert, OperandScheme(outer="tensor")),
        MoEScheme(OperandScheme(fmt="mxfp4", outer="expert"), None),
        MoEScheme(None, OperandScheme()),
    ]
    for scheme in schemes:
        case = make_case(scheme, hidden=64, width=32, grad=False)
        for body in (portable_moe, stacked_moe):
            with pytest.raises(UnknownFormatError, match="export"):
                body(*case.operands())
    case = make_case(W4A4_ROW, grad=False)
    with pytest.raises((UnknownFormatError, GuidanceError)):
        portable_moe(*case.operands(record="bit"))


def test_foreign_scale_bytes() -> None:
    """Zero and subnormal block scales in weights, which this package never writes."""
    case = make_case(W4A16, grad=False)
    arguments = list(case.operands(w13=None, w2=None))
    generator = torch.Generator().manual_seed(1)

    def drawn(like: Tensor) -> Tensor:
        return torch.randint(0, 16, like.shape, generator=generator).to(torch.uint8)

    for index in (8, 11):
        arguments[index] = drawn(arguments[index])
    expected = torch.ops.trace_compile.nvfp4_moe(*arguments)[Out.Y]
    for (found,) in (portable_moe(*arguments), stacked_moe(*arguments)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
