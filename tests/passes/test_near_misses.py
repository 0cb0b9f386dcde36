"""Graphs that are almost a mixture-of-experts block: matched correctly, or refused with the reason and the node.

Each case edits the captured graph of the hand-written grouped block. What is matched has to compute what the edited
graph computes; what is refused has to name the cause. Nothing may be skipped in silence.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from tests.passes.blocks import E, H, I, K, captured_grouped, find, insert_after, run_with_gradients
from trace_compile.errors import NoMoERegionError
from trace_compile.ops.tolerance import check_close
from trace_compile.passes import PIPELINE, Mode, PassRunner, match_moe
from trace_compile.passes.graph import op_name, output_of

Edit = Callable[[GraphModule], None]


def edited(edit: Edit) -> GraphModule:
    gm = captured_grouped().graph()
    edit(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def first_gemm(gm: GraphModule) -> torch.fx.Node:
    return find(gm, "grouped_mm_fallback", 0)


def second_gemm(gm: GraphModule) -> torch.fx.Node:
    return find(gm, "grouped_mm_fallback", 1)


# --- matched ----------------------------------------------------------------------------------------------------------


def extra_view(gm: GraphModule) -> None:
    insert_after(find(gm, "index_add").args[3], "call_method", "view", -1, H)  # type: ignore[arg-type]


def views_of_ids(gm: GraphModule) -> None:
    flat = find(gm, "flatten")
    insert_after(insert_after(flat, "call_method", "unsqueeze", -1), "call_method", "reshape", -1)


def commuted_products(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if op_name(node) == "mul":
            node.args = node.args[::-1]


def commuted_bias(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if op_name(node) == "add":
            node.args = node.args[::-1]


def useless_casts(gm: GraphModule) -> None:
    for node in (first_gemm(gm), second_gemm(gm), find(gm, "silu")):
        insert_after(node, "call_method", "to", torch.float32)
    insert_after(find(gm, "flatten"), "call_method", "long")


def contiguous_rows(gm: GraphModule) -> None:
    insert_after(find(gm, "silu"), "call_method", "contiguous")


def no_renormalisation(gm: GraphModule) -> None:
    node = find(gm, "div")
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    gm.graph.erase_node(node)


def gates_in_double(gm: GraphModule) -> None:
    insert_after(insert_after(find(gm, "div"), "call_method", "double"), "call_method", "float")


def widened_before_gating(gm: GraphModule) -> None:
    """Results and gates in double, their sum rounded back."""
    gated = [n for n in gm.graph.nodes if op_name(n) == "mul"][-1]
    product = insert_after(gated, "call_method", "float")
    for operand in gated.all_input_nodes:
        with gm.graph.inserting_before(gated):
            wide = gm.graph.call_method("double", (operand,))
        wide.meta["example_value"] = operand.meta["example_value"].double()
        gated.replace_input_with(operand, wide)
    gated.meta["example_value"] = gated.meta["example_value"].double()
    assert product.args[0] is gated


def counting_read_elsewhere(gm: GraphModule) -> None:
    """Rows per expert are handed out too: dispatch values may have other readers."""
    output = output_of(gm.graph)
    output.args = ((*output.args[0], find(gm, "cumsum"), find(gm, "floor_divide")),)  # type: ignore[misc]


def bias_in_place(gm: GraphModule) -> None:
    node = find(gm, "add")
    with gm.graph.inserting_before(node):
        new = gm.graph.call_method("add_", node.args)
    new.meta.update(node.meta)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    gm.graph.erase_node(node)


def masked_dropped_rows(gm: GraphModule) -> None:
    """What transformers does for ids of other ranks, with this block's own E."""
    _mask_rows(gm, E)


def _mask_rows(gm: GraphModule, experts: int) -> None:
    gemm, order, flat = first_gemm(gm), find(gm, "argsort"), find(gm, "flatten")
    with gm.graph.inserting_before(gemm):
        ids = gm.graph.call_function(operator.getitem, (flat, order))
        outside = gm.graph.call_function(operator.ge, (ids, experts))
        column = gm.graph.call_method("unsqueeze", (outside, -1))
    value = flat.meta["example_value"][order.meta["example_value"]]
    ids.meta["example_value"] = value
    outside.meta["example_value"] = value >= experts
    column.meta["example_value"] = (value >= experts).unsqueeze(-1)
    masked = insert_after(gemm, "call_method", "mul", 1.0)
    masked.target, masked.args = "masked_fill", (gemm, column, 0.0)


def computed_weight(gm: GraphModule) -> None:
    weight = next(n for n in gm.graph.nodes if op_name(n) == "transpose")
    insert_after(weight, "call_function", operator.mul, 0.5)


