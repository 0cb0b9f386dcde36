"""One expert GEMM on 4-bit operands: integers-times-block-scales multiply, outer scales and bias follow in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..numerics import decode_blocks, unpack_nibbles
from .grouped import grouped_mm
from .quads import from_quads, in_quads
from .residual import Extra
from .routing import Routing


@dataclass(frozen=True)
class ExpertWeights:
    """One GEMM's weights, ready to multiply: ``values [E, N, K]`` in the compute dtype times ``outer f32 [E]``."""

    values: Tensor
    outer: Tensor | None

    @property
    def transposed(self) -> ExpertWeights:
        """``[E, K, N]``, a view: what multiplies gradients."""
        return ExpertWeights(self.values.transpose(-2, -1), self.outer)

    def augmented(self, extra: Extra | None) -> ExpertWeights:
        """``[E, N, K + K']``: the columns that multiply ``extra`` follow the weights' own."""
        if extra is None:
            return self
        more = self.values if extra.channels is None else self.values.index_select(-1, extra.channels)
        return ExpertWeights(torch.cat([self.values, more], -1), self.outer)

    @classmethod
    def load(
        cls, master: Tensor | None, codes: Tensor, scales: Tensor, outer: Tensor, fmt: str | None, dtype: torch.dtype
    ) -> ExpertWeights:
        """From packed codes, a scratch copy of one layer; or the master itself where ``fmt`` is None."""
        if fmt is None:
            assert master is not None
            return cls(master.to(dtype), None)
        if in_quads(codes):
            codes, scales = from_quads(codes, scales)
        return cls(decode_blocks(unpack_nibbles(codes), scales, fmt, dtype), outer)


def expert_linear(
    rows: Tensor, row_outer: Tensor | None, weights: ExpertWeights, bias: Tensor | None, routing: Routing
) -> Tensor:
    """``(rows . W^T) * g_expert * g_row + bias``: ``rows [S, K]``, ``row_outer f32 [S]`` -> ``[S, N]`` of rows' dtype.

    Scales and bias are applied in float32, one scale after the other: their product could leave float32's range.
    """
    acc = grouped_mm(rows, weights.values, routing)
    out = acc
    if weights.outer is not None:
        out = out.float() * weights.outer[routing.expert].unsqueeze(-1)
    if row_outer is not None:
        out = out.float() * row_outer.unsqueeze(-1)
    if bias is not None:
        out = (out.float() + bias[routing.expert].float()).masked_fill(routing.dropped, 0)
    return out.to(rows.dtype)
