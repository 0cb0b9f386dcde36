"""Other people's blocks: what is found in them, the same function unquantized, and quantized as the op does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.backends import Compiled
from tests.passes.blocks import E, H, I, K, capture, run_with_gradients
from tests.passes.foreign import Adapted, Capacity, Permuted, Sequential, ThreeWeights
from tests.passes.test_match import assert_same_function
from trace_compile.ops import SWIGLU, UNQUANTIZED, W4A4_ROW, W4A16, WeightLayout, check_close, pack_experts
from trace_compile.passes import PIPELINE, ExpertParam, Mode, PassRunner

BLOCKS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "three weights": (lambda: ThreeWeights(), "grouped_mm_fallback", ""),
    "three weights, commuted": (lambda: ThreeWeights(commuted=True), "grouped_mm_fallback", ""),
    "scores first": (lambda: ThreeWeights(scores_first=True), "grouped_mm_fallback", "gates of a token's 2 experts"),
    "unknown permutation": (lambda: Permuted(), "grouped_mm_fallback", "do not come from counting"),
    "capacity": (lambda: Capacity(), "einsum", "no known step from expert results to tokens"),
    "capacity, three weights": (lambda: Capacity(split=True), "einsum", "no known step from"),
    "every token": (lambda: Sequential("every_token"), "loop", "one after the other"),
    "every token, fused, biased": (lambda: Sequential("every_token", fused=True, bias=True), "loop", "one after"),
    "selected": (lambda: Sequential("selected", bias=True), "loop", "one after the other"),
    "split": (lambda: Sequential("split", fused=True), "loop", "one after the other"),
    "adapted": (lambda: Adapted(), "grouped_mm_fallback", ""),
}


def block(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return BLOCKS[name][0](), torch.randn(10, H, requires_grad=True)


@pytest.mark.parametrize("name", BLOCKS)
def test_found_and_the_same_function(name: str) -> None:
    (module, x), (_, source, slots) = block(name), BLOCKS[name]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        found = capture(module, x.detach())
    gm = PassRunner(PIPELINE).run(found.graph(), found.inputs, config=Mode(scheme=None))
    assert gm.meta["unmatched"] == ()
    (region,) = gm.meta["regions"]
    assert (region.source, region.num_experts, region.hidden, region.width) == (source, E, H, I)
    assert slots in region.slots and bool(slots) == bool(region.slots)
    assert region.top_k == (1 if region.slots and not region.weight_input else K)
    if region.activation.gated:
        assert region.activation == SWIGLU
    assert_same_function(run_with_gradients(found.graph(), found.args), run_with_gradients(gm, found.args))


@pytest.mark.parametrize("name", BLOCKS)
def test_quantized_weights_are_those_of_the_block(name: str) -> None:
    """W4A16: the function and all gradients of the block itself with its weights rounded to what was packed."""
    module, x = block(name)
    compiled = Compiled(module, Mode(scheme=W4A16, train=True))
    out = compiled(x)
    found = [out.detach(), *gradients_of(module, out, x)]
    (region,) = compiled.backend.reports[0].regions
    adapters = [2 + i for i, (p, _) in enumerate(module.named_parameters()) if p in ("a", "b")]
    assert all(found[i].norm() > 0 for i in adapters)
    if isinstance(module, Adapted):  # their part is packed with what they adapt
        with torch.no_grad():
            module.w13.add_(torch.einsum("enr,erk->enk", module.b, module.a) * 0.5)
            module.b.zero_()
    for which in ("w13", "w2"):
        round_to_packed(module, *region.weight(which))
    y = module(x)
    expected = [y.detach(), *gradients_of(module, y, x)]
    kept = [i for i in range(len(found)) if i not in adapters]
    assert_same_function([expected[i] for i in kept], [found[i] for i in kept])


def round_to_packed(module: nn.Module, expert: ExpertParam, layout: WeightLayout) -> None:
    parts = [module.get_parameter(p.name) for p in expert.parameters]
    packed = pack_experts(torch.cat(parts) if expert.parts else parts[0], layout, W4A16.weight)  # type: ignore[arg-type]
    rounded = layout.parameter(packed.dequantize())
    with torch.no_grad():
        for part, new in zip(parts, rounded.split([len(p) for p in parts]), strict=True):
            part.copy_(new)


def gradients_of(module: nn.Module, out: Tensor, x: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    wanted = [x, *module.parameters()]
    grads = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, grads)]


@pytest.mark.parametrize("name", ["scores first", "unknown permutation", "capacity", "every token", "adapted"])
def test_activations_are_quantized_and_ranges_recorded(name: str) -> None:
    """Rows that are no tokens are quantized and observed; record rows and routing come by token, so they have none."""
    module, x = block(name)
    plain = Compiled(module, Mode(scheme=UNQUANTIZED, train=True))
    with torch.no_grad():
        check_close(plain(x), module(x), k=4 * H, stages=6)
    compiled = Compiled(module, Mode(scheme=W4A4_ROW, record="bit", routing=True))
    with torch.no_grad():
        out = compiled(x)
        assert not torch.equal(out, module(x)) and (out - module(x)).norm() < 0.5 * module(x).norm()
    (emitted,) = compiled.runtime.emitted
    (region,) = compiled.backend.reports[0].regions
    assert emitted["amax"][region.name].shape == (2, E) and emitted["amax"][region.name].max() > 0
    by_token = not region.slots
    assert ("routing" in emitted) == by_token and ("record" in emitted) == by_token
