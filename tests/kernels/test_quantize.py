"""``kernels.quantize`` against ``numerics.quantize``, byte for byte, on inputs chosen to show each known fault."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trace_compile import numerics
from trace_compile.errors import BlockSizeError, DeviceMismatchError, LoweringError, OperandError
from trace_compile.kernels import quantize as kernel
from trace_compile.kernels.launch import QuantizeLaunch
from trace_compile.kernels.quantize import quantize_rows, round_rows
from trace_compile.numerics.formats import E2M1, E4M3

NAN_BYTE = 0x7F
kernel_test = pytest.mark.kernel
# NumPy, under Triton's interpreter, warns of each Inf and NaN that the kernel meets.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def assert_same_bytes(x: Tensor, outer: Tensor | None = None, launch: QuantizeLaunch | None = None) -> None:
    """The kernel's bytes on x's device are those of the reference on the CPU."""
    got = quantize_rows(x, outer, launch=launch)
    want = numerics.quantize(x.cpu(), outer="row" if outer is None else outer.cpu())
    assert torch.equal(got.outer.cpu().reshape(want.outer.shape), want.outer)
    assert torch.equal(got.scales.cpu(), want.scales), describe(got.scales.cpu(), want.scales)
    assert torch.equal(got.packed.cpu(), want.packed), describe(got.packed.cpu(), want.packed)


def describe(got: Tensor, want: Tensor) -> str:
    wrong = (got != want).nonzero()
    first = tuple(wrong[0].tolist())
    bytes_there = f"{int(got[first]):#x}, not {int(want[first]):#x}"
    return f"{len(wrong)} of {want.numel()} bytes differ, first at {first}: {bytes_there}"


def ulp_neighbours(x: Tensor) -> Tensor:
    """x, the float32 below it and the one above it: [..., 3]."""
    x = x.float()
    infinity = torch.tensor(torch.inf)
    return torch.stack([x, torch.nextafter(x, -infinity), torch.nextafter(x, infinity)], dim=-1)


def adversarial_rows(k: int, dtype: torch.dtype) -> Tensor:
    """One row for each known fault, [rows, k]."""
    generator = torch.Generator().manual_seed(k)
    largest = torch.finfo(dtype).max
    normal = torch.randn(16, k, generator=generator)
    grid = torch.arange(k) % 16 * 0.25
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(k // 8)
    rows = [
        normal[0],
        normal[1] * 1e-3,
        normal[2] * 3e4,
        torch.zeros(k),
        -torch.zeros(k),
        torch.where(torch.arange(k) < 16, 0.0, normal[3]),
        torch.where(torch.arange(k) == k - 1, 100.0, normal[4] * 1e-6),
        torch.full((k,), 1e-40),
        torch.full((k,), torch.finfo(dtype).tiny),
        -normal[5].abs(),
        torch.where(torch.arange(k) == 0, -largest, normal[6]),
        torch.full((k,), largest),
        grid,
        -grid,
        ties * 448,
        ties * 448 * (1 - 2 * (torch.arange(k) % 2)),
        torch.where(torch.arange(k) == 0, torch.nan, normal[7]),
        torch.where(torch.arange(k) == k - 1, torch.inf, normal[8]),
        torch.where(torch.arange(k) == k // 2, -torch.inf, normal[9] * 1e-3),
        torch.full((k,), -torch.nan),
        torch.where(torch.arange(k) % 16 == 3, 50.0, 1.0) * normal[10],
    ]
    return (
        torch.stack(rows).clamp(-largest, largest).to(dtype) if dtype == torch.float16 else torch.stack(rows).to(dtype)
    )


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [16, 48, 80, 96, 112, 144, 2880])
def test_adversarial_rows(k: int, dtype: torch.dtype, device: torch.device) -> None:
    x = adversarial_rows(k, dtype).to(device)
    assert_same_bytes(x)
    for outer in (1.0, 2.0**-10, 2.0**7):
        assert_same_bytes(x, torch.tensor([outer], device=device))


@kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern(dtype: torch.dtype, device: torch.device) -> None:
    """All 65,536 inputs, in blocks of neighbours and in blocks that mix magnitudes, NaN and Inf included."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    shuffled = patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    assert_same_bytes(patterns.reshape(-1, 16).to(device))
    assert_same_bytes(shuffled.reshape(-1, 128).to(device))
    assert_same_bytes(patterns.reshape(-1, 256).to(device), torch.tensor([2.0**-3], device=device))


