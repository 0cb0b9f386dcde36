"""Ranges: exact merging, fallbacks for what was never seen, and staleness."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import warnings

import pytest
import torch

from trace_compile.errors import FingerprintMismatchError, GuidanceError
from trace_compile.numerics import decode_blocks, quantize_blocks, saturated
from trace_compile.state.ranges import BUCKETS, HEADROOM, Ranges, RangeWarning, SiteRange

BOUND = 2688.0
"""Largest NVFP4 value at outer scale 1: 6 * 448."""


def site(amax, tokens=None, saturated=0, elements=0) -> SiteRange:
    amax = torch.as_tensor(amax, dtype=torch.float32)
    tokens = torch.ones(len(amax), dtype=torch.int64) if tokens is None else torch.tensor(tokens)
    hist = torch.zeros(BUCKETS, dtype=torch.int64)
    hist[3] = elements
    return SiteRange(amax, tokens, hist, torch.tensor(saturated))


def batch(seed: int, experts: int = 4) -> Ranges:
    g = torch.Generator().manual_seed(seed)
    ranges = Ranges.empty()
    for layer in (0, 2, 10):
        tokens = torch.randint(0, 3, (experts,), generator=g)
        ranges = ranges.merge(
            Ranges.observed(
                f"model.layers.{layer}.mlp.experts",
                torch.rand(2, experts, generator=g) * (tokens > 0),
                tokens,
                torch.randint(0, 100, (2, BUCKETS), generator=g),
                torch.randint(0, 3, (2,), generator=g),
            )
        )
    return ranges


def test_order_of_batches_and_grouping_do_not_matter():
    batches = [batch(seed) for seed in range(4)]
    results = []
    for order in itertools.permutations(batches):
        a, b, c, d = order
        results += [a.merge(b).merge(c).merge(d), a.merge(b).merge(c.merge(d))]
    assert all(result == results[0] for result in results)
    assert all(torch.equal(result.outer_scales(), results[0].outer_scales()) for result in results)
    assert results[0] != batches[0]


def test_merging_changes_neither_side():
    a, b = batch(0), batch(1)
    a.merge(b)
    assert a == batch(0) and b == batch(1)


def test_merge_is_maximum_and_sum():
    a = Ranges({("r", "down"): site([1.0, 5.0], [1, 0], saturated=2, elements=7)})
    b = Ranges({("r", "down"): site([2.0, 3.0], [4, 1], saturated=1, elements=3)})
    assert a.merge(b) == Ranges({("r", "down"): site([2.0, 5.0], [5, 1], saturated=3, elements=10)})
    assert a.merge(Ranges.empty()) == a == Ranges.empty().merge(a)


def test_observed_values_are_copies():
    amax, tokens = torch.ones(2, 3), torch.ones(3, dtype=torch.int64)
    hist, sat = torch.zeros(2, BUCKETS, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    ranges = Ranges.observed("r", amax, tokens, hist, sat)
    for buffer in (amax, tokens, hist, sat):
        buffer.fill_(99)
    assert all(
        s == SiteRange(torch.ones(3), torch.ones(3, dtype=torch.int64), hist[0] * 0, sat[0] * 0)
        for s in ranges.sites.values()
    )


def test_sites_are_in_model_order():
    names = [region for region, projection in batch(0).sites if projection == "gate_up"]
    assert names == [f"model.layers.{i}.mlp.experts" for i in (0, 2, 10)]
    assert [projection for _, projection in batch(0).sites] == ["gate_up", "down"] * 3


def test_different_models_do_not_merge():
    with pytest.raises(FingerprintMismatchError, match=r"r\.down has 2 experts in one range and 3 in the other"):
        Ranges({("r", "down"): site([1, 2])}).merge(Ranges({("r", "down"): site([1, 2, 3])}))
    with pytest.raises(GuidanceError, match="needs amax"):
        SiteRange(torch.ones(2), torch.ones(3), torch.zeros(BUCKETS), torch.tensor(0))


@pytest.mark.parametrize("amax", [1e-40, 1e-37, 1e-5, 0.01, 1.0, 1343.9, 1344.0, 1344.1, 6e4, 1e30, 3e38])
def test_outer_scale_is_the_smallest_power_of_two_with_headroom(amax):
    g = float(Ranges({("r", "gate_up"): site([amax, amax / 2])}).outer_scales()[0])
    assert math.frexp(g)[0] == 0.5 and math.isfinite(g) and g > 0
    exact = float(torch.tensor(amax))
    k = max(-100, min(116, math.ceil(math.log2(HEADROOM * exact / BOUND))))
    assert g == 2.0**k


def test_outer_scales_follow_the_given_order():
    ranges = Ranges({("a", "gate_up"): site([1344.0]), ("b", "gate_up"): site([2688.0]), ("b", "down"): site([1.0])})
    assert ranges.outer_scales().tolist() == [1.0, 2.0, 2.0**-10]
    assert ranges.outer_scales([("b", "down"), ("a", "gate_up")]).tolist() == [2.0**-10, 1.0]
    assert ranges.outer_scales([]).shape == (0,)
    assert ranges.outer_scales().dtype == torch.float32


def test_what_was_never_seen_has_a_finite_positive_scale():
    nothing = Ranges.empty().outer_scales([("a", "gate_up")])
    zeros = Ranges({("a", "gate_up"): site([0.0, 0.0], [0, 0])}).outer_scales()
    none = Ranges({("a", "gate_up"): site([], [])}).outer_scales()
    assert nothing.tolist() == zeros.tolist() == none.tolist() == [1.0]


def test_unused_experts_take_the_scale_of_their_layer_and_are_named():
    """T03: only experts 0 and 1 of 8 get tokens."""
    amax, tokens = [3.0, 7.0] + [0.0] * 6, [5, 9] + [0] * 6
    ranges = Ranges({("m.0", "gate_up"): site(amax, tokens), ("m.0", "down"): site(amax, tokens)})
    full = Ranges({("m.0", "gate_up"): site([7.0]), ("m.0", "down"): site([7.0])})
    assert torch.equal(ranges.outer_scales(), full.outer_scales())
    assert ranges.unused_experts() == {"m.0": (2, 3, 4, 5, 6, 7)}
    with pytest.warns(RangeWarning, match=r"m\.0: experts \[2, 3, 4, 5, 6, 7\] got no token"):
        assert len(ranges.warn()) == 1
    # Another batch that uses the others ends the report.
    rest = Ranges({("m.0", p): site([0.0] * 2 + [1.0] * 6, [0, 0] + [1] * 6) for p in ("gate_up", "down")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ranges.merge(rest).warn() == ()
    assert ranges.merge(rest).unused_experts() == {}


def observe(x: torch.Tensor, outer: torch.Tensor) -> Ranges:
    """What the quantized op reports for one site with all tokens on one expert."""
    hist = torch.zeros(1, BUCKETS, dtype=torch.int64)
    hist[0, 0] = x.numel()
    count = saturated(x, outer, "nvfp4").sum()
    return Ranges.observed("m", x.abs().max().reshape(1, 1), torch.tensor([len(x)]), hist, count[None], ["gate_up"])


def error(x: torch.Tensor, outer: torch.Tensor) -> float:
    codes, scales = quantize_blocks(x, outer.expand(len(x)), "nvfp4", "pow2")
    y = decode_blocks(codes, scales, "nvfp4", torch.float32) * outer
    return float((y - x).norm() / x.norm())


@pytest.mark.parametrize("growth", [2, 4, 16])
@pytest.mark.parametrize("size", [0.7, 1.0, 1.9])
def test_stale_scales_are_noticed_and_a_refresh_repairs_them(growth, size):
    """T07: activations grow by a factor after the scales were frozen."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * size
    x[:, 5] *= 50  # an outlier channel, as in practice
    first = observe(x, torch.tensor(torch.inf))
    outer = first.outer_scales()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert observe(x, outer).warn() == ()
    stale = observe(x * growth, outer)
    if growth == 2:
        assert stale.problems() == ()  # inside the headroom
        assert error(x * growth, outer) == pytest.approx(error(x, outer), rel=1e-6)
        return
    assert stale.sites["m", "gate_up"].saturation > 0
    with pytest.warns(RangeWarning, match=r"m\.gate_up: .* saturate .*trace again"):
        stale.warn()
    assert stale.problems(threshold=1.0) == ()
    refreshed = stale.outer_scales()[0]
    assert refreshed == outer * growth
    if growth == 16:  # at 4 a few elements saturate, at 16 it hurts
        assert error(x * growth, outer) > 1.5 * error(x, outer)
    assert error(x * growth, refreshed) == pytest.approx(error(x, outer), rel=1e-6)


