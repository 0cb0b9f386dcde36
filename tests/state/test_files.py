"""Atomic writes and the suspicious reader."""

from __future__ import annotations

import json
import os
import stat

import numpy as np
import pytest
import safetensors.torch
import torch

from trace_compile.errors import TraceFileError
from trace_compile.state import files
from trace_compile.state.files import DTYPES, atomic_save_safetensors, atomic_write, load_safetensors


def every_dtype() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2, (3, 5 * dtype.itemsize), generator=generator, dtype=torch.uint8)
        tensors[f"x.{name}"] = raw.view(dtype)
    return tensors | {"empty": torch.empty(0, 7), "scalar": torch.tensor(2.5), "view": torch.arange(12).reshape(3, 4).T}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(files.raw_bytes(a)) == bytes(files.raw_bytes(b))


def test_the_format_is_that_of_the_safetensors_package(tmp_path):
    tensors, metadata = every_dtype(), {"who": 'é " \\ \n', "a": ""}
    atomic_save_safetensors(tensors, tmp_path / "ours", metadata)
    with safetensors.safe_open(tmp_path / "ours", "pt") as reader:
        assert reader.metadata() == metadata
        assert set(reader.keys()) == set(tensors)
        assert all(same(reader.get_tensor(name), tensor) for name, tensor in tensors.items())
    safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "theirs", metadata)
    for name in ("ours", "theirs"):
        loaded, found = load_safetensors(tmp_path / name)
        assert found == metadata and loaded.keys() == tensors.keys()
        assert all(same(loaded[key], tensor) for key, tensor in tensors.items())


