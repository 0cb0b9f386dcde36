"""Expert pruning in other families: routers with sigmoids, biases, groups, softmax before and after the top-k.

The reference is the plain model whose router GEMMs give -inf for the pruned experts, whatever the model does next.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tools.families import families
from tools.family_checks import compiled, inputs
from trace_compile.errors import PruningError
from trace_compile.state.usage import Kept

PRUNED, E = 2, 4
LIMIT = 1e-5
FAMILIES = ("qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe", "granitemoe", "minimax_m2")


class WithoutExpert(TorchFunctionMode):
    """Linear layers with one output per expert give -inf for the pruned one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and out.shape[-1] == E:
            out = out.clone()
            out[..., PRUNED] = -torch.inf
        return out


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_routers_choose_among_the_kept_by_their_own_rule(name: str) -> None:
    family = families()[name]
    model = compiled(family, "bf16")
    kept = tuple(e for e in range(E) if e != PRUNED)
    regions = [r.name for r in model.explain().regions]
    batch = inputs(family)
    pruned = model.rollout(keep=Kept.everywhere(dict.fromkeys(regions, kept)))
    with model.trace() as trace, torch.no_grad():
        found = pruned(**batch).logits
        whole = model(**batch).logits
    with WithoutExpert(), torch.no_grad():
        expected = model._plain()(**batch).logits
    assert (found - expected).norm() <= LIMIT * expected.norm()
    assert (found - whole).norm() > 100 * LIMIT * whole.norm()
    assert all(int(counts[PRUNED]) == 0 for counts in trace.usage.prefill.values())


@pytest.mark.slow
def test_other_routers_are_refused_by_name() -> None:
    family = families()["phimoe"]
    model = compiled(family, "bf16")
    regions = [r.name for r in model.explain().regions]
    pruned = model.rollout(keep=Kept.everywhere({regions[0]: (0, 1)}))
    with pytest.raises(PruningError, match=rf"{regions[0]} cannot be pruned: .*not from a top-k"):
        pruned(**inputs(family))


@pytest.mark.slow
def test_packed_experts_with_biases() -> None:
    """gpt-oss normalises behind its top-k: without the experts that nobody chose, every token computes the same."""
    family = families()["gpt_oss"]
    model = compiled(family, "qat")
    whole = model.rollout()
    ids = torch.tensor([[5, 6]])
    with model.trace() as trace, torch.no_grad():
        expected = whole(input_ids=ids).logits
    used = {r: tuple(counts.nonzero().flatten().tolist()) for r, counts in trace.usage.prefill.items()}
    assert any(len(experts) < E for experts in used.values())
    pruned = model.rollout(keep=Kept.everywhere(used))
    assert pruned.packed_bytes < whole.packed_bytes
    with torch.no_grad():
        assert torch.equal(pruned(input_ids=ids).logits, expected)
