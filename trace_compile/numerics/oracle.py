"""The scalar oracle: the numerics contract in exact rational arithmetic, one number at a time, to be read next to it.

It shares the tables of ``formats`` with the tensor reference and nothing else; the reference is tested against it.
Roundings happen only where a profile or a format asks for one, each by ``rounded``. Slow on purpose. Blocks and rows
are lists of floats that are float32 values; NaN and Inf are allowed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

from trace_compile.numerics.formats import (
    E2M1,
    E4M3,
    INT4_SMALLEST_SCALE,
    OUTER_EXPONENTS,
    BlockRule,
    Choice,
    Element,
    ElementRule,
    Format,
    OuterRule,
    Profile,
    ScaleKind,
    format_of,
    profile_of,
)

FLOAT32_DIGITS, FLOAT32_LOWEST = 24, -126
BFLOAT16_DIGITS = 8


@dataclass(frozen=True)
class Row:
    """One quantized row: codes per element, raw scale bytes, outer scale."""

    codes: list[int]
    scales: list[int]
    outer: float


def rounded(value: Fraction, digits: int = FLOAT32_DIGITS, lowest: int = FLOAT32_LOWEST) -> Fraction:
    """value to ``digits`` significant bits, nearest, ties to even; below 2^lowest the spacing stays (subnormals)."""
    if value == 0:
        return value
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, lowest) - digits + 1)
    return round(value / step) * step  # Python rounds halves to even


def outer_scale(amax: float, fmt: str = "nvfp4", profile: str = "pow2") -> float:
    """The outer scale of a finite amax."""
    f, p, (low, high) = format_of(fmt), profile_of(profile), OUTER_EXPONENTS
    bound = Fraction(f.element.max) * (Fraction(p.scale_bound) if f.scale is ScaleKind.E4M3 else 1)
    if amax == 0:
        return 1.0
    if p.outer is OuterRule.POWER_OF_TWO:
        k = low
        while k < high and Fraction(amax) > bound * Fraction(2) ** k:
            k += 1
        return 2.0**k
    return float(min(max(rounded(Fraction(amax) / bound), Fraction(2) ** low), Fraction(2) ** high))


def encode(value: Fraction, element: Element) -> int:
    """Magnitude code of value >= 0: nearest in the code book, ties to the even code, saturating."""
    book = element.codebook
    low = bisect_right(book, value) - 1
    if low == len(book) - 1:
        return low
    below, above = value - Fraction(book[low]), Fraction(book[low + 1]) - value
    return low if below < above or (below == above and low % 2 == 0) else low + 1


def signed(magnitude: int, x: float, element: Element) -> int:
    """The element's code for a magnitude code and the sign of x (the sign of zero and of NaN is kept)."""
    if math.copysign(1.0, x) > 0:
        return magnitude
    if element.twos_complement:
        return -magnitude % (1 << element.bits)
    return magnitude | 1 << element.magnitude_bits


def decode(code: int, element: Element) -> float:
    """The value of a code."""
    if element.twos_complement:
        return float(code - (1 << element.bits) if code >> element.magnitude_bits else code)
    value = element.magnitude(code & ((1 << element.magnitude_bits) - 1))
    return -value if code >> element.magnitude_bits else value


def quantize_row(row: list[float], g: float | None, fmt: str = "nvfp4", profile: str = "pow2") -> Row:
    """Quantize one row with its own block scales; g None: the row's own outer scale."""
    f, p = format_of(fmt), profile_of(profile)
    if g is None:
        g = outer_scale(max((abs(v) for v in row if math.isfinite(v)), default=0.0), fmt, profile) if f.outer else 1.0
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, len(row), f.block):
        c, s = quantize_block(row[start : start + f.block], Fraction(g), f, p)
        codes += c
        scales += s
    return Row(codes, scales, g)


