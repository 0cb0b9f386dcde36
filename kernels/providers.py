"""Registers the Triton kernels as providers of ops; importing this module is all it takes.

Invariant: each provider is an op with the schema of the op it stands for, and refuses operands it cannot run, with the
reason, so that the next one is asked; native runs what nobody else does.
"""

from __future__ import annotations

import torch

from trace_compile.kernels import moe_forward, pack, train
from trace_compile.ops import Out, Provider, register_provider
from trace_compile.ops import nvfp4_moe as forward_op
from trace_compile.ops import nvfp4_moe_backward as backward_op
from trace_compile.ops.schema import custom_op
from trace_compile.ops.weights import PACKERS

ops = torch.ops.trace_compile

_trains = custom_op("nvfp4_moe_trains", forward_op.NvFp4MoEOperands, len(Out), train.forward, forward_op.fake)
_trains_backward = custom_op(
    "nvfp4_moe_trains_backward", backward_op.BackwardOperands, 6, train.backward, backward_op.fake
)
train.register_autograd(_trains, _trains_backward)
register_provider("nvfp4_moe", Provider("triton_training", ops.nvfp4_moe_trains.default, train.refuses))

custom_op("nvfp4_moe_generates", forward_op.NvFp4MoEOperands, len(Out), moe_forward.forward, forward_op.fake)
register_provider("nvfp4_moe", Provider("triton", ops.nvfp4_moe_generates.default, moe_forward.refuses))

PACKERS.append(pack.pack)
