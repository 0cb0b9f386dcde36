"""Byte arithmetic of record rows, and the routing codec."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from trace_compile.errors import BlockSizeError, GuidanceError
from trace_compile.numerics import FORMATS
from trace_compile.ops.records import decode_routing, encode_routing
from trace_compile.state.layout import RecordLayout, Routing, Site


def bit_sites(layers: int, width: int, outer_bytes: int) -> tuple[Site, ...]:
    return tuple(Site(f"model.layers.{i}.mlp.experts", "gate_up", width, "bit", outer_bytes) for i in range(layers))  # type: ignore[arg-type]


def test_the_paper_byte_count():
    """TRACE states 7,680 bytes per token for hidden 2048 and 20 layers of 1-bit guidance."""
    assert RecordLayout(bit_sites(20, 2048, 0)).guidance_bytes == 7680
    assert RecordLayout(bit_sites(20, 2048, 1)).guidance_bytes == 7680 + 20


@pytest.mark.parametrize("width", [16, 48, 80, 2048, 2880])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("outer_bytes", [0, 1, 4])
def test_guidance_bytes_follow_the_formula(width, layers, outer_bytes):
    bits = RecordLayout(bit_sites(layers, width, outer_bytes))
    assert bits.guidance_bytes == layers * (width * (1 + 8 / 16) / 8 + outer_bytes)
    codes = RecordLayout(tuple(Site(s.region, "gate_up", width, "code", outer_bytes) for s in bits.sites))
    assert codes.guidance_bytes == layers * (width * (4 + 8 / 16) / 8 + outer_bytes)
    assert codes.compact("bit") == bits
    assert bits.compact("bit") == bits


def test_default_block_is_that_of_nvfp4():
    assert Site("r", "gate_up", 64, "bit", 0).block == FORMATS["nvfp4"].block


def test_segments_are_adjacent_and_cover_the_row():
    layout = RecordLayout(
        (Site("a", "gate_up", 64, "bit", 1), Site("b", "gate_up", 32, "code", 4), Site("b", "down", 48, "bit", 0)),
        (Routing("a", 2), Routing("b", 6)),
    )
    spans = [(o, o + s.row_bytes) for o, s in zip(layout.offsets, layout.sites)]
    spans += [(o, o + r.row_bytes) for o, r in zip(layout.routing_offsets, layout.routings)]
    assert spans[0][0] == 0 and spans[-1][1] == layout.row_bytes
    assert all(end == begin for (_, end), (begin, _) in pairwise(spans))
    assert layout.routing_bytes == 2 * (2 + 6)
    assert layout.site_index("b", "down") == 2 and layout.routing_index("b") == 1
    assert RecordLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert hash(RecordLayout.from_dict(layout.to_dict())) == hash(layout)


def test_assemble_puts_pieces_where_the_offsets_say():
    layout = RecordLayout((Site("a", "gate_up", 16, "bit", 1), Site("b", "gate_up", 16, "code", 0)), (Routing("a", 2),))
    a = torch.arange(8, dtype=torch.uint8).reshape(2, 4)
    b = torch.arange(100, 118, dtype=torch.uint8).reshape(2, 9)
    ids = torch.tensor([[3, 300], [-1, 0]])
    rows = layout.assemble([a, b], [ids])
    assert rows.shape == (2, layout.row_bytes)
    assert torch.equal(rows[:, :4], a) and torch.equal(rows[:, 4:13], b)
    assert torch.equal(decode_routing(rows[:, 13:]), ids)
    with pytest.raises(GuidanceError, match=r"\[9, 4, 4\].*\[4, 9, 4\]"):
        layout.assemble([b, a], [ids])
    with pytest.raises(GuidanceError):
        layout.assemble([a, b])


def test_routing_is_little_endian_and_keeps_every_id():
    assert encode_routing(torch.tensor([[1, 0x1234]])).tolist() == [[1, 0, 0x34, 0x12]]
    assert encode_routing(torch.tensor([[-1, -7]])).tolist() == [[255] * 4]
    ids = torch.arange(0xFFFF).reshape(-1, 3)
    assert torch.equal(decode_routing(encode_routing(ids)), ids)
    assert encode_routing(torch.zeros(0, 8, dtype=torch.int64)).shape == (0, 16)


@pytest.mark.parametrize("width", [0, -16, 8, 72, 17])
def test_widths_off_the_block_are_refused_by_name(width):
    with pytest.raises(BlockSizeError, match=rf"model.x.gate_up: width {width} "):
        Site("model.x", "gate_up", width, "bit", 0)


def test_other_values_are_refused_by_name():
    with pytest.raises(GuidanceError, match="kind 'nibble'"):
        Site("a", "gate_up", 16, "nibble", 0)  # type: ignore[arg-type]
    with pytest.raises(GuidanceError, match="outer_bytes 2"):
        Site("a", "gate_up", 16, "bit", 2)  # type: ignore[arg-type]
    with pytest.raises(GuidanceError, match="top_k is 0"):
        Routing("a", 0)
    site = Site("a", "gate_up", 16, "bit", 0)
    with pytest.raises(GuidanceError, match="twice"):
        RecordLayout((site, Site("a", "gate_up", 32, "code", 0)))
    with pytest.raises(GuidanceError, match="twice"):
        RecordLayout((site,), (Routing("a", 2), Routing("a", 4)))
    layout = RecordLayout((site,))
    with pytest.raises(GuidanceError, match="'code'"):
        layout.compact("code")  # type: ignore[arg-type]
    with pytest.raises(GuidanceError, match=r"a\.down is not recorded"):
        layout.site_index("a", "down")
    with pytest.raises(GuidanceError, match="routing of a is not recorded"):
        layout.routing_index("a")
