"""``nvfp4_moe`` for inference on a GPU: both expert GEMMs from packed weights, with nothing between them but rows.

    tiles     which expert multiplies which slots           one launch; none where a tile is one slot
    x         rounded to NVFP4 where the scheme says so     one launch
    gate/up   GEMM, scales, bias, activation                one launch
    h         rounded to NVFP4 where the scheme says so     one launch
    down      GEMM, scales, bias                            one launch
    y         gates times rows, summed in slot order        one launch

Same operands, results and rounding as ``ops.nvfp4_moe.native``, which is the reference; sums of products differ in
their order. A token's result has the same bits whatever else is in the batch and however the launches are chosen.

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
from trace_compile.kernels.launch import GemmLaunch, MoELaunch, moe_launch, target_of
from trace_compile.kernels.observe import observed_by_slot
from trace_compile.kernels.recording import Recorder
from trace_compile.kernels.round_rows import round_rows
from trace_compile.numerics.formats import FORMATS
from trace_compile.ops.activation import Activation
from trace_compile.ops.nvfp4_moe import NvFp4MoEOperands, Out, check, in_order, native
from trace_compile.ops.quads import in_quads, refuses_quads
from trace_compile.ops.scheme import OperandScheme


def refuses(o: NvFp4MoEOperands) -> str | None:
    """Why these kernels do not run the op on these operands, or None."""
    if o.trains:
        return "runs inference; gradients need what it does not save"
    if o.guidance != "none" or o.diagnose:
        return "takes no guidance"
    if o.x.device.type != "cuda":
        return f"needs a GPU, x is on {o.x.device.type}"
    if o.x.dtype != torch.bfloat16:
        return f"multiplies in bfloat16, x is {o.x.dtype}"
    if o.gates.dtype == torch.float64:
        return "gates are float64"
    weight, act = o.schemes.weight, o.schemes.act
    reason = refuses_quads(weight, o.x.shape[1], o.width)
    if reason is not None:
        return reason
    if not (in_quads(o.c13) and in_quads(o.c2)):
        return "weights are packed in the linear form"
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
    (tokens, hidden), (experts, _) = o.x.shape, o.shape13
    top_k = o.expert_ids.shape[1]
    if tokens == 0 or top_k == 0:
        return dict(enumerate(native(o)))
    recorder = Recorder.of(o)
    activation = Activation.parse(o.activation)
    plan = launch or moe_launch(tokens, top_k, experts, hidden, o.width, target_of(o.x.device))
    ids = o.expert_ids.contiguous()
    tiles = tiles_of(ids, experts, plan.gate_up.tile)
    down_tiles = tiles if plan.down.tile == plan.gate_up.tile else tiles_of(ids, experts, plan.down.tile)
    x = _rows(o.x.contiguous(), o, 0, top_k, recorder)
    h = _hidden(x, Weights(o.c13, o.s13, o.g13, o.b13), tiles, plan.gate_up, activation)
    hq = _rows(h, o, 1, 1, recorder)
    out = expert_gemm(hq, Weights(o.c2, o.s2, o.g2, o.b2), down_tiles, plan.down)
    found: dict[int, Tensor] = {int(Out.Y): combine(out, o.gates, ids, experts)}
    if recorder is None:
        return found | observed_by_slot(o, h)
    assert x.outer is not None and hq.outer is not None
    return found | recorder.results((x.outer, hq.outer))


def _rows(x: Tensor, o: NvFp4MoEOperands, which: int, top_k: int, recorder: Recorder | None) -> Rows:
    """``x`` as the scheme wants it multiplied, with the traced outer scale of gate/up (0) or down (1) if it is."""
    act = o.schemes.act
    if act is None:
        return Rows(x, None, top_k)
    traced = None
    if act.outer == "traced":
        assert o.outer_in is not None
        traced = o.outer_in[which]
    return Rows(*round_rows(x, traced, recorder=recorder, which=which), top_k)


def _hidden(x: Rows, w13: Weights, tiles: Tiles, launch: GemmLaunch, activation: Activation) -> Tensor:
    if codegen.unsupported(activation, x.values.dtype) is not None:
        return activation.evaluate(expert_gemm(x, w13, tiles, launch))
    act = codegen.compile_activation(activation, x.values.dtype).forward
    return expert_gemm(x, w13, tiles, launch, Epilogue(act, activation.gated))