def added_twice(gm: GraphModule) -> None:
    """Summed onto something that is not zero."""
    node = find(gm, "index_add")
    start = node.args[0]
    insert_after(start, "call_function", operator.add, 1.0)  # type: ignore[arg-type]


MATCHED = [
    extra_view,
    views_of_ids,
    commuted_products,
    commuted_bias,
    useless_casts,
    contiguous_rows,
    no_renormalisation,
    gates_in_double,
    widened_before_gating,
    counting_read_elsewhere,
    bias_in_place,
    computed_weight,
    added_twice,
]


@pytest.mark.parametrize("edit", MATCHED, ids=lambda e: e.__name__)
def test_matched(edit: Edit) -> None:
    gm = edited(edit)
    found = captured_grouped()
    before = run_with_gradients(edited(edit), found.args)
    rewritten = PassRunner(PIPELINE).run(gm, found.inputs, config=Mode(scheme=None))
    assert len(rewritten.meta["regions"]) == 1 and rewritten.meta["unmatched"] == ()
    assert not [n for n in rewritten.graph.nodes if op_name(n) == "grouped_mm_fallback"]
    for i, (a, b) in enumerate(zip(run_with_gradients(rewritten, found.args), before, strict=True)):
        check_close(a.float(), b.float(), k=4 * H, stages=6, name=f"value {i}")


# --- refused ----------------------------------------------------------------------------------------------------------


def pre_activation_read_elsewhere(gm: GraphModule) -> None:
    output = output_of(gm.graph)
    output.args = ((*output.args[0], find(gm, "chunk").args[0]),)  # type: ignore[misc]


def gate_half_read_elsewhere(gm: GraphModule) -> None:
    output = output_of(gm.graph)
    output.args = ((*output.args[0], find(gm, "silu").args[0]),)  # type: ignore[misc]


def expert_results_read_elsewhere(gm: GraphModule) -> None:
    output = output_of(gm.graph)
    output.args = ((*output.args[0], second_gemm(gm)),)  # type: ignore[misc]


def half_precision_between(gm: GraphModule) -> None:
    insert_after(insert_after(find(gm, "silu"), "call_method", "half"), "call_method", "float")


def rounded_pre_activation(gm: GraphModule) -> None:
    insert_after(insert_after(first_gemm(gm), "call_method", "bfloat16"), "call_method", "float")


def gates_twice(gm: GraphModule) -> None:
    gated = [n for n in gm.graph.nodes if op_name(n) == "mul"][-1]
    column = next(n for n in gated.all_input_nodes if op_name(n) == "unsqueeze")
    insert_after(gated, "call_function", operator.mul, 1.0)
    again = next(n for n in gated.users)
    again.args = (gated, column)


def gates_never(gm: GraphModule) -> None:
    gated = [n for n in gm.graph.nodes if op_name(n) == "mul"][-1]
    rows = next(n for n in gated.all_input_nodes if op_name(n) != "unsqueeze")
    gated.replace_all_uses_with(rows)
    gm.graph.erase_node(gated)


def gates_in_another_order(gm: GraphModule) -> None:
    """Gates by token, rows by expert."""
    column = next(n for n in gm.graph.nodes if op_name(n) == "unsqueeze")
    column.args = (column.args[0].args[0], -1)  # type: ignore[union-attr]


def unknown_elementwise(gm: GraphModule) -> None:
    insert_after(find(gm, "silu"), "call_method", "erf")


def learned_scale_inside(gm: GraphModule) -> None:
    """A parameter multiplied into the activation."""
    silu = find(gm, "silu")
    scale = next(n for n in gm.graph.nodes if n.op == "placeholder" and "b2" in n.name)
    with gm.graph.inserting_before(silu):
        row = gm.graph.call_function(operator.getitem, (scale, (0, slice(0, I))))
    row.meta["example_value"] = scale.meta["example_value"][0, :I]
    insert_after(silu, "call_function", operator.mul, 1.0)
    next(n for n in silu.users).args = (silu, row)


def normalised_inside(gm: GraphModule) -> None:
    insert_after(find(gm, "silu"), "call_method", "softmax", -1)


def other_ends(gm: GraphModule) -> None:
    """Group ends through something the rules do not know."""
    insert_after(find(gm, "cumsum"), "call_method", "clamp", 0)


def limited_to_fewer_experts(gm: GraphModule) -> None:
    _mask_rows(gm, E - 1)


def wrong_repetition(gm: GraphModule) -> None:
    node = find(gm, "floor_divide")
    node.args = (node.args[0], K + 1)


def sorted_descending(gm: GraphModule) -> None:
    node = find(gm, "argsort")
    node.kwargs = {"descending": True}


