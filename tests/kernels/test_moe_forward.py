"""The inference kernels against the native op, and bit against bit where launches, batches and routes differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.ops.reference import ACTIVATIONS, GPT_OSS, SQUARED_RELU, make_case
from trace_compile import numerics
from trace_compile.kernels import providers  # noqa: F401
from trace_compile.kernels.dispatch import tile_limit, tiles_of
from trace_compile.kernels.grouped_gemm import Rows, Weights, expert_gemm
from trace_compile.kernels.launch import QuantizeLaunch
from trace_compile.kernels.moe_forward import forward, refuses
from trace_compile.kernels.moe_launch import DispatchLaunch, GemmLaunch, MoELaunch, segments
from trace_compile.kernels.recording import Recorder
from trace_compile.kernels.round_rows import round_rows
from trace_compile.ops import (
    OPS,
    W4A4_ROW,
    W4A4_TRACED,
    W4A16,
    Activation,
    MoEScheme,
    OperandScheme,
    Out,
    WeightLayout,
    check_close,
    pack_experts,
    provider_for,
)
from trace_compile.ops.nvfp4_moe import NvFp4MoEOperands, native
from trace_compile.ops.observe import histogram
from trace_compile.ops.quads import has_fp4
from trace_compile.ops.weights import Packed

kernel_test = pytest.mark.kernel
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")
OUTER_IN = (2.0**-8, 2.0**-7)
TOLERANCE = OPS["nvfp4_moe"].tolerance


def operands(device: torch.device, scheme: MoEScheme = W4A4_ROW, **options: Any) -> NvFp4MoEOperands:
    """Inference operands in quads; widths of whole chunks."""
    options = {"hidden": 128, "width": 64, "tokens": 5, "experts": 4} | options
    case = make_case(scheme, dtype=torch.bfloat16, device=str(device), grad=False, **options)
    outer = torch.tensor(OUTER_IN, device=device)
    o = NvFp4MoEOperands(*case.operands(w13=None, w2=None, outer_in=outer))
    q13, q2 = Packed(o.c13, o.s13, o.g13).quads, Packed(o.c2, o.s2, o.g2).quads
    return replace(o, c13=q13.codes, s13=q13.scales, c2=q2.codes, s2=q2.scales)


def linear(o: NvFp4MoEOperands) -> NvFp4MoEOperands:
    """The same weights as FP4 tensor cores take them."""
    p13, p2 = Packed(o.c13, o.s13, o.g13).linear, Packed(o.c2, o.s2, o.g2).linear
    return replace(o, c13=p13.codes, s13=p13.scales, c2=p2.codes, s2=p2.scales)


def result(o: NvFp4MoEOperands, launch: MoELaunch | None = None) -> Tensor:
    return forward(o, launch)[Out.Y]


def assert_native(o: NvFp4MoEOperands) -> None:
    check_close(result(o), native(o)[Out.Y], **TOLERANCE(o))


@kernel_test
@pytest.mark.parametrize("scheme", [W4A16, W4A4_ROW, W4A4_TRACED], ids=["w4a16", "row", "traced"])
def test_equals_native(scheme: MoEScheme, device: torch.device) -> None:
    assert_native(operands(device, scheme))


@kernel_test
@pytest.mark.parametrize(
    "activation", [*ACTIVATIONS, Activation.build(True, [("pow", ("gate", 1.5)), ("mul", ("%0", "up"))])]
)
def test_activations_biases_and_those_without_device_form(activation: Activation, device: torch.device) -> None:
    o = operands(device, W4A4_TRACED, activation=activation, tokens=3, hidden=64)
    if activation not in ACTIVATIONS:
        o = replace(o, b13=None)
    assert_native(o)


@kernel_test
@pytest.mark.parametrize("record", ["ranges", "bit", "code+down"])
@pytest.mark.parametrize("scheme", [W4A4_ROW, W4A4_TRACED], ids=["row", "traced"])
def test_records_are_natives(scheme: MoEScheme, record: str, device: torch.device) -> None:
    """What is of the tokens' rows is equal byte for byte; what is of h, where h is."""
    valid = torch.tensor([True, True, False, True, True], device=device)
    o = replace(operands(device, scheme, hidden=64, bias=False), record=record, valid=valid)
    got, want = forward(o), native(o)
    for out in (Out.RECORD_OUTER, Out.RECORD, Out.COUNTS, Out.AMAX, Out.HIST, Out.SATURATED):
        a, b = got[out], want[out]
        assert a.shape == b.shape and a.dtype == b.dtype, out.name
        if out in (Out.AMAX, Out.HIST, Out.SATURATED):
            assert torch.equal(a[0], b[0]), out.name
            assert out is not Out.HIST or int((a[1] - b[1]).abs().sum()) <= 0.02 * int(b[1].sum())
        elif record.endswith("+down") and out is not Out.COUNTS:
            assert float((a != b).double().mean()) < 0.02, out.name
        else:
            assert torch.equal(a, b), out.name