def test_changing_a_scale_by_powers_of_two_changes_no_value():
    """Why a refresh is harmless: only E4M3 exponents shift."""
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    g = Ranges({("m", "gate_up"): site([float(x.abs().max())])}).outer_scales()[0]

    def values(outer):
        codes, scales = quantize_blocks(x, outer.expand(len(x)), "nvfp4", "pow2")
        return decode_blocks(codes, scales, "nvfp4", torch.float32) * outer

    assert all(torch.equal(values(g * factor), values(g)) for factor in (2, 8, 32))


def test_round_trip_through_tensors():
    ranges = batch(3)
    tensors, names = ranges.to_tensors()
    assert Ranges.from_tensors(tensors, names) == ranges
    assert Ranges.from_tensors(*Ranges.empty().to_tensors()) == Ranges.empty()
    assert ranges.to("cpu") == ranges


def _rank(rank: int, path: str, results) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mine = {0: [0, 1], 1: [4, 5]}[rank]
    tokens = [int(e in mine) for e in range(8)]
    ranges = Ranges({("m.0", "gate_up"): site([float(t * (rank + 1)) for t in tokens], tokens)})
    if rank:  # a site that the other rank never ran
        ranges = ranges.merge(Ranges({("m.1", "gate_up"): site([3.0])}))
    reduced = ranges.all_reduce({("m.0", "gate_up"): 8, ("m.1", "gate_up"): 1, ("m.2", "gate_up"): 4})
    results.put((reduced.outer_scales().tolist(), reduced.unused_experts()))
    dist.destroy_process_group()


def test_ranks_with_disjoint_experts_agree(tmp_path):
    """T03: no hang, equal scales, although neither experts nor sites overlap."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, str(tmp_path / "store"), results)) for r in range(2)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert found[0] == found[1] == ([2.0**-9, 2.0**-8], {"m.0": (2, 3, 6, 7)})