def quantize_block(block: list[float], g: Fraction, f: Format, p: Profile) -> tuple[list[int], list[int]]:
    """One block: element codes and raw scale bytes."""
    if not all(math.isfinite(v) for v in block):
        if f.scale is ScaleKind.NONE:
            return [signed(f.element.nan_code, v, f.element) for v in block], []
        nan = {
            ScaleKind.E4M3: [E4M3.nan_code],
            ScaleKind.E8M0: [0xFF],
            ScaleKind.FLOAT32: [0x00, 0x00, 0xC0, 0x7F],
            ScaleKind.HIF4: [0xFF, 0, 0, 0],
            ScaleKind.MACRO: [0xFF, 0xFF, 0xFF, 0xFF, 0],
        }[f.scale]
        return [signed(0, v, f.element) for v in block], nan
    if f.scale is ScaleKind.HIF4:
        return _hif4_block(block, f.element)
    if f.scale is ScaleKind.MACRO:
        return _macro_block(block, p)
    if f.scale is ScaleKind.NONE:
        return [signed(encode(rounded(abs(Fraction(v)) / g), f.element), v, f.element) for v in block], []
    amax = max(abs(Fraction(v)) for v in block)
    if f.scale is ScaleKind.E8M0:
        byte = max(math.frexp(amax)[1] - math.frexp(f.element.max)[1] + 127, 0) if amax else 0
        scale = Fraction(2) ** (byte - 127)
        return [signed(encode(abs(Fraction(v)) / scale, f.element), v, f.element) for v in block], [byte]
    if f.scale is ScaleKind.FLOAT32:
        scale = max(rounded(amax / Fraction(f.element.max)), rounded(Fraction(INT4_SMALLEST_SCALE)))
        raw = list(_float32_bytes(scale))
        return [signed(encode(abs(Fraction(v)) / scale, f.element), v, f.element) for v in block], raw
    candidates = [_nvfp4_block(block, amax, g, f, p, Fraction(f.element.max))]
    if p.choice is not None:
        candidates.append(_nvfp4_block(block, amax, g, f, p, Fraction(f.element.codebook[-2])))
        errors = [_error(block, c, s[0], g, f, p.choice) for c, s in candidates]
        return candidates[1] if errors[1] < errors[0] else candidates[0]
    return candidates[0]


def _nvfp4_block(
    block: list[float], amax: Fraction, g: Fraction, f: Format, p: Profile, m: Fraction
) -> tuple[list[int], list[int]]:
    def r(
        v: Fraction,
    ) -> Fraction:  # a profile that follows an engine rounds each operation; with g = 2^k nothing needs to
        return v if p.power_of_two else rounded(v)

    exact = {
        BlockRule.DIVIDE: lambda: r(amax / r(m * g)),
        BlockRule.FOLD: lambda: r(amax * r(1 / r(m * g))),
        BlockRule.MAX_THEN_OUTER: lambda: r(r(amax / m) / g),
        BlockRule.ENCODE: lambda: r(r(1 / g) * r(amax / m)),
        BlockRule.ENCODE_RECIPROCAL: lambda: r(r(1 / g) * r(amax * r(1 / m))),
    }[p.block]()
    byte = encode(max(exact, Fraction(p.floor)), E4M3)
    if p.zero_scale is not None and (amax == 0 or byte == 0):
        byte = E4M3.codebook.index(p.zero_scale)
    s = Fraction(E4M3.magnitude(byte))
    codes = []
    for v in block:
        x = abs(Fraction(v))
        if s == 0:
            z = Fraction(0)
        else:
            z = {
                ElementRule.DIVIDE: lambda x=x: r(x / r(s * g)),
                ElementRule.RECIPROCAL: lambda x=x: r(x * r(r(1 / g) / s)),
                ElementRule.TWO_RECIPROCALS: lambda x=x: r(x * r(1 / r(s * g))),
                ElementRule.DIVIDE_ENCODED: lambda x=x: r(x / r(s / r(1 / g))),
            }[p.element]()
        codes.append(signed(encode(z, f.element), v, f.element))
    return codes, [byte]


def _error(block: list[float], codes: list[int], byte: int, g: Fraction, f: Format, choice: Choice) -> float:
    """A candidate's error as the contract defines it: float64, summed by halves."""
    scale = E4M3.magnitude(byte) * float(g)
    errors = [abs(abs(v) - abs(decode(c, f.element)) * scale) for v, c in zip(block, codes, strict=True)]
    if choice is Choice.MSE:
        errors = [e * e for e in errors]
    while len(errors) > 1:
        half = len(errors) // 2
        errors = [a + b for a, b in zip(errors[:half], errors[half:], strict=True)]
    return errors[0]


