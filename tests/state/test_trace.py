"""The trace store: what goes in comes out under its key, within bounds, and everything else is counted."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.state.records import layout, quantized_row, quantized_rows, random_keys, random_rows
from trace_compile.errors import GuidanceError
from trace_compile.state import runs
from trace_compile.state.layout import RecordLayout, Routing, Site
from trace_compile.state.prefix import prefix_keys
from trace_compile.state.ranges import Ranges
from trace_compile.state.trace import KEY_BYTES, Trace, TraceFullWarning

ONES = torch.ones(2)


def store(where: RecordLayout | None = None, **kwargs) -> Trace:
    return Trace(where or layout(), "fingerprint", **kwargs)


def filled(n: int, version: int = 0, seed: int = 0, **kwargs) -> tuple[Trace, torch.Tensor, torch.Tensor]:
    trace = store(**kwargs)
    keys, rows = random_keys(n, seed), random_rows(n, trace.layout, seed)
    trace.append(keys, rows, version, ONES)
    return trace, keys, rows


def test_rows_come_back_in_any_order_and_shape():
    trace, keys, rows = filled(60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    guidance = trace.lookup(keys[order].reshape(5, 12), newest=0)
    assert guidance.hit.all() and torch.equal(guidance.rows, rows[order])
    assert torch.equal(trace.lookup(keys.repeat(2), newest=0).rows, rows.repeat(2, 1))
    assert len(trace) == 60 and trace.versions == (0,)


def test_a_rollout_is_found_by_a_reshuffled_padded_trainer():
    """Prefill and decode record; the trainer sees the sequences in another order with padding on the other side."""
    where = layout()
    trace = store(where)
    prompts, masks = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    recorded: dict[int, torch.Tensor] = {}
    state, tokens, mask = None, prompts, masks
    for step in range(3):
        keys, valid, state = prefix_keys(tokens, mask, start=state)
        rows = random_rows(keys.numel(), where, step).reshape(*keys.shape, -1)
        trace.append(keys, rows, 4, ONES, valid=valid)
        recorded |= {int(k): r for k, r, v in zip(keys.flatten(), rows.flatten(0, 1), valid.flatten()) if v}
        tokens = torch.tensor([[20 + step], [30 + step]])
        mask = torch.cat((masks, torch.ones(2, step + 1, dtype=torch.int64)), 1)
    full = torch.tensor([[7, 8, 9, 30, 31, 32], [5, 6, 20, 21, 22, 0]])
    right = torch.tensor([[1] * 6, [1] * 5 + [0]])
    keys, valid, _ = prefix_keys(full, right)
    found = trace.lookup(keys, newest=4, valid=valid)
    # The last sampled token was never fed to the rollout: no record.
    assert found.hit.reshape(2, 6).tolist() == [[True] * 5 + [False], [True] * 4 + [False, False]]
    for key, row, hit in zip(keys.flatten(), found.rows, found.hit):
        assert torch.equal(row, recorded[int(key)] if hit else torch.zeros_like(row))
    assert (trace.counters.lookups, trace.counters.hits, trace.counters.fallbacks) == (11, 9, 2)
    assert trace.counters.hit_rate == 9 / 11


def test_misses_are_zero_rows_with_outer_one_and_no_route():
    where = layout(outer_bytes=1)
    trace = store(where)
    assert not trace.lookup(random_keys(3), newest=0).hit.any()  # nothing at all recorded
    keys = random_keys(10)
    trace.append(keys[:5], random_rows(5, where), 0)
    found = trace.lookup(keys, newest=0)
    assert found.hit.tolist() == [True] * 5 + [False] * 5
    assert not found.rows[5:].any() and torch.equal(found.outer[5:], torch.ones(5, 2))
    assert torch.equal(found.routing(1)[5:], torch.full((5, 2), -1))
    assert (found.routing(1)[:5] >= -1).all() and trace.counters.fallbacks == 8
    assert trace.lookup(keys[:0], newest=0).rows.shape == (0, where.row_bytes)


def test_invalid_positions_are_neither_recorded_nor_found_nor_counted():
    trace = store()
    keys, rows = random_keys(6), random_rows(6, trace.layout)
    valid = torch.tensor([True, False, True, False, True, True])
    trace.append(keys, rows, 0, ONES, valid=valid)
    assert torch.equal(trace.lookup(keys, 0).hit, valid)
    found = trace.lookup(keys, 0, valid=~valid)
    assert not found.hit.any() and not found.rows.any()
    assert (trace.counters.appended, trace.counters.lookups, trace.counters.hits) == (4, 6 + 2, 4)


def test_recorded_buffers_may_be_reused():
    """CUDA graphs overwrite their outputs with every replay."""
    trace = store()
    keys, rows, outer = random_keys(4), random_rows(4, trace.layout), torch.tensor([2.0, 4.0])
    valid = torch.ones(4, dtype=torch.bool)
    expected = keys.clone(), rows.clone()
    trace.append(keys, rows, 0, outer, valid=valid)
    for buffer in (keys, rows, outer, valid):
        buffer.zero_()
    found = trace.lookup(expected[0], 0)
    assert found.hit.all() and torch.equal(found.rows, expected[1])
    assert torch.equal(found.outer, torch.tensor([[2.0, 4.0]]).expand(4, 2))
    # And what a lookup returns is not the store's memory.
    found.rows.zero_()
    found.outer.zero_()
    assert torch.equal(trace.lookup(expected[0], 0).rows, expected[1])
    assert torch.equal(trace.lookup(expected[0], 0).outer[0], torch.tensor([2.0, 4.0]))


@pytest.mark.parametrize("stage_bytes", [1, 1 << 20])
def test_the_first_record_stays_and_later_ones_are_compared(stage_bytes):
    trace = store(stage_bytes=stage_bytes)
    keys, rows = random_keys(8), random_rows(8, trace.layout)
    trace.append(keys, rows, 0, ONES)
    other = rows.clone()
    other[2, 5] ^= 1
    other[3] = ~other[3]
    trace.append(keys[:5], other[:5], 0, ONES)
    assert torch.equal(trace.lookup(keys, 0).rows, rows)
    counters = trace.counters
    assert (counters.appended, counters.duplicates, counters.conflicts) == (8, 5, 2)
    assert counters.conflict_bytes == 1 + trace.layout.row_bytes
    # The same key several times within one call.
    trace = store(stage_bytes=stage_bytes)
    trace.append(keys[:1].repeat(3), torch.stack((rows[0], rows[0], rows[1])), 0, ONES)
    assert torch.equal(trace.lookup(keys[:1], 0).rows, rows[:1])
    assert (trace.counters.appended, trace.counters.duplicates, trace.counters.conflicts) == (1, 2, 1)


def test_a_recomputed_forward_changes_nothing():
    """T06: checkpointing records every position a second time."""
    once, keys, rows = filled(20)
    twice, _, _ = filled(20)
    twice.append(keys, rows, 0, ONES)
    assert [r.keys.tolist() for r in once.runs] == [r.keys.tolist() for r in twice.runs]
    assert torch.equal(once.runs[0].rows, twice.runs[0].rows)
    assert twice.counters.duplicates == 20 and twice.counters.conflicts == 0


def test_the_newest_allowed_version_is_taken():
    trace = store()
    keys = random_keys(3)
    by_version = {v: random_rows(3, trace.layout, v) for v in (1, 2, 4)}
    for version in (2, 1, 4):  # out of order
        trace.append(keys, by_version[version], version, torch.full((2,), float(version)))

    def version_of(newest, staleness):
        found = trace.lookup(keys, newest, staleness)
        if not found.hit.any():
            return None
        version = int(found.outer[0, 0])
        assert torch.equal(found.rows, by_version[version]) and (found.outer == version).all()
        return version

    assert [version_of(4, s) for s in (0, 1, 5)] == [4, 4, 4]
    assert [version_of(3, s) for s in (0, 1, 2)] == [None, 2, 2]
    assert version_of(1, 0) == 1 and version_of(0, 9) is None and version_of(6, 1) is None
    assert trace.versions == (1, 2, 4)
    assert trace.counters.duplicates == 0  # versions are part of the key
    assert trace.counters.stale == 2 * 3
    trace.discard(before=4)
    assert trace.versions == (4,) and version_of(3, 9) is None and version_of(4, 9) == 4


def test_stale_records_fill_only_what_newer_ones_lack():
    trace = store()
    keys = random_keys(6)
    old, new = random_rows(6, trace.layout, 1), random_rows(6, trace.layout, 2)
    trace.append(keys[:4], old[:4], 0, torch.tensor([2.0, 2.0]))
    trace.append(keys[2:5], new[2:5], 1, torch.tensor([8.0, 8.0]))
    found = trace.lookup(keys, newest=1, staleness=1)
    assert found.hit.tolist() == [True] * 5 + [False]
    assert torch.equal(found.rows[:5], torch.cat((old[:2], new[2:5])))
    assert found.outer[:, 0].tolist() == [2.0, 2.0, 8.0, 8.0, 8.0, 1.0]
    assert trace.counters.stale == 2


def test_ranges_refreshed_within_a_version_keep_each_row_its_scale():
    trace = store()
    keys, rows = random_keys(4), random_rows(4, trace.layout)
    trace.append(keys[:2], rows[:2], 0, torch.tensor([1.0, 2.0]))
    trace.append(keys[2:], rows[2:], 0, torch.tensor([4.0, 2.0]))
    trace.append(keys[:1], rows[:1], 0, torch.tensor([4.0, 2.0]))  # the same bytes mean something else here
    found = trace.lookup(keys, 0)
    assert torch.equal(found.rows, rows)
    assert found.outer.tolist() == [[1, 2], [1, 2], [4, 2], [4, 2]]
    assert (trace.counters.duplicates, trace.counters.conflicts, trace.counters.conflict_bytes) == (1, 1, 0)


@pytest.mark.parametrize("kind", ["bit", "code"])
def test_outer_scales_come_from_the_row_or_from_the_table(kind):
    sites = (Site("a", "gate_up", 32, kind, 1), Site("b", "gate_up", 32, kind, 0), Site("c", "gate_up", 48, kind, 4))
    where = RecordLayout(sites, (Routing("b", 2),))
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(7, s.width, generator=g) * 10.0 ** torch.arange(-3, 4)[:, None] for s in sites]
    recorded = [quantized_row(x, site) for x, site in zip(xs, sites)]
    ids = torch.randint(0, 60000, (7, 2), generator=g)
    rows = where.assemble([r for r, _ in recorded], [ids])
    keys = random_keys(7)
    trace = store(where)
    trace.append(keys, rows, 0, torch.tensor([99.0, 0.5, 99.0]))
    found = trace.lookup(keys, 0)
    assert torch.equal(found.outer[:, 0], recorded[0][1]) and torch.equal(found.outer[:, 2], recorded[2][1])
    assert (found.outer[:, 1] == 0.5).all() and found.outer.dtype == torch.float32
    for i, site in enumerate(sites):
        assert torch.equal(found.site(i), recorded[i][0][:, : site.guide_bytes])
    assert torch.equal(found.routing(0), ids)


def test_a_full_store_drops_counts_and_warns_once():
    per_token = layout().row_bytes + KEY_BYTES
    trace = store(max_bytes=10 * per_token + 5, stage_bytes=3 * per_token)
    assert trace.bytes_per_token == per_token
    keys, rows = random_keys(24), random_rows(24, trace.layout)
    with pytest.warns(TraceFullWarning, match=f"max_bytes={trace.max_bytes} .*raise max_bytes or discard") as caught:
        for i in range(0, 24, 4):
            trace.append(keys[i : i + 4], rows[i : i + 4], 0, ONES)
        found = trace.lookup(keys, 0)
    assert len(caught) == 1
    assert found.hit.tolist() == [True] * 10 + [False] * 14  # the earliest stay
    assert torch.equal(found.rows[:10], rows[:10])
    assert (trace.counters.appended, trace.counters.dropped) == (10, 14)
    assert trace.nbytes == 10 * per_token <= trace.max_bytes
    trace.append(keys[:10], rows[:10], 0, ONES)  # known keys are still compared, not dropped
    assert len(trace) == 10 and trace.counters.duplicates == 10 and trace.counters.dropped == 14
    trace.discard(before=1)
    trace.append(keys[20:], rows[20:], 1, ONES)
    assert trace.lookup(keys[20:], 1).hit.all()


def test_staged_rows_are_bounded_too():
    trace = store(stage_bytes=1000)
    for i in range(50):
        trace.append(random_keys(3, i), random_rows(3, trace.layout), 0, ONES)
        staged = trace.nbytes - sum(run.nbytes for run in trace._runs)
        assert staged < 4 * 1000  # one that fills, two that wait, one that is being made a run
    assert trace.nbytes == 150 * trace.bytes_per_token


def test_many_small_appends_make_few_runs(monkeypatch):
    trace = store(stage_bytes=1)
    keys, rows = random_keys(512), random_rows(512, trace.layout)
    for i in range(0, 512, 2):
        trace.append(keys[i : i + 2], rows[i : i + 2], 0, ONES)
    assert len(trace.runs) <= 9
    assert torch.equal(trace.lookup(keys, 0).rows, rows)
    monkeypatch.setattr(runs, "MERGE_BYTES", 64 * trace.bytes_per_token)
    bounded = store(stage_bytes=1)
    for i in range(0, 512, 2):
        bounded.append(keys[i : i + 2], rows[i : i + 2], 0, ONES)
    assert 32 <= max(run.keys.numel() for run in bounded.runs) <= 64
    assert torch.equal(bounded.lookup(keys, 0).rows, rows)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 3)), max_size=12),
    st.sampled_from([1, 60, 1 << 20]),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_the_store_is_a_dictionary(appends, stage_bytes, newest, staleness):
    """Against the obvious model: a dict from (key, version) to the first row."""
    trace = store(stage_bytes=stage_bytes)
    pool = random_keys(13)
    pool[0], pool[1] = -(2**63), 2**63 - 1
    model: dict[tuple[int, int], torch.Tensor] = {}
    duplicates = conflicts = 0
    for seed, (picked, version) in enumerate(appends):
        rows = random_rows(len(picked), trace.layout, seed % 3)
        trace.append(pool[torch.tensor(picked, dtype=torch.int64)], rows, version, torch.full((2,), 1.0 + version))
        for i, row in zip(picked, rows):
            first = model.setdefault((i, version), row)
            duplicates += first is not row
            conflicts += not torch.equal(first, row)
    found = trace.lookup(pool, newest, staleness)
    for i in range(13):
        versions = [v for v in range(newest, newest - staleness - 1, -1) if (i, v) in model]
        assert bool(found.hit[i]) == bool(versions)
        if versions:
            assert torch.equal(found.rows[i], model[i, versions[0]]) and found.outer[i, 0] == 1.0 + versions[0]
    assert len(trace) == trace.counters.appended == len(model)
    # The accelerator's way to the same, here on the CPU: rows, scales, hits and what is counted.
    before = replace(trace.counters)
    runs = sorted((r for r in trace.runs if newest - staleness <= r.version <= newest), key=lambda r: -r.version)
    wanted = torch.arange(13) % 5 != 0
    there = trace._lookup_there(pool, wanted, runs, newest)
    here = trace.lookup(pool, newest, staleness, valid=wanted)
    for name in ("rows", "outer", "hit"):
        assert torch.equal(getattr(there, name), getattr(here, name))
    after = trace.counters
    assert after.lookups - before.lookups == 2 * int(wanted.sum()) and after.hits - before.hits == 2 * int(
        here.hit.sum()
    )
    assert (after.stale - before.stale) % 2 == 0
    assert (trace.counters.duplicates, trace.counters.conflicts) == (duplicates, conflicts)


@pytest.mark.parametrize("outer_bytes", [0, 1, 4])
def test_compacted_codes_are_the_bits_that_would_have_been_recorded(outer_bytes):
    codes, bits = layout("code", outer_bytes, width=48), layout("bit", outer_bytes, width=48)
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(50, 48, generator=g) for _ in codes.sites]
    ids = [torch.randint(-1, 8, (50, 2), generator=g) for _ in codes.routings]
    keys = random_keys(50)
    traces = []
    for where in (codes, bits):
        trace = store(where, recipe={"name": "trace"}, ranges=Ranges.empty(), max_bytes=12345)
        trace.append(keys[:30], quantized_rows(xs, ids, where)[:30], 0, ONES)
        trace.append(keys[30:], quantized_rows(xs, ids, where)[30:], 1, ONES)
        traces.append(trace)
    compacted = traces[0].compact("bit")
    assert compacted.layout == bits and compacted.nbytes == traces[1].nbytes < traces[0].nbytes
    for ours, direct in zip(compacted.runs, traces[1].runs):
        assert torch.equal(ours.keys, direct.keys) and torch.equal(ours.rows, direct.rows)
        assert ours.version == direct.version
    assert (compacted.fingerprint, compacted.recipe, compacted.max_bytes) == ("fingerprint", {"name": "trace"}, 12345)
    before, after = traces[1].lookup(keys, 1, 1), compacted.lookup(keys, 1, 1)
    assert torch.equal(before.rows, after.rows) and torch.equal(before.outer, after.outer)
    again = compacted.compact("bit")
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(again.runs, compacted.runs))
    compacted.counters.hits += 5
    assert traces[0].counters.hits == 0


def test_misfitting_rows_are_refused_and_nothing_is_recorded():
    trace = store()
    keys, rows = random_keys(4), random_rows(4, trace.layout)
    with pytest.raises(GuidanceError, match=rf"uint8 \[..., {trace.layout.row_bytes}\]"):
        trace.append(keys, rows[:, :-1], 0, ONES)
    with pytest.raises(GuidanceError, match="int32"):
        trace.append(keys, rows.int(), 0, ONES)
    with pytest.raises(GuidanceError, match="3 rows"):
        trace.append(keys, rows[:3], 0, ONES)
    with pytest.raises(GuidanceError, match="float32 keys"):
        trace.append(keys.float(), rows, 0, ONES)
    with pytest.raises(GuidanceError, match="4 positions"):
        trace.append(keys, rows, 0, ONES, valid=torch.ones(3, dtype=torch.bool))
    with pytest.raises(GuidanceError, match="need the table"):
        trace.append(keys, rows, 0)
    with pytest.raises(GuidanceError, match=r"\(3,\) for 2 sites"):
        trace.append(keys, rows, 0, torch.ones(3))
    assert len(trace) == 0


def test_an_empty_append_is_harmless():
    trace = store()
    trace.append(random_keys(0), random_rows(0, trace.layout), 0, ONES)
    trace.append(random_keys(2), random_rows(2, trace.layout), 0, ONES, valid=torch.zeros(2, dtype=torch.bool))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(trace) == 0 and trace.versions == ()


@pytest.mark.parametrize("routing", [True, False])
def test_layouts_without_sites(routing):
    """Ranges or routing alone may be recorded; then no table of outer scales is needed."""
    where = RecordLayout((), (Routing("a", 3),) if routing else ())
    trace = store(where)
    keys, rows = random_keys(6), random_rows(6, where)
    trace.append(keys.reshape(2, 3), rows.reshape(2, 3, -1) if routing else rows.reshape(2, 3, 0), 0)
    found = trace.lookup(keys, 0)
    assert found.hit.all() and torch.equal(found.rows, rows) and found.outer.shape == (6, 0)
    assert trace.bytes_per_token == KEY_BYTES + 6 * routing and len(trace.compact("bit")) == 6


@pytest.mark.slow
def test_lookup_speed():
    """A micro-batch of a million positions, against a million records: at least a million positions per CPU second."""
    where = RecordLayout((Site("a", "gate_up", 128, "bit", 0),))
    trace = store(where)
    n = 1_000_000
    keys = random_keys(n)
    rows = torch.zeros(n, where.row_bytes, dtype=torch.uint8)
    trace.append(keys, rows, 0, torch.ones(1))
    assert len(trace) == n
    queries = keys[torch.randperm(n, generator=torch.Generator().manual_seed(1))]
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()
        assert trace.lookup(queries, 0).hit.all()
        best = min(best, time.process_time() - begin)
    print(f"{n / best / 1e6:.2f} M positions/s")
    assert n / best > 1_000_000


@pytest.mark.gpu
@pytest.mark.parametrize("device_bytes", [1 << 30, 0])
def test_rows_recorded_and_looked_up_on_the_gpu(device_bytes):
    trace, keys, rows = filled(100, version=1)
    device = store(device_bytes=device_bytes, stage_bytes=20 * trace.bytes_per_token)
    buffer = rows.cuda()
    for part in torch.arange(100).split(10):
        device.append(keys[part].cuda(), buffer[part], 1, ONES, valid=torch.ones(10, dtype=torch.bool).cuda())
    buffer.zero_()  # what was appended is copied
    there, wanted = keys.cuda(), torch.ones(100, dtype=torch.bool).cuda()
    device.lookup(there, 1, valid=wanted)
    if device_bytes:
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = device.lookup(there, 1, valid=wanted)
        again = device.lookup(there, 2, 1, valid=wanted) if not device_bytes else found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.rows.is_cuda and found.outer.is_cuda and found.hit.is_cuda
    assert torch.equal(found.rows.cpu(), trace.lookup(keys, 1).rows) and again.hit.all()
    assert device.counters.hits == device.counters.lookups
