"""Record rows for the tests, made the way a recorder makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from trace_compile.numerics import encode_exponent, outer_scale, pack_bits, pack_nibbles, quantize_blocks
from trace_compile.state.layout import RecordLayout, Routing, Site

REGIONS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def layout(kind: str = "bit", outer_bytes: int = 0, width: int = 32, routing: bool = True) -> RecordLayout:
    sites = tuple(Site(r, "gate_up", width, kind, outer_bytes) for r in REGIONS)  # type: ignore[arg-type]
    return RecordLayout(sites, tuple(Routing(r, 2) for r in REGIONS) if routing else ())


def random_rows(n: int, where: RecordLayout, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, where.row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_keys(n: int, seed: int = 0) -> Tensor:
    """Distinct keys over the whole range of int64."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**63), 2**63 - 1, (n,), generator=g)
    assert keys.unique().numel() == n
    return keys


def quantized_row(x: Tensor, site: Site) -> tuple[Tensor, Tensor]:
    """One site's record of x [T, width]: uint8 [T, row_bytes] and the outer scale float32 [T] behind it."""
    outer = outer_scale(x.abs().amax(-1))
    codes, scales = quantize_blocks(x, outer, "nvfp4", "pow2")
    payload = pack_bits(codes) if site.kind == "bit" else pack_nibbles(codes)
    own = {
        0: lambda: payload[:, :0],
        1: lambda: encode_exponent(outer)[:, None],
        4: lambda: outer[:, None].view(torch.uint8),
    }
    return torch.cat((payload, scales, own[site.outer_bytes]()), 1), outer


def quantized_rows(xs: list[Tensor], ids: list[Tensor], where: RecordLayout) -> Tensor:
    return where.assemble([quantized_row(x, site)[0] for x, site in zip(xs, where.sites)], ids)
