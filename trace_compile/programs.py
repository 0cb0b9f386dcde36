"""The rollout's graph as a program that runs without the model: what ``.pt2``, AOTInductor and ONNX files are made of.

The model's forward is captured once more through the pass pipeline, over plain tensors: token ids, mask, positions, and
the cached keys and values of every layer. What the graph takes beyond those (parameters, packed experts, outer scales)
becomes constants of a module, and ``torch.export`` traces that module. One program serves prefill (a cache of length 0)
and decoding, for any batch, any number of new tokens and any cache length.

    logits [B, L, V], keys and values [B, heads, P + L, d] of each layer
        = program(input_ids [B, L], attention_mask [B, P + L], position_ids [B, L], keys and values [B, heads, P, d])

Invariants: packed experts are uint8 constants (4.5 bits per weight), no dense expert weight is in a program; symbolic
sizes are read off the inputs' shapes, so no size is baked in.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from trace_compile.capture import capturing
from trace_compile.engine import own_code
from trace_compile.errors import ExportError
from trace_compile.export.checkpoint import ExportReport
from trace_compile.export.config import export_block, model_config
from trace_compile.export.onnx_model import write_onnx
from trace_compile.export.writer import CONFIG, MARK, staged_folder, write_json
from trace_compile.ops.portable import portable_moe, stacked_moe
from trace_compile.ops.weights import Packed
from trace_compile.passes.feeds import region_ops
from trace_compile.passes.graph import clone, fake, op_name, placeholders
from trace_compile.passes.mode import Mode
from trace_compile.passes.pipeline import PIPELINE
from trace_compile.passes.runner import IR_OPS, PassRunner
from trace_compile.runtime import OuterScales, SiteKey

Form = Literal["fused", "portable", "stacked"]
"""What the experts are: ``fused``, the op of this package that the device's lowering chose; ``portable``, standard
operations that unpack one expert at a time; ``stacked``, standard operations around one dequantization per weight."""

_BODIES = {"portable": portable_moe, "stacked": stacked_moe}

PROGRAM_FORMATS = ("pt2", "aoti", "onnx")

# Unequal, and none 0 or 1: equal sizes would become one symbol, and those two constants.
_BATCH, _NEW, _PAST = 3, 5, 7


@dataclass(frozen=True)
class Rollout:
    """What a program is captured from: a twin's module, its class's forward, its mode, packed weights by region and
    name, traced scales and the sites that these are of."""

    module: nn.Module
    forward: Callable[..., Any]
    mode: Mode
    packed: Mapping[tuple[str, str], Packed]
    outer: OuterScales
    sites: tuple[SiteKey, ...]

    @property
    def quantizes_activations(self) -> bool:
        return self.mode.scheme is not None and self.mode.scheme.act is not None


@dataclass(frozen=True)
class RolloutProgram:
    """A traced rollout. ``inputs`` and ``outputs`` are names in order; ``example`` arguments fit ``exported``."""

    exported: ExportedProgram
    example: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def rollout_program(rollout: Rollout, form: Form) -> RolloutProgram:
    """Capture and trace. Raises ExportError where the model keeps no plain key-value cache or has other inputs, and
    what capturing raises."""
    example = _example(rollout.module)
    # Lowering chooses kernels of this package for this device, which the other forms do without.
    graph, captured, results = _capture(rollout, example, () if form == "fused" else ("lower",))
    if form != "fused":
        _without_own_ops(graph, form)
    module = _Constants(rollout, graph, captured, example)
    # DYNAMIC and not AUTO: a size that became a constant is an error, not a surprise.
    shapes = tuple(_dynamic(i) for i in range(len(example)))
    with torch.no_grad():
        exported = torch.export.export(module, example, dynamic_shapes={"inputs": shapes})
    layers = range((len(example) - 3) // 2)
    caches = [f"{what}_{i}" for i in layers for what in ("keys", "values")]
    inputs = ("input_ids", "attention_mask", "position_ids", *(f"past_{name}" for name in caches))
    assert results == 1 + len(caches)
    return RolloutProgram(exported, example, inputs, ("logits", *caches))


def _without_own_ops(graph: GraphModule, form: Form) -> None:
    for scope, node, region in region_ops(graph, *IR_OPS):
        if op_name(node) != "nvfp4_moe":
            raise ExportError(
                f"{region.name}: only quantized experts are written as standard operations, not {op_name(node)}; use "
                "form='fused'"
            )
        node.target = _BODIES[form]
        scope.module.recompile()


def export_program(
    rollout: Rollout,
    path: str | os.PathLike[str],
    *,
    format: str,
    form: Form | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write the rollout's program to the folder ``path``: the program, config.json, program.json that says how to call
    it, and the tokenizer.

    Args:
        format: ``"pt2"``, for ``torch.export.load``; ``"aoti"``, compiled for this device, for
            ``torch._inductor.aoti_load_package`` (inputs must be contiguous: others give wrong values
            without an error, since its input checks are off unless ``AOTI_RUNTIME_CHECK_INPUTS=1``);
            ``"onnx"``, see ``export.onnx_model``.
        form: see ``Form``. Default: ``portable``, which needs nothing of this package. ``fused`` programs need
            the imports that program.json lists before they are loaded.
        overwrite: replace an earlier export at ``path``.

    Raises ExportError as ``rollout_program``, and for a form that the format cannot hold; ``path`` is then untouched.
    """
    form = form or "portable"
    if form not in ("fused", *_BODIES):
        raise ExportError(f"unknown form {form!r}; use 'fused', 'portable' or 'stacked'")
    if format == "onnx" and form == "fused":
        raise ExportError("ONNX has no fused experts; use form='portable' (onnxruntime) or 'stacked' (TensorRT)")
    if format != "onnx" and form == "stacked":
        raise ExportError(f"form 'stacked' is for ONNX; use 'portable' or 'fused' with format {format!r}")
    with staged_folder(path, overwrite=overwrite) as folder:
        program = rollout_program(rollout, form)
        name = _write(program, folder, format)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        parameter = next(rollout.module.parameters())
        about = {
            "format": format,
            "form": form,
            "file": name,
            "inputs": program.inputs,
            "outputs": program.outputs,
            "scheme": rollout.mode.scheme.key if rollout.mode.scheme else None,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": parameter.device.type,
            "torch": torch.__version__,
            "imports": _imports(parameter.device) if form == "fused" else [],
        }
        write_json(folder / "program.json", about)
        config = model_config(rollout.module, parameter.dtype)
        write_json(folder / CONFIG, config | {MARK: export_block(format, rollout.quantizes_activations, {})})
        files = sorted(entry for entry in folder.rglob("*") if entry.is_file())
        constants = [value for value in program.exported.constants.values() if isinstance(value, Tensor)]
        packed = rollout.packed.values()
        return ExportReport(
            path=Path(path).resolve(),
            format=format,
            files=tuple(str(file.relative_to(folder)) for file in files),
            bytes=sum(file.stat().st_size for file in files),
            bits_per_expert_weight=8 * sum(p.nbytes for p in packed) / sum(2 * p.codes.numel() for p in packed),
            tensors=len(program.exported.state_dict) + len(constants),
        )


