"""The folder writer: all or nothing, aligned, sharded, the same bytes every time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trace_compile.errors import ExportError
from trace_compile.export import writer
from trace_compile.export.writer import CONFIG, INDEX, MARK, staged_folder, write_json, write_tensors

TENSORS = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "scale": torch.tensor([0.25]),
    "scales": torch.arange(8, 24, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 8),
    "half": torch.randn(3, 5).to(torch.bfloat16),
    "scalar": torch.tensor(2.0),
    "wide": torch.arange(6).reshape(2, 3).T,
    "empty": torch.empty(0, 4),
}


def stream() -> Iterator[tuple[str, Tensor]]:
    yield from TENSORS.items()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def export(path: Path, value: int, *, overwrite: bool = True, max_shard_bytes: int = 40) -> None:
    with staged_folder(path, overwrite=overwrite) as folder:
        write_tensors(folder, stream, max_shard_bytes=max_shard_bytes)
        write_json(folder / CONFIG, {MARK: {"value": value}})


@pytest.mark.parametrize("max_shard_bytes", [1, 40, 10**9])
def test_every_tensor_reads_back_through_the_safetensors_package(tmp_path: Path, max_shard_bytes: int) -> None:
    specs = write_tensors(tmp_path, stream, max_shard_bytes=max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    loaded: dict[str, Tensor] = {}
    for file in files:
        loaded |= load_file(file)
    assert loaded.keys() == TENSORS.keys() == {spec.name for spec in specs}
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8)), name
    if len(files) == 1:
        assert files[0].name == "model.safetensors"
        assert not (tmp_path / INDEX).exists()
    else:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    if max_shard_bytes == 40:
        data = [sum(t.nbytes for t in load_file(f).values()) for f in files]
        assert 1 < len(files) < len(TENSORS)
        assert all(size <= 40 or len(load_file(f)) == 1 for size, f in zip(data, files))


def test_tensors_are_aligned_to_their_element_size(tmp_path: Path) -> None:
    write_tensors(tmp_path, stream, max_shard_bytes=10**9)
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    assert length % 8 == 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] % TENSORS[name].element_size() == 0, name


def test_names_must_be_unique_and_dtypes_storable(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="twin would be written twice"):
        write_tensors(tmp_path, lambda: iter([("twin", torch.ones(1)), ("twin", torch.ones(1))]), max_shard_bytes=1)
    with pytest.raises(ExportError, match="complex64"):
        write_tensors(tmp_path, lambda: iter([("z", torch.ones(1, dtype=torch.complex64))]), max_shard_bytes=1)
    assert not list(tmp_path.iterdir())


def test_a_stream_that_changes_between_its_passes_is_refused(tmp_path: Path) -> None:
    sizes = iter([2, 3])
    with pytest.raises(ExportError, match="do not train meanwhile"):
        write_tensors(tmp_path, lambda: iter([("w", torch.ones(next(sizes)))]), max_shard_bytes=1)


@pytest.mark.parametrize("module, name", [(writer, "_write"), (writer, "sync"), (os, "rename"), (os, "replace")])
@pytest.mark.parametrize("previous", [False, True])
def test_a_failure_at_any_step_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, previous: bool
) -> None:
    """Fail the n-th call of a function that touches the disk, for every n that a whole export makes."""
    path = tmp_path / "checkpoint"
    export(tmp_path / "complete", 2)
    complete = contents(tmp_path / "complete")
    if previous:
        export(path, 1)
    before = contents(tmp_path)
    real = getattr(module, name)
    calls = 0

    def failing(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError("disk full")
        return real(*arguments)

    monkeypatch.setattr(module, name, failing)
    fail_at = 0
    export(tmp_path / "counted", 2)
    if previous:
        export(tmp_path / "counted", 2)
    shutil.rmtree(tmp_path / "counted")
    total, left_alone = calls, 0
    for fail_at in range(1, total + 1):  # noqa: B007  (read by `failing`)
        calls = 0
        try:
            export(path, 2)
        except ExportError as error:
            assert "disk full" in str(error)
        except OSError:
            assert name == "sync"  # of the parent folder, when the new one is in its place
        if contents(tmp_path) == before:
            left_alone += 1
            continue
        # Either no call failed, or the last one did: the sync of the parent folder, after the rename.
        assert contents(path) == complete
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "complete"]
        break
    assert left_alone >= {"_write": 10, "sync": 5, "rename": 2 * previous, "replace": not previous}[name]


def test_an_interrupt_counts_as_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    export(path, 1)
    before = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt), staged_folder(path, overwrite=True) as folder:
        write_json(folder / CONFIG, {})
        raise KeyboardInterrupt
    assert contents(tmp_path) == before


def test_what_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "checkpoint"
    export(path, 1, overwrite=False)
    with pytest.raises(ExportError, match="overwrite=True"):
        export(path, 2, overwrite=False)
    export(path, 3)
    assert json.loads((path / CONFIG).read_text())[MARK] == {"value": 3}

    foreign = tmp_path / "home"
    foreign.mkdir()
    export(foreign, 1, overwrite=False)  # an empty folder may be filled
    (foreign / CONFIG).write_text("{}")
    with pytest.raises(ExportError, match="not made by an export"):
        export(foreign, 2)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ExportError, match="file"):
        export(file, 2)
    assert file.read_text() == "x"


def test_the_previous_checkpoint_stays_readable_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    export(path, 1)
    with staged_folder(path, overwrite=True) as folder:
        write_json(folder / CONFIG, {MARK: {"value": 2}})
        assert json.loads((path / CONFIG).read_text())[MARK] == {"value": 1}
        assert len(load_file(next(iter(path.glob("*.safetensors"))))) > 0
    assert contents(path).keys() == {CONFIG}


def test_links_are_followed_and_permissions_are_ordinary(tmp_path: Path) -> None:
    real = tmp_path / "real"
    export(real, 1)
    link = tmp_path / "latest"
    link.symlink_to(real)
    export(link, 2)
    assert link.is_symlink()
    assert json.loads((real / CONFIG).read_text())[MARK] == {"value": 2}
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    assert real.stat().st_mode == ordinary.stat().st_mode
