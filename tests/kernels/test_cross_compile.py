"""Compiles kernels for Hopper and Blackwell on any machine: Triton carries the assembler, so no GPU is needed.

What is checked is that code for each target exists and that nothing approximate slipped into it; whether Blackwell runs
it fast is not measured here.
"""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trace_compile.kernels.launch import Target, quantize_launch
from trace_compile.kernels.quantize import _quantize_nvfp4_kernel

TARGETS = {90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("own_outer", [True, False], ids=["own", "given"])
def test_quantize(capability: int, dtype: str, own_outer: bool) -> None:
    k = 2880
    plan = quantize_launch(rows=4096, k=k, own_outer=own_outer, target=Target(capability, 132))
    types = {"x_ptr": f"*{dtype}", "packed_ptr": "*u8", "scales_ptr": "*u8", "outer_ptr": "*fp32"}
    types |= {"rows": "i32", "x_stride": "i32", "outer_stride": "i32"}
    constants = {
        "K": k,
        "OWN_OUTER": own_outer,
        "BLOCK_M": plan.block_m,
        "BLOCK_K": plan.block_k,
        "SPLITS": plan.splits,
    }
    names = _quantize_nvfp4_kernel.arg_names
    # As at a launch, where pointers and the row stride are multiples of 16.
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name in types if name not in ("rows", "outer_stride")
    }
    source = ASTSource(_quantize_nvfp4_kernel, {n: types.get(n, "constexpr") for n in names}, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": plan.num_warps})
    ptx = built.asm["ptx"]
    assert f".target {TARGETS[capability]}" in ptx
    assert len(built.asm["cubin"]) > 1000
    # The float32 path forms no quotient; the 16-bit path forms 1/step once for what a thread holds of a block,
    # a load of 16 bytes, and the error of that is accounted for.
    divisions = 0 if dtype == "fp32" else plan.block_m * plan.block_k // (8 * 32 * plan.num_warps)
    assert ptx.count("div.full.f32") == divisions
    assert not [word for word in ("div.rn", "div.approx", "rcp.approx", "e4m3", "call.uni") if word in ptx]
