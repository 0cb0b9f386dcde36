"""The expert GEMMs of real layers compile for Hopper and Blackwell without a GPU, on the tensor cores that were meant.

Unpacked weights go to bfloat16 tensor cores; packed ones, on Blackwell, to those that multiply FP4 with a scale for
every block. No launch that is chosen spills a register.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trace_compile.kernels.codegen import compile_activation
from trace_compile.kernels.grouped_gemm import _expert_gemm_kernel
from trace_compile.kernels.grouped_gemm_fp4 import _expert_gemm_fp4_kernel
from trace_compile.kernels.launch import Target
from trace_compile.kernels.moe_launch import GemmLaunch, moe_launch, segments
from trace_compile.ops import SWIGLU

QWEN, GPT_OSS, MIXTRAL = (128, 2048, 768, 8), (32, 2880, 2880, 4), (8, 4096, 14336, 2)
TYPES = {"x_outer_ptr": "*fp32", "outer_ptr": "*fp32", "out_ptr": "*bf16", "expert_ptr": "*i32", "slots_ptr": "*i32"}
UNPACKING = TYPES | {"x_ptr": "*bf16", "codes_ptr": "*i16", "scales_ptr": "*i32"}
FP4 = TYPES | {"x_codes_ptr": "*u8", "x_scales_ptr": "*u8", "codes_ptr": "*u8", "scales_ptr": "*u8"}
BLOCK_SCALED = "kind::mxf4nvf4.block_scale.scale_vec::4X"
"""16 elements share an E4M3 scale."""
# Layer, tokens, whether gate/up; the remaining ones are compiled with the slow tests.
FEW = [(QWEN, 8, True), (MIXTRAL, 8, False)]
CASES = [
    pytest.param(layer, tokens, first, marks=[] if (layer, tokens, first) in FEW else [pytest.mark.slow])
    for layer in (QWEN, GPT_OSS, MIXTRAL)
    for tokens in (1, 8, 32, 128, 512, 4096)
    for first in (True, False)
]


def compiled(
    kernel: Any, types: dict[str, str], layer: tuple[int, ...], first: bool, launch: GemmLaunch, capability: int
) -> Any:
    experts, hidden, width, top_k = layer
    columns, k = (2 * width, hidden) if first else (hidden, width)
    act = compile_activation(SWIGLU, torch.bfloat16).forward if first else None
    constants = {
        "bias_ptr": None,
        "EXPERTS": experts,
        "K": k,
        "COLUMNS": columns,
        "WIDTH": width if first else hidden,
        "TOP_K": top_k if first else 1,
        "GATED": first,
        "ACT": act,
        "TILE": launch.tile,
        "BLOCK_N": launch.block_n,
        "STAGES": launch.stages,
        "SEGMENTS": segments(columns, k),
        "SIDE_BY_SIDE": launch.side_by_side,
    }
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types}
    source = ASTSource(kernel, signature, {n: v for n, v in constants.items() if n in names}, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": launch.num_warps})


def assert_no_spills(built: Any, folder: Path) -> None:
    (folder / "cubin").write_bytes(built.asm["cubin"])
    usage = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "cubin")]
    assert "STACK:0 " in subprocess.run(usage, capture_output=True, text=True, check=True).stdout


def chosen(layer: tuple[int, ...], tokens: int, first: bool, target: Target, *, fp4: bool = False) -> GemmLaunch:
    experts, hidden, width, top_k = layer
    plan = moe_launch(tokens, top_k, experts, hidden, 2 * width, width, target, fp4=fp4)
    return plan.gate_up if first else plan.down


@pytest.mark.parametrize(("layer", "tokens", "first"), CASES)
def test_unpacking_on_hopper(layer: tuple[int, ...], tokens: int, first: bool, tmp_path: Path) -> None:
    launch = chosen(layer, tokens, first, Target(90, 132, "NVIDIA H200"))
    built = compiled(_expert_gemm_kernel, UNPACKING, layer, first, launch, 90)
    ptx = built.asm["ptx"]
    assert ".target sm_90a" in ptx and re.search(r"(wgmma\.mma_async|mma)\.sync\S*bf16", ptx)
    # One register of two weights a multiplication, and nothing of the operand goes back through shared memory.
    assert "mul.bf16x2" in ptx
    assert_no_spills(built, tmp_path)


@pytest.mark.parametrize("capability", [100, 120])
@pytest.mark.parametrize(("layer", "tokens", "first"), CASES)
def test_block_scaled_on_blackwell(
    layer: tuple[int, ...], tokens: int, first: bool, capability: int, tmp_path: Path
) -> None:
    launch = chosen(layer, tokens, first, Target(capability, 148), fp4=True)
    built = compiled(_expert_gemm_fp4_kernel, FP4, layer, first, launch, capability)
    ptx = built.asm["ptx"]
    assert f".target sm_{capability}a" in ptx
    instruction = "tcgen05.mma" if capability == 100 else "mma.sync"
    assert re.search(rf"{re.escape(instruction)}\S*{re.escape(BLOCK_SCALED)}", ptx)
    assert_no_spills(built, tmp_path)


@pytest.mark.parametrize("capability", [100, 120])
def test_unpacking_on_blackwell(capability: int, tmp_path: Path) -> None:
    """What runs 4-bit weights with 16-bit activations there."""
    launch = chosen(QWEN, 128, True, Target(capability, 148))
    built = compiled(_expert_gemm_kernel, UNPACKING, QWEN, True, launch, capability)
    assert f".target sm_{capability}a" in built.asm["ptx"]
    assert_no_spills(built, tmp_path)