def _imports(device: torch.device) -> list[str]:
    """What defines the ops of a fused program; to be imported before it is loaded."""
    return ["trace_compile.ops", *(["trace_compile.kernels.providers"] if device.type == "cuda" else [])]


def _write(program: RolloutProgram, folder: Path, format: str) -> str:
    if format == "onnx":
        write_onnx(program.exported, folder / "model.onnx", list(program.inputs), list(program.outputs))
        return "model.onnx"
    if format == "aoti":
        # Constants of up to eight elements, such as the outer scales of eight experts, would become code.
        configs = {"always_keep_tensor_constants": True}
        torch._inductor.aoti_compile_and_package(
            program.exported, package_path=str(folder / "model.pt2"), inductor_configs=configs
        )
        return "model.pt2"
    torch.export.save(program.exported, folder / "model.pt2")
    return "model.pt2"


def _dynamic(position: int) -> dict[int, Any]:
    return {0: Dim.DYNAMIC, 2 if position > 2 else 1: Dim.DYNAMIC}


def _example(module: nn.Module) -> tuple[Tensor, ...]:
    config: Any = getattr(module, "config", None)
    try:
        from transformers import DynamicCache

        layers = DynamicCache(config=config.get_text_config()).layers
        if {type(layer).__name__ for layer in layers} != {"DynamicLayer"} or not hasattr(module, "generate"):
            raise ExportError(f"its cache is made of {sorted({type(layer).__name__ for layer in layers})}")
        text = config.get_text_config()
        heads = text.num_key_value_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    except (AttributeError, TypeError, ExportError) as error:
        raise ExportError(
            f"{type(module).__name__}: programs are made of causal language models with one plain key-value cache per "
            f"layer ({error})"
        ) from error
    parameter = next(module.parameters())
    device = parameter.device
    ids = torch.zeros(_BATCH, _NEW, dtype=torch.int64, device=device)
    mask = torch.ones(_BATCH, _PAST + _NEW, dtype=torch.int64, device=device)
    positions = torch.arange(_PAST, _PAST + _NEW, device=device).repeat(_BATCH, 1)
    past = [
        torch.zeros(_BATCH, heads, _PAST, width, dtype=parameter.dtype, device=device) for _ in range(2 * len(layers))
    ]
    return (ids, mask, positions, *past)


class _Captured(Exception):
    """Ends the call whose graph was captured; what it would compute is of no use."""


