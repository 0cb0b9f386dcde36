"""Number formats, scaling, quantization, packing and guided rounding. Torch only; imports nothing else of the
package.
"""

from trace_compile.numerics.blocks import (
    decode_blocks,
    finite_scales,
    guided_blocks,
    poison_scales,
    quantize_blocks,
    saturated,
)
from trace_compile.numerics.codec import (
    decode_e4m3,
    decode_exponent,
    encode_e4m3,
    encode_exponent,
    pack_bits,
    pack_nibbles,
    unpack_bits,
    unpack_nibbles,
)
from trace_compile.numerics.formats import FORMATS, PROFILES, Element, Format, Profile, format_of, profile_of
from trace_compile.numerics.guided import guided_round
from trace_compile.numerics.qtensor import QTensor, quantize
from trace_compile.numerics.scales import amax, outer_bound, outer_scale

__all__ = [
    "FORMATS",
    "PROFILES",
    "Element",
    "Format",
    "Profile",
    "QTensor",
    "amax",
    "decode_blocks",
    "decode_e4m3",
    "decode_exponent",
    "encode_e4m3",
    "encode_exponent",
    "finite_scales",
    "format_of",
    "guided_blocks",
    "guided_round",
    "outer_bound",
    "outer_scale",
    "pack_bits",
    "pack_nibbles",
    "poison_scales",
    "profile_of",
    "quantize",
    "quantize_blocks",
    "saturated",
    "unpack_bits",
    "unpack_nibbles",
]
