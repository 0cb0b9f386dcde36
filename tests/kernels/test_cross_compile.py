"""Compiles kernels for Hopper and Blackwell on any machine: Triton carries the assembler, so no GPU is needed.

What is checked is that code for each target exists and that nothing approximate slipped into it; whether Blackwell runs
it fast is not measured here.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trace_compile.kernels import activate, guided, observe, pack, quantize, routing, rows
from trace_compile.kernels.codegen import compile_activation
from trace_compile.kernels.launch import Target, quantize_launch, rows_launch, words_launch
from trace_compile.kernels.quantize import _quantize_nvfp4_kernel
from trace_compile.kernels.round_rows import _round_rows_kernel
from trace_compile.ops import SWIGLU

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


SWIGLU_CODE = compile_activation(SWIGLU, torch.bfloat16)
K, WIDTH = 2880, 768
WORDS_PLAN = words_launch(10**6, K // 16, True, Target(90, 132))
ROWS_PLAN = rows_launch(K // 8)
INTEGERS = ("rows", "words_stride", "outer_stride", "slots", "experts")
TYPES = {
    "fp32": ("outer", "outers", "guess", "guide_outer"),
    "i64": ("token", "order", "inverse", "expert", "ids", "counts", "hist", "saturated"),
    "i32": ("words", "offsets", "starts", "amax", "top"),
    "u8": ("scales", "guide_scales", "payload", "hit", "dropped", "valid", "packed"),
}
# Kernel, which pointers are not given, constants, warps. Pointers not named in TYPES are bfloat16.
TRAINING: dict[str, tuple[Any, tuple[str, ...], dict[str, Any], int]] = {
    "quantize": (
        quantize._quantize_words_kernel,
        ("values_ptr", "top_ptr"),
        {"ROWS_PER_TOP": 1, "BLOCKS": K // 16, "OWN_OUTER": True, "KEEP_OUTER": True, "BLOCK_M": WORDS_PLAN.block_m}
        | {"BLOCK_B": WORDS_PLAN.block_b},
        WORDS_PLAN.num_warps,
    ),
    "unpack": (
        rows._unpack_kernel,
        (),
        {"ROWS_PER_OUTER": 1, "WORDS": K // 8, "BLOCK_M": ROWS_PLAN.block_m, "BLOCK_W": ROWS_PLAN.block_k},
        ROWS_PLAN.num_warps,
    ),
    "combine": (rows._combine_kernel, (), {"HIDDEN": K, "TOP_K": 8, "BLOCK": 2048}, 8),
    "activate": (
        activate._activate_kernel,
        ("outer_ptr",),
        {"WIDTH": WIDTH, "GATED": True, "ACT": SWIGLU_CODE.forward, "BLOCK": 1024},
        4,
    ),
    "activate_backward": (
        activate._activate_backward_kernel,
        ("bias_dots_ptr",),
        {"WIDTH": WIDTH, "COLUMNS": 2 * WIDTH, "GATED": True, "BLOCK": 1024}
        | {"ACT": SWIGLU_CODE.forward, "VJP": SWIGLU_CODE.derivative},
        4,
    ),
    "guide": (guided._guide_kernel, (), {"K": K, "BITS": True, "BLOCK": 4096}, 16),
    "activate_words": (
        activate._activate_words_kernel,
        ("outer_ptr",),
        {"BLOCKS": WIDTH // 16, "GATED": True, "ACT": SWIGLU_CODE.forward, "BLOCK_M": 2, "BLOCK_B": 64},
        4,
    ),
    "pack_again": (pack._again_kernel, (), {"BLOCKS": K // 16, "BLOCK_M": 1, "BLOCK_B": 64}, 2),
    "statistics": (observe._statistics_kernel, ("order_ptr",), {"K": K, "TOP_K": 8, "BLOCK": 4096}, 16),
    "place": (routing._place_kernel, (), {"TOP_K": 8, "BINS": 256, "CHUNK": 512, "PART": 32}, 8),
}


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("name", TRAINING)
def test_training_kernels(name: str, capability: int, tmp_path: Path) -> None:
    """They compile, and no register is spilled."""
    kernel, absent, constants, warps = TRAINING[name]
    constants = constants | dict.fromkeys(absent)
    kinds = {f"{pointer}_ptr": f"*{kind}" for kind, pointers in TYPES.items() for pointer in pointers}
    if name in ("quantize", "activate_words", "pack_again"):  # in words
        kinds |= dict.fromkeys(("packed_ptr", "values_ptr", "pre_ptr"), "*i32")
    signature = {
        n: "constexpr" if n in constants else "i32" if n in INTEGERS else kinds.get(n, "*bf16")
        for n in kernel.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert f".target {TARGETS[capability]}" in built.asm["ptx"]
    (tmp_path / "cubin").write_bytes(built.asm["cubin"])
    usage = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(tmp_path / "cubin")]
    assert "STACK:0 " in subprocess.run(usage, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("capability", "k", "count", "top_k", "bits"),
    [(90, 192, 256, 1, True), (90, 2048, 256, 1, True), (90, 768, 2048, 8, False), (100, 2048, 256, 1, True)],
)
def test_recording(capability: int, k: int, count: int, top_k: int, bits: bool) -> None:
    """Rows rounded and recorded in one kernel; no step of it is a call, and integers are counted in 64 bits."""
    plan = quantize_launch(rows=count, k=k, own_outer=False, target=Target(capability, 132))
    pointers = {"x_ptr": "*bf16", "values_ptr": "*bf16", "outers_ptr": "*fp32", "outer_ptr": "*fp32", "ids_ptr": "*i64"}
    pointers |= {"valid_ptr": "*i1", "record_ptr": "*u8", "amax_ptr": "*i32", "counts_ptr": "*i64", "hist_ptr": "*i64"}
    pointers |= {"saturated_ptr": "*i64"}
    types = pointers | dict.fromkeys(("rows", "token_stride", "row_stride", "experts"), "i32")
    constants = {"K": k, "BLOCK_M": plan.block_m, "BLOCK_K": plan.block_k, "SPLITS": plan.splits, "TOP_K": 8}
    constants |= {"PER_TOKEN": top_k, "BITS": bits, "OUTER_BYTE": False, "SLOTS": top_k > 1}
    names = _round_rows_kernel.arg_names
    source = ASTSource(_round_rows_kernel, {n: types.get(n, "constexpr") for n in names}, constants)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": plan.num_warps})
    ptx = built.asm["ptx"]
    assert f".target {TARGETS[capability]}" in ptx and "call.uni" not in ptx
    assert "add.u64" in ptx and "atom" in ptx + built.asm["ttgir"]