def _capture(
    rollout: Rollout, example: tuple[Tensor, ...], disabled: tuple[str, ...]
) -> tuple[GraphModule, tuple[Any, ...], int]:
    """The rewritten graph, the arguments that Dynamo called it with, and the number of its results."""
    found: list[tuple[GraphModule, tuple[Any, ...]]] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        rewritten = PassRunner(PIPELINE, disabled, None).run(clone(gm), inputs, config=rollout.mode)

        def stop(*args: Any) -> Any:
            found.append((rewritten, args))
            raise _Captured

        return stop

    entry = torch.compile(own_code(_with_cache(rollout.forward)), backend=backend, fullgraph=True, dynamic=True)
    ids, mask, positions, *past = example
    with torch.no_grad(), capturing(), contextlib.suppress(_Captured):
        entry(rollout.module, ids, mask, positions, past)
    graph, args = found[0]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return graph, args, len(output.args[0])


def _with_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    from transformers import DynamicCache

    def run(module: Any, ids: Tensor, mask: Tensor, positions: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        cache = DynamicCache(config=module.config.get_text_config())
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        out = forward(
            module,
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        found = [out.logits]
        for filled in out.past_key_values.layers:
            found += [filled.keys, filled.values]
        return tuple(found)

    return run


class _Constants(nn.Module):
    """A captured graph with everything but the caller's tensors bound: ``forward(*inputs)`` takes those."""

    def __init__(
        self, rollout: Rollout, graph: GraphModule, captured: tuple[Any, ...], example: tuple[Tensor, ...]
    ) -> None:
        super().__init__()
        self.graph = graph
        # What each argument of the graph is: an input, (input, dimension) of a size, or the name of a constant.
        self._arguments: list[int | tuple[int, int] | str] = []
        names = {id(t): name for name, t in rollout.module.named_parameters(remove_duplicate=False)}
        names |= {id(t): name for name, t in rollout.module.named_buffers(remove_duplicate=False)}
        positions = {id(tensor): i for i, tensor in enumerate(example)}
        nodes = placeholders(graph.graph)
        sizes = self._sizes(nodes[: len(captured)], captured, positions)
        for i, node in enumerate(nodes):
            if not node.users:
                graph.graph.erase_node(node)
                continue
            if i >= len(captured):
                constant = self._feed(node.meta["feed"], rollout)
                self._constant(node.name.removeprefix("feed_"), constant)
            elif id(captured[i]) in positions:
                self._arguments.append(positions[id(captured[i])])
            elif isinstance(captured[i], Tensor):
                if id(captured[i]) not in names:
                    raise ExportError(f"the graph reads {node.name}, which is no tensor of the model and no input")
                self._constant(names[id(captured[i])], captured[i].detach())
            else:
                self._arguments.append(sizes[node.name])
        graph.recompile()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.graph(*(self._value(argument, inputs) for argument in self._arguments)))

    def _value(self, argument: int | tuple[int, int] | str, inputs: tuple[Tensor, ...]) -> Any:
        if isinstance(argument, str):
            return getattr(self, argument)
        if isinstance(argument, tuple):
            return inputs[argument[0]].shape[argument[1]]
        return inputs[argument]

    def _constant(self, name: str, value: Tensor) -> None:
        name = name.replace(".", "_")
        if not hasattr(self, name):
            self.register_buffer(name, value)
        self._arguments.append(name)

    @staticmethod
    def _sizes(
        nodes: list[torch.fx.Node], captured: tuple[Any, ...], positions: dict[int, int]
    ) -> dict[str, tuple[int, int]]:
        """Placeholder of a symbolic size -> (input, dimension) that has it."""
        places: dict[Any, tuple[int, int]] = {}
        for node, value in zip(nodes, captured):
            if id(value) in positions:
                for dim, size in enumerate(fake(node).shape):
                    if isinstance(size, torch.SymInt):
                        places.setdefault(size.node.expr, (positions[id(value)], dim))
        found = {}
        for node, value in zip(nodes, captured):
            if not isinstance(value, Tensor) and node.users:
                symbol = fake(node)
                if not isinstance(symbol, torch.SymInt) or symbol.node.expr not in places:
                    raise ExportError(f"the graph reads {node.name} = {value!r}, which is no size of an input")
                found[node.name] = places[symbol.node.expr]
        return found

    @staticmethod
    def _feed(feed: Any, rollout: Rollout) -> Tensor:
        if feed.kind == "packed":
            part: Tensor = getattr(rollout.packed[feed.region, feed.weight], feed.part)
            return part
        if feed.kind == "outer":
            device = next(rollout.module.parameters()).device
            return rollout.outer.stacked(rollout.sites, device).clone()
        raise ExportError(f"a rollout's graph has no {feed.kind!r} to export")
