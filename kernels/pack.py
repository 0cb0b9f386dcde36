"""Packs expert weights: every expert in two launches, from the parameter's own dtype to linear codes and scales.

The first reads the weight for each expert's largest magnitude, from which the outer scale follows; the second quantizes
(``quantize``). The bytes are those of ``ops.weights.pack_experts``, which stays the reference and gives the named error
for what is not finite.

Invariant: nothing but codes, scales and one float32 an expert is allocated; a transposed or interleaved parameter is
copied once, in its own dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_compile.kernels import nvfp4
from trace_compile.kernels.quantize import INTERPRETING, quantize_rows
from trace_compile.kernels.rows import on
from trace_compile.numerics.formats import FORMATS
from trace_compile.ops.scheme import OperandScheme
from trace_compile.ops.weights import Packed

_FORMAT = FORMATS["nvfp4"]


def pack(weight: Tensor, scheme: OperandScheme) -> Packed | None:
    """``weight [E, N, K]`` -> its packed form, or None where the reference is to pack it: another device, dtype or
    scheme, no elements, or values that are not finite. Waits for the device once."""
    if not (weight.is_cuda or INTERPRETING) or weight.dim() != 3 or weight.numel() == 0:
        return None
    if weight.shape[-1] % _FORMAT.block:
        return None
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    if FORMATS.get(scheme.fmt) is not _FORMAT or scheme.profile != "pow2" or scheme.residual is not None:
        return None
    weight = weight.contiguous()
    experts, n, k = weight.shape
    outer, finite = _outer_scales(weight, scheme.outer == "tensor")
    q = quantize_rows(weight.view(experts * n, k), outer.repeat_interleave(n))
    return Packed(q.packed.view(experts, n, -1), q.scales.view(experts, n, -1), outer) if bool(finite) else None


def _outer_scales(weight: Tensor, shared: bool) -> tuple[Tensor, Tensor]:
    """Outer scales float32 [E], the largest expert's for all if ``shared``, and whether all values are finite."""
    experts, size = weight.shape[0], weight[0].numel()
    top = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    block = 4096
    with on(weight):
        _amax_kernel[(triton.cdiv(size, 8 * block), experts)](weight, top, size, TURNS=8, BLOCK=block, num_warps=4)
        if shared:
            top = top.amax().expand(experts).contiguous()
        outer = torch.empty(experts, dtype=torch.float32, device=weight.device)
        _outer_kernel[(triton.cdiv(experts, 128),)](top, outer, experts, BLOCK=128, num_warps=4)
    return outer, (top < nvfp4.INFINITY.value).all()


@triton.jit
def _amax_kernel(weight_ptr, top_ptr, size, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (parts, experts). A maximum of bit patterns: those of Inf and NaN are above all others."""
    expert = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * (TURNS * BLOCK)
    largest = tl.zeros([BLOCK], tl.int32)
    for turn in tl.static_range(TURNS):
        i = start + turn * BLOCK + tl.arange(0, BLOCK)
        x = nvfp4.to_float32(tl.load(weight_ptr + expert * size + i, mask=i < size, other=0.0))
        largest = tl.maximum(largest, nvfp4.magnitude_bits(x))
    tl.atomic_max(top_ptr + expert, tl.max(largest, axis=0))


@triton.jit
def _outer_kernel(top_ptr, outer_ptr, experts, BLOCK: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(top_ptr + expert, mask=expert < experts, other=0)
    tl.store(outer_ptr + expert, nvfp4.power_of_two(nvfp4.outer_exponent(top)), mask=expert < experts)
