"""The intermediate representation: opaque ops with a native torch body, and what they are parameterised by."""

from .activation import SWIGLU, Activation
from .moe_float import moe_float
from .scheme import UNQUANTIZED, W4A4_ROW, W4A4_TRACED, W4A16, MoEScheme, OperandScheme

__all__ = [
    "SWIGLU",
    "UNQUANTIZED",
    "W4A4_ROW",
    "W4A4_TRACED",
    "W4A16",
    "Activation",
    "MoEScheme",
    "OperandScheme",
    "moe_float",
]
