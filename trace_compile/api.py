"""``trace_compile(model)``: the one call before training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trace_compile.errors import TraceCompileError
from trace_compile.model import ATTRIBUTE, attach, session_of
from trace_compile.passes.mode import Unquantized
from trace_compile.recipes import Recipe, get_recipe
from trace_compile.session import Options

logger = logging.getLogger("trace_compile")

COMPILERS = ("eager", "aot_eager", "inductor")


def trace_compile(
    model: nn.Module,
    recipe: str | Recipe = "trace",
    *,
    strict: bool = True,
    compiler: str | None = None,
    last: float = 0.5,
    max_staleness: int = 3,
    replay_routing: bool = False,
    recompute: bool = False,
    unquantized: Unquantized | Iterable[str] = (),
    example_inputs: Mapping[str, Any] | None = None,
    disabled_passes: Iterable[str] = (),
    dump_dir: str | None = None,
    include: Iterable[str] = (),
    ignore: Iterable[str] = (),
    layers: Iterable[str] | Callable[[str], bool] | None = None,
    sites: Iterable[str] = ("gate_up",),
) -> Any:
    """Compile ``model`` for FP4-aware training, in place; returns the same object with the methods of its new class.

    Args:
        model: any module with mixture-of-experts blocks. Transformers models are switched to
            ``experts_implementation="grouped_mm"``, because the eager per-expert loop cannot be captured.
        recipe: name or ``Recipe``; see ``trace_compile.recipes``.
        strict: every expert-shaped operation must be rewritten, else ``NoMoERegionError``; ``False`` reports the rest.
        compiler: what compiles the rewritten graphs: ``"inductor"``, ``"aot_eager"`` or ``"eager"``. Default: chosen at
            each compilation by where the model then is: ``"inductor"`` on GPUs, ``"eager"`` on CPUs, where Inductor
            takes tens of seconds per graph and the expert ops dominate anyway.
        last: share of the layers, counted from the end, whose outcome is recorded and replayed (TRACE: 0.5).
        max_staleness: oldest record, in weight versions, that guidance may use.
        replay_routing: guided forwards also take the rollout's expert ids, with gates from their own logits (R3).
        recompute: recompute the gate/up pre-activation in the backward instead of keeping it ([T*K, 2I] per layer): one
            more grouped GEMM per layer and step.
        unquantized: regions that compute in the model's own dtype in both graphs: shell patterns of their names, or a
            rule, such as ``Unquantized(first=1, last=4)`` for boundary layers.
        example_inputs: keyword arguments of one small forward, for models without ``dummy_inputs``; with either, the
            model is captured now and errors show at once, else at the first forward.
        disabled_passes: names of passes to leave out (debugging).
        dump_dir: write each pass's graph there.
        include: patterns of linear layers to quantize like the experts, by module name: a name, a shell wildcard
            (``"*.shared_expert.*"``, ``"*_proj"``), or ``"re:"`` and a regular expression. Routers, gates, output heads
            and layers tied to an embedding are taken only where a pattern is their very name.
        ignore: patterns of layers that stay as they are, whatever ``include`` says; an expert-shaped operation whose
            modules they name is no error.
        layers: which layers to record instead of the last ones: patterns of the regions' names, as for ``include``, or
            a function of the name that says yes.
        sites: what is recorded of them: the inputs of ``"gate_up"``, and also of ``"down"`` (top_k rows per token).

    Raises:
        UnknownRecipeError, NoMoERegionError, GraphCaptureError; each names what was found and what to do.
    """
    if not isinstance(model, nn.Module):
        raise TraceCompileError(f"trace_compile takes an nn.Module, got {type(model).__name__}")
    if ATTRIBUTE in model.__dict__:
        raise TraceCompileError("this model went through trace_compile already; load it again for another recipe")
    if not 0.0 < last <= 1.0:
        raise TraceCompileError(f"last is the share of layers to record, 0 < last <= 1, got {last}")
    chosen = get_recipe(recipe)
    if compiler is not None and compiler not in COMPILERS:
        raise TraceCompileError(f"unknown compiler {compiler!r}; choose one of {', '.join(COMPILERS)}")
    included, ignored = _patterns(include, ignore)
    if not isinstance(unquantized, Unquantized):
        unquantized = Unquantized(patterns=_patterns(unquantized)[0])
    options = Options(
        strict=strict,
        compiler=compiler,
        last=last,
        max_staleness=max_staleness,
        replay_routing=replay_routing,
        recompute=recompute,
        unquantized=unquantized,
        disabled_passes=tuple(disabled_passes),
        dump_dir=dump_dir,
        include=included,
        ignore=ignored,
        layers=layers if layers is None or callable(layers) else _patterns(layers)[0],
        down=_down(sites),
    )
    original, implementations = type(model), _experts_implementations(model)
    try:
        _use_grouped_experts(model)
        inputs = dict(example_inputs) if example_inputs is not None else _dummy_inputs(model)
        attach(model, chosen, options)
        if inputs is not None:
            session_of(model).discover(model, (), inputs)
    except BaseException:
        model.__class__ = original
        model.__dict__.pop(ATTRIBUTE, None)
        for config, implementation in implementations:
            config._experts_implementation_internal = implementation
        raise
    return model


def _down(sites: Iterable[str]) -> bool:
    chosen = {sites} if isinstance(sites, str) else set(sites)
    if chosen not in ({"gate_up"}, {"gate_up", "down"}):
        raise TraceCompileError(f"sites are ('gate_up',) or ('gate_up', 'down'), got {sorted(chosen)}")
    return "down" in chosen


def _experts_implementations(model: nn.Module) -> list[tuple[Any, Any]]:
    """Every config of the model's parts with the experts implementation that it names."""
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}
    known = [c for c in configs.values() if hasattr(c, "_experts_implementation_internal")]
    return [(config, config._experts_implementation_internal) for config in known]


def _patterns(*lists: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    if any(isinstance(patterns, str) for patterns in lists):
        raise TraceCompileError(
            "include, ignore, unquantized and layers are lists of patterns: pass [pattern], not one string"
        )
    return tuple(tuple(patterns) for patterns in lists)


def _use_grouped_experts(model: nn.Module) -> None:
    for module in model.modules():  # a model inside of another may be the one that can change, with its own config
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            before = module.config._experts_implementation
            if before != "grouped_mm":
                module.set_experts_implementation("grouped_mm")
            if before == "eager":
                logger.warning("experts_implementation 'eager' is now 'grouped_mm': a loop over experts is no graph")


def _dummy_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Inputs of a small forward for a transformers causal language model, else ``None``."""
    if not hasattr(model, "dummy_inputs") or not hasattr(model, "config"):
        return None
    ids = torch.zeros(2, 3, dtype=torch.long, device=next(model.parameters()).device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
