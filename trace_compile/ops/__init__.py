"""The intermediate representation: opaque ops with a native torch body, and what they are parameterised by."""

from .activation import SWIGLU, Activation
from .nvfp4_moe import NvFp4MoEOperands, Out
from .observe import Diag
from .registry import OPS, OpSpec, Provider, provider_for, register_provider
from .scheme import UNQUANTIZED, W4A4_ROW, W4A4_TRACED, W4A16, MoEScheme, OperandScheme
from .tolerance import check_close
from .weights import Packed, WeightLayout, pack_experts

NvFp4MoEOutputs = Out

__all__ = [
    "OPS",
    "SWIGLU",
    "UNQUANTIZED",
    "W4A4_ROW",
    "W4A4_TRACED",
    "W4A16",
    "Activation",
    "Diag",
    "MoEScheme",
    "NvFp4MoEOperands",
    "NvFp4MoEOutputs",
    "OpSpec",
    "OperandScheme",
    "Out",
    "Packed",
    "Provider",
    "WeightLayout",
    "check_close",
    "pack_experts",
    "provider_for",
    "register_provider",
]
