"""Records and guidance: the bytes of a record, rounding toward a rollout, and what the diagnosis says about it.

TARGETS has a CPU and a CUDA variant of the main tests; the latter carries pytest.mark.gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.reference import (
    TARGETS,
    Case,
    compare_gradients,
    make_case,
    quantized_operands,
    reference,
    slots,
)
from trace_compile.errors import GuidanceError
from trace_compile.numerics import (
    decode_blocks,
    decode_e4m3,
    decode_exponent,
    guided_blocks,
    guided_round,
    pack_bits,
    pack_nibbles,
    quantize,
    unpack_bits,
    unpack_nibbles,
)
from trace_compile.ops import W4A4_ROW, W4A4_TRACED, W4A16, Diag, MoEScheme, OperandScheme, Out, check_close
from trace_compile.ops.records import RegionRow, encode_routing
from trace_compile.ops.rows import guide_bytes, record_bytes

H = 48
FP32 = MoEScheme(OperandScheme(outer="expert"), OperandScheme(profile="fp32"))
TENSOR = MoEScheme(OperandScheme(outer="expert"), OperandScheme(outer="tensor"))
TRACED = torch.tensor([2.0**-9, 2.0**-8])
PER_BYTE = {"bit": 8, "code": 2}


def drifted(case: Case, relative: float, seed: int = 3) -> Case:
    noise = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(seed)).to(case.x)
    return case.with_leaves(x=case.x * (1 + relative * noise))


def guidance(rollout: Any, kind: str, **more: Any) -> dict[str, Any]:
    """Options that guide a call by what ``rollout`` recorded; a row's outer bytes are not part of the guide."""
    width = H // PER_BYTE[kind] + H // 16
    return {
        "guidance": kind,
        "guide": rollout[Out.RECORD][:, :width],
        "guide_outer": rollout[Out.RECORD_OUTER],
        **more,
    }


def codes_of(out: tuple[Tensor, ...]) -> Tensor:
    return unpack_nibbles(out[Out.X_CODES])


def guided_values(x: Tensor, rollout: Any, kind: str) -> Tensor:
    """q * s by the definition: z in units of the rollout's scale, and the bracket member its outcome points to."""
    unit = (decode_e4m3(rollout.scales) * rollout.outer[:, None]).repeat_interleave(16, -1)
    told = {"bit": rollout.codes & 1} if kind == "bit" else {}
    if kind == "code":
        ones = torch.full_like(rollout.scales, 0x38)  # E4M3 1.0: codeword values
        told = {"q_roll": decode_blocks(rollout.codes, ones)}
    return guided_round(x.float() / unit, **told) * unit


