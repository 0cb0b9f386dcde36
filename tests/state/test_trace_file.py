"""The trace file: a faithful copy, or an error that says why not; never a crash, never garbage."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest
import torch

from tests.state.records import layout, random_keys, random_rows
from trace_compile.errors import FingerprintMismatchError, TraceFileError
from trace_compile.state import files, trace_file
from trace_compile.state.files import atomic_save_safetensors, load_safetensors
from trace_compile.state.ranges import Ranges
from trace_compile.state.trace import Trace


def sample(rows: int = 5, seed: int = 0) -> Trace:
    where = layout(width=16)
    g = torch.Generator().manual_seed(seed)
    ranges = Ranges.observed(
        "model.layers.0.mlp.experts",
        torch.rand(2, 4, generator=g),
        torch.tensor([1, 0, 2, 3]),
        torch.randint(0, 9, (2, 64), generator=g),
        torch.tensor([0, 1]),
    )
    trace = Trace(where, "tiny|w4a4", {"recipe": "trace", "last": 0.5}, ranges=ranges)
    trace.append(random_keys(rows, seed), random_rows(rows, where, seed), 3, torch.tensor([0.5, 2.0]))
    trace.append(random_keys(rows + 1, seed + 1), random_rows(rows + 1, where, seed + 1), 4, torch.tensor([1.0, 2.0]))
    return trace


def equal(a: Trace, b: Trace) -> bool:
    same = (a.layout, a.fingerprint, a.recipe) == (b.layout, b.fingerprint, b.recipe) and a.ranges == b.ranges
    return (
        same
        and [r.version for r in a.runs] == [r.version for r in b.runs]
        and all(
            torch.equal(x.keys, y.keys) and torch.equal(x.rows, y.rows) and torch.equal(x.outer, y.outer)
            for x, y in zip(a.runs, b.runs)
        )
    )


def test_round_trip(tmp_path):
    trace = sample()
    trace.save(tmp_path / "t")
    loaded = Trace.load(tmp_path / "t", fingerprint="tiny|w4a4")
    assert equal(loaded, trace)
    assert len(loaded) == loaded.counters.appended == 11
    keys = random_keys(5)
    before, after = trace.lookup(keys, 4, 1), loaded.lookup(keys, 4, 1)
    assert after.hit.all() and torch.equal(before.rows, after.rows) and torch.equal(before.outer, after.outer)
    # A loaded trace goes on recording, and knows what it has.
    loaded.append(keys, random_rows(5, loaded.layout, 0), 3, torch.tensor([0.5, 2.0]))
    loaded.append(random_keys(2, 9), random_rows(2, loaded.layout), 5, torch.ones(2))
    assert len(loaded) == 13 and loaded.counters.duplicates == 5 and loaded.counters.conflicts == 0


def test_an_empty_trace_carries_its_ranges(tmp_path):
    trace = Trace(layout(), "f", ranges=sample().ranges)
    trace.save(tmp_path / "t")
    loaded = Trace.load(tmp_path / "t")
    assert len(loaded) == 0 and loaded.ranges == trace.ranges
    assert torch.equal(loaded.ranges.outer_scales(), trace.ranges.outer_scales())


def test_equal_traces_give_equal_files(tmp_path):
    sample().save(tmp_path / "a")
    sample().save(tmp_path / "b")
    Trace.load(tmp_path / "a").save(tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


def test_another_model_is_refused_with_both_names(tmp_path):
    sample().save(tmp_path / "t")
    with pytest.raises(FingerprintMismatchError, match=r"'tiny\|w4a4'.*'other\|w4a4'") as caught:
        Trace.load(tmp_path / "t", fingerprint="other|w4a4")
    assert str(tmp_path / "t") in str(caught.value)


def small(path) -> bytes:
    """A file with one of everything and little of it."""
    where = layout(width=16, routing=False)
    ranges = Ranges.observed("r", torch.ones(1, 2), torch.ones(2), torch.ones(1, 64), torch.ones(1), ["gate_up"])
    trace = Trace(where, "f", ranges=ranges)
    trace.append(random_keys(2), random_rows(2, where), 0, torch.ones(2))
    trace.save(path)
    return path.read_bytes()


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "t"
    content = small(path)
    assert len(Trace.load(path)) == 2
    path.write_bytes(content + b"\0")
    for length in (len(content) + 1, *reversed(range(len(content)))):
        os.truncate(path, length)
        with pytest.raises(TraceFileError) as caught:
            Trace.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("flip", [0x01, 0x10, 0x80])
def test_every_flipped_byte_is_refused(tmp_path, flip):
    path = tmp_path / "t"
    content = bytearray(small(path))
    for at in range(len(content)):
        content[at] ^= flip
        path.write_bytes(content)
        with pytest.raises(TraceFileError) as caught:
            Trace.load(path)
        assert str(path) in str(caught.value)
        content[at] ^= flip


def test_random_garbage_is_refused(tmp_path):
    path = tmp_path / "t"
    sample(rows=1).save(path)
    content, rng = path.read_bytes(), random.Random(0)
    for _ in range(200):
        broken = bytearray(content)
        for _ in range(rng.randrange(1, 6)):
            begin = rng.randrange(len(broken))
            end = min(len(broken), begin + rng.randrange(1, 30))
            broken[begin:end] = rng.choice([rng.randbytes(end - begin), b"", b"9" * (end - begin)])
        if bytes(broken) != content:
            path.write_bytes(broken)
            with pytest.raises(TraceFileError):
                Trace.load(path)


def resealed(path, change) -> None:
    """Applies ``change(tensors, metadata)`` and writes a file that is valid but for it (its checksum is right)."""
    tensors, metadata = load_safetensors(path)
    metadata.pop("sha256")
    change(tensors, metadata)
    metadata["sha256"] = trace_file._digest(tensors, metadata)
    atomic_save_safetensors(tensors, path, metadata)


def set_tensor(name, function):
    return lambda tensors, _: tensors.__setitem__(name, function(tensors[name]))


def set_metadata(name, value):
    return lambda _, metadata: metadata.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_metadata("version", "2"), "version '2', this package reads '1'"),
        (set_metadata("format", "pt"), "not a trace file"),
        (lambda _, m: m.pop("format"), "not a trace file"),
        (lambda _, m: m.pop("recipe"), "metadata fields"),
        (set_metadata("extra", ""), "metadata fields"),
        (set_metadata("layout", "{"), "inconsistent"),
        (set_metadata("layout", "{}"), "inconsistent"),
        (set_metadata("layout", "[]"), "inconsistent"),
        (set_metadata("layout", '{"sites":[{"region":"a"}],"routings":[]}'), "inconsistent"),
        (set_metadata("layout", '{"sites":[],"routings":[]}'), "the layout says"),
        (set_metadata("recipe", "[]"), "malformed"),
        (set_metadata("runs", "[3]"), "the layout says None"),
        (set_metadata("runs", "[3,4,5]"), "inconsistent"),
        (set_metadata("runs", "[3,4.0]"), "malformed"),
        (set_metadata("runs", "7"), "malformed"),
        (set_metadata("ranges", "[]"), "the layout says None"),
        (set_metadata("ranges", '[["a"]]'), "malformed"),
        (set_metadata("ranges", '[["a",1]]'), "malformed"),
        (set_tensor("run.0.keys", lambda t: t.int()), "torch.int32"),
        (set_tensor("run.0.keys", lambda t: t[:-1]), "run.0.rows"),
        (set_tensor("run.0.keys", lambda t: t[0]), "inconsistent"),
        (set_tensor("run.0.keys", lambda t: t.flip(0)), "not increasing"),
        (set_tensor("run.0.keys", torch.zeros_like), "not increasing"),
        (set_tensor("run.1.rows", lambda t: t.view(torch.int8)), "torch.int8"),
        (set_tensor("run.1.rows", lambda t: t[:, 1:]), "run.1.rows"),
        (set_tensor("run.1.outer", lambda t: t[:1]), "run.1.outer"),
        (set_tensor("run.1.outer", lambda t: t.double()), "torch.float64"),
        (set_tensor("ranges.0.amax", lambda t: t[:-1]), "ranges.0.tokens"),
        (set_tensor("ranges.1.hist", lambda t: t[:-1]), "ranges.1.hist"),
        (lambda t, _: t.pop("run.1.outer"), "run.1.outer"),
        (lambda t, _: t.pop("run.1.keys"), "inconsistent"),
        (lambda t, _: t.__setitem__("more", torch.ones(1)), "'more'"),
    ],
)
def test_inconsistent_files_are_refused_by_reason(tmp_path, change, reason):
    path = tmp_path / "t"
    sample().save(path)
    resealed(path, lambda *_: None)
    assert equal(Trace.load(path), sample())
    resealed(path, change)
    with pytest.raises(TraceFileError, match=reason) as caught:
        Trace.load(path)
    assert str(path) in str(caught.value)


def test_other_safetensors_files_are_refused(tmp_path):
    atomic_save_safetensors({"weight": torch.ones(2)}, tmp_path / "t")
    with pytest.raises(TraceFileError, match="not a trace file"):
        Trace.load(tmp_path / "t")


def test_a_file_larger_than_the_bound_is_refused_before_memory_is_taken(tmp_path, monkeypatch):
    trace = sample()
    trace.save(tmp_path / "t")
    assert len(Trace.load(tmp_path / "t", max_bytes=trace.nbytes)) == len(trace)
    monkeypatch.setattr(files.torch, "empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(TraceFileError, match=f"holds {trace.nbytes} bytes .*max_bytes={trace.nbytes - 1}"):
        Trace.load(tmp_path / "t", max_bytes=trace.nbytes - 1)


def test_a_missing_file_is_the_usual_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "t")


def in_child(work) -> int:
    """Runs ``work`` in a forked process; its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_save_killed_at_any_step_leaves_the_old_file(tmp_path, step):
    path = tmp_path / "t"
    sample().save(path)
    old = path.read_bytes()

    def work():
        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        if step == "write":
            real, left = files.raw_bytes, iter(range(3))
            files.raw_bytes = lambda tensor: real(tensor) if next(left, None) is not None else die()  # type: ignore[assignment]
        else:
            setattr(os, step, die)
        sample(rows=50, seed=7).save(path)

    assert in_child(work) == signal.SIGKILL
    assert path.read_bytes() == old
    assert equal(Trace.load(path), sample())


def test_a_save_killed_at_a_random_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path / "t"
    versions = [sample(rows=300, seed=s) for s in (0, 5)]
    for trace in versions:
        len(trace)  # stage to runs, before the child copies the process
    versions[0].save(path)
    rng = random.Random(0)
    for _ in range(12):
        child = os.fork()
        if child == 0:
            while True:
                for trace in versions:
                    trace.save(path)
        time.sleep(0.005 + 0.03 * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loaded = Trace.load(path)
        assert any(equal(loaded, trace) for trace in versions)


def test_the_metadata_says_what_the_file_is(tmp_path):
    sample().save(tmp_path / "t")
    _, metadata = load_safetensors(tmp_path / "t")
    assert (metadata["format"], metadata["version"], metadata["fingerprint"]) == (
        "trace_compile.trace",
        "1",
        "tiny|w4a4",
    )
    assert json.loads(metadata["recipe"]) == {"recipe": "trace", "last": 0.5}
    assert json.loads(metadata["layout"])["sites"][0]["region"] == "model.layers.0.mlp.experts"
    assert json.loads(metadata["runs"]) == [3, 4]
