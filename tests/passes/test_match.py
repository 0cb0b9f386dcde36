"""What is matched: every spelling of the block, with its parameters, activation and layout, and the same function."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.blocks import (
    Broadcast,
    Dense,
    DenseMasked,
    E,
    GatedInput,
    Gathered,
    Grouped,
    H,
    I,
    K,
    Stacked,
    capture,
    run_with_gradients,
)
from trace_compile.errors import NoMoERegionError
from trace_compile.ops import SWIGLU, UNQUANTIZED
from trace_compile.ops.tolerance import check_close
from trace_compile.passes import PIPELINE, Mode, MoERegion, PassRunner
from trace_compile.passes.report import formula

transformers = pytest.importorskip("transformers")
IDENTITY = Mode(scheme=None)


def experts_config(kind: str, implementation: str, **changes: Any) -> Any:
    sizes = {"hidden_size": H, "num_experts_per_tok": K, "intermediate_size": I}
    config = {
        "qwen3": lambda: transformers.Qwen3MoeConfig(
            **sizes, moe_intermediate_size=I, num_experts=E, norm_topk_prob=True, **changes
        ),
        "mixtral": lambda: transformers.MixtralConfig(**sizes, num_local_experts=E, **changes),
        "olmoe": lambda: transformers.OlmoeConfig(**sizes, num_experts=E, **changes),
        "gpt_oss": lambda: transformers.GptOssConfig(**sizes, num_local_experts=E, **changes),
    }[kind]()
    config._experts_implementation = implementation
    return config


def transformers_block(kind: str, implementation: str, **changes: Any) -> nn.Module:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    blocks = {
        "qwen3": Qwen3MoeSparseMoeBlock,
        "mixtral": MixtralSparseMoeBlock,
        "olmoe": OlmoeSparseMoeBlock,
        "gpt_oss": GptOssMLP,
    }
    torch.manual_seed(1)
    block = blocks[kind](experts_config(kind, implementation, **changes))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


def rewrite(module: nn.Module, x: Tensor, mode: Mode = IDENTITY) -> tuple[MoERegion, list[Tensor], list[Tensor]]:
    """The only region of ``module``, and results with gradients before and after the passes."""
    found = capture(module, x)
    gm = PassRunner(PIPELINE).run(found.graph(), found.inputs, config=mode)
    assert gm.meta["unmatched"] == ()
    (region,) = gm.meta["regions"]
    return region, run_with_gradients(found.graph(), found.args), run_with_gradients(gm, found.args)


def assert_same_function(before: list[Tensor], after: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(after, before, strict=True)):
        check_close(a, b, k=4 * H, stages=6, name=f"value {i}")


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "olmoe"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_transformers_blocks(kind: str, implementation: str) -> None:
    region, before, after = rewrite(transformers_block(kind, implementation), torch.randn(2, 5, H))
    assert (region.name, region.num_experts, region.top_k, region.hidden, region.width) == ("experts", E, K, H, I)
    assert (region.w13.name, region.w2.name) == ("experts.gate_up_proj", "experts.down_proj")
    assert region.activation == SWIGLU
    assert region.source == ("grouped_mm_fallback" if implementation == "grouped_mm" else "bmm")
    assert_same_function(before, after)
    if implementation == "grouped_mm":
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_gpt_oss_is_transposed_interleaved_biased_and_clamped(implementation: str) -> None:
    x = 6 * torch.randn(2, 5, H)  # beyond the clamp's limit
    region, before, after = rewrite(transformers_block("gpt_oss", implementation), x)
    assert region.w13_layout.transposed and region.w13_layout.interleaved
    assert region.w2_layout.transposed and not region.w2_layout.interleaved
    assert region.b13 is not None and region.b13.name == "experts.gate_up_proj_bias"
    assert region.b2 is not None and region.b2.name == "experts.down_proj_bias"
    gate = "clamp(gate, None, 7.0)"
    assert formula(region) == f"(clamp(up, -7.0, 7.0) + 1) * {gate} * sigmoid({gate} * 1.702)"
    assert_same_function(before, after)


def test_a_renamed_copy_of_the_experts_class_is_matched() -> None:
    from transformers.integrations.moe import use_experts_implementation
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    @use_experts_implementation
    class Unheard(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = E
            self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H) * 0.3)
            self.down_proj = nn.Parameter(torch.randn(E, H, I) * 0.3)

        def _apply_gate(self, pre: Tensor) -> Tensor:
            gate, up = pre[:, :I], pre[:, I:]
            return up * F.silu(gate)

        def forward(self, *args: Any) -> Tensor:
            raise AssertionError("the eager loop is not used")

    config = experts_config("qwen3", "grouped_mm")
    block = Qwen3MoeSparseMoeBlock(config)
    nn.init.normal_(block.gate.weight)
    block.experts = Unheard(config)  # type: ignore[assignment]
    region, before, after = rewrite(block, torch.randn(3, 4, H))
    assert region.activation == SWIGLU  # the commuted product is the same program
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("block", "source", "shape"),
    [
        (lambda: Grouped(), "grouped_mm_fallback", (10, H)),
        (lambda: Grouped(bias=True), "grouped_mm_fallback", (10, H)),
        (lambda: GatedInput(), "grouped_mm_fallback", (10, H)),
        (lambda: Gathered(), "bmm", (10, H)),
        (lambda: Dense(), "einsum", (10, H)),
        (lambda: Dense(bias=True), "einsum", (10, H)),
        (lambda: DenseMasked(), "einsum", (2, 5, H)),
        (lambda: Broadcast(), "bmm", (10, H)),
        (lambda: Broadcast(bias=True), "bmm", (10, H)),
    ],
    ids=[
        *("grouped", "grouped-bias", "gated-input", "gathered", "dense", "dense-bias", "dense-one-hot"),
        *("broadcast", "broadcast-bias"),
    ],
)
def test_hand_written_blocks(block: Callable[[], Stacked], source: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    module = block()
    region, before, after = rewrite(module, torch.randn(shape))
    assert (region.source, region.w13.name, region.w2.name) == (source, "w13", "w2")
    assert (region.b13 is not None) == (module.b13 is not None)
    assert region.weight_input == isinstance(module, GatedInput)
    assert_same_function(before, after)


def llama4(top_k: int) -> nn.Module:
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    config = transformers.Llama4TextConfig(
        hidden_size=H, intermediate_size=I, intermediate_size_mlp=I, num_local_experts=E, num_experts_per_tok=top_k
    )
    block = Llama4TextMoe(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


@pytest.mark.parametrize("top_k", [1, 2])
def test_llama4_scores_scale_the_input_of_every_expert(top_k: int) -> None:
    torch.manual_seed(5)
    region, before, after = rewrite(llama4(top_k), torch.randn(2, 5, H))
    assert (region.source, region.weight_input, region.top_k) == ("bmm", True, top_k)
    assert region.w13_layout.transposed and region.activation == SWIGLU
    assert_same_function(before, after)


def test_scaled_inputs_of_experts_that_do_not_keep_zero_are_refused() -> None:
    """Experts that were not chosen see zeros; a sigmoid would turn those into something."""
    block = llama4(1)
    block.experts.forward = types.MethodType(_sigmoid_experts, block.experts)  # type: ignore[union-attr, method-assign]
    found = capture(block, torch.randn(2, 5, H))
    with pytest.raises(NoMoERegionError, match="gates scale the input of experts that do not map zero to zero"):
        PassRunner(PIPELINE).run(found.graph(), found.inputs, config=IDENTITY)


def _sigmoid_experts(self: Any, x: Tensor) -> Tensor:
    gate, up = torch.bmm(x.view(E, -1, H), self.gate_up_proj).chunk(2, dim=-1)
    return torch.bmm(torch.sigmoid(gate) * (up + 1), self.down_proj).view(-1, H)


def test_quantized_llama4_quantizes_the_scaled_tokens() -> None:
    found = capture(llama4(1), torch.randn(2, 5, H))
    gm = PassRunner(PIPELINE).run(found.graph(), found.inputs, config=Mode(scheme=UNQUANTIZED))
    for a, b in zip(gm(*found.args), found.graph()(*found.args), strict=True):
        check_close(a, b, k=4 * H, stages=6)


def squared_relu(pre: Tensor) -> Tensor:
    return torch.square(F.relu(pre))


def swapped(pre: Tensor) -> Tensor:
    """The second half is the gate."""
    return pre[..., :I] * F.silu(pre[..., I:])


def interleaved(pre: Tensor) -> Tensor:
    return F.gelu(pre[..., ::2], approximate="tanh") * pre[..., 1::2]


def narrowed(pre: Tensor) -> Tensor:
    gate, up = torch.split(pre, I, dim=-1)
    return F.gelu(gate) * (1 - up).clamp(min=-0.5)


def quick(pre: Tensor) -> Tensor:
    gate, up = pre.narrow(-1, 0, I), pre.narrow(-1, I, I)
    return gate * torch.sigmoid(1.702 * gate) * up


@pytest.mark.parametrize(
    ("act", "gated", "text"),
    [
        (squared_relu, False, "square(relu(x))"),
        (swapped, True, "silu(up) * gate"),
        (interleaved, True, "gelu_tanh(gate) * up"),
        (narrowed, True, "gelu(gate) * clamp(1 - up, -0.5, None)"),
        (quick, True, "sigmoid(gate * 1.702) * gate * up"),
    ],
    ids=lambda v: v.__name__ if callable(v) else None,
)
def test_activations(act: Callable[[Tensor], Tensor], gated: bool, text: str) -> None:
    torch.manual_seed(3)
    region, before, after = rewrite(Grouped(act, gated=gated), torch.randn(10, H))
    assert formula(region) == text
    assert region.activation.gated == gated
    assert region.w13_layout.interleaved == (act is interleaved)
    assert_same_function(before, after)


def test_the_halves_are_not_swapped() -> None:
    """Gate near 0, up near 3: exchanging them gives another function, and the comparison would show it."""
    torch.manual_seed(4)
    right, wrong = Grouped(), Grouped(swapped)
    for block in (right, wrong):
        with torch.no_grad():
            block.w13[:, I:] += 3.0 / H
            block.load_state_dict(right.state_dict())
    x = torch.rand(10, H)
    _, before, after = rewrite(right, x)
    _, _, other = rewrite(wrong, x)
    assert_same_function(before, after)
    with pytest.raises(AssertionError, match="value 0"):
        assert_same_function(before, other)


def test_a_block_run_twice_gives_two_named_regions() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Grouped()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x + self.block(x))

    found = capture(Twice(), torch.randn(6, H))
    gm = PassRunner(PIPELINE).run(found.graph(), found.inputs, config=IDENTITY)
    assert [r.name for r in gm.meta["regions"]] == ["block", "block#2"]
    assert {r.w13.name for r in gm.meta["regions"]} == {"block.w13"}
    assert_same_function(run_with_gradients(found.graph(), found.args), run_with_gradients(gm, found.args))


def test_experts_by_token_id() -> None:
    """A table of expert ids, read by one token id per row: a table of integers, not a stack of weights."""

    class ByTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Buffer(torch.stack([torch.randperm(E)[:K] for _ in range(32)]))
            self.score = nn.Linear(H, E)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            tokens = (8 * x.detach()[:, :1].abs()).long() % 32
            ids = self.table[tokens.reshape(-1)].long()
            return self.score(x).sigmoid().gather(1, ids), ids

    block = Grouped()
    block.router = ByTable()  # type: ignore[assignment]
    region, before, after = rewrite(block, torch.randn(10, H))
    assert region.top_k == K
    assert_same_function(before, after)
