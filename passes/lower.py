"""Who runs each op: the first provider that does not refuse the operands' shapes, dtypes and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule
from torch.fx.node import map_arg

from ..errors import LoweringError
from ..ops.registry import OPS, provider_for
from .feeds import region_ops
from .graph import fake, op_name, scopes
from .mode import Mode
from .runner import IR_OPS


@dataclass(frozen=True)
class Choice:
    """What runs one region, and why: the refusals of those that were asked first."""

    region: str
    op: str
    provider: str
    reason: str


def lower(gm: GraphModule, example_inputs: list[Any], *, config: Mode) -> GraphModule:
    """Puts each op's provider into the graph; records ``choices`` in ``gm.meta``.

    Raises ``LoweringError`` when nobody runs an op, or one is left that belongs to no region.
    """
    choices = []
    for _, node, region in region_ops(gm, *IR_OPS):
        name = op_name(node)
        provider = provider_for(name, map_arg(node.args, fake))
        node.target = provider.target
        node.meta["provider"] = provider.name
        choices.append(Choice(region.name, name, provider.name, provider.reason))
    for scope in scopes(gm):
        left = [n.name for n in scope.graph.nodes if op_name(n) in OPS and "provider" not in n.meta]
        if left:
            raise LoweringError(f"{left[0]} was given no provider: it belongs to no region")
        scope.module.recompile()
    gm.meta["choices"] = tuple(choices)
    return gm