@kernel_test
def test_elements_next_to_every_tie_under_every_scale(device: torch.device) -> None:
    """Neighbours of midpoint * scale in float32: an approximate quotient, or one by 1/s, gets some of these wrong."""
    scales = torch.tensor(E4M3.codebook)[8:]
    book = torch.tensor(E2M1.codebook)
    points = torch.cat([book, (book[1:] + book[:-1]) / 2])
    near = ulp_neighbours(scales[:, None] * points).flatten(1)
    near = torch.cat([near, -near], dim=1)
    # 15 probes a block; the first element, 6 * scale, makes the block's scale what it should be.
    blocks = near[:, : near.shape[1] // 15 * 15].reshape(len(scales), -1, 15)
    anchor = (scales * E2M1.max)[:, None, None].expand(-1, blocks.shape[1], 1)
    x = torch.cat([anchor, blocks], dim=-1).flatten(1).to(device)
    assert_same_bytes(x, torch.ones(1, device=device))
    for exponent in (-100, -37, 116):
        assert_same_bytes(x * 2.0**exponent, torch.tensor([2.0**exponent], device=device))


@kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_short_element_under_every_scale(dtype: torch.dtype, device: torch.device) -> None:
    """All 16-bit values from an eighth of the block's scale to beyond 6 scales, for all 119 scales."""
    scales = torch.tensor(E4M3.codebook)[8:]
    bits = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    rows = [bits[(bits >= s / 8) & (bits <= s * E2M1.max)] for s in scales]
    width = max(map(len, rows))
    x = torch.zeros(len(rows), -(-width // 15) * 15)
    for row, values in zip(x, rows):
        row[: len(values)] = values
    x[:, ::2] *= -1
    anchor = (scales * E2M1.max)[:, None, None].expand(-1, x.shape[1] // 15, 1)
    x = torch.cat([anchor, x.unflatten(1, (-1, 15))], dim=-1).flatten(1)
    assert bool((x.to(dtype) == x).all())
    assert_same_bytes(x.to(dtype).to(device), torch.ones(1, device=device))


@kernel_test
def test_block_scales_next_to_every_tie(device: torch.device) -> None:
    """amax/6 at, below and above every midpoint of E4M3, under the floor and beyond the largest scale."""
    book = torch.tensor(E4M3.codebook)
    points = torch.cat([book, (book[1:] + book[:-1]) / 2, torch.tensor([448.0, 464.0, 465.0, 480.0, 1e5, 1e37])])
    amax = ulp_neighbours(6 * points).flatten()
    x = torch.zeros(amax.numel(), 16)
    x[:, 5] = amax
    assert_same_bytes(x.to(device), torch.ones(1, device=device))
    got = quantize_rows(x.to(device), torch.ones(1, device=device)).scales
    assert set(got.flatten().tolist()) == set(range(8, 0x7F)), "every normal scale byte, and no other, must occur"


@kernel_test
def test_outer_scales_next_to_every_power_of_two(device: torch.device) -> None:
    powers = 2.0 ** torch.arange(-126, 117, dtype=torch.float64)
    amax = ulp_neighbours((powers * numerics.outer_bound()).float()).flatten()
    x = torch.zeros(amax.numel(), 16)
    x[:, 11] = -amax
    assert bool(x.isfinite().all())
    assert_same_bytes(x.to(device))


@kernel_test
@pytest.mark.parametrize("k", [16, 80, 144])
def test_values_are_those_that_are_packed(k: int, device: torch.device) -> None:
    """NaN where the block's scale is; the outer scale can be left out."""
    x = adversarial_rows(k, torch.bfloat16).to(device)
    for outer in (None, torch.tensor([2.0**-10], device=device)):
        q = numerics.quantize(x.cpu(), outer="row" if outer is None else outer.cpu())
        values, outers = round_rows(x, outer)
        torch.testing.assert_close(values.cpu(), q.dequantize().bfloat16(), rtol=0, atol=0, equal_nan=True)
        bare = round_rows(x, outer, keep_outer=False)[0].cpu().float() * outers.cpu().reshape(-1, 1)
        torch.testing.assert_close(bare.bfloat16(), q.dequantize().bfloat16(), rtol=0, atol=0, equal_nan=True)


@kernel_test
@pytest.mark.parametrize("rows", [0, 1, 7, 65])
def test_row_counts_and_shapes(rows: int, device: torch.device) -> None:
    x = torch.randn(rows, 3, 48, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16).to(device)
    assert_same_bytes(x)
    own = quantize_rows(x)
    assert (own.packed.shape, own.scales.shape, own.outer.shape) == ((rows, 3, 24), (rows, 3, 3), (rows, 3))
    assert_same_bytes(x, 2.0 ** torch.randint(-8, 4, (rows, 3), device=device).float())
    assert_same_bytes(x[:, 1])
    assert_same_bytes(x.transpose(0, 1))
    assert_same_bytes(torch.randn(48, rows).to(device).t())
    assert_same_bytes(torch.randn(1, 48).to(device).expand(rows, 48))


@kernel_test
@pytest.mark.parametrize("own", [True, False], ids=["own", "given"])
def test_launch_choice_changes_no_byte(own: bool, device: torch.device) -> None:
    x = torch.randn(9, 208, generator=torch.Generator().manual_seed(1)).to(device)
    x[3] *= 1e5
    outer = None if own else torch.tensor([2.0**-6], device=device)
    for launch in (
        QuantizeLaunch(1, 16, 1, 1),
        QuantizeLaunch(2, 64, 3, 2),
        QuantizeLaunch(8, 128, 4, 4),
        QuantizeLaunch(16, 512, 1, 8),
        QuantizeLaunch(4, 512, 2, 4),
    ):
        assert_same_bytes(x, outer, launch)


@kernel_test
def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    x[::3, ::7] = torch.inf
    together = quantize_rows(x)
    for row in (0, 1, 17, 39):
        alone = quantize_rows(x[row])
        assert torch.equal(alone.packed, together.packed[row]) and torch.equal(alone.scales, together.scales[row])
        assert torch.equal(alone.outer, together.outer[row])


@kernel_test
def test_impossible_outer_scales_are_seen(device: torch.device) -> None:
    impossible = [3.0, 0.0, -1.0, torch.nan, torch.inf, 2.0**-101, 2.0**117, 1.0 + 2.0**-23]
    x = torch.ones(len(impossible) + 1, 32, device=device)
    outer = torch.tensor([*impossible, 1.0], device=device)
    got = quantize_rows(x, outer)
    assert bool((got.scales[:-1] == NAN_BYTE).all()) and bool((got.packed[:-1] == 0).all())
    assert bool((got.scales[-1] != NAN_BYTE).all())


@kernel_test
def test_refusals(device: torch.device) -> None:
    with pytest.raises(BlockSizeError, match="72"):
        quantize_rows(torch.zeros(2, 72, device=device))
    with pytest.raises(BlockSizeError, match=r"\(\)"):
        quantize_rows(torch.zeros((), device=device))
    with pytest.raises(OperandError, match="float64"):
        quantize_rows(torch.zeros(2, 32, dtype=torch.float64, device=device))
    x = torch.zeros(2, 32, device=device)
    with pytest.raises(OperandError, match="bfloat16"):
        quantize_rows(x, torch.ones(2, dtype=torch.bfloat16, device=device))
    with pytest.raises(OperandError, match=r"\(3,\)"):
        quantize_rows(x, torch.ones(3, device=device))
    with pytest.raises(DeviceMismatchError, match=rf"{device.type}.*meta"):
        quantize_rows(x, torch.ones(1, device="meta"))


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "INTERPRETING", False)
    with pytest.raises(LoweringError, match="cpu"):
        quantize_rows(torch.zeros(2, 32))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    """The last rows lie beyond 32-bit addresses of x."""
    rows, k = 1_050_000, 2064
    assert rows * k > 2**31
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, k, device="cuda")
    got = quantize_rows(x)
    want = numerics.quantize(x[-3:].cpu())
    assert torch.equal(got.packed[-3:].cpu(), want.packed)
    assert torch.equal(got.scales[-3:].cpu(), want.scales)
    assert torch.equal(got.outer[-3:].cpu(), want.outer)
    assert not bool(got.packed[:-3].any())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_on_the_tensors_device() -> None:
    with torch.cuda.device(0):
        assert_same_bytes(torch.randn(5, 96, device="cuda:1"))
        with pytest.raises(DeviceMismatchError, match=r"cuda:1.*cuda:0"):
            quantize_rows(torch.randn(5, 96, device="cuda:1"), torch.ones(1, device="cuda:0"))
