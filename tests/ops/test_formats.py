"""Every 4-bit format and every residual rule through the op, forward and backward, against rows quantized in NumPy.

The quantizers are those of ``tests.quantizers``, which share nothing with the package; the region's formula and its
straight-through gradients are ``tests.ops.reference.reference``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.reference import ACTIVATIONS, TARGETS, Case, compare_gradients, in_range, make_case, reference, slots
from tests.quantizers import compensated, quantize_experts, quantize_rows
from trace_compile.errors import UnknownFormatError
from trace_compile.ops import MoEScheme, OperandScheme, Out, WeightLayout, check_close, pack_experts
from trace_compile.ops.scheme import Residual


def symmetric(fmt: str = "nvfp4", profile: str = "pow2", residual: Residual | None = None) -> MoEScheme:
    return MoEScheme(OperandScheme(fmt, profile, "expert"), OperandScheme(fmt, profile, "row", residual))


SCHEMES = {
    "hif4": symmetric("hif4"),
    "mxfp4_macro": symmetric("mxfp4_macro"),
    "four_over_six": symmetric(profile="four_over_six"),
    "four_over_six_mae": symmetric(profile="four_over_six_mae"),
    "pow2_four_over_six": symmetric(profile="pow2_four_over_six"),
    "int4": MoEScheme(OperandScheme("int4_g32", outer="expert"), None),
    "int4_g128": MoEScheme(OperandScheme("int4_g128", outer="expert"), None),
    "quads": symmetric(residual=Residual("gathered", 0.5)),
    "quads-eighth": symmetric(residual=Residual("gathered", 0.125)),
    "resq-dense": symmetric(residual=Residual("dense")),
    "resq-channels": symmetric(residual=Residual("channels", 0.5)),
    "resq-2of4": symmetric(residual=Residual("2of4", 0.5)),
    "resq-blocks": symmetric(residual=Residual("blocks", 0.5)),
    "hif4-resq-2of4": symmetric("hif4", residual=Residual("2of4", 0.5)),
    "hif4-quads": symmetric("hif4", residual=Residual("gathered", 0.5)),
    "mxfp4-fallback": symmetric("mxfp4", residual=Residual("dense", gain=0.5)),
    "four-over-six-quads": symmetric(profile="four_over_six", residual=Residual("gathered", 0.25)),
}


def rows_of(x: Tensor, act: OperandScheme | None, counted: np.ndarray) -> Tensor | None:
    """Values float64 of activation rows ``x [M, K]``; None where they are not quantized."""
    if act is None:
        return None
    rows, kept = x.detach().float().cpu().numpy(), act.residual
    if kept is None:
        values, _ = quantize_rows(rows, act.fmt, act.profile)
    else:
        values = compensated(rows, act.fmt, act.profile, kept.select, kept.keep, kept.gain, counted)
    return torch.from_numpy(values).to(x.device)


def expected(case: Case, out: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
    """xq [T, H], hq [T, K, I] and both weights, float64. Hidden rows are those of the op's own pre-activation."""
    act, weight = case.scheme.act, case.scheme.weight
    assert weight is not None
    routed = in_range(case)
    h = ACTIVATIONS[case.activation](out[Out.PRE])
    hq = rows_of(h, act, routed.reshape(-1)[out[Out.ORDER]].cpu().numpy())
    masters = [w.detach().float().cpu().numpy() for w in (case.w13, case.w2)]
    weights = [torch.from_numpy(quantize_experts(w, weight.fmt, weight.profile)).to(h.device) for w in masters]
    xq = rows_of(case.x, act, routed.any(1).cpu().numpy())
    return xq, None if hq is None else slots(case, hq, out), weights


FAST = ("hif4", "four_over_six", "int4", "quads", "resq-2of4", "mxfp4-fallback")
EACH = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SCHEMES]


@pytest.mark.parametrize(("device", "dtype"), TARGETS)
@pytest.mark.parametrize("name", EACH)
def test_forward_and_every_gradient(name: str, device: str, dtype: torch.dtype) -> None:
    width = 128 if name in ("mxfp4_macro", "int4_g128") else 64
    case = make_case(SCHEMES[name], tokens=37, hidden=128, width=width, seed=3, device=device, dtype=dtype)
    uneven = torch.linspace(-2, 2, 128).exp2().to(device, dtype)
    case = case.with_leaves(x=case.x.detach() * uneven)  # so that it matters which
    dy = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    kept = case.run()
    ref = reference(case, dy, *expected(case, kept))
    check_close(slots(case, kept[Out.PRE], kept), ref.pre, k=256, dtype=dtype, stages=2, name="pre")
    for out in (kept, case.run(recompute=True)):
        check_close(out[Out.Y], ref.y, k=256, dtype=dtype, stages=4, name="y")
        compare_gradients(case, case.grads(out[Out.Y], dy), ref.grads)


