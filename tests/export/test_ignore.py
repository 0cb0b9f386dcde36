"""The ignore list: every unpacked module named and no packed one, in both languages, as engines would match."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest

from trace_compile.errors import ExportError
from trace_compile.export.ignore import REGEX, WILDCARD, IgnoreStyle, ancestors, ignore_list


def experts(layers: range | list[int], count: int = 4) -> set[str]:
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        for layer in layers
        for expert in range(count)
        for projection in ("gate", "up", "down")
    }


OTHERS = {"lm_head", "model.embed_tokens", "model.norm"} | {
    f"model.layers.{layer}.{leaf}"
    for layer in range(12)
    for leaf in (
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "mlp.gate",
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert_gate",
    )
}


def engine_matches(style: IgnoreStyle, patterns: list[str], module: str) -> bool:
    """Written apart from the styles' own matching: expressions from the start; wildcards, or anywhere in the name."""
    if style is REGEX:
        return any(bool(re.compile(p[3:]).match(module)) if p[:3] == "re:" else p == module for p in patterns)
    return any(fnmatchcase(module, p) or module.find(p) >= 0 for p in patterns)


@pytest.mark.parametrize("style", [REGEX, WILDCARD])
@pytest.mark.parametrize("unpacked", [[], [1], [1, 10], [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
def test_exactly_the_unpacked_modules_are_named(style: IgnoreStyle, unpacked: list[int]) -> None:
    packed = experts([layer for layer in range(12) if layer not in unpacked])
    modules = OTHERS | experts(unpacked)
    patterns = ignore_list(style, modules, packed)
    assert all(engine_matches(style, patterns, module) for module in modules)
    hit = {module for module in packed | ancestors(packed) if engine_matches(style, patterns, module)}
    assert not hit
    # An engine asks about a whole layer of experts under the name that holds them, or by expert 0.
    for layer in unpacked:
        container = f"model.layers.{layer}.mlp.experts"
        assert engine_matches(style, patterns, f"{container}.0.gate_proj")
        assert style is REGEX or engine_matches(style, patterns, container)
    assert len(patterns) <= 9 + 2 * len(unpacked)


@pytest.mark.parametrize("style", [REGEX, WILDCARD])
def test_patterns_survive_another_prefix(style: IgnoreStyle) -> None:
    patterns = ignore_list(style, OTHERS, experts(range(12)))
    renamed = [m.replace("model.layers", "language_model.model.layers") for m in OTHERS if ".layers." in m]
    assert all(engine_matches(style, patterns, module) for module in renamed)


def test_router_is_not_named_by_a_prefix_of_the_experts() -> None:
    packed = {"layers.0.mlp.gate_up_proj"}
    assert ignore_list(WILDCARD, {"layers.0.mlp.gate"}, packed) == ["*.mlp.gate"]
    assert ignore_list(REGEX, {"layers.0.mlp.gate"}, packed) == [r"re:.*\.mlp\.gate$"]


def test_fused_projections_of_dense_layers_are_named_exactly() -> None:
    dense = {f"model.layers.0.mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")}
    assert dense <= set(ignore_list(WILDCARD, dense, experts([1])))


def test_a_module_that_no_pattern_can_single_out_is_an_error() -> None:
    with pytest.raises(ExportError, match="names gate without"):
        ignore_list(WILDCARD, {"gate"}, {"layers.0.gate_proj"})


def test_ancestors() -> None:
    assert ancestors(["a.b.c", "a.d"]) == {"a", "a.b"}