@pytest.mark.parametrize("kind", ["bit", "code"])
@pytest.mark.parametrize("scheme", [W4A4_ROW, W4A4_TRACED, FP32, TENSOR])
def test_record_rows_are_the_quantizers_bytes(scheme: MoEScheme, kind: str) -> None:
    case = make_case(scheme, tokens=20)
    case = case.with_leaves(expert_ids=case.expert_ids.clamp(0, 2))
    act, traced = scheme.act, scheme is W4A4_TRACED
    assert act is not None
    out = case.run(record=kind, outer_in=TRACED if traced else None)
    q = quantize(case.x.detach(), outer=TRACED[0].expand(20) if traced else act.outer, profile=act.profile)
    payload = H // PER_BYTE[kind]
    row = out[Out.RECORD]
    assert row.dtype == torch.uint8 and row.shape == (20, record_bytes(H, kind, act))
    assert torch.equal(row[:, :payload], pack_bits(q.codes) if kind == "bit" else pack_nibbles(q.codes))
    assert torch.equal(row[:, payload : payload + H // 16], q.scales)
    outer, tail = q.outer.expand(20), row[:, payload + H // 16 :]
    assert tail.shape[1] == {W4A4_ROW: 1, W4A4_TRACED: 0, FP32: 4, TENSOR: 1}[scheme]
    assert torch.equal(out[Out.RECORD_OUTER], outer)
    if tail.shape[1] == 1:
        assert torch.equal(decode_exponent(tail[:, 0]), outer)
    if tail.shape[1] == 4:
        assert torch.equal(tail.contiguous().view(torch.float32)[:, 0], outer)


@pytest.mark.parametrize("kind", ["bit", "code"])
def test_row_sizes(kind: str) -> None:
    act = OperandScheme()
    assert guide_bytes(2048, kind, "nvfp4") == {"bit": 384, "code": 1152}[kind]
    assert record_bytes(2048, kind, act) == guide_bytes(2048, kind, "nvfp4") + 1
    assert record_bytes(2048, kind, OperandScheme(outer="traced")) == guide_bytes(2048, kind, "nvfp4")
    with pytest.raises(GuidanceError, match="'nibble'"):
        guide_bytes(2048, "nibble", "nvfp4")


@pytest.mark.parametrize(("device", "dtype"), TARGETS)
@pytest.mark.parametrize("hits", ["all", "some", "none"])
@pytest.mark.parametrize("kind", ["bit", "code"])
def test_guided_forward_and_gradients(kind: str, hits: str, device: str, dtype: torch.dtype) -> None:
    """Codes are guided_round's where there is a record, the quantizer's own elsewhere; wgrad uses the guided rows."""
    rollout = make_case(W4A4_ROW, tokens=24, device=device, dtype=dtype)
    case = drifted(rollout, 0.05)
    roll = quantize(rollout.x.detach())
    hit = {"all": None, "some": torch.arange(24, device=device) % 3 > 0, "none": torch.zeros(24, dtype=torch.bool)}[
        hits
    ]
    hit = None if hit is None else hit.to(device)
    out = case.run(**guidance(rollout.run(record=kind), kind, hit=hit))
    own = quantize(case.x.detach())
    chosen = torch.ones(24, 1, dtype=torch.bool, device=device) if hit is None else hit[:, None]
    expected = torch.where(chosen, guided_values(case.x.detach(), roll, kind), own.dequantize())
    values = decode_blocks(codes_of(out), out[Out.X_SCALES]) * out[Out.X_OUTER][:, None]
    assert torch.equal(values, expected)
    assert torch.equal(values.signbit(), expected.signbit())
    assert torch.equal(out[Out.X_SCALES], torch.where(chosen, roll.scales, own.scales))
    assert torch.equal(out[Out.X_OUTER], torch.where(chosen[:, 0], roll.outer, own.outer))
    changed = (codes_of(out) != own.codes).any()
    assert changed if hits != "none" else not changed

    dy = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    hq = hidden_rows(case, out)
    ref = reference(case, dy, expected, hq)
    check_close(slots(case, out[Out.PRE], out), ref.pre, k=H, dtype=dtype, stages=2)
    check_close(out[Out.Y], ref.y, k=H, dtype=dtype, stages=4)
    compare_gradients(case, case.grads(out[Out.Y], dy), ref.grads)


def hidden_rows(case: Case, out: tuple[Tensor, ...]) -> Tensor | None:
    """Down inputs are never guided. The helper's own-scale check of gate/up inputs does not apply: give it its own."""
    q = quantize(case.x.detach())
    unguided = list(out)
    unguided[Out.X_CODES], unguided[Out.X_SCALES], unguided[Out.X_OUTER] = q.packed, q.scales, q.outer
    return quantized_operands(case, tuple(unguided), None)[1]


@pytest.mark.parametrize("scheme", [W4A4_ROW, W4A4_TRACED])
@pytest.mark.parametrize("kind", ["bit", "code"])
@pytest.mark.parametrize(("drift", "exact"), [(1e-3, True), (0.16, False)])
def test_guidance_reproduces_the_rollout(kind: str, scheme: MoEScheme, drift: float, exact: bool) -> None:
    outer_in = TRACED if scheme is W4A4_TRACED else None
    rollout = make_case(scheme, tokens=200, seed=7)
    recorded = rollout.run(record=kind, outer_in=outer_in)
    case = drifted(rollout, drift)
    guided = case.run(outer_in=outer_in, record=kind, **guidance(recorded, kind))
    plain = case.run(outer_in=outer_in)
    assert not torch.equal(codes_of(plain), codes_of(recorded))  # there was something to align
    same = torch.equal(codes_of(guided), codes_of(recorded))
    assert same is exact
    assert torch.equal(guided[Out.X_SCALES], recorded[Out.X_SCALES])
    if exact:  # the gate/up input is the rollout's, so is everything behind it; and it is recorded as such
        assert torch.equal(guided[Out.Y], recorded[Out.Y])
        assert torch.equal(guided[Out.RECORD], recorded[Out.RECORD])


def test_the_rollouts_outer_scale_counts_even_after_a_refresh() -> None:
    """Ranges may be refreshed between rollout and training: a record means what it meant when it was made."""
    rollout = make_case(W4A4_TRACED, tokens=30)
    recorded = rollout.run(record="code", outer_in=TRACED)
    later = drifted(rollout, 1e-3).run(outer_in=TRACED * 4, **guidance(recorded, "code"))
    assert torch.equal(codes_of(later), codes_of(recorded)) and torch.equal(later[Out.X_OUTER], TRACED[:1].expand(30))


@pytest.mark.parametrize("kind", ["bit", "code"])
def test_poison_on_either_side(kind: str) -> None:
    """A NaN token's record is no record; a NaN in the trainer spoils its own token's output, guided or not."""
    rollout = make_case(W4A4_ROW, tokens=12)
    rollout = rollout.with_leaves(expert_ids=rollout.expert_ids.clamp(0, 2))
    x = rollout.x.detach().clone()
    x[2, 20] = torch.nan
    recorded = rollout.with_leaves(x=x).run(record=kind)
    guided = rollout.run(**guidance(recorded, kind))
    own = quantize(rollout.x.detach()[2:3])
    assert torch.equal(codes_of(guided)[2:3], own.codes) and torch.equal(guided[Out.X_SCALES][2:3], own.scales)
    assert guided[Out.Y].isfinite().all()
    bad = rollout.x.detach().clone()
    bad[5, 3] = torch.inf
    spoiled = rollout.with_leaves(x=bad).run(**guidance(recorded, kind))
    others = torch.arange(12) != 5
    assert spoiled[Out.Y][5].isnan().all() and torch.equal(spoiled[Out.Y][others], guided[Out.Y][others])


@pytest.mark.parametrize("kind", ["bit", "code"])
def test_diagnosis_counts_what_guidance_changed(kind: str) -> None:
    rollout = make_case(W4A4_ROW, tokens=40)
    ids = rollout.expert_ids.clone()
    ids[9] = -1
    rollout = rollout.with_leaves(expert_ids=ids)
    case = drifted(rollout, 0.12)
    hit, valid = torch.arange(40) % 4 > 0, torch.arange(40) % 7 > 0
    out = case.run(diagnose=True, **guidance(rollout.run(record=kind), kind, hit=hit, valid=valid))
    routed = ((case.expert_ids >= 0) & (case.expert_ids < 3)).any(1)
    assert not routed.all()
    counted = hit & valid & routed
    own, roll = quantize(case.x.detach()[counted]), quantize(rollout.x.detach()[counted])
    used = codes_of(out)[counted]
    diag, down = out[Out.DIAG]
    assert not down.any()
    assert diag.dtype == torch.float64 and diag[Diag.ELEMENTS] == int(counted.sum()) * H
    if kind == "bit":
        assert diag[Diag.MISMATCH_BEFORE] == ((own.codes ^ roll.codes) & 1).sum()
        assert diag[Diag.MISMATCH_AFTER] == ((used ^ roll.codes) & 1).sum() == 0
        assert (diag[Diag.ADJACENT :] == 0).all()
        return
    q_roll, q_used = roll.dequantize().double(), guided_values(case.x.detach()[counted], roll, "code").double()
    before, after = own.dequantize() != q_roll, q_used != q_roll
    assert diag[Diag.MISMATCH_BEFORE] == before.sum() > diag[Diag.MISMATCH_AFTER] == after.sum() > 0
    assert diag[Diag.ADJACENT] == (before & ~after).sum()
    distances = [(q - q_roll).square().sum() for q in (own.dequantize().double(), q_used)]
    torch.testing.assert_close(diag[Diag.DISTANCE_BEFORE :], torch.stack([*distances, q_roll.square().sum()]))
    assert diag[Diag.DISTANCE_AFTER] < diag[Diag.DISTANCE_BEFORE] / 3


def test_bits_guide_from_codes_where_they_are_diagnosed_with() -> None:
    """Rows of codes say how far a trainer is that bits guide, or that nothing guides; the results are the same."""
    rollout = make_case(W4A4_ROW, tokens=24)
    case, codes = drifted(rollout, 0.05), rollout.run(record="code")
    by_code = case.run(diagnose=True, **guidance(codes, "code"))
    by_bits = case.run(diagnose=True, **guidance(codes, "code", guidance="bit"))
    plain = case.run(diagnose=True, **guidance(codes, "code", guidance="none"))
    assert torch.equal(by_bits[Out.Y], case.run(**guidance(rollout.run(record="bit"), "bit"))[Out.Y])
    assert torch.equal(plain[Out.Y], case.run()[Out.Y])
    a, b, c = (out[Out.DIAG][0] for out in (by_code, by_bits, plain))
    same = [Diag.ELEMENTS, Diag.MISMATCH_BEFORE, Diag.ADJACENT, Diag.DISTANCE_BEFORE, Diag.NORM]
    assert torch.equal(a[same], b[same]) and torch.equal(a[same], c[same])
    assert c[Diag.MISMATCH_AFTER] == c[Diag.MISMATCH_BEFORE] > b[Diag.MISMATCH_AFTER] >= a[Diag.MISMATCH_AFTER]
    with pytest.raises(GuidanceError, match="needs guide rows of 9 bytes, got 27"):
        case.run(**guidance(codes, "code", guidance="bit"))


@pytest.mark.parametrize("scheme", [W4A4_ROW, W4A4_TRACED])
@pytest.mark.parametrize("kind", ["bit", "code"])
def test_down_rows_are_recorded_and_found_by_their_expert(kind: str, scheme: MoEScheme) -> None:
    """The trainer's slots stand in another order, and one of them chose an expert that the rollout did not."""
    act, outer_in = scheme.act, TRACED if scheme is W4A4_TRACED else None
    assert act is not None
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:3] for i in range(20)])
    ids[5, 1] = -1
    rollout = make_case(scheme, tokens=20, top_k=3, experts=4, ids=ids)
    row = RegionRow(H, 32, 3, f"{kind}+down", act)
    out = rollout.run(record=row.kind, outer_in=outer_in)
    record, outer = out[Out.RECORD], out[Out.RECORD_OUTER]
    gate_up = record_bytes(H, kind, act)
    assert record.shape == (20, row.record_bytes) and outer.shape == (20, 4)
    assert torch.equal(record[:, :gate_up], rollout.run(record=kind, outer_in=outer_in)[Out.RECORD])
    slots = record[:, gate_up:].reshape(20, 3, -1)[..., : guide_bytes(32, kind, "nvfp4")]
    inverse = torch.empty_like(out[Out.ORDER]).scatter_(0, out[Out.ORDER], torch.arange(60))
    h_codes, h_scales = (out[i][inverse].view(20, 3, -1) for i in (Out.H_CODES, Out.H_SCALES))
    payload = pack_bits(unpack_nibbles(h_codes)) if kind == "bit" else h_codes
    assert torch.equal(slots, torch.cat((payload, h_scales), -1))
    guide = torch.cat((record[:, : guide_bytes(H, kind, "nvfp4")], slots.flatten(1), encode_routing(ids)), 1)
    assert guide.shape[1] == row.guide_bytes

    shuffled = ids.roll(1, 1)
    shuffled[7, 0] = next(e for e in range(4) if e not in ids[7].tolist())
    moved = rollout.w13 * (1 + 0.04 * torch.randn(rollout.w13.shape, generator=torch.Generator().manual_seed(8)))
    later = drifted(rollout, 0.04).with_leaves(expert_ids=shuffled, gates=rollout.gates.roll(1, 1), w13=moved)
    hit = torch.arange(20) % 6 != 0
    options = {"guidance": row.kind, "guide": guide, "guide_outer": outer, "hit": hit, "outer_in": outer_in}
    guided = later.run(**options)
    gate_up_rows = {Out.RECORD: record[:, :gate_up], Out.RECORD_OUTER: outer[:, 0]}
    only = later.run(**(options | guidance(gate_up_rows, kind)))
    assert torch.equal(guided[Out.X_CODES], only[Out.X_CODES]) and torch.equal(guided[Out.PRE], only[Out.PRE])
    order = guided[Out.ORDER]
    assert torch.equal(order, only[Out.ORDER])
    h = later.activation.evaluate(guided[Out.PRE]).detach()
    recorded = 0
    for position, slot in enumerate(order.tolist()):
        token, k = divmod(slot, 3)
        expert = int(shuffled[token, k])
        source = [j for j in range(3) if expert >= 0 and int(ids[token, j]) == expert]
        if not hit[token] or not source:
            assert torch.equal(guided[Out.H_CODES][position], only[Out.H_CODES][position])
            assert torch.equal(guided[Out.H_SCALES][position], only[Out.H_SCALES][position])
            continue
        recorded += 1
        j = source[0]
        assert torch.equal(guided[Out.H_SCALES][position], h_scales[token, j])
        codes = unpack_nibbles(h_codes[token, j])
        told = {"codes": codes} if kind == "code" else {"bits": codes & 1}
        g = outer[token, 1 + j]
        expected = guided_blocks(h[position][None], h_scales[token, j][None], g[None], fmt="nvfp4", **told)
        assert torch.equal(unpack_nibbles(guided[Out.H_CODES][position]), expected[0])
    assert recorded > 30 and not torch.equal(guided[Out.Y], only[Out.Y])
    twice = rollout.run(**(options | {"hit": None, "diagnose": True}))
    assert torch.equal(twice[Out.Y], out[Out.Y])  # what was recorded, replayed where it was recorded
    if kind == "code":
        down = twice[Out.DIAG][1]
        assert down[Diag.ELEMENTS] == int((ids >= 0).sum()) * 32 and down[Diag.MISMATCH_AFTER] == 0