def weight_from_tokens(gm: GraphModule) -> None:
    weight = next(n for n in gm.graph.nodes if op_name(n) == "transpose")
    x = next(n for n in gm.graph.nodes if n.op == "placeholder" and "x" in n.name)
    insert_after(weight, "call_function", operator.mul, 1.0)
    with gm.graph.inserting_before(next(iter(weight.users))):
        factor = gm.graph.call_method("mean", (x,))
    factor.meta["example_value"] = x.meta["example_value"].mean()
    next(iter(weight.users)).args = (weight, factor)


REFUSED = [
    (pre_activation_read_elsewhere, "uses .*, which is inside the expert block"),
    (gate_half_read_elsewhere, "uses gate, which is inside the expert block"),
    (half_precision_between, "cast to torch.float16 inside the activation"),
    (rounded_pre_activation, "activation not understood: gate: getitem is no elementwise operation"),
    (unknown_elementwise, "erf is no elementwise operation that an activation may use"),
    (learned_scale_inside, "getitem is no elementwise operation"),
    (normalised_inside, "softmax is no elementwise operation"),
    (limited_to_fewer_experts, r"ids are limited to \[7, 8\], but there are 8 experts"),
    (other_ends, "do not come from counting the expert ids.*getitem is no elementwise operation"),
    (sorted_descending, "not known to be sorted by expert.*getitem is no elementwise operation"),
    (weight_from_tokens, "weight operand .* is computed, not a stacked parameter"),
]

BY_ROW = [
    (expert_results_read_elsewhere, "is used by .*; one step of the weighted sum was expected"),
    (gates_twice, "mul is no known step from expert results to tokens"),
    (gates_never, "no gate weights are applied"),
    (gates_in_another_order, "mul is no known step from expert results to tokens"),
    (wrong_repetition, "rows .* repeat each token 3 times|no known step from expert results to tokens"),
]
"""What is done with the experts' rows is not understood, what they compute is."""


@pytest.mark.parametrize(("edit", "reason"), BY_ROW, ids=[e.__name__ for e, _ in BY_ROW])
def test_the_experts_alone_with_the_reason(edit: Edit, reason: str) -> None:
    gm, found = edited(edit), captured_grouped()
    before = run_with_gradients(edited(edit), found.args)
    rewritten = PassRunner(PIPELINE).run(gm, found.inputs, config=Mode(scheme=None))
    (region,) = rewritten.meta["regions"]
    assert re.search(reason, region.slots) and "blocks.py:" in region.slots and region.top_k == 1
    for i, (a, b) in enumerate(zip(run_with_gradients(rewritten, found.args), before, strict=True)):
        check_close(a.float(), b.float(), k=4 * H, stages=6, name=f"value {i}")


@pytest.mark.parametrize(("edit", "reason"), REFUSED, ids=[e.__name__ for e, _ in REFUSED])
def test_refused_with_the_reason(edit: Edit, reason: str) -> None:
    gm = edited(edit)
    before = str(gm.graph)
    with pytest.raises(NoMoERegionError, match=reason) as raised:
        PassRunner(PIPELINE, disabled=("canonicalize",)).run(gm, captured_grouped().inputs, config=Mode(scheme=None))
    assert "blocks.py:" in str(raised.value)  # the line of the model
    assert str(gm.graph) == before  # nothing was changed


def test_the_mask_with_the_blocks_own_number_of_experts_is_matched() -> None:
    """The counterpart of ``limited_to_fewer_experts``."""
    matches, unmatched = match_moe(edited(masked_dropped_rows))
    assert len(matches) == 1 and unmatched == []


def test_a_match_is_pure() -> None:
    gm = captured_grouped().graph()
    before = str(gm.graph)
    first, second = match_moe(gm), match_moe(gm)
    assert first[0][0].region == second[0][0].region
    assert str(gm.graph) == before


def test_random_dispatch_edits_never_change_the_function_silently() -> None:
    """Every single argument of the dispatch nodes replaced in turn: a match must still equal the edited graph."""
    found = captured_grouped()
    names = [n.name for n in found.gm.graph.nodes if op_name(n) in ("argsort", "scatter_add", "cumsum", "index_add")]
    for name in names:
        for position, value in ((1, 0), (1, -1), (2, 1)):
            gm = found.graph()
            node = next(n for n in gm.graph.nodes if n.name == name)
            if position >= len(node.args) or isinstance(node.args[position], torch.fx.Node):
                continue
            node.update_arg(position, value)
            gm.recompile()
            matches, unmatched = match_moe(gm)
            assert len(matches) + len(unmatched) > 0
            if matches:
                try:
                    expected = run_with_gradients(gm, found.args)
                except RuntimeError:  # such a graph never runs
                    continue
                rewritten = PassRunner(PIPELINE).run(gm, found.inputs, config=Mode(scheme=None))
                for a, b in zip(run_with_gradients(rewritten, found.args), expected, strict=True):
                    check_close(a, b, k=4 * H, stages=6)
