"""A traced rollout as an ONNX model: standard operations, checked, with the packed bytes as its weights.

Two forms:

 - ``portable``: one ``Scan`` over the experts, which unpacks uint8 codes with standard operations. onnxruntime runs it
   on a CPU, and cannot fold the unpacked weights into constants. Opset 23, IR 10.
 - ``stacked``: codes are FLOAT4E2M1 and block scales FLOAT8E4M3FN tensors, and each weight is two DequantizeLinear
   nodes: block scales by the outer scale of each expert (axis 0), codes by the result (blocks of 16 along the last
   axis); scales of DequantizeLinear may not be 8-bit floats, hence two. That is the form that TensorRT reads.
   onnxruntime's CPU has no kernel for it; the reference evaluator runs it. Opset 23, IR 11 (4-bit floats came with it).

Programs have the model's dtype; onnxruntime's CPU runs float32 ones (it has no bfloat16 GEMM).

Opset 23 in both: attention, rotary embedding and RMS normalization are operations of their own from it on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trace_compile.errors import ExportError
from trace_compile.export.formats import GROUP

OPSET = 23
_IR_WITH_FLOAT4 = 11


def write_onnx(
    exported: torch.export.ExportedProgram, path: str | os.PathLike[str], inputs: list[str], outputs: list[str]
) -> None:
    """Translate ``exported`` and write ``path`` and, beside it, ``<name>.data`` with the weights.

    Raises ExportError if the packages are missing, an operation has no translation, or the checker objects.
    """
    try:
        import onnx
        import onnxscript
    except ImportError as error:
        raise ExportError(
            f"exporting to ONNX needs the package {error.name}; pip install 'trace-compile[onnx]'"
        ) from error
    ops = onnxscript.values.Opset("", OPSET)

    def dequantize(codes: Any, scales: Any, outer: Any) -> Any:
        # Types follow in _retype: constants of a torch program cannot be 4-bit floats.
        factors = ops.DequantizeLinear(scales, outer, axis=0)
        return ops.DequantizeLinear(codes, factors, axis=2, block_size=GROUP)

    try:
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET,
            input_names=inputs,
            output_names=outputs,
            custom_translation_table={torch.ops.trace_compile.dequantize_experts.default: dequantize},
            verbose=False,
        )
    except Exception as error:
        raise ExportError(f"the program cannot be written as ONNX: {error}") from error
    assert program is not None
    model = program.model_proto
    _two_levels(model)
    target = Path(path)
    onnx.save_model(model, str(target), save_as_external_data=True, location=f"{target.name}.data", size_threshold=1024)
    try:
        onnx.checker.check_model(str(target), full_check=True)
    except Exception as error:
        raise ExportError(f"the ONNX checker refuses the exported program: {error}") from error


def _two_levels(model: Any) -> None:
    """Gives the operands of each pair of DequantizeLinear nodes their types; the bytes are what they were."""
    import onnx

    made_by = {node.output[0]: node for node in model.graph.node if node.op_type == "DequantizeLinear"}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in made_by.values():
        first = made_by.get(node.input[1])
        if first is None:
            continue
        if node.input[0] not in weights or first.input[0] not in weights:
            raise ExportError(f"{node.input[0]} is no constant of the program; only constant weights are 4-bit floats")
        codes, scales = weights[node.input[0]], weights[first.input[0]]
        experts, rows, half = codes.dims
        _retype(codes, onnx.TensorProto.FLOAT4E2M1, [experts, rows, 2 * half])
        _retype(scales, onnx.TensorProto.FLOAT8E4M3FN, [experts, rows, 2 * half // GROUP])
        model.ir_version = max(model.ir_version, _IR_WITH_FLOAT4)
    # What shape inference wrote about the bytes no longer holds.
    for value in [value for value in model.graph.value_info if value.name in weights]:
        model.graph.value_info.remove(value)


def _retype(tensor: Any, data_type: int, dims: list[int]) -> None:
    """The same bytes as another type. The low nibble of a byte is the first element in ONNX, as it is here."""
    tensor.data_type = data_type
    del tensor.dims[:]
    tensor.dims.extend(dims)
