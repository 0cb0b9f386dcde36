"""Ranges and counts the op reports, against loops over tokens and routes.

TARGETS has a CPU and a CUDA variant of the main tests; the latter carries pytest.mark.gpu.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.ops.reference import ACTIVATIONS, TARGETS, Case, make_case, slots
from trace_compile.ops import UNQUANTIZED, W4A4_ROW, W4A4_TRACED, W4A16, MoEScheme, Out
from trace_compile.ops.observe import histogram

TRACED = torch.tensor([2.0**-11, 2.0**-10])


def bucket(v: float) -> int:
    if not math.isfinite(v):
        return 63
    return 0 if v == 0 else min(max(math.frexp(abs(v))[1] - 1 + 32, 0), 63)


def expected_statistics(
    case: Case, out: tuple[Tensor, ...], valid: Tensor, outers: Tensor | None
) -> tuple[Tensor, ...]:
    """amax [2, E], counts [E], hist [2, 64], saturated [2] by looking at every token, route and element."""
    amax, counts = torch.zeros(2, case.experts), torch.zeros(case.experts, dtype=torch.int64)
    hist, saturated = torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    x, h = case.x.detach().cpu().float(), slots(case, ACTIVATIONS[case.activation](out[Out.PRE]), out).cpu().float()

    def element_counts(site: int, row: Tensor) -> None:
        for v in row.tolist():
            hist[site, bucket(v)] += 1
            saturated[site] += outers is not None and abs(v) > 6 * 448 * float(outers[site])

    for t, ids in enumerate(case.expert_ids.tolist()):
        routes = [(k, e) for k, e in enumerate(ids) if 0 <= e < case.experts and bool(valid[t])]
        if routes:
            element_counts(0, x[t])
        for k, e in routes:
            counts[e] += 1
            element_counts(1, h[t, k])
            for site, row in enumerate((x[t], h[t, k])):
                finite = row[row.isfinite()]
                if finite.numel():
                    amax[site, e] = torch.maximum(amax[site, e], finite.abs().max())
    return amax, counts, hist, saturated


@pytest.mark.parametrize(("device", "dtype"), TARGETS)
@pytest.mark.parametrize("scheme", [W4A4_TRACED, W4A16, UNQUANTIZED])
def test_statistics_are_those_of_a_simple_count(scheme: MoEScheme, device: str, dtype: torch.dtype) -> None:
    outers = TRACED if scheme is W4A4_TRACED else None
    case = make_case(scheme, tokens=20, device=device, dtype=dtype)
    ids = case.expert_ids.clone()
    ids[4], ids[5, 0] = -1, 7
    x = case.x.detach() * 2.0 ** torch.arange(-40, 8)[torch.arange(48) % 48].to(device, dtype)
    x[7, 3], x[8, :] = torch.nan, 0
    case = case.with_leaves(expert_ids=ids, x=x)
    valid = torch.arange(20, device=device) % 6 > 0
    out = case.run(record="ranges", valid=valid, outer_in=None if outers is None else outers.to(device))
    expected = expected_statistics(case, out, valid, outers)
    for i, e in zip((Out.AMAX, Out.COUNTS, Out.HIST, Out.SATURATED), expected, strict=True):
        assert torch.equal(out[i].cpu(), e), Out(i)
        assert out[i].dtype == e.dtype
    assert scheme is not W4A4_TRACED or out[Out.SATURATED].min() > 0
    assert int(out[Out.COUNTS].sum()) < ids.numel()


def test_row_scales_never_saturate() -> None:
    case = make_case(W4A4_ROW, tokens=50)
    assert (case.with_leaves(x=case.x * 1e6).run(record="ranges")[Out.SATURATED] == 0).all()


def test_masked_tokens_are_computed_but_not_counted() -> None:
    case = make_case(W4A4_ROW, tokens=16)
    everyone, nobody = case.run(record="ranges"), case.run(record="ranges", valid=torch.zeros(16, dtype=torch.bool))
    assert torch.equal(everyone[Out.Y], nobody[Out.Y])
    for i in (Out.AMAX, Out.COUNTS, Out.HIST, Out.SATURATED):
        assert (nobody[i] == 0).all()
    assert everyone[Out.COUNTS].sum() > 0
    assert torch.equal(case.run(record="ranges", valid=torch.ones(16, dtype=torch.bool))[Out.AMAX], everyone[Out.AMAX])


def test_batches_merge_to_the_whole() -> None:
    """Maxima and sums over two halves are those of the whole: what merging ranges relies on."""
    case = make_case(W4A4_ROW, tokens=30)
    names = ("x", "expert_ids", "gates")
    halves = [
        case.with_leaves(**{n: getattr(case, n)[part] for n in names}).run(record="ranges")
        for part in (slice(0, 11), slice(11, 30))
    ]
    whole = case.run(record="ranges")
    assert torch.equal(torch.maximum(halves[0][Out.AMAX][0], halves[1][Out.AMAX][0]), whole[Out.AMAX][0])
    for i in (Out.COUNTS, Out.SATURATED):
        assert torch.equal(halves[0][i] + halves[1][i], whole[i])
    assert torch.equal(halves[0][Out.HIST][0] + halves[1][Out.HIST][0], whole[Out.HIST][0])


def test_recording_changes_no_result() -> None:
    case = make_case(W4A4_ROW)
    for record in ("ranges", "bit", "code"):
        assert torch.equal(case.run(record=record)[Out.Y], case.run()[Out.Y])


def test_buckets_at_their_edges() -> None:
    values = [
        0.0,
        2.0**-33,
        2.0**-32,
        2.0**-31,
        1.0,
        1.9999999,
        2.0,
        2.0**30,
        2.0**31,
        2.0**90,
        1e-40,
        math.inf,
        math.nan,
    ]
    hist = histogram(torch.tensor([values, [-v for v in values]]), torch.tensor([True, True]))
    expected = torch.zeros(64, dtype=torch.int64)
    for v in values:
        expected[bucket(v)] += 2
    assert torch.equal(hist, expected) and hist[32] == 4 and hist[33] == 2
