"""What tests of the backend share: a small runtime, blocks in a row, one module under one backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.passes.blocks import Grouped
from trace_compile.capture import Backend, capturing
from trace_compile.ops import MoEScheme
from trace_compile.ops.weights import Master, Packed, pack_experts
from trace_compile.passes import Mode, Region


@dataclass
class GuideRows:
    rows: Tensor
    outer: Tensor
    hit: Tensor


@dataclass
class RuntimeForTests:
    """Packs at every call, counts tokens that are not zero, keeps what is emitted."""

    scheme: MoEScheme | None
    guide: GuideRows | None = None
    replayed: Tensor | None = None
    masked: int = 0
    emitted: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)
    asked: list[tuple[str, str, int]] = field(default_factory=list)

    def packed(self, region: Region, which: str, param: Master) -> Packed:
        assert self.scheme is not None and self.scheme.weight is not None
        expert, layout = region.weight(which)
        self.asked.append((region.name, which, id(param)))
        param = torch.cat(param) if isinstance(param, tuple) else param
        return pack_experts(param, layout, self.scheme.weight, name=expert.name)

    def outer(self, sites: tuple[tuple[str, str], ...]) -> Tensor:
        return torch.tensor([2.0 ** -(6 + i) for i in range(len(sites))])

    def guidance(self, regions: tuple[str, ...]) -> GuideRows:
        assert self.guide is not None
        return self.guide

    def routing(self, regions: tuple[str, ...]) -> Tensor:
        assert self.replayed is not None
        return self.replayed

    def valid(self, tokens: int) -> Tensor:
        return torch.arange(tokens) >= self.masked

    def experts(self, region: str, part: str) -> Tensor:
        raise AssertionError(f"nothing is pruned here: {region}, {part}")

    def noise(self, norms: tuple[str, ...], width: int) -> Tensor:
        return torch.zeros(len(norms), width)

    def emit(self, emits: dict[str, dict[str, Tensor]]) -> None:
        self.emitted.append(emits)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing: router products and the region's own op are kept, the rest is computed again."""
    kept = op in (torch.ops.aten.mm.default, torch.ops.trace_compile.nvfp4_moe.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "not reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, keep_products),
    },
}


class Chain(nn.Module):
    """Blocks with residuals, under checkpoints of a kind or not."""

    def __init__(self, blocks: int = 2, checkpointed: bool | str = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Grouped() for _ in range(blocks)])
        self.flags = CHECKPOINTS[checkpointed if isinstance(checkpointed, str) else "not reentrant"]
        self.checkpointed = bool(checkpointed)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, **self.flags) if self.checkpointed else block(x))
        return x


def chain(**options: Any) -> Chain:
    torch.manual_seed(0)
    return Chain(**options)


class Compiled:
    """A module under one backend, with a code cache of its own."""

    def __init__(self, module: nn.Module, mode: Mode, runtime: RuntimeForTests | None = None, **options: Any) -> None:
        self.module = module
        self.runtime = runtime or RuntimeForTests(mode.scheme)
        self.backend = Backend(mode, self.runtime, **options)
        torch._dynamo.reset()
        self.run = torch.compile(module, backend=self.backend, dynamic=True, fullgraph=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with capturing():
            return self.run(*args, **kwargs)


def gradients(module: nn.Module, output: Tensor, x: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, max(output.numel(), 1))[: output.numel()].view_as(output)
    return list(torch.autograd.grad((output * weights).sum(), [x, *module.parameters()]))


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"value {i} differs by {(a - b).abs().max()}"
