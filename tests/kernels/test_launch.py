"""Launch choices are pure functions: every choice is legal, covers the row, and fills the device where it can."""

from __future__ import annotations

import itertools

from trace_compile.kernels.launch import (
    INTERPRETER,
    Target,
    activate_launch,
    quantize_launch,
    rows_launch,
    words_launch,
)
from trace_compile.kernels.moe_launch import GemmLaunch, MoELaunch, moe_launch, segments


def power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def test_quantize_launch_is_legal() -> None:
    shapes = itertools.product((1, 8, 132, 4096, 1_000_000), (16, 48, 80, 768, 2048, 2880, 14336), (True, False))
    for (rows, k, own), target in itertools.product(shapes, (INTERPRETER, Target(90, 132), Target(100, 148))):
        plan = quantize_launch(rows, k, own, target)
        case = (rows, k, own, target, plan)
        assert power_of_two(plan.block_m) and power_of_two(plan.block_k) and plan.block_k >= 16, case
        assert power_of_two(plan.num_warps) and plan.num_warps <= 16, case
        assert 1 <= plan.splits <= -(-k // plan.block_k), case


def test_few_rows_are_split_over_the_device() -> None:
    target = Target(90, 132)
    assert quantize_launch(1, 14336, True, target).splits > 1
    assert quantize_launch(100_000, 14336, True, target).splits == 1


H200 = Target(90, 132, "NVIDIA H200")
LAYERS = [(128, 2048, 1536, 768, 8), (32, 2880, 5760, 2880, 4), (8, 4096, 28672, 14336, 2), (6, 128, 192, 64, 2)]


def test_moe_launch_is_legal() -> None:
    for (experts, hidden, columns, width, top_k), target in itertools.product(LAYERS, (H200, Target(100, 148))):
        for tokens in (1, 2, 8, 33, 128, 700, 4096, 100_000):
            plan = moe_launch(tokens, top_k, experts, hidden, columns, width, target)
            for launch, rows, k in ((plan.gate_up, columns, hidden), (plan.down, hidden, width)):
                case = (experts, tokens, target, launch)
                sizes = (launch.tile, launch.block_n, launch.num_warps)
                assert all(map(power_of_two, sizes)) and launch.tile >= 8 and launch.stages >= 2, case
                assert launch.block_n >= 16 * launch.num_warps or launch.side_by_side, case
                assert not launch.side_by_side or launch.num_warps == segments(rows, k) > 1, case


def test_measured_launches_are_taken_by_the_nearest_tokens() -> None:
    def chosen(tokens: int, target: Target) -> MoELaunch:
        return moe_launch(tokens, 8, 128, 2048, 1536, 768, target)

    assert chosen(128, H200) == MoELaunch(GemmLaunch(16, 128, 4, 4), GemmLaunch(16, 128, 4, 4))
    assert chosen(100, H200) == chosen(128, H200) == chosen(200, H200) != chosen(32, H200)
    assert chosen(512, H200) != chosen(512, Target(90, 132, "another"))


def test_segments_depend_on_the_weight_alone() -> None:
    assert [segments(n, k) for n, k in ((1536, 2048), (2048, 768), (5760, 2880), (2880, 2880), (4096, 14336))] == [
        1, 1, 1, 2, 4
    ]  # fmt: skip
    for n, k in itertools.product((64, 4096, 30000), range(64, 20000, 64)):
        parts, chunks = segments(n, k), k // 64
        assert power_of_two(parts) and (parts - 1) * -(-chunks // parts) < chunks, "every segment has something to add"


def test_launches_on_words_are_legal() -> None:
    """Powers of two; a row with its own outer scale lies in one tile, of up to 1024 blocks where rows are loaded."""
    shapes = itertools.product((1, 4096, 1_000_000), (1, 3, 5, 48, 128, 180, 896, 2048), (True, False))
    for (rows, blocks, own), target in itertools.product(shapes, (INTERPRETER, Target(90, 132))):
        for plan in (words_launch(rows, blocks, own, target), activate_launch(blocks, own, target)):
            case = (rows, blocks, own, target, plan)
            assert all(map(power_of_two, (plan.block_m, plan.block_b, plan.num_warps))), case
            assert plan.num_warps <= 16 and plan.block_m * plan.block_b <= 64 * 2048, case
        assert not own or activate_launch(blocks, own, target).block_b >= blocks
        assert not own or words_launch(rows, blocks, own, target).block_b >= min(blocks, 1024)


def test_rows_launch_is_legal() -> None:
    for words in (2, 6, 10, 96, 256, 360, 1792):
        plan = rows_launch(words)
        assert power_of_two(plan.block_m) and power_of_two(plan.block_k) and plan.block_m * plan.block_k == 1024
