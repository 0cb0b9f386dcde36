"""Loading a checkpoint with transformers, experts dequantized, activations not quantized.

transformers 5.17 reads compressed-tensors NVFP4 experts without their outer scales: its loader hands its decompressor
``weight_packed`` and ``weight_scale`` only, lists ``weight_global_scale`` as unexpected, and leaves every expert weight
too large by 1/g. So the weights are decompressed here, by the compressed-tensors library's own decompressor, and then
go through transformers' loader as the bf16 checkpoint that they now are (its conversion stacks the experts). ModelOpt
checkpoints, which transformers does not know, take the same way after their scales are renamed and turned round.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor

from trace_compile.errors import ExportError
from trace_compile.export.config import check_scheme
from trace_compile.export.formats import FORMATS
from trace_compile.export.opened import Checkpoint
from trace_compile.export.verify import verify_checkpoint
from trace_compile.ops.scheme import MoEScheme
from trace_compile.ops.weights import WeightLayout


def reload(
    path: str | os.PathLike[str], *, scheme: MoEScheme | None = None, dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """The model of an exported or foreign checkpoint in eval mode on the CPU, with dequantized weights.

    Args:
        scheme: what the caller's graphs quantize with; checked against the checkpoint.
        dtype: of the loaded model; float32 and bfloat16 hold the dequantized weights exactly.

    Raises:
        ExportError: the folder is incomplete or damaged, its model class is not one of transformers', or keys of the
            checkpoint and of the model differ.
        FingerprintMismatchError: the checkpoint was made with another scheme.
    """
    verify_checkpoint(path)
    checkpoint = Checkpoint(path)
    if scheme is not None:
        check_scheme(checkpoint.config, scheme)
    architecture = (checkpoint.config.get("architectures") or [""])[0]
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ExportError(f"{path}: transformers has no model class {architecture!r}; read it with verify.Checkpoint")
    config = model_class.config_class.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=dict(_dense_state(checkpoint)), dtype=dtype, output_loading_info=True
    )
    differences = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(differences.values()):
        raise ExportError(f"{path}: checkpoint and {architecture} differ: {differences}")
    return model.eval()


def _dense_state(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors by name; packed matrices as bf16 weights, stacked where the family stacks them."""
    packed = checkpoint.modules if checkpoint.format.packed else {}
    for name in sorted(checkpoint.names):
        module, _, suffix = name.rpartition(".")
        if module not in packed or suffix == "bias":
            yield name, checkpoint.tensor(name)
    if not packed:
        return
    decompress = _decompressor(checkpoint)
    if checkpoint.foreign:
        yield from ((f"{module}.weight", decompress(_compressed(checkpoint, module))) for module in packed)
        return
    for entry in checkpoint.block["regions"].values():
        stacks: dict[str, list[Tensor]] = {}
        for projection, template in entry["modules"].items():
            key = "down" if projection == "down" else "gate_up"
            modules = [template.format(expert) for expert in range(entry["experts"])]
            weights = [decompress(_compressed(checkpoint, module)) for module in modules]
            if key in entry["stacked"]:
                stacks.setdefault(key, []).append(torch.stack(weights))
            else:
                yield from zip([f"{module}.weight" for module in modules], weights)
        for key, parts in stacks.items():
            layout = WeightLayout(**entry["layouts"][key])
            yield entry["stacked"][key], layout.parameter(torch.cat(parts, dim=1)).contiguous()


def _decompressor(checkpoint: Checkpoint) -> Any:
    """compressed-tensors' decompressor for the scheme that config.json declares."""
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError as error:
        raise ExportError("loading packed checkpoints needs the package compressed-tensors; install it") from error
    config = copy.deepcopy(checkpoint.config["quantization_config"])
    if checkpoint.format.name != "compressed-tensors":
        reference = FORMATS["compressed-tensors"].quantization_config
        assert reference is not None
        config = reference(checkpoint.activations, [])
    parsed = QuantizationConfig.model_validate(config)
    (group,) = parsed.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(parsed.format)
    return lambda state: compressor.decompress(state, group)["weight"]


def _compressed(checkpoint: Checkpoint, module: str) -> dict[str, Tensor]:
    """The tensors of one matrix under compressed-tensors' names and in its direction."""
    source = {field.role: field for field in checkpoint.format.fields}
    state = {}
    for field in FORMATS["compressed-tensors"].fields_for(False):
        stored = source[field.role]
        tensor = checkpoint.tensor(f"{module}.{stored.suffix}")
        if stored.reciprocal != field.reciprocal:
            tensor = 1.0 / tensor
        state[field.suffix] = tensor if field.role in ("codes", "scales") else tensor.reshape(field.shape)
    return state
