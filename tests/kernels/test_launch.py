"""Launch choices are pure functions: every choice is legal, covers the row, and fills the device where it can."""

from __future__ import annotations

import itertools

from trace_compile.kernels.launch import INTERPRETER, Target, quantize_launch


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
