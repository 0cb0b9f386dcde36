"""The README's training loop runs as printed, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import PAD, prompts, qwen3

README = Path(__file__).resolve().parent.parent / "README.md"


def policy_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def test_training_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = qwen3(eos_token_id=None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names: dict[str, Any] = {
        "model": model,
        "batches": [prompts(batch=3, seed=3), prompts(batch=3, seed=4)],
        "pad_token_id": PAD,
        "policy_loss": policy_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(code, names)
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert any("experts" in name for name in moved)
    assert (tmp_path / "checkpoint" / "config.json").exists()
    assert names["trace"].counters.hits > 0
