"""The table of number formats and of scaling profiles: every numeric constant of the package is data in this file.

An ``Element`` is a small float (or an integer grid written as one) given by its bit fields; its largest value, its code
book and its rounding are derived. A ``Format`` says how elements share scales. A ``Profile`` says how an amax becomes
the bytes of those scales, in which order of float32 operations, so that training can match a given rollout engine.

Invariants: tables are immutable; a name that is not in a table raises ``UnknownFormatError`` listing the names that
are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from trace_compile.errors import UnknownFormatError


@dataclass(frozen=True)
class Element:
    """Sign-magnitude small float: value = (-1)^sign * 2^(e - bias) * (1 + m / 2^mantissa_bits), e = 0 subnormal.

    ``top`` is the magnitude code of the largest finite value; ``nan_codes``/``inf_code`` are magnitude codes, or None.
    ``twos_complement`` changes only how the sign is written in the code. A uniform grid (INT4, S1P2) is the special
    case in which every magnitude lies below the second binade.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    top: int
    nan_from: int | None = None
    inf_code: int | None = None
    twos_complement: bool = False

    @property
    def magnitude_bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits

    @property
    def bits(self) -> int:
        return self.magnitude_bits + 1

    @property
    def nan_code(self) -> int:
        """Magnitude code that is written for NaN; 0 in elements without one."""
        return self.nan_from or 0

    def magnitude(self, code: int) -> float:
        """The value of a magnitude code (no sign); NaN and Inf codes included."""
        if self.nan_from is not None and code >= self.nan_from:
            return float("nan")
        if self.inf_code is not None and code == self.inf_code:
            return float("inf")
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if exponent:
            mantissa += 1 << self.mantissa_bits
        return mantissa * 2.0 ** (max(exponent, 1) - self.bias - self.mantissa_bits)

    @cached_property
    def max(self) -> float:
        return self.magnitude(self.top)

    @cached_property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @cached_property
    def codebook(self) -> tuple[float, ...]:
        """Non-negative finite values in ascending order: index = magnitude code."""
        return tuple(self.magnitude(code) for code in range(self.top + 1))


E2M1 = Element("e2m1", 2, 1, 1, top=7)
E4M3 = Element("e4m3", 4, 3, 7, top=0x7E, nan_from=0x7F)
E5M2 = Element("e5m2", 5, 2, 15, top=0x7B, nan_from=0x7D, inf_code=0x7C)
S1P2 = Element("s1p2", 1, 2, 1, top=7)
INT4 = Element("int4", 1, 2, -1, top=7, twos_complement=True)


class ScaleKind(Enum):
    """What a block's scale is made of; the value is its size in bytes."""

    NONE = ("none", 0)
    E4M3 = ("e4m3", 1)  # positive E4M3 byte times the outer scale
    E8M0 = ("e8m0", 1)  # 2^(byte - 127); 0xFF is NaN
    FLOAT32 = ("float32", 4)  # little-endian float32
    HIF4 = ("hif4", 4)  # E6M2 byte, 8 one-bit factors (1 byte), 16 one-bit factors (2 bytes, little-endian)
    MACRO = ("macro", 5)  # four E8M0 bytes, one per quarter of the block, and the byte m of a common factor 1 + m/256

    @property
    def bytes(self) -> int:
        return self.value[1]


@dataclass(frozen=True)
class Format:
    """``block`` consecutive elements along K share a scale; ``outer`` says whether a float32 outer scale multiplies
    it.
    """

    name: str
    element: Element
    block: int
    scale: ScaleKind
    outer: bool

    @property
    def bits_per_value(self) -> float:
        """Bits per value without the outer scale."""
        return self.element.bits + 8 * self.scale.bytes / self.block

    def scale_bytes(self, k: int) -> int:
        """Bytes of block scales in a row of ``k`` elements, a multiple of the block."""
        return k // self.block * self.scale.bytes

    @property
    def operand(self) -> bool:
        """Whether an activation can have this format: 4-bit floats whose dequantised values a GEMM takes as they are.

        INT4's float32 scales are for weights, which are rounded once to the compute dtype.
        """
        return self.element.bits == 4 and self.scale in _OPERAND_SCALES


_OPERAND_SCALES = (ScaleKind.E4M3, ScaleKind.E8M0, ScaleKind.HIF4, ScaleKind.MACRO)

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("nvfp4", E2M1, 16, ScaleKind.E4M3, outer=True),
        Format("mxfp4", E2M1, 32, ScaleKind.E8M0, outer=False),
        Format("mxfp4_macro", E2M1, 128, ScaleKind.MACRO, outer=False),
        Format("mxfp8_e4m3", E4M3, 32, ScaleKind.E8M0, outer=False),
        Format("mxfp8_e5m2", E5M2, 32, ScaleKind.E8M0, outer=False),
        Format("hif4", S1P2, 64, ScaleKind.HIF4, outer=False),
        Format("int4_g32", INT4, 32, ScaleKind.FLOAT32, outer=False),
        Format("int4_g128", INT4, 128, ScaleKind.FLOAT32, outer=False),
        Format("fp8_e4m3", E4M3, 1, ScaleKind.NONE, outer=True),
        Format("fp8_e5m2", E5M2, 1, ScaleKind.NONE, outer=True),
    )
}