@kernel_test
@pytest.mark.parametrize(("tokens", "top_k", "experts", "ids"), [(0, 2, 3, None), (1, 4, 4, None), (6, 2, 5, [3, 3])])
def test_routes(tokens: int, top_k: int, experts: int, ids: list[int] | None, device: torch.device) -> None:
    """No token, one token, all tokens to one expert twice (which real routers do not), experts without tokens."""
    chosen = None if ids is None else torch.tensor(ids, device=device).repeat(tokens, 1)
    o = operands(device, tokens=tokens, top_k=top_k, experts=experts, hidden=64, ids=chosen)
    assert result(o).shape == o.x.shape
    assert_native(o)
    nowhere = replace(o, expert_ids=torch.full_like(o.expert_ids, experts))
    assert not bool(result(nowhere).any())


@kernel_test
def test_a_token_has_its_bits_in_any_batch_and_launch(device: torch.device) -> None:
    interpreted = device.type == "cpu"
    o = operands(device, tokens=4 if interpreted else 300, hidden=128 if interpreted else 2880, width=192, experts=3)
    together = result(o)
    for rows in (slice(0, 1), slice(1, 3)) if interpreted else (slice(0, 1), slice(4, 5), slice(2, 70)):
        alone = replace(o, x=o.x[rows], expert_ids=o.expert_ids[rows], gates=o.gates[rows])
        assert torch.equal(result(alone), together[rows])
    launches = [GemmLaunch(8, 64, 3, 2), GemmLaunch(16, 64, 2, 4), GemmLaunch(64, 128, 3, 4)]
    for gate_up, down in list(zip(launches, reversed(launches)))[: 1 if interpreted else None]:
        assert torch.equal(result(o, MoELaunch(gate_up, down)), together)


