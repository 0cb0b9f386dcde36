"""Runs the kernel tests of this folder in Triton's interpreter, one process a file: no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MARK = "pytest.mark." + "kernel"


@pytest.mark.parametrize("name", sorted(p.name for p in HERE.glob("test_*.py") if MARK in p.read_text()))
def test_file_in_the_interpreter(name: str) -> None:
    # Under pytest-xdist the worker's own variables must not reach the inner pytest.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "kernel", "-p", "no:cacheprovider", str(HERE / name)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