INT4_SMALLEST_SCALE = 1e-5  # the floor INT4 QAT for RL serves with

# Exponents of the outer scale: far enough from float32's limits that no product of scales overflows or is subnormal.
OUTER_EXPONENTS = (-100, 116)


class OuterRule(Enum):
    """From amax to the outer scale g; bound = largest element * ``Profile.scale_bound``."""

    POWER_OF_TWO = "smallest 2^k with amax <= bound * 2^k"
    QUOTIENT = "amax / bound"


class BlockRule(Enum):
    """From a block's amax a to its scale before E4M3; every operation is rounded to float32; M = largest element."""

    DIVIDE = "a / (M*g)"
    FOLD = "a * (1 / (M*g))"
    MAX_THEN_OUTER = "(a / M) / g"
    ENCODE = "(1/g) * (a / M)"
    ENCODE_RECIPROCAL = "(1/g) * (a * (1/M))"


class ElementRule(Enum):
    """From x, the block scale s and g to the value that is rounded to an element; every operation rounded to
    float32.
    """

    DIVIDE = "x / (s*g)"  # the correctly rounded quotient x/g/s when g is a power of two
    RECIPROCAL = "x * ((1/g) / s)"
    TWO_RECIPROCALS = "x * (1 / (s*g))"
    DIVIDE_ENCODED = "x / (s / (1/g))"


class Choice(Enum):
    """Four over six: which error decides between mapping the block's amax to 6 and to 4 (a tie goes to 6)."""

    MSE = "sum of squares"
    MAE = "sum of magnitudes"


@dataclass(frozen=True)
class Profile:
    """The rule from amax to bytes.

    ``floor``: the smallest block scale. ``zero_scale``: what replaces the scale of an all-zero block, or one that
    rounds to zero; None: nothing does. ``scale_bound``: block scale of the block that holds amax. ``choice``: four over
    six.
    """

    name: str
    outer: OuterRule
    block: BlockRule
    element: ElementRule
    floor: float
    zero_scale: float | None = None
    scale_bound: float = E4M3.max
    choice: Choice | None = None

    @property
    def power_of_two(self) -> bool:
        return self.outer is OuterRule.POWER_OF_TWO


_POW2, _QUOTIENT = OuterRule.POWER_OF_TWO, OuterRule.QUOTIENT
_NORMAL, _SMALLEST = E4M3.smallest_normal, E4M3.codebook[1]
_HALF_RANGE = 256.0  # four over six leaves room for scales 1.5 times larger below E4M3's maximum

PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        Profile("pow2", _POW2, BlockRule.DIVIDE, ElementRule.DIVIDE, _NORMAL),
        Profile("fp32", _QUOTIENT, BlockRule.FOLD, ElementRule.DIVIDE, 0.0),
        Profile("four_over_six", _QUOTIENT, BlockRule.DIVIDE, ElementRule.DIVIDE, 0.0, None, _HALF_RANGE, Choice.MSE),
        Profile(
            "four_over_six_mae", _QUOTIENT, BlockRule.DIVIDE, ElementRule.DIVIDE, 0.0, None, _HALF_RANGE, Choice.MAE
        ),
        Profile(
            "pow2_four_over_six", _POW2, BlockRule.DIVIDE, ElementRule.DIVIDE, _NORMAL, None, _HALF_RANGE, Choice.MSE
        ),
        Profile("torchao", _QUOTIENT, BlockRule.MAX_THEN_OUTER, ElementRule.RECIPROCAL, _NORMAL),
        Profile("modelopt", _QUOTIENT, BlockRule.DIVIDE, ElementRule.DIVIDE, _SMALLEST, 1.0),
        Profile("compressed_tensors", _QUOTIENT, BlockRule.ENCODE, ElementRule.DIVIDE_ENCODED, 0.0, 0.125),
        Profile("vllm", _QUOTIENT, BlockRule.ENCODE_RECIPROCAL, ElementRule.TWO_RECIPROCALS, 0.0),
    )
}


def format_of(fmt: str) -> Format:
    """The format named ``fmt``; ``UnknownFormatError`` otherwise."""
    if fmt not in FORMATS:
        raise UnknownFormatError(f"unknown number format {fmt!r}; known formats: {', '.join(FORMATS)}")
    return FORMATS[fmt]


def profile_of(profile: str) -> Profile:
    """The profile named ``profile``; ``UnknownFormatError`` otherwise."""
    if profile not in PROFILES:
        raise UnknownFormatError(f"unknown scaling profile {profile!r}; known profiles: {', '.join(PROFILES)}")
    return PROFILES[profile]