def test_drift_table_of_the_method() -> None:
    """Relative D of Gaussian activations under 1.6 % drift: 0.071 with own scales, 0.0002 guided fully."""
    case = make_case(W4A4_ROW, tokens=400, hidden=H, bias=False)
    later = drifted(case, 0.016)
    out = later.run(diagnose=True, **guidance(case.run(record="code"), "code"))
    diag = out[Out.DIAG][0]
    assert 0.06 < (diag[Diag.DISTANCE_BEFORE] / diag[Diag.NORM]).sqrt() < 0.08
    assert (diag[Diag.DISTANCE_AFTER] / diag[Diag.NORM]).sqrt() < 0.002


def test_wrong_guides_are_refused() -> None:
    case = make_case(W4A4_ROW)
    good = guidance(case.run(record="bit"), "bit")
    for change, message in (
        ({"guide": good["guide"][:, :-1]}, "needs guide rows of 9 bytes, got 8"),
        ({"guidance": "code"}, "needs guide rows of 27 bytes, got 9"),
        ({"guide": None}, "got none"),
        ({"guide_outer": None}, "missing"),
        ({"guidance": "two-bit"}, "two-bit"),
        ({"record": "all"}, "'all'"),
    ):
        with pytest.raises(GuidanceError, match=message):
            case.run(**{**good, **change})
    for options in (good, {"record": "bit"}):
        with pytest.raises(GuidanceError, match="quantizes no activations"):
            make_case(W4A16).run(**options)


def test_bits_are_read_as_written() -> None:
    """Element i is bit i % 8 of byte i // 8, and code 2i is the low nibble of byte i."""
    case = make_case(W4A4_ROW, tokens=3)
    codes = codes_of(case.run())
    bits, nibbles = (case.run(record=kind)[Out.RECORD] for kind in ("bit", "code"))
    assert torch.equal(unpack_bits(bits[:, :6]), codes & 1)
    assert int(nibbles[1, 4]) == int(codes[1, 8]) | int(codes[1, 9]) << 4
