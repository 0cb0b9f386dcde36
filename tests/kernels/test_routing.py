"""The counting sort of slots by expert against ``ops.routing``, element for element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trace_compile.errors import OperandError
from trace_compile.kernels import routing as kernel
from trace_compile.ops import routing as reference


def assert_same(got: reference.Routing, want: reference.Routing) -> None:
    for name, value in vars(want).items():
        found = getattr(got, name)
        assert found.dtype == value.dtype and torch.equal(found, value), name


def ids_of(kind: str, tokens: int, top_k: int, experts: int) -> Tensor:
    g = torch.Generator().manual_seed(tokens)
    if kind == "one":
        return torch.full((tokens, top_k), experts - 1)
    if kind == "none":
        return torch.tensor([-1, experts])[torch.arange(tokens * top_k).view(tokens, top_k) % 2]
    ids = torch.randint(-1 if kind == "wild" else 0, experts + (kind == "wild"), (tokens, top_k), generator=g)
    return ids.clamp(min=experts // 2) if kind == "half" else ids


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("kind", "tokens", "top_k", "experts"),
    [
        ("all", 1, 1, 1),
        ("wild", 7, 2, 3),
        ("none", 5, 2, 6),
        ("one", 600, 2, 60),
        ("half", 300, 8, 128),
        ("wild", 1100, 2, 6),
    ],
)
def test_routing(kind: str, tokens: int, top_k: int, experts: int, device: torch.device) -> None:
    ids = ids_of(kind, tokens, top_k, experts).to(device)
    want = reference.route(ids, experts)
    assert_same(kernel.route(ids, experts), want)
    assert_same(kernel.routing_of(want.order, want.offsets, top_k), want)


def test_more_slots_than_int32_numbers_are_refused() -> None:
    with pytest.raises(OperandError, match="split the batch"):
        kernel.route(torch.empty(2**28, 8, dtype=torch.int64, device="meta"), 128)
