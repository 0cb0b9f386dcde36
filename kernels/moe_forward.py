"""``nvfp4_moe`` for inference on a GPU: both expert GEMMs from packed weights, with nothing between them but rows.

    tiles     which expert multiplies which slots           one launch; none where a tile is one slot
    x         rounded to NVFP4 where the scheme says so     one launch
    gate/up   GEMM, scales, bias, activation                one launch
    h         rounded to NVFP4 where the scheme says so     one launch
    down      GEMM, scales, bias                            one launch
    y         gates times rows, summed in slot order        one launch

Same operands, results and rounding as ``ops.nvfp4_moe.native``, which is the reference; sums of products differ in
their order. A token's result has the same bits whatever else is in the batch and however the launches are chosen.

Weights in quads are unpacked to bfloat16 in the GEMMs; linear ones go to FP4 tensor cores as they are, with packed
rows.

Recording adds no launch but those of cleared counters: rows are recorded where they are rounded (``recording``), or
only looked at where they are not (``observe``).

An activation that has no device form runs as torch operations between the GEMMs.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from trace_compile.kernels import codegen
from trace_compile.kernels.dispatch import Tiles, combine, tiles_of
from trace_compile.kernels.grouped_gemm import Epilogue, Rows, Weights, expert_gemm
from trace_compile.kernels.grouped_gemm_fp4 import PackedRows, expert_gemm_fp4
from trace_compile.kernels.launch import target_of, unsuited
from trace_compile.kernels.moe_launch import GemmLaunch, MoELaunch, moe_launch
from trace_compile.kernels.observe import observed_by_slot
from trace_compile.kernels.quantize import quantize_rows
from trace_compile.kernels.recording import Recorder
from trace_compile.kernels.round_rows import round_rows
from trace_compile.numerics.formats import FORMATS
from trace_compile.ops.activation import Activation
from trace_compile.ops.nvfp4_moe import NvFp4MoEOperands, Out, check, in_order, native
from trace_compile.ops.quads import has_fp4, in_quads, refuses_quads
from trace_compile.ops.scheme import OperandScheme


def refuses(o: NvFp4MoEOperands) -> str | None:
    """Why these kernels do not run the op on these operands, or None."""
    if o.trains:
        return "runs inference; gradients need what it does not save"
    if o.guidance != "none" or o.diagnose:
        return "takes no guidance"
    reason = unsuited(o.x, o.gates)
    if reason is not None:
        return reason
    weight, act = o.schemes.weight, o.schemes.act
    reason = refuses_quads(weight, o.x.shape[1], o.width)
    if reason is not None:
        return reason
    if not (in_quads(o.c13) and in_quads(o.c2)) and (act is None or not has_fp4(o.x.device)):
        return "weights are packed in the linear form, which needs FP4 tensor cores and 4-bit activations"
    if not in_quads(o.c13) and o.record != "none":
        return "packed rows are not recorded"
    return None if act is None else _refuses_rows(act)


def _refuses_rows(act: OperandScheme) -> str | None:
    if FORMATS[act.fmt] is not FORMATS["nvfp4"] or act.profile != "pow2":
        return f"activations are rounded as nvfp4:pow2, not {act.key}"
    if act.residual is not None:
        return "the rows have a residual"
    return "the whole batch sets the outer scale" if act.outer == "tensor" else None


def forward(o: NvFp4MoEOperands, launch: MoELaunch | None = None) -> tuple[Tensor, ...]:
    """The op's results: ``Out.Y``, and what is recorded. ``launch`` overrides the choice and changes no bit."""
    check(o)
    with torch.cuda.device(o.x.device) if o.x.is_cuda else nullcontext():
        return in_order(_forward(o, launch), o)


def _forward(o: NvFp4MoEOperands, launch: MoELaunch | None) -> dict[int, Tensor]:
    (tokens, hidden), (experts, columns) = o.x.shape, o.shape13
    top_k = o.expert_ids.shape[1]
    if tokens == 0 or top_k == 0:
        return dict(enumerate(native(o)))
    recorder = Recorder.of(o)
    activation = Activation.parse(o.activation)
    target, fp4 = target_of(o.x.device), not in_quads(o.c13)
    plan = launch or moe_launch(tokens, top_k, experts, hidden, columns, o.width, target, fp4=fp4)
    ids = o.expert_ids.contiguous()
    tiles = tiles_of(ids, experts, plan.gate_up.tile)
    down_tiles = tiles if plan.down.tile == plan.gate_up.tile else tiles_of(ids, experts, plan.down.tile)
    epilogue = _epilogue(activation, o.x.dtype)
    x = _rows(o.x.contiguous(), o, 0, top_k, recorder)
    h = _gemm(x, Weights(o.c13, o.s13, o.g13, o.b13), tiles, plan.gate_up, epilogue)
    if epilogue is None:
        h = activation.evaluate(h)
    hq = _rows(h, o, 1, 1, recorder)
    out = _gemm(hq, Weights(o.c2, o.s2, o.g2, o.b2), down_tiles, plan.down, None)
    found: dict[int, Tensor] = {int(Out.Y): combine(out, o.gates, ids, experts)}
    if recorder is None:
        return found | observed_by_slot(o, h)
    assert x.outer is not None and hq.outer is not None
    return found | recorder.results((x.outer, hq.outer))


def _rows(x: Tensor, o: NvFp4MoEOperands, which: int, top_k: int, recorder: Recorder | None) -> Rows | PackedRows:
    """``x`` as the scheme wants it multiplied, with the traced outer scale of gate/up (0) or down (1) if it is."""
    act = o.schemes.act
    if act is None:
        return Rows(x, None, top_k)
    traced = None
    if act.outer == "traced":
        assert o.outer_in is not None
        traced = o.outer_in[which]
    if in_quads(o.c13):
        return Rows(*round_rows(x, traced, recorder=recorder, which=which), top_k)
    q = quantize_rows(x, traced)
    return PackedRows(q.packed, q.scales, q.outer.expand(x.shape[0]).contiguous(), top_k)


def _epilogue(activation: Activation, dtype: torch.dtype) -> Epilogue | None:
    """The activation as device code; None where it has no such form."""
    if codegen.unsupported(activation, dtype) is not None:
        return None
    return Epilogue(codegen.compile_activation(activation, dtype).forward, activation.gated)


def _gemm(
    rows: Rows | PackedRows, weights: Weights, tiles: Tiles, launch: GemmLaunch, epilogue: Epilogue | None
) -> Tensor:
    if isinstance(rows, PackedRows):
        return expert_gemm_fp4(rows, weights, tiles, launch, epilogue)
    return expert_gemm(rows, weights, tiles, launch, epilogue)
