"""Guided rounding on values: the readable form of ``guided_blocks``, for analysis and tests (numerics 2; TRACE,
methods 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_compile.errors import OperandError
from trace_compile.numerics.blocks import bracket
from trace_compile.numerics.codec import decode
from trace_compile.numerics.formats import E2M1


def guided_round(z: Tensor, *, q_roll: Tensor | None = None, bit: Tensor | None = None) -> Tensor:
    """z [...] in units of the scale -> the member of z's bracket nearest to q_roll, or with mantissa bit ``bit``.

    Returns float32 codeword values; z is clipped to the largest element; a zero result has the sign of z.
    Raises ``OperandError`` unless exactly one of q_roll (codeword values [...]) and bit (0/1 [...]) is given.
    """
    if (q_roll is None) == (bit is None):
        raise OperandError("guided rounding takes exactly one of q_roll= (full) and bit= (1-bit)")
    z = z.float().clamp(-E2M1.max, E2M1.max)
    low = bracket(z.abs().nan_to_num_(nan=0.0), -(z < 0).int(), E2M1)
    near = torch.copysign(decode(low, E2M1), z)
    far = torch.copysign(decode(low + 1, E2M1), torch.where(z == 0, 1.0, z))  # -0.0 lies in the bracket {0, +0.5}
    if q_roll is not None:
        q_roll = q_roll.float()
        q = torch.where((near - q_roll).abs() <= (far - q_roll).abs(), near, far)
    else:
        assert bit is not None
        q = torch.where(((low & 1) ^ bit) == 0, near, far)
    return torch.where(q == 0, torch.copysign(q, z), q)
