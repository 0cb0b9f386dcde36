"""Linear layers by torchao's way: ``torchao.quantize_(model, TraceCompileConfig(...))``, and its tensor class.

    quantize_(model, TraceCompileConfig("qat"))                    # train: masters stay, the ops of this package run
    ...
    quantize_(model, TraceCompileConfig("qat", step="convert"))    # weights become torchao's NVFP4Tensor

Nothing is quantized twice: what ``convert`` stores are the bytes that the training forward multiplied with, and
:func:`to_torchao` and :func:`from_torchao` only move bytes. For models that live in torchao; one that goes through
``trace_compile()`` names its linear layers there, with ``include``.

Needs torchao; importing this module registers the configuration with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, QuantizeTensorToNVFP4Kwargs
from torchao.prototype.mx_formats.utils import from_blocked
from torchao.quantization.transform_module import register_quantize_module_handler

from trace_compile.errors import BlockSizeError, OperandError, UnknownRecipeError
from trace_compile.numerics import FORMATS, QTensor, unpack_nibbles
from trace_compile.ops.nvfp4_linear import LinearOut, nvfp4_linear
from trace_compile.ops.scheme import MoEScheme
from trace_compile.ops.weights import Packed, WeightLayout
from trace_compile.passes.linears import chosen
from trace_compile.recipes import get_recipe
from trace_compile.state.packed import PackedWeights

__all__ = ["QuantizedLinear", "TraceCompileConfig", "from_torchao", "to_torchao"]

_FMT = "nvfp4"
_LAYOUT = WeightLayout(experts=1)
_packed: WeakKeyDictionary[nn.Module, PackedWeights] = WeakKeyDictionary()
"""Beside the modules: copies and pickles of a module hold what a linear layer holds."""


# --- tensors ----------------------------------------------------------------------------------------------------------


def to_torchao(
    tensor: QTensor | Packed, dtype: torch.dtype = torch.bfloat16, *, activations: bool = False
) -> NVFP4Tensor:
    """The same codes and scales as torchao's class, sharing memory where the layout allows.

    Args:
        tensor: ``[N, K]`` with one outer scale, ``[E, N, K]`` with one per expert, or packed weights (one expert's
            become two-dimensional).
        dtype: what it shall look like to others.
        activations: products also quantize their other operand dynamically, as torchao does; needs its GPU kernels.

    Raises ``OperandError`` for another format and for outer scales per row, which that class cannot hold.
    """
    if isinstance(tensor, Packed):
        codes, scales, outer, fmt = tensor.codes, tensor.scales, tensor.outer, _FMT
        if codes.shape[0] == 1:
            codes, scales = codes[0], scales[0]
    else:
        codes, scales, outer, fmt = tensor.packed, tensor.scales, tensor.outer, tensor.fmt
    if fmt != _FMT:
        raise OperandError(f"torchao's NVFP4Tensor holds {_FMT}, not {fmt!r}")
    if codes.dim() not in (2, 3) or outer.numel() != (1 if codes.dim() == 2 else codes.shape[0]):
        raise OperandError(
            f"torchao's NVFP4Tensor has one outer scale per matrix; codes {list(codes.shape)} come with "
            f"{list(outer.shape)} of them: quantize with outer='tensor' or 'expert'"
        )
    return NVFP4Tensor(
        codes.contiguous(),
        scales.contiguous().view(torch.float8_e4m3fn),
        FORMATS[_FMT].block,
        dtype,
        outer.reshape(()) if codes.dim() == 2 else outer.reshape(-1, 1, 1),
        act_quant_kwargs=QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=True) if activations else None,
    )


def from_torchao(tensor: NVFP4Tensor, profile: str = "torchao") -> QTensor:
    """The same codes and scales as ours; swizzled scales are put in order, and a transposed matrix is turned back.

    ``profile`` states the rule by which the scales were made, which the bytes do not say. A missing per-tensor scale
    is 1.
    """
    data, scales = tensor.qdata, tensor.scale
    if data.stride(-2) < data.stride(-1):
        data, scales = data.transpose(-2, -1), scales.transpose(-2, -1)
    codes = unpack_nibbles(data.contiguous().view(torch.uint8))
    *lead, k = codes.shape
    rows, blocks = codes.numel() // k, k // tensor.block_size
    if tensor.is_swizzled_scales:
        scales = from_blocked(scales.contiguous().view(torch.uint8), rows, blocks)
    scales = scales.contiguous().view(torch.uint8).reshape(*lead, blocks)
    outer = tensor.per_tensor_scale
    outer = torch.ones(1, device=codes.device) if outer is None else outer.reshape(-1).float()
    return QTensor(_FMT, profile, codes, scales, outer)


# --- modules ----------------------------------------------------------------------------------------------------------


@dataclass
class TraceCompileConfig(AOBaseConfig):
    """What ``torchao.quantize_`` is to do with each linear layer that its filter takes.

    Args:
        recipe: whose training scheme the layers follow: ``"qat"`` (W4A4), ``"w4a16"``, or a ``MoEScheme`` key.
        step: ``"prepare"``: masters stay and train, forwards run on quantized operands. ``"convert"``: weights become
            ``NVFP4Tensor``, from prepared layers and plain ones alike.
        activations: converted layers quantize their input too, by torchao's dynamic rule, on GPUs that torchao
            supports; else they are weight-only.

    Raises ``UnknownRecipeError`` for a recipe that packs no NVFP4 weights or has traced scales, or another step.
    """

    recipe: str = "qat"
    step: str = "prepare"
    activations: bool = False

    def __post_init__(self) -> None:
        if self.step not in ("prepare", "convert"):
            raise UnknownRecipeError(f"step {self.step!r}: use 'prepare' or 'convert'")
        weight = self.scheme.weight
        if weight is None or weight.fmt != _FMT:
            raise UnknownRecipeError(f"recipe {self.recipe!r} packs no {_FMT} weights")
        if self.scheme.act is not None and self.scheme.act.outer == "traced":
            raise UnknownRecipeError(f"recipe {self.recipe!r} takes traced scales; only trace_compile() traces")

    @property
    def scheme(self) -> MoEScheme:
        if self.recipe.startswith("w="):
            return MoEScheme.parse(self.recipe)
        return get_recipe(self.recipe).train or MoEScheme(None, None)

    @staticmethod
    def filter(include: tuple[str, ...] = ("*",), ignore: tuple[str, ...] = ()) -> Callable[[nn.Module, str], bool]:
        """A ``filter_fn`` for ``quantize_`` with the rules of ``trace_compile(include=..., ignore=...)``: routers,
        gates and output heads are taken only by their very name."""
        return lambda module, name: isinstance(module, nn.Linear) and chosen(include, ignore, name)


class QuantizedLinear(nn.Linear):
    """A linear layer over the parameters of the one it was made from, whose products run on 4-bit operands."""

    scheme: MoEScheme

    @classmethod
    def of(cls, linear: nn.Linear, scheme: MoEScheme) -> QuantizedLinear:
        block = FORMATS[_FMT].block
        if linear.in_features % block:
            raise BlockSizeError(
                f"a layer with {linear.in_features} input features cannot be quantized in blocks of {block}; leave it "
                "out with filter_fn"
            )
        made = cls.__new__(cls)
        made.__dict__.update(linear.__dict__)
        made.scheme = scheme
        return made

    @torch.compiler.disable
    def packed(self) -> Packed:
        """The weight's bytes, packed again when it changed."""
        assert self.scheme.weight is not None
        return _packed.setdefault(self, PackedWeights()).get("weight", self.weight, _LAYOUT, self.scheme.weight)

    def forward(self, input: Tensor) -> Tensor:
        p = self.packed()
        rows = input.reshape(-1, self.in_features)
        fixed = (None,) * 5  # traced scale, guide, its scales, hits, valid tokens
        options = (self.scheme.key, "none", "none", False)
        out = nvfp4_linear(rows, self.weight, self.bias, p.codes, p.scales, p.outer, *fixed, *options)
        return out[LinearOut.Y].view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme.key}"


@register_quantize_module_handler(TraceCompileConfig)
def _transform(module: nn.Module, config: TraceCompileConfig) -> nn.Module:
    """What ``quantize_`` calls for each module that its filter takes."""
    if not isinstance(module, nn.Linear):
        raise OperandError(f"TraceCompileConfig quantizes linear layers, not {type(module).__name__}: use filter_fn")
    if config.step == "prepare":
        return QuantizedLinear.of(module, config.scheme)
    prepared = module if isinstance(module, QuantizedLinear) else QuantizedLinear.of(module, config.scheme)
    weight = to_torchao(prepared.packed(), module.weight.dtype, activations=config.activations)
    plain = nn.Linear.__new__(nn.Linear)
    plain.__dict__.update({name: value for name, value in module.__dict__.items() if name != "scheme"})
    plain._parameters = dict(module._parameters)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    return plain