@kernel_test
def test_segments_have_their_bits_side_by_side_and_in_turn(device: torch.device) -> None:
    k, columns, experts, rows = 2880, 48, 2, 3
    assert segments(columns, k) == 2 and (k // 64) % 2
    generator = torch.Generator().manual_seed(0)
    scheme = W4A16.weight
    assert scheme is not None
    packed = pack_experts(torch.randn(experts, columns, k, generator=generator), WeightLayout(), scheme).quads
    weights = Weights(packed.codes.to(device), packed.scales.to(device), packed.outer.to(device), None)
    x = torch.randn(rows, k, generator=generator).to(torch.bfloat16)
    ids = torch.arange(rows, device=device)[:, None] % experts
    tiles = tiles_of(ids, experts, 8)
    found = [
        expert_gemm(Rows(x.to(device), None, 1), weights, tiles, launch)
        for launch in (GemmLaunch(8, 64, 3, 2, side_by_side=True), GemmLaunch(8, 32, 3, 2))
    ]
    assert torch.equal(*found)
    exact = torch.stack([packed.dequantize(torch.float64)[e] @ x[i].double() for i, e in enumerate(ids[:, 0].tolist())])
    check_close(found[0].cpu(), exact.to(torch.bfloat16), k=k)


@kernel_test
@pytest.mark.parametrize("scheme", [W4A16, W4A4_ROW], ids=["w4a16", "row"])
def test_non_finite_tokens_stay_alone(scheme: MoEScheme, device: torch.device) -> None:
    o = operands(device, scheme, hidden=64)
    ids = torch.arange(10, device=device).view(5, 2) % 4
    o = replace(o, expert_ids=ids)
    x = o.x.clone()
    x[1, 3], x[3, 60] = torch.nan, torch.inf
    found, clean = result(replace(o, x=x)), result(o)
    assert bool(found[[1, 3]].isnan().all()) and torch.equal(found[[0, 2, 4]], clean[[0, 2, 4]])


@kernel_test
@pytest.mark.parametrize("scheme", [W4A4_ROW, W4A4_TRACED], ids=["row", "traced"])
@pytest.mark.parametrize("activation", [GPT_OSS, SQUARED_RELU], ids=["gated", "plain"])
def test_fp4_tensor_cores_equal_native(scheme: MoEScheme, activation: Activation, device: torch.device) -> None:
    """What the block-scaled product computes, decoded: K beyond and short of whole blocks, a NaN token."""
    if device.type == "cuda" and not has_fp4(device):
        pytest.skip("no FP4 tensor cores; Triton's interpreter checks the arithmetic")
    o = operands(device, scheme, activation=activation, tokens=4, hidden=192, width=64, experts=3)
    x = o.x.clone()
    x[2, 5] = torch.nan
    assert_native(linear(replace(o, x=x)))


@kernel_test
@pytest.mark.parametrize(("slots", "tile", "block"), [(1, 16, 32), (40, 4, 32), (96, 16, 64)])
def test_tiles(slots: int, tile: int, block: int, device: torch.device) -> None:
    experts = 6
    ids = torch.randint(-1, experts + 1, (slots, 1), generator=torch.Generator().manual_seed(slots))
    ids[ids == 2] = 3  # an expert without slots
    tiles = tiles_of(ids.to(device), experts, tile, launch=DispatchLaunch(block, 1))
    expected = []
    for expert in range(experts):
        own = (ids[:, 0] == expert).nonzero()[:, 0].tolist()
        expected += [(expert, own[i : i + tile]) for i in range(0, len(own), tile)]
    if tiles.slots is None:
        assert slots == 1 and torch.equal(tiles.expert.cpu(), ids[:, 0])
        return
    assert len(expected) <= tile_limit(slots, experts, tile) == tiles.expert.shape[0]
    found = tiles.expert.tolist()
    assert found == [e for e, _ in expected] + [-1] * (len(found) - len(expected))
    for row, (_, own) in zip(tiles.slots.tolist(), expected):
        assert row == own + [-1] * (tile - len(own))


@kernel_test
@pytest.mark.parametrize("outer", [None, 2.0**-6])
def test_rounded_rows_are_the_packed_ones(outer: float | None, device: torch.device) -> None:
    x = torch.randn(12, 208, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[0], x[1, :16], x[2, 100], x[3, 5] = 0, 0, torch.inf, torch.nan
    x[4] *= 1e-30
    x[5, ::2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(13).to(torch.bfloat16)
    x[6] = torch.where(x[6] > 0, 0.0, -0.0).to(torch.bfloat16)
    given = None if outer is None else torch.tensor(outer)
    want = numerics.quantize(x, outer="row" if given is None else given)
    for launch in (None, QuantizeLaunch(2, 64, 3, 2)):
        values, outers = round_rows(x.to(device), None if given is None else given.to(device), launch=launch)
        expected = want.values(torch.bfloat16)
        assert torch.equal(values.cpu().isnan(), expected.isnan())
        assert torch.equal(values.cpu().nan_to_num(0).view(torch.int16), expected.nan_to_num(0).view(torch.int16))
        assert torch.equal(outers.cpu(), want.outer.reshape(-1).expand(12))


def on_fake_gpu(o: NvFp4MoEOperands) -> NvFp4MoEOperands:
    with FakeTensorMode():
        parts: dict[str, Any] = {
            k: torch.empty(v.shape, dtype=v.dtype, device="cuda") for k, v in vars(o).items() if isinstance(v, Tensor)
        }
    return replace(o, **parts)


def test_what_is_refused() -> None:
    own = operands(torch.device("cpu"), activation=GPT_OSS)
    o = on_fake_gpu(own)
    assert refuses(o) is None and provider_for("nvfp4_moe", list(vars(o).values())).name == "triton"
    whole = MoEScheme(OperandScheme(outer="expert"), OperandScheme(outer="tensor"))
    unpacked = on_fake_gpu(linear(own))
    for refused, reason in (
        (own, "cpu"),
        (replace(o, w13=o.x, w2=o.x), "gradients"),
        (replace(o, guidance="bit"), "guidance"),
        (replace(o, x=o.x.float()), "float32"),
        (replace(o, gates=o.gates.double()), "float64"),
        (replace(o, scheme=whole.key), "whole batch"),
        (unpacked, "linear"),
    ):
        found = refuses(refused)
        assert found is not None and reason in found
        chosen = provider_for("nvfp4_moe", list(vars(refused).values()))
        assert chosen.name == "native" and found in chosen.reason


@kernel_test
@pytest.mark.parametrize("kind", ["ranges", "bit", "code", "bit+down", "code+down"])
@pytest.mark.parametrize("scheme", [W4A4_ROW, W4A4_TRACED], ids=["row", "traced"])
def test_what_is_recorded_is_what_native_records(scheme: MoEScheme, kind: str, device: torch.device) -> None:
    """Rows and statistics byte for byte, with routes to nowhere, tokens that do not count, values beyond the scale and
    non-finite ones. The hidden rows of both come from different GEMMs, so those are compared where they are equal."""
    o = operands(device, scheme, tokens=9, top_k=2, hidden=192 if scheme is W4A4_ROW else 64)
    x = o.x.clone()
    x[1, 3], x[4, 5], x[6, 7] = torch.nan, 1e6, -torch.inf
    ids = o.expert_ids.clone()
    ids[2], ids[3, 0] = -1, 7
    valid = torch.arange(9, device=device) % 4 != 1
    o = replace(o, x=x, expert_ids=ids, valid=valid, record=kind)
    assert refuses(replace(o, record="none")) == refuses(o)
    found, expected = forward(o), native(o)
    rows = o.x.shape[1] // {"b": 8, "c": 2}.get(kind[0], 1) + o.x.shape[1] // 16 + (scheme is W4A4_ROW)
    for out in (Out.RECORD, Out.RECORD_OUTER, Out.AMAX, Out.COUNTS, Out.HIST, Out.SATURATED):
        assert found[out].shape == expected[out].shape and found[out].dtype == expected[out].dtype, out
    if kind != "ranges":
        assert torch.equal(found[Out.RECORD][:, :rows], expected[Out.RECORD][:, :rows])
    assert torch.equal(found[Out.COUNTS], expected[Out.COUNTS]) and int(found[Out.COUNTS].sum()) > 0
    for out in (Out.AMAX, Out.HIST, Out.SATURATED):
        assert torch.equal(found[out][0], expected[out][0]), out
    assert int(found[Out.SATURATED][0]) == (1 if scheme is W4A4_ROW else 2)  # Inf, and what a traced scale cannot hold
    # Down: totals of elements agree whatever the GEMM, and where its rows come out equal so do records and statistics.
    assert int(found[Out.HIST][1].sum()) == int(expected[Out.HIST][1].sum()) > 0
    torch.testing.assert_close(found[Out.AMAX][1], expected[Out.AMAX][1], rtol=0.02, atol=0)
    if kind.endswith("+down"):
        counts = (ids >= 0) & (ids < 4) & o.x.isfinite().all(1, keepdim=True)
        mine, theirs = (r[Out.RECORD][:, rows:].reshape(9, 2, -1)[counts] for r in (found, expected))
        assert (mine != theirs).float().mean() < 0.1


@kernel_test
@pytest.mark.parametrize("kind", ["bit+down", "code+down"])
def test_recorded_rows_decode_to_what_was_multiplied(kind: str, device: torch.device) -> None:
    """The recorder's own rows: codes, block scales and outer scales of what ``round_rows`` gives, by slot."""
    o = operands(device, W4A4_ROW, tokens=6, top_k=2, hidden=64)
    o = replace(o, record=kind)
    recorder = Recorder.of(o)
    assert recorder is not None and recorder.row is not None and recorder.record is not None
    h = torch.randn(12, 64, device=device, dtype=torch.bfloat16)
    values, outer = round_rows(h, None, recorder=recorder, which=1)
    counted = ((o.expert_ids >= 0) & (o.expert_ids < 4)).view(-1)
    h = h.masked_fill(~counted[:, None], 0)  # no GEMM writes the slots of no expert
    plain = round_rows(h, None)
    assert torch.equal(values, plain[0]) and torch.equal(outer, plain[1])
    q = numerics.quantize(h)
    rows = recorder.record[:, recorder.row.gate_up_record_bytes :].reshape(12, -1)
    payload = numerics.pack_bits(q.codes) if kind == "bit+down" else numerics.pack_nibbles(q.codes)
    assert torch.equal(rows, torch.cat((payload, q.scales, numerics.encode_exponent(q.outer)[:, None]), 1))
    assert torch.equal(recorder.hist[1], histogram(h, counted))
    amax = torch.zeros(4, device=device).scatter_reduce(
        0, o.expert_ids.view(-1).clamp(0, 3), torch.where(counted, h.float().abs().amax(1), 0), "amax"
    )
    assert torch.equal(recorder.amax[1], amax) and not recorder.counts.any()


@pytest.mark.gpu
def test_a_cuda_graph_follows_new_tokens_and_routes() -> None:
    """Nothing waits for the host: what is captured with some routes is right for others, empty experts included."""
    o = operands(torch.device("cuda"), tokens=40, hidden=256, width=128, experts=6)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        result(o)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = result(o)
    for ids in (torch.full_like(o.expert_ids, 5), torch.full_like(o.expert_ids, -1), o.expert_ids.flip(0) % 3):
        o.x.copy_(torch.randn_like(o.x))
        o.expert_ids.copy_(ids)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, result(o))


@pytest.mark.gpu
def test_the_last_expert_lies_beyond_32_bit_addresses() -> None:
    experts, columns, k = 520, 2048, 4096
    codes = torch.zeros(experts, k // 64, columns, 16, dtype=torch.int16, device="cuda")
    codes[-1].random_(-(2**15), 2**15)
    assert codes.nbytes > 2**31
    scales = torch.full((experts, k // 64, columns), 0x38383838, dtype=torch.int32, device="cuda")
    x, outer = torch.randn(5, k, device="cuda").to(torch.bfloat16), torch.ones(experts, device="cuda")
    last = torch.full((5, 1), experts - 1, device="cuda")
    for launch in (GemmLaunch(8, 64, 3, 2), GemmLaunch(16, 128, 3, 4)):
        tiles = tiles_of(last, experts, launch.tile)
        found = expert_gemm(Rows(x, None, 1), Weights(codes, scales, outer, None), tiles, launch)
        alone = Weights(codes[-1:].clone(), scales[-1:].clone(), outer[-1:], None)
        assert torch.equal(found, expert_gemm(Rows(x, None, 1), alone, tiles_of(last * 0, 1, launch.tile), launch))
        assert bool(found.any())