def _float32_bytes(value: Fraction) -> bytes:
    """Little-endian bytes of a positive normal float32."""
    mantissa, exponent = math.frexp(value)
    bits = (exponent - 1 + 127 << 23) + int((2 * mantissa - 1) * 2**23)
    return bits.to_bytes(4, "little")


def _hif4_block(block: list[float], element: Element) -> tuple[list[int], list[int]]:
    def bfloat16(v: Fraction) -> Fraction:
        return rounded(v, BFLOAT16_DIGITS)

    x = [abs(Fraction(v)) for v in block]
    v16 = [max(x[i : i + 4]) for i in range(0, 64, 4)]
    v8 = [max(x[i : i + 8]) for i in range(0, 64, 8)]
    factor = bfloat16(max(x) * bfloat16(Fraction(1, 7)))
    factor = min(max(factor, Fraction(2) ** -48), Fraction(49152))
    e6m2 = rounded(factor, digits=3)
    rec = bfloat16(1 / e6m2)
    e8 = [int(v * rec >= 4) for v in v8]
    e16 = [int(v * rec / 2 ** e8[k // 2] >= 2) for k, v in enumerate(v16)]
    codes = []
    for i, v in enumerate(block):
        step = x[i] * rec / 2 ** (e8[i // 8] + e16[i // 4]) * 4
        codes.append(signed(min(math.floor(step + Fraction(1, 2)), 7), v, element))
    exponent = math.frexp(e6m2)[1] - 1
    byte = (exponent + 48) * 4 + int((e6m2 / Fraction(2) ** exponent - 1) * 4)
    factors = sum(b << i for i, b in enumerate(e8)) | sum(b << (8 + i) for i, b in enumerate(e16))
    return codes, [byte, *factors.to_bytes(3, "little")]


def _macro_block(block: list[float], p: Profile) -> tuple[list[int], list[int]]:
    """128 values: a factor 1 + m/256 from their amax/6, then MXFP4 of the quotients."""
    target = rounded(max(abs(Fraction(v)) for v in block) / 6)
    m = 0
    if target >= Fraction(2) ** FLOAT32_LOWEST:
        m = round((target / _binade(target) - 1) * 256) % 256
    factor = 1 + Fraction(m, 256)
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, len(block), 32):
        quotients = [math.copysign(float(rounded(abs(Fraction(v)) / factor)), v) for v in block[start : start + 32]]
        c, s = quantize_block(quotients, Fraction(1), format_of("mxfp4"), p)
        codes, scales = codes + c, scales + s
    return codes, [*scales, m]


def _binade(value: Fraction) -> Fraction:
    """The largest power of two that is at most value > 0."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return Fraction(2) ** (exponent - (Fraction(2) ** exponent > value))


def bracket(z: Fraction, element: Element = E2M1) -> tuple[Fraction, Fraction]:
    """The two adjacent signed codewords around z clipped to the largest; from one going up, the last two at the top."""
    book = [Fraction(v) for v in element.codebook]
    words = [-v for v in reversed(book[1:])] + book
    z = min(max(z, words[0]), words[-1])
    low = min(bisect_right(words, z) - 1, len(words) - 2)
    return words[low], words[low + 1]


def guided_code(
    x: float, scale: float, *, code: int | None = None, bit: int | None = None, element: Element = E2M1
) -> int:
    """The guided code of finite x under scale = s_roll * g_roll > 0: nearest to the rollout's code, or with its
    mantissa bit.
    """
    z = Fraction(x) / Fraction(scale)
    low, high = bracket(z, element)
    if code is not None:
        target = Fraction(decode(code, element))
        q = low if abs(low - target) <= abs(high - target) else high
    else:
        q = low if element.codebook.index(abs(low)) % 2 == bit else high
    return signed(element.codebook.index(abs(q)), float(q) if q else x, element)
