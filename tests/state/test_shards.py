"""A trace as a folder: killed workers, several workers, readers meanwhile, and merging."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.state.records import layout, random_keys, random_rows
from trace_compile.errors import FingerprintMismatchError, GuidanceError, TraceFileError
from trace_compile.state import files
from trace_compile.state.ranges import Ranges
from trace_compile.state.shards import FolderReader, Manifest
from trace_compile.state.trace import Trace, TraceFullWarning

ONES = torch.ones(2)


def worker(
    folder: Path, name: str = "0", *, stage_bytes: int = 1, fingerprint: str = "fingerprint", **options
) -> Trace:
    """A trace whose every append becomes a file."""
    return Trace(layout(), fingerprint, stage_bytes=stage_bytes, **options).record_into(folder, name)


def add(trace: Trace, keys: torch.Tensor, seed: int = 0, version: int = 0) -> torch.Tensor:
    rows = random_rows(len(keys), trace.layout, seed)
    trace.append(keys, rows, version, ONES)
    return rows


def ranges(amax: float) -> Ranges:
    one = torch.tensor([amax])
    zeros = torch.zeros(2, 64, dtype=torch.int64)
    counts = torch.ones(1, dtype=torch.int64)
    return Ranges.observed("r", one.expand(2, 1), counts, zeros, torch.zeros(2, dtype=torch.int64))


def test_what_workers_record_is_read_as_one_trace(tmp_path):
    keys = random_keys(40)
    rows = []
    for i, name in enumerate(("b", "a")):
        trace = worker(tmp_path, name)
        rows.append(add(trace, keys[i * 15 : i * 15 + 25], seed=i, version=i))
        trace.ranges = ranges(1.0 + i)
        trace.close()
    loaded = Trace.load(tmp_path, fingerprint="fingerprint")
    assert loaded.layout == layout() and loaded.versions == (0, 1)
    assert loaded.ranges == ranges(1.0).merge(ranges(2.0))
    assert torch.equal(loaded.lookup(keys[:25], 0).rows, rows[0])
    assert torch.equal(loaded.lookup(keys[15:], 1).rows, rows[1])
    assert len(Trace.load(tmp_path, oldest=1)) == 25
    with pytest.raises(TraceFileError, match="oldest"):
        Trace.load(tmp_path, max_bytes=30 * loaded.bytes_per_token)
    with pytest.raises(FingerprintMismatchError, match="other"):
        Trace.load(tmp_path, fingerprint="other")
    with pytest.raises(TraceFileError, match="no manifest"):
        Trace.load(tmp_path.parent / tmp_path.name / "..")


def test_the_records_of_two_workers_under_one_key_are_conflicts_and_the_first_name_wins(tmp_path):
    keys = random_keys(6)
    theirs = add(worker(tmp_path, "b"), keys, seed=1)
    ours = add(worker(tmp_path, "a"), keys[:4], seed=2)
    worker(tmp_path, "c").close()
    for name in ("a", "b"):
        wait_for(tmp_path, name)
    loaded = Trace.load(tmp_path)
    assert torch.equal(loaded.lookup(keys, 0).rows, torch.cat((ours, theirs[4:])))
    assert (loaded.counters.conflicts, loaded.counters.duplicates) == (4, 4)


def wait_for(folder: Path, name: str) -> None:
    """Until the background thread has written something."""
    import time

    end = time.monotonic() + 30
    while not Manifest.load(folder / f"{name}.json").shards:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_merging_traces_equals_appending_to_one():
    keys = random_keys(30)
    traces = [Trace(layout(), "fingerprint") for _ in range(3)]
    one = Trace(layout(), "fingerprint")
    for i, trace in enumerate(traces):
        part = keys[i * 8 : i * 8 + 12]
        for into in (trace, one):
            into.append(part, random_rows(12, layout(), i), i % 2, ONES)
        trace.ranges = ranges(float(i))
    merged = traces[0].merge(*traces[1:])
    assert merged is traces[0] and len(merged) == len(one)
    assert merged.ranges == ranges(2.0).merge(ranges(1.0)).merge(ranges(0.0))
    for newest in (0, 1):
        a, b = merged.lookup(keys, newest, 1), one.lookup(keys, newest, 1)
        assert torch.equal(a.rows, b.rows) and torch.equal(a.hit, b.hit)
    assert merged.counters == one.counters
    before = len(merged)
    for other, error in (
        (Trace(layout(), "other"), FingerprintMismatchError),
        (Trace(layout("code"), "fingerprint"), GuidanceError),
    ):
        other.append(random_keys(1, 9), random_rows(1, other.layout), 0, ONES)
        with pytest.raises(error):
            merged.merge(traces[1], other)
    assert len(merged) == before


@pytest.mark.parametrize("name", ["", "a/b", "..", "a-b", ".hidden"])
def test_names_that_are_no_file_names_are_refused(tmp_path, name):
    with pytest.raises(TraceFileError, match="worker"):
        worker(tmp_path / "folder", name)
    assert not (tmp_path / "folder").exists()


def test_a_worker_does_not_mix_models_in_one_folder(tmp_path):
    worker(tmp_path).close()
    with pytest.raises(FingerprintMismatchError, match="another folder"):
        worker(tmp_path, fingerprint="other")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-20], "not a manifest"),
        (lambda text: text.replace('"rows": 3', '"rows": 4'), "checksum"),
        (lambda text: "[]", "not a manifest"),
        (lambda text: text.replace("trace_folder", "else"), "expected"),
    ],
)
def test_damaged_manifests_are_refused_by_name(tmp_path, change, reason):
    trace = worker(tmp_path)
    add(trace, random_keys(3))
    trace.close()
    path = tmp_path / "0.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(TraceFileError, match=rf"0\.json: .*{reason}"):
        Trace.load(tmp_path)


def test_missing_or_resized_files_are_refused_and_discarded_ones_are_not_missed(tmp_path, monkeypatch):
    trace = worker(tmp_path)
    keys = random_keys(8)
    add(trace, keys[:4], version=0)
    add(trace, keys[4:], version=1)
    trace.runs  # noqa: B018  both are written now
    before = FolderReader(tmp_path).manifests()
    trace.discard(before=1)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == ["0-000001.safetensors"]
    into = Trace(layout(), "fingerprint")
    with monkeypatch.context() as patch:
        patch.setattr(FolderReader, "manifests", lambda _: before)  # what was read before the worker discarded
        assert FolderReader(tmp_path).update(into) == 1 and into.versions == (1,)
    assert FolderReader(tmp_path).manifests()[0].shards == before[0].shards[1:]
    path = tmp_path / "0-000001.safetensors"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(TraceFileError, match="bytes, its manifest says"):
        Trace.load(tmp_path)
    path.unlink()
    with pytest.raises(TraceFileError, match="not there"):
        Trace.load(tmp_path)


def test_a_full_memory_still_writes_everything(tmp_path):
    keys = random_keys(20)
    trace = worker(tmp_path, max_bytes=5 * (layout().row_bytes + 8))
    with pytest.warns(TraceFullWarning, match="in its folder only"):
        for part in keys.split(4):
            add(trace, part)
        assert len(trace) == 5
    trace.close()
    assert trace.counters.dropped == 15 and Trace.load(tmp_path).lookup(keys, 0).hit.all()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", ["os.replace", "sync", "write"])
def test_a_worker_killed_at_any_step_of_any_write_continues(tmp_path, monkeypatch, call):
    """What was complete before the kill is there, readers never see half a file, and the next run goes on."""
    keys = random_keys(64)
    complete, at = 0, 0
    while True:
        folder = tmp_path / str(at)
        count = 0

        def step(*args, real, at=at):
            nonlocal count
            count += 1
            if count == at + 1:
                raise Killed
            return real(*args)

        trace = worker(folder)
        rows = [add(trace, keys[:3])]
        trace.runs  # noqa: B018
        with monkeypatch.context() as patch:
            if call == "os.replace":
                patch.setattr(os, "replace", lambda *a, real=os.replace: step(*a, real=real))
            elif call == "sync":
                patch.setattr(files, "sync", lambda *a, real=files.sync: step(*a, real=real))
            else:
                patch.setattr(files, "raw_bytes", lambda *a, real=files.raw_bytes: step(*a, real=real))
            killed = False
            for i in range(1, 4):
                try:
                    rows.append(add(trace, keys[3 * i : 3 * i + 3], seed=i))
                    trace.runs  # noqa: B018
                except Killed:
                    killed = True
                    break
        done = i if killed else 4
        again = Trace.load(folder)  # read while the remains of the kill lie around
        found = again.lookup(keys[:12], 0)
        assert found.hit[: 3 * done].all()
        for j in range(done):
            assert torch.equal(found.rows[3 * j : 3 * j + 3], rows[j])
        resumed = worker(folder)
        last = add(resumed, keys[30:33], seed=9)
        resumed.close()
        assert again.update() >= 1
        assert torch.equal(again.lookup(keys[30:33], 0).rows, last)
        named = {s.file for m in FolderReader(folder).manifests() for s in m.shards}
        assert {p.name for p in folder.glob("*.safetensors")} == named
        complete, at = complete + (not killed), at + 1
        if complete:
            break
    assert at > 3


def test_a_reader_follows_a_writer(tmp_path):
    """Whatever a reader finds is right, it finds more and more, and in the end all."""
    keys = random_keys(400)
    rows = random_rows(400, layout())
    trace = worker(tmp_path)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            for part in torch.arange(400).split(10):
                trace.append(keys[part], rows[part], 0, ONES)
            trace.close()
        except BaseException as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    reader = Trace.load(tmp_path)
    writer.start()
    seen = 0
    while True:
        alive = writer.is_alive()
        reader.update()
        found = reader.lookup(keys, 0)
        assert torch.equal(found.rows[found.hit], rows[found.hit]) and int(found.hit.sum()) >= seen
        seen = int(found.hit.sum())
        if not alive:
            break
    writer.join()
    assert not errors and seen == 400


def test_appending_and_looking_up_in_two_threads():
    keys, rows = random_keys(600), random_rows(600, layout())
    trace = Trace(layout(), "fingerprint", stage_bytes=20 * layout().row_bytes)
    done = threading.Event()

    def write() -> None:
        for part in torch.arange(600).split(7):
            trace.append(keys[part], rows[part], 0, ONES)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while True:
        last = done.is_set()
        found = trace.lookup(keys, 0)
        assert torch.equal(found.rows[found.hit], rows[found.hit])
        if last:
            break
    writer.join()
    assert found.hit.all() and trace.counters.appended == 600 and trace.counters.conflicts == 0


class FolderMachine(RuleBasedStateMachine):
    """Workers append, write, are killed and come back, discard; readers come late. The model is a dictionary."""

    NAMES = ("a", "b", "c")

    @initialize()
    def start(self) -> None:
        from tempfile import TemporaryDirectory

        self.temporary = TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.pool = random_keys(10)
        self.workers: dict[str, Trace] = {}
        # per worker: (key, version) -> rows in the order they were appended; what is written; what is not yet
        self.written: dict[str, dict[tuple[int, int], list[torch.Tensor]]] = {n: {} for n in self.NAMES}
        self.staged: dict[str, list[tuple[int, int, torch.Tensor]]] = {n: [] for n in self.NAMES}
        self.reader: Trace | None = None

    def teardown(self) -> None:
        if hasattr(self, "temporary"):
            self.temporary.cleanup()

    def of(self, name: str) -> Trace:
        if name not in self.workers:
            self.workers[name] = worker(self.folder, name, stage_bytes=1 << 30)
        return self.workers[name]

    @rule(
        name=st.sampled_from(NAMES),
        picked=st.lists(st.integers(0, 9), min_size=1, max_size=5),
        version=st.integers(0, 2),
        seed=st.integers(0, 2),
    )
    def append(self, name: str, picked: list[int], version: int, seed: int) -> None:
        trace = self.of(name)
        rows = random_rows(len(picked), trace.layout, seed)
        stage = trace._stage
        if stage is not None and stage.version != version:
            self.flush(name)
        trace.append(self.pool[torch.tensor(picked)], rows, version, ONES)
        self.staged[name] += [(i, version, row) for i, row in zip(picked, rows)]

    @rule(name=st.sampled_from(NAMES))
    def flush(self, name: str) -> None:
        """Looking is what completes a stage."""
        if name in self.workers:
            self.workers[name].runs  # noqa: B018
            for i, version, row in self.staged[name]:
                self.written[name].setdefault((i, version), []).append(row)
            self.staged[name] = []

    @rule(name=st.sampled_from(NAMES))
    def kill(self, name: str) -> None:
        """What was only staged is lost, with what half-written files look like left behind."""
        if self.workers.pop(name, None) is not None:
            self.staged[name] = []
            (self.folder / f"{name}-999999.safetensors").write_bytes(b"\x08\x00")
            (self.folder / f".{name}.json.1-0.tmp").write_bytes(b"{")

    @rule(name=st.sampled_from(NAMES), before=st.integers(1, 2))
    def discard(self, name: str, before: int) -> None:
        if name in self.workers and self.reader is None:
            self.flush(name)
            self.workers[name].discard(before)
            self.written[name] = {k: v for k, v in self.written[name].items() if k[1] >= before}

    @rule()
    def read(self) -> None:
        if self.reader is None:
            with contextlib.suppress(TraceFileError):
                self.reader = Trace.load(self.folder)
        else:
            self.reader.update()
        if self.reader is None:
            assert not self.workers and not any(self.written.values())
            return
        for newest, staleness in ((0, 0), (1, 0), (2, 2)):
            found = self.reader.lookup(self.pool, newest, staleness)
            for i in range(10):
                allowed = [
                    [w[i, v] for w in self.written.values() if (i, v) in w]
                    for v in range(newest, newest - staleness - 1, -1)
                ]
                newest_rows = next((rows for rows in allowed if rows), [])
                assert bool(found.hit[i]) == bool(newest_rows)
                if newest_rows:  # which of several workers' depends on when this reader came; within one, the first
                    assert any(torch.equal(found.rows[i], rows[0]) for rows in newest_rows)

    @invariant()
    def manifests_are_whole(self) -> None:
        if hasattr(self, "folder"):
            for path in self.folder.glob("*.json"):
                assert {s.file for s in Manifest.load(path).shards} <= {p.name for p in self.folder.iterdir()}
                assert json.loads(path.read_text())["worker"] == path.stem


FolderMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestFolder = FolderMachine.TestCase