def test_each_scheme_gives_another_result() -> None:
    found = {}
    for name, scheme in {"nvfp4": symmetric(), "mxfp4": symmetric("mxfp4"), **SCHEMES}.items():
        case = make_case(scheme, tokens=40, hidden=128, width=128, grad=False)
        found[name] = case.run(w13=None, w2=None)[Out.Y]
    names = list(found)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert not torch.equal(found[a], found[b]), (a, b)


def test_more_of_the_residual_is_closer_to_unquantized_activations() -> None:
    def distance(scheme: MoEScheme) -> float:
        case = make_case(scheme, tokens=64, hidden=128, width=128, grad=False)
        plain = make_case(MoEScheme(scheme.weight, None), tokens=64, hidden=128, width=128, grad=False)
        return float((case.run()[Out.Y] - plain.run()[Out.Y]).norm())

    shares = [distance(symmetric(residual=Residual("gathered", keep))) for keep in (0.125, 0.25, 0.5, 0.75, 1.0)]
    assert shares == sorted(shares, reverse=True)
    plain = distance(symmetric())
    assert plain > shares[0] and distance(symmetric(residual=Residual("dense"))) < 0.2 * plain


def test_gathering_every_channel_is_the_dense_residual() -> None:
    whole, dense = (
        make_case(symmetric(residual=r), tokens=20, hidden=128, width=64, grad=False).run()[Out.Y]
        for r in (Residual("gathered", 1.0), Residual("dense"))
    )
    assert torch.equal(whole, dense)


@pytest.mark.parametrize("name", ["quads", "resq-2of4", "resq-blocks", "hif4-quads"])
def test_a_poisoned_or_unrouted_token_has_no_say(name: str) -> None:
    case = make_case(SCHEMES[name], tokens=37, hidden=128, width=64, grad=False)
    ids = case.expert_ids.clone()
    ids[6] = -1
    found = []
    for poison, unrouted in ((torch.nan, 1e6), (-torch.inf, 0.0)):
        x = case.x.clone()
        x[5, 3], x[6] = poison, unrouted
        found.append(case.with_leaves(x=x, expert_ids=ids).run()[Out.Y])
        assert found[-1].isnan().any(1).nonzero().tolist() == [[5]] and (found[-1][6] == 0).all()
    assert torch.equal(*(y.nan_to_num() for y in found))


@pytest.mark.parametrize("name", EACH)
def test_no_tokens(name: str) -> None:
    case = make_case(SCHEMES[name], tokens=0, hidden=128, width=128)
    out = case.run()
    assert out[Out.Y].shape == (0, 128)
    assert all(g.eq(0).all() for g in case.grads(out[Out.Y], out[Out.Y]))


BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "mxfp4_macro": 4.3125, "hif4": 4.5, "int4_g32": 5.0, "int4_g128": 4.25}


@pytest.mark.parametrize("fmt", BITS)
def test_bits_per_weight(fmt: str) -> None:
    packed = pack_experts(torch.randn(2, 8, 256), WeightLayout(), OperandScheme(fmt, outer="expert"))
    assert packed.bits_per_value == BITS[fmt]


@pytest.mark.parametrize(
    "key",
    ["nvfp4:pow2:row:gathered", "nvfp4:pow2:row:some@0.5*1.0", "nvfp4:pow2:row:2of4@0.25*1.0", "a:b:row:dense@1.0*0.0"],
)
def test_malformed_residuals_are_refused(key: str) -> None:
    with pytest.raises(UnknownFormatError, match="residual"):
        OperandScheme.parse(key)


def test_keys_of_residuals_round_trip_and_weights_have_none() -> None:
    for scheme in SCHEMES.values():
        assert MoEScheme.parse(scheme.key) == scheme
    assert len({scheme.key for scheme in SCHEMES.values()}) == len(SCHEMES)
    with pytest.raises(UnknownFormatError, match="only activations"):
        MoEScheme(OperandScheme(outer="expert", residual=Residual()), None)


def test_activations_in_a_weight_format_are_refused() -> None:
    with pytest.raises(UnknownFormatError, match="activations.*hif4.*int4_g32"):
        make_case(MoEScheme(None, OperandScheme("int4_g32")), hidden=64, width=32).run()
    with pytest.raises(UnknownFormatError, match="4-bit formats, not 'mxfp8_e4m3'"):
        make_case(MoEScheme(OperandScheme("mxfp8_e4m3", outer="expert"), None), hidden=64, width=32).run()
