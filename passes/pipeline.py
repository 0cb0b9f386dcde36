"""The passes in the order in which they run."""

from __future__ import annotations

from .canonicalize import canonicalize
from .linears import linears
from .lower import lower
from .observe import observe
from .outline import outline
from .perturb import perturb
from .prune import prune
from .quantize import quantize
from .replay_routing import replay_routing
from .runner import Pass

PIPELINE: tuple[Pass, ...] = (
    Pass("canonicalize", changes_numerics=False, run=canonicalize),
    Pass("outline", changes_numerics=True, run=outline),  # summation order, unless the model used the same grouped GEMM
    Pass("linears", changes_numerics=False, run=linears),  # only where a mode names some
    Pass("perturb", changes_numerics=True, run=perturb),  # these three only where a mode asks for it
    Pass("prune", changes_numerics=True, run=prune),
    Pass("replay_routing", changes_numerics=True, run=replay_routing),
    Pass("quantize", changes_numerics=True, run=quantize),
    Pass("observe", changes_numerics=False, run=observe),
    Pass("lower", changes_numerics=True, run=lower),  # summation order again; not with the native providers
)
