"""Where kernel tests run: on a GPU or in Triton's interpreter.

A test marked ``kernel`` launches Triton kernels on ``device``, a GPU under ``make test-gpu``. Triton decides for its
interpreter when it is imported, so that one runs in processes of its own, one for each file of this folder, which
``test_interpreter.py`` starts. By hand:

    TRITON_INTERPRET=1 pytest -m kernel tests/kernels/test_quantize.py
"""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    assert torch.cuda.is_available(), "kernel tests need a GPU or TRITON_INTERPRET=1"
    return torch.device("cuda")