def test_equal_content_gives_equal_bytes(tmp_path):
    tensors, metadata = every_dtype(), {str(i): "x" for i in range(20)}
    atomic_save_safetensors(tensors, tmp_path / "a", metadata)
    atomic_save_safetensors(dict(reversed(tensors.items())), tmp_path / "b", dict(reversed(metadata.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert int.from_bytes((tmp_path / "a").read_bytes()[:8], "little") % 8 == 0


def test_a_file_without_tensors_and_one_without_metadata(tmp_path):
    atomic_save_safetensors({}, tmp_path / "a")
    assert load_safetensors(tmp_path / "a") == ({}, {})
    atomic_save_safetensors({"x": torch.ones(2)}, str(tmp_path / "b"))
    assert load_safetensors(str(tmp_path / "b"))[1] == {}


def test_the_new_file_appears_whole_and_nothing_else_stays(tmp_path):
    target = tmp_path / "out.bin"
    target.write_bytes(b"old")
    with atomic_write(target) as temporary:
        assert temporary.parent == tmp_path and temporary != target
        temporary.write_bytes(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out.bin"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_an_error_keeps_the_old_file_and_removes_the_temporary(tmp_path, error):
    target = tmp_path / "out.bin"
    target.write_bytes(b"old")
    with pytest.raises(error), atomic_write(target) as temporary:
        temporary.write_bytes(b"half")
        raise error
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.bin"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_system_call_keeps_the_old_file(tmp_path, monkeypatch, step):
    target = tmp_path / "out.bin"
    target.write_bytes(b"old")

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(OSError, match="no space"), atomic_write(target) as temporary:
        temporary.write_bytes(b"new")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.bin"]


def test_a_caller_that_removes_the_temporary_gets_its_own_error(tmp_path):
    with pytest.raises(RuntimeError, match="mine"), atomic_write(tmp_path / "out") as temporary:
        temporary.unlink()
        raise RuntimeError("mine")
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "missing" / "out"):
        pass


def test_content_and_folder_are_flushed_before_and_after_the_rename(tmp_path, monkeypatch):
    calls = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(handle):
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        real_sync(handle)

    monkeypatch.setattr(files.os, "fsync", sync)

    def replace(*paths):
        calls.append("rename")
        real_replace(*paths)

    monkeypatch.setattr(files.os, "replace", replace)
    atomic_save_safetensors({"x": torch.ones(2)}, tmp_path / "x")
    assert calls == ["file", "rename", "folder"]


def test_the_file_has_ordinary_permissions(tmp_path):
    mask = os.umask(0o027)
    try:
        atomic_save_safetensors({"x": torch.ones(2)}, tmp_path / "x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_unknown_dtypes_are_refused_by_name_and_leave_nothing(tmp_path):
    with pytest.raises(TraceFileError, match=r"'z' of torch\.complex64"):
        atomic_save_safetensors({"a": torch.ones(1), "z": torch.ones(1, dtype=torch.complex64)}, tmp_path / "x")
    assert os.listdir(tmp_path) == []


def written(tmp_path, header: object, data: bytes = b"") -> str:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return str(path)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([], "not a JSON object"),
        ({"__metadata__": {"a": 1}}, "metadata"),
        ({"__metadata__": []}, "metadata"),
        ({"x": 3}, "no valid description"),
        ({"x": entry() | {"more": 1}}, "no valid description"),
        ({"x": entry(dtype="F4")}, "unknown dtype 'F4'"),
        ({"x": entry(dtype=[])}, "unknown dtype"),
        ({"x": entry(shape=(-2,))}, "malformed"),
        ({"x": entry(shape=(2.0,))}, "malformed"),
        ({"x": entry(shape=(True, 2))}, "malformed"),
        ({"x": entry(offsets=(0, 8, 8))}, "malformed"),
        ({"x": entry(shape=(3,))}, "does not fill"),
        ({"x": entry(offsets=(8, 0))}, "does not fill"),
        ({"x": entry(shape=(1 << 62, 1 << 62))}, "does not fill"),
        ({"x": entry(offsets=(4, 12))}, "starts at byte 4"),
        ({"x": entry(), "y": entry()}, "starts at byte 0, not at 8"),
        ({"x": entry(), "y": entry(offsets=(8, 16))}, "describes"),
        ({"x": entry(shape=(1 << 40,), offsets=(0, 1 << 42))}, "describes"),
        ({}, "describes"),
    ],
)
def test_bad_headers_are_refused_with_path_and_reason(tmp_path, header, reason):
    path = written(tmp_path, header, bytes(8))
    with pytest.raises(TraceFileError, match=reason) as caught:
        load_safetensors(path)
    assert path in str(caught.value)


def test_sizes_are_checked_before_memory_is_taken(tmp_path, monkeypatch):
    path = tmp_path / "x"
    atomic_save_safetensors({"x": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(files.torch, "empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(TraceFileError, match="the file has"):
        load_safetensors(path)
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(TraceFileError, match="claims"):
        load_safetensors(path)
    path.write_bytes(b"")
    with pytest.raises(TraceFileError, match="0 bytes"):
        load_safetensors(path)


def test_a_check_can_refuse_before_memory_is_taken(tmp_path, monkeypatch):
    atomic_save_safetensors({"x": torch.ones(4, 2)}, tmp_path / "x", {"a": "b"})
    monkeypatch.setattr(files.torch, "empty", lambda *_, **__: pytest.fail("allocated"))

    def check(specs, metadata):
        assert specs == {"x": (torch.float32, (4, 2))} and metadata == {"a": "b"}
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        load_safetensors(tmp_path / "x", check)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "x"
    atomic_save_safetensors({"x": torch.ones(300_000)}, path)

    def shrink(specs, metadata):
        os.truncate(path, 600_000)

    with pytest.raises(TraceFileError, match="ends inside tensor 'x'"):
        load_safetensors(path, shrink)


def test_loaded_tensors_own_their_memory(tmp_path):
    path = tmp_path / "x"
    atomic_save_safetensors({"x": torch.arange(1000)}, path)
    tensors, _ = load_safetensors(path)
    os.truncate(path, 0)
    assert np.array_equal(tensors["x"].numpy(), np.arange(1000))
