"""What is checked of a family: is the compiled model the model, does it train, generate, and survive an export?

Each check compares with something that shares no code with the passes: the untouched model; a quantization-aware model
made of hooks and ``numerics.quantize`` alone (:class:`Reference`); the trainer for what its twin generated; the twin's
packed weights for what a checkpoint gives back.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tools.families import EOS, PAD, VOCAB, Family
from trace_compile import trace_compile
from trace_compile.errors import TraceCompileError
from trace_compile.export import reload
from trace_compile.model import session_of
from trace_compile.numerics import quantize
from trace_compile.passes.region import LinearRegion, MoERegion, Region
from trace_compile.passes.report import formula

ROUNDING = 1e-5
"""Relative distance that another order of float32 sums makes in a model of two layers."""
FLIPS = 2e-2
"""The same of quantized models: sums that differ in their last bit may round one element to another code."""


NOTHING = "-"
"""Of a cell: there is no such thing to check."""


SILENT = 1e-4
"""Share of the largest gradient below which one is a rest of rounding: a router whose gates are normalised to one."""


@dataclass(frozen=True)
class Row:
    """One line of the support table. Cells are ``bitwise``, ``yes``, ``NOTHING``, or say what happens."""

    family: str
    model: str
    regions: str
    layout: str
    activation: str
    identity: str
    training: str
    generation: str
    export: str


def check(family: Family) -> Row:
    """All checks of one family. Cells that depend on a failed one are ``-``."""
    torch._dynamo.reset()
    found = dict.fromkeys((f.name for f in fields(Row)), NOTHING)
    found |= {"family": family.name, "model": family.model}
    try:
        model = compiled(family, "bf16")
    except TraceCompileError as refusal:
        return Row(**found | {"regions": refused(refusal)})
    regions = experts_of(model)
    found["regions"] = str(len(regions))
    found["layout"] = _one_of_all(layout, regions)
    found["activation"] = _one_of_all(formula, regions)
    found["identity"] = _verdict(lambda: identity(family, model))
    trained = compiled(family, "trace")
    found["training"] = _verdict(lambda: training(family, trained))
    if hasattr(trained, "prepare_inputs_for_generation"):
        found["generation"] = _verdict(lambda: generation(trained))
    found["export"] = _verdict(lambda: export(trained))
    return Row(**found)


def compiled(family: Family, recipe: str, **options: Any) -> Any:
    options = dict[str, Any](compiler="eager", last=1.0, example_inputs=inputs(family)) | family.options | options
    with quiet():
        return trace_compile(family.build(), recipe=recipe, **options)


def experts_of(model: Any) -> tuple[MoERegion, ...]:
    return tuple(r for r in session_of(model).regions if isinstance(r, MoERegion))


def inputs(family: Family, batch: int = 2, length: int = 7) -> dict[str, Any]:
    """Arguments of a small forward; one sequence has padding on its left."""
    ids = torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    found = {"input_ids": torch.where(mask == 1, ids, PAD), "attention_mask": mask}
    parameters = inspect.signature(family.model_class.forward).parameters
    if "decoder_input_ids" in parameters:
        found["decoder_input_ids"] = ids[:, :4]
    return found | ({"use_cache": False} if "use_cache" in parameters else {})


# --- identity ---------------------------------------------------------------------------------------------------------


def results(run: Any, model: nn.Module, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits (and auxiliary loss, where there is one) and the gradients of a loss that weighs every logit."""
    model.zero_grad()
    with quiet():
        out = run(**arguments)
    logits = out.logits if hasattr(out, "logits") else out[0]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    loss = (logits.float() * weights).sum()
    auxiliary = getattr(out, "aux_loss", None)
    if isinstance(auxiliary, Tensor):
        loss = loss + auxiliary
    loss.backward()
    found = {"logits": logits.detach(), "loss": loss.detach()}
    named = model.named_parameters(remove_duplicate=False)
    return found | {name: p.grad.clone() for name, p in named if p.grad is not None}


def identity(family: Family, model: Any) -> str:
    """The compiled, unquantized model against the untouched one: logits and every gradient."""
    untouched = family.build()
    if untouched._can_set_experts_implementation():
        untouched.set_experts_implementation("grouped_mm")
    arguments = inputs(family)
    routed = arguments | {"output_router_logits": True}
    try:
        expected = results(untouched, untouched, routed)
    except (TypeError, IndexError, ValueError):  # the family has no such option, or it does not work
        routed, expected = arguments, results(untouched, untouched, arguments)
    return compare(results(model, model, routed), expected, ROUNDING)


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> str:
    """``bitwise``, ``yes`` within the tolerance (relative norm), or what differs."""
    if found.keys() != expected.keys():
        return f"gradients of other parameters: {sorted(found.keys() ^ expected.keys())[:3]}"
    if all(torch.equal(found[name], expected[name]) for name in expected):
        return "bitwise"
    floor = SILENT * max(value.double().norm() for name, value in expected.items() if name not in ("logits", "loss"))
    for name, value in expected.items():
        error = float((found[name] - value).double().norm() / torch.maximum(value.double().norm(), floor))
        if not error <= tolerance:
            return f"{name} differs by {error:.0e}"
    return "yes"


# --- quantization-aware training --------------------------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """``x`` quantized along its last dimension, each row with its own scale; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outer: str) -> Tensor:
        return quantize(x, outer=outer).dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class RowsQuantized(TorchFunctionMode):
    """While on, every product quantizes the rows of its left operand."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("linear", "matmul", "__matmul__", "bmm", "mm"):
            args = (Straight.apply(args[0], "row"), *args[1:])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def rows_quantized_inside(owners: list[nn.Module]) -> Iterator[None]:
    """Turns :class:`RowsQuantized` on while one of the modules runs."""
    modes: list[RowsQuantized] = []

    def enter(*_: Any) -> None:
        modes.append(RowsQuantized())
        modes[-1].__enter__()

    def leave(*_: Any) -> None:
        modes.pop().__exit__(None, None, None)

    hooks = [
        h for owner in owners for h in (owner.register_forward_pre_hook(enter), owner.register_forward_hook(leave))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def reference_results(family: Family, regions: tuple[Region, ...]) -> dict[str, Tensor]:
    """A quantization-aware step of the model with its own eager experts and linear layers.

    Hooks and ``numerics.quantize`` make it; nothing of the passes, the ops or the packed weights.
    """
    model = family.build()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    quantized: dict[str, Tensor] = {}
    for region in regions:
        for which in region.weights:
            quantized |= quantized_parameters(region, which, dict(model.named_parameters(remove_duplicate=False)))
    owners = {name.rpartition(".")[0]: model.get_submodule(name.rpartition(".")[0]) for name in quantized}

    def run(**arguments: Any) -> Any:
        return torch.func.functional_call(model, quantized, kwargs=arguments)

    with rows_quantized_inside(list(owners.values())):
        return results(run, model, inputs(family))


def quantized_parameters(region: Region, which: str, params: dict[str, Any]) -> dict[str, Tensor]:
    """Values of one weight's parameters, by name: quantized along its reduction, one outer scale per expert, or for all
    linear layers that read the same input."""
    expert, layout = region.weight(which)
    if isinstance(region, LinearRegion):
        joined = torch.cat([params[p.name] for p in expert.parameters])
        parts = Straight.apply(joined.unsqueeze(0), "expert")[0].split(region.rows)
        return dict(zip((p.name for p in expert.parameters), parts, strict=True))
    weight = params[expert.name].transpose(1, 2) if layout.transposed else params[expert.name]
    value = Straight.apply(weight, "expert")
    return {expert.name: value.transpose(1, 2) if layout.transposed else value}


def training(family: Family, model: Any) -> str:
    """One step: every gradient finite, those of quantized weights not zero, and all of them the reference's."""
    regions = session_of(model).regions
    found, expected = results(model, model, inputs(family)), reference_results(family, regions)
    for region in regions:
        for param in (p for which in region.weights for p in region.weight(which)[0].parameters):
            if param.name in expected and not bool(found[param.name].any()):
                return f"no gradient reaches {param.name}"
    for name, value in found.items():
        if not bool(value.isfinite().all()):
            return f"{name} is not finite"
    verdict = compare(found, expected, FLIPS)
    return "yes" if verdict == "bitwise" else verdict


# --- generation and export --------------------------------------------------------------------------------------------


def generation(model: Any) -> str:
    """The twin's greedy tokens are the trainer's; what it recorded is found again by a guided step."""
    rollout = model.rollout()
    prompt = torch.randint(2, VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))
    new = 4
    with quiet(), model.trace() as trace:
        ids = rollout.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=new,
                               max_new_tokens=new, pad_token_id=PAD)  # fmt: skip
    if ids.shape != (2, 5 + new):
        return f"generated {tuple(ids.shape)}"

    def step() -> Tensor:
        with quiet():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        return logits[:, 4:-1].index_fill(-1, torch.tensor([EOS]), -torch.inf)

    if not torch.equal(step().argmax(-1), ids[:, 5:]):
        return "trainer and twin choose different tokens"
    model.guide(trace)
    guided = step()
    model.guide(None)
    if trace.counters.hits != ids[:, :-1].numel():
        return f"{trace.counters.hits} of {ids[:, :-1].numel()} records found again"
    return "yes" if torch.equal(guided.argmax(-1), ids[:, 5:]) else "guided trainer and twin choose different tokens"


def export(model: Any) -> str:
    """A checkpoint gives back the packed experts bit for bit and everything else as it is."""
    folder = Path(tempfile.mkdtemp())
    try:
        with quiet():
            model.export(folder / "out", activations=False)
            loaded = reload(folder / "out").state_dict()
    finally:
        shutil.rmtree(folder)
    expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for region in session_of(model).regions:
        for which in region.weights:
            expected |= quantized_parameters(region, which, expected)
    return "yes" if (verdict := compare(loaded, expected, 0.0)) == "bitwise" else verdict


# --- words ------------------------------------------------------------------------------------------------------------


def layout(region: MoERegion) -> str:
    """``[E, 2I, H]``, or as the parameter has it, and what else is special."""
    rows = "2I" if region.activation.gated else "I"
    words = [f"[E, H, {rows}]" if region.w13_layout.transposed else f"[E, {rows}, H]"]
    words += ["interleaved"] if region.w13_layout.interleaved else []
    words += ["biased"] if region.b13 or region.b2 else []
    words += ["gates on the input"] if region.weight_input else []
    return ", ".join(words)


def refused(error: TraceCompileError) -> str:
    """The error and the first reason that it gives, without the paths of this machine."""
    text = re.sub(r"/[^ ]*/transformers/", "", str(error))
    _, _, reasons = text.partition("\n  - ")
    if reasons:
        text = reasons.partition("\n")[0]
    return f"refused: {type(error).__name__}: {' '.join(text.split())}"


def _one_of_all(words: Callable[[MoERegion], str], regions: tuple[MoERegion, ...]) -> str:
    return "; ".join(dict.fromkeys(words(region) for region in regions))


def _verdict(run: Callable[[], str]) -> str:
    try:
        return run()
    except TraceCompileError as refusal:
        return refused(refusal)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
