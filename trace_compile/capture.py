"""The Dynamo backend: from a captured graph, through the passes, to a callable that asks the runtime for what is not in
the graph.

Dynamo captures the model as one torch-level graph before autograd and calls a :class:`Backend` with it. The backend
rewrites a copy of the graph and hands it to an inner compiler. What a graph cannot hold comes from and goes to a
:class:`Runtime` at every call: packed weights, outer scales and guidance go in behind the model's own arguments,
records come out behind the model's own results. Parameters are addressed by their position among the arguments, never
by identity: the compiled graph serves whatever parameters Dynamo calls it with.

Capture under :func:`capturing`, which sets what the passes rely on and gives errors their names:

    with capturing():
        out = torch.compile(model, backend=Backend(mode, runtime), dynamic=True, fullgraph=True)(ids)
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._inductor
import torch._inductor.config
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import GraphCaptureError, GuidanceError, TraceCompileError
from .ops.scheme import W4A4_ROW, MoEScheme
from .ops.weights import Master, Packed
from .passes.graph import clone, fake, output_of, placeholders
from .passes.mode import Mode
from .passes.pipeline import PIPELINE
from .passes.region import Emit, ExpertParam, Feed, Region
from .passes.report import CompileReport, untouched
from .passes.runner import PassRunner
from .state.packed import PackedWeights

if importlib.util.find_spec("triton") is not None:  # torch brings it where there are GPUs that it compiles for
    from .kernels import providers  # noqa: F401

__all__ = ["Backend", "CompileReport", "Mode", "Runtime", "capturing", "trace_compile_backend"]

COMPILERS = ("eager", "aot_eager", "inductor", "reduce-overhead", "max-autotune")
"""The last three are Inductor in ``torch.compile``'s modes default, reduce-overhead and max-autotune."""
Emits = dict[str, dict[str, Tensor]]


class Guidance(Protocol):
    """Records of the current call's T tokens, the guided regions side by side in model order.

    rows u8 [T, R], each region's payload and block scales; outer f32 [T, guided regions]; hit bool [T].
    """

    @property
    def rows(self) -> Tensor: ...
    @property
    def outer(self) -> Tensor: ...
    @property
    def hit(self) -> Tensor: ...


class Runtime(Protocol):
    """Resolves a graph's feeds and takes its emits. None of it happens while compiling."""

    def packed(self, region: Region, which: str, param: Master) -> Packed:
        """Packed ``"w13"`` or ``"w2"`` (or ``"w"``) of the region, whose parameter (or parameters, joined along rows)
        now is ``param``. Cheap while it is unchanged."""
        ...

    def outer(self, sites: tuple[tuple[str, str], ...]) -> Tensor:
        """f32 [n]: the traced outer scale of each (region name, projection)."""
        ...

    def guidance(self, regions: tuple[str, ...]) -> Guidance:
        """Of the named regions, in this order."""
        ...

    def valid(self, tokens: int) -> Tensor:
        """bool [tokens]: the tokens that count in statistics."""
        ...

    def routing(self, regions: tuple[str, ...]) -> Tensor:
        """i64 [T, top_k of the regions side by side]: expert ids to replay, -1 where there is no record."""
        ...

    def experts(self, region: str, part: str) -> Tensor:
        """``allowed`` bool [E], ``index`` i64 [E] or ``kept`` i64 [m] of a pruned region; see ``Feed``."""
        ...

    def noise(self, norms: tuple[str, ...], width: int) -> Tensor:
        """f32 [norms, width]: what is added to each norm's weight."""
        ...

    def emit(self, emits: Emits) -> None:
        """kind -> region name -> tensor, for the kinds that the mode asks for."""
        ...


class Backend:
    """One mode's backend; Dynamo may call it several times (lengths 0 and 1, and once more per frame when dynamic).

    Args:
        mode: what the graphs are for.
        runtime: resolves feeds, takes emits.
        compiler: one of ``COMPILERS``. ``eager`` runs the rewritten graph as it is, autograd coming from the ops.
        dump_dir: where to write the graph before and after each pass, one folder per compilation.
        disabled_passes: names of passes to leave out.
        prefix: dotted path, with a dot behind it, of the module that is compiled, where it is part of a model: what
            leaves here, and the regions that ``mode`` names, are called as in the model.

    Raises ``NoMoERegionError`` and the passes' other errors while compiling; Dynamo wraps them, :func:`capturing`
    unwraps them.
    """

    def __init__(
        self,
        mode: Mode,
        runtime: Runtime,
        *,
        compiler: str = "eager",
        dump_dir: str | Path | None = None,
        disabled_passes: Iterable[str] = (),
        prefix: str = "",
    ) -> None:
        if compiler not in COMPILERS:
            raise GraphCaptureError(f"unknown compiler {compiler!r}; choose one of {', '.join(COMPILERS)}")
        self.mode = mode
        self.runtime = runtime
        self.compiler = compiler
        self.dump_dir = Path(dump_dir) if dump_dir is not None else None
        self.disabled_passes = tuple(disabled_passes)
        self.prefix = prefix
        self.reports: list[CompileReport] = []

    @property
    def compile_count(self) -> int:
        return len(self.reports)

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        start = time.perf_counter()
        rewritten = clone(gm)
        folder = self.dump_dir / f"graph{len(self.reports)}" if self.dump_dir is not None else None
        runner = PassRunner(PIPELINE, self.disabled_passes, folder)
        rewritten = runner.run(rewritten, example_inputs, config=_within(self.mode, self.prefix))
        if self.prefix:
            _name_from_root(rewritten, self.prefix)
        guided = tuple(r.name for r in rewritten.meta.get("regions", ()) if self.mode.guides(r.name))
        call = _Call(rewritten, len(example_inputs), self.runtime, guided, reused=self.compiler not in COMPILERS[:3])
        call.compiled = _compile(rewritten, [*example_inputs, *call.fake_feeds()], self.compiler)
        meta = rewritten.meta
        self.reports.append(
            CompileReport(
                mode=self.mode,
                regions=meta.get("regions", ()),
                unmatched=meta.get("unmatched", ()),
                choices=meta.get("choices", ()),
                untouched=tuple(self.prefix + name for name in untouched(rewritten)),
                feeds=meta.get("feeds", ()),
                emits=meta.get("emits", ()),
                timings=tuple(runner.timings),
                seconds=time.perf_counter() - start,
            )
        )
        return call if call.feeds or call.emits else call.compiled


def _compile(gm: GraphModule, inputs: list[Any], compiler: str) -> Callable[..., Any]:
    if compiler == "eager":
        return gm.forward
    # Fused elementwise chains keep bfloat16 values in float32 unless told to round where the model rounds: the
    # quantizers of two graphs, or of a compiled and an eager one, would then see different bits.
    with torch._inductor.config.patch(emulate_precision_casts=True):
        if compiler == "aot_eager":
            return torch._dynamo.lookup_backend(compiler)(gm, inputs)  # type: ignore[return-value]
        options = torch._inductor.list_mode_options(compiler) if compiler != "inductor" else None
        return compile_fx(gm, inputs, config_patches=options)  # type: ignore[return-value]


def _within(mode: Mode, prefix: str) -> Mode:
    """``mode`` for the module at ``prefix``, inside of which regions have shorter names."""

    def inside(names: frozenset[str] | None) -> frozenset[str] | None:
        if names is None or prefix[:-1] in names:  # the module holds the parameters itself: it is one region
            return None
        return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    return replace(mode, guided=inside(mode.guided), recorded=inside(mode.recorded)) if prefix else mode


def _name_from_root(gm: GraphModule, prefix: str) -> None:
    """Names the regions of a module's graph as they are called in the model that it is part of."""
    names: dict[str, str] = {}

    def param(p: ExpertParam | None) -> ExpertParam | None:
        if p is None:
            return None
        parts = tuple(replace(part, name=prefix + part.name) for part in p.parts)
        return replace(p, name="+".join(part.name for part in parts) or prefix + p.name, parts=parts)

    regions = []
    for r in gm.meta.get("regions", ()):
        name, hash_, again = r.name.partition("#")
        own = name == r.w13.name  # the module that was compiled owns the parameters: the region has its name
        names[r.name] = (prefix[:-1] if own else prefix + name) + hash_ + again
        params = {part: param(getattr(r, part)) for part in ("w13", "w2", "b13", "b2")}
        regions.append(replace(r, name=names[r.name], **params))
    gm.meta["regions"] = tuple(regions)
    gm.meta["quantized"] = tuple(names[name] for name in gm.meta.get("quantized", ()))
    for kind in ("feeds", "emits", "choices"):
        records = gm.meta.get(kind, ())
        gm.meta[kind] = tuple(replace(r, region=names[r.region]) if r.region else r for r in records)


class _Call:
    """A compiled graph with its feeds and emits: takes the model's arguments, returns the model's results."""

    compiled: Callable[..., Any]

    def __init__(
        self, gm: GraphModule, inputs: int, runtime: Runtime, guided: tuple[str, ...], *, reused: bool
    ) -> None:
        self._reused = reused  # by the next call, where CUDA graphs are replayed
        self.feeds: tuple[Feed, ...] = gm.meta.get("feeds", ())
        self.emits: tuple[Emit, ...] = gm.meta.get("emits", ())
        self._runtime = runtime
        self._regions: dict[str, Region] = {r.name: r for r in gm.meta.get("regions", ())}
        self._quantized: tuple[str, ...] = gm.meta.get("quantized", ())
        self._noisy: tuple[str, ...] = gm.meta.get("noisy", ())
        self._guided = guided
        nodes = placeholders(gm.graph)
        self._position = {node.name: i for i, node in enumerate(nodes[:inputs])}
        self._fakes = [fake(node) for node in nodes[inputs:]]
        per_token = [f for feed, f in zip(self.feeds, self._fakes, strict=True) if feed.kind in _PER_TOKEN]
        self._tokens = _size_reader(per_token[0].shape[0], [fake(n) for n in nodes[:inputs]]) if per_token else None
        self._results = len(output_of(gm.graph).args[0]) - len(self.emits)  # type: ignore[arg-type]

    def fake_feeds(self) -> list[Tensor]:
        """Example inputs for the feeds, in the inner compiler's fake mode."""
        mode = torch._guards.detect_fake_mode()
        if mode is None:
            return self._fakes
        with mode:
            return [torch.empty(f.shape, dtype=f.dtype, device=f.device) for f in self._fakes]

    def __call__(self, *args: Any) -> Any:
        results = self.compiled(*args, *self._resolve(args))
        if not self.emits:
            return results
        emitted: Emits = {}
        for emit, tensor in zip(self.emits, results[self._results :], strict=True):
            emitted.setdefault(emit.kind, {})[emit.region] = tensor.clone() if self._reused else tensor
        self._runtime.emit(emitted)
        return results[: self._results]

    def _resolve(self, args: tuple[Any, ...]) -> list[Tensor]:
        tokens = self._tokens(args) if self._tokens is not None else None
        packed: dict[tuple[str, str], Packed] = {}
        whole: dict[str, Tensor] = {}
        found = []
        for feed, like in zip(self.feeds, self._fakes, strict=True):
            if feed.kind == "packed":
                key = (feed.region, feed.weight)
                if key not in packed:
                    region = self._regions[feed.region]
                    expert, _ = region.weight(feed.weight)
                    params = tuple(args[self._position[p.placeholder]] for p in expert.parameters)
                    param = params if expert.parts else params[0]
                    packed[key] = self._runtime.packed(region, feed.weight, param)
                found.append(getattr(packed[key], feed.part))
            elif feed.kind == "experts":
                found.append(self._runtime.experts(feed.region, feed.part))
            else:
                if feed.kind not in whole:
                    whole |= self._whole(feed.kind, tokens, like)
                found.append(whole[feed.kind])
        return found

    def _whole(self, kind: str, tokens: int | None, like: Tensor) -> dict[str, Tensor]:
        """Feeds that are one tensor for all regions; guidance resolves three of them at once."""
        if kind == "outer":
            regions = [self._regions[name] for name in self._quantized]
            sites = tuple((region.name, projection) for region in regions for projection in region.projections)
            return {"outer": self._runtime.outer(sites)}
        if kind == "noise":
            return {"noise": self._runtime.noise(self._noisy, like.shape[1])}
        assert tokens is not None
        if kind == "valid":
            return {"valid": self._runtime.valid(tokens)}
        if kind == "replay":
            return {"replay": self._runtime.routing(tuple(self._regions))}
        guidance = self._runtime.guidance(self._guided)
        width = next(f for feed, f in zip(self.feeds, self._fakes, strict=True) if feed.kind == "guide").shape[1]
        rows = guidance.rows
        if tuple(rows.shape) != (tokens, width):
            raise GuidanceError(
                f"guidance has {rows.shape[0]} rows of {rows.shape[1]} bytes; this call runs {tokens} tokens and its "
                f"guided regions take {width} bytes of each"
            )
        return {"guide": rows, "guide_outer": guidance.outer, "hit": guidance.hit}


_PER_TOKEN = ("guide", "guide_outer", "hit", "valid", "replay")


def _size_reader(size: Any, inputs: list[Any]) -> Callable[[tuple[Any, ...]], int]:
    """Computes a symbolic size from a call's arguments."""
    if isinstance(size, int):
        return lambda args: size
    expression = size.node.expr
    readers: list[Callable[[tuple[Any, ...]], int]] = []
    symbols = sorted(expression.free_symbols, key=str)
    for symbol in symbols:
        readers.append(_symbol_reader(symbol, inputs))
    import sympy

    compute = sympy.lambdify(symbols, expression, "math")
    return lambda args: int(compute(*(read(args) for read in readers)))


def _symbol_reader(symbol: Any, inputs: list[Any]) -> Callable[[tuple[Any, ...]], int]:
    for position, value in enumerate(inputs):
        if isinstance(value, torch.SymInt) and value.node.expr == symbol:
            return lambda args, i=position: args[i]  # type: ignore[misc]
        if isinstance(value, Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    return lambda args, i=position, d=dim: args[i].shape[d]  # type: ignore[misc]
    raise GuidanceError(f"the number of tokens depends on {symbol}, which is no size of an input")


# --- capturing --------------------------------------------------------------------------------------------------------


_DYNAMO_SETTINGS = {
    name: value
    for name, value in (
        ("specialize_float", True),  # floats of modules are constants, which an activation's literals have to be
        ("skip_fwd_side_effects_in_bwd_under_checkpoint", True),  # transformers collects router logits in checkpoints
        ("capture_dynamic_output_shape_ops", True),  # experts that select their tokens, when it is their turn
        ("capture_scalar_outputs", True),  # or are handed pieces, whose lengths are read from a tensor
        ("optimize_ddp", False),  # would cut the graph at DistributedDataParallel's buckets, through regions
    )
    if hasattr(torch._dynamo.config, name)
}


@contextmanager
def capturing() -> Iterator[None]:
    """Calls of compiled models belong in here: floats of modules become constants, and errors get their names.

    A graph break becomes ``GraphCaptureError`` with the model's source line; an error that the backend raised comes out
    as itself.
    """
    try:
        with torch._dynamo.config.patch(_DYNAMO_SETTINGS):
            yield
    except torch._dynamo.exc.BackendCompilerFailed as failed:
        if isinstance(failed.inner_exception, TraceCompileError):
            raise failed.inner_exception from None
        raise
    except (torch._dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode) as broken:
        raise GraphCaptureError(_explain(broken)) from None


def _explain(broken: Exception) -> str:
    text = str(broken)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', text.partition("from user code")[2])
    where = "an unknown line"
    if frames:
        file, line, function, code = frames[-1]
        where = f"{file}:{line}, in {function}: {code.strip()}"
    reason = text.strip().splitlines()[0]
    hint = ""
    if any(word in text.lower() for word in ("data-dependent", "data dependent", "nonzero", "dynamic shape")):
        hint = ". Experts that loop over data (transformers: experts_implementation='eager') break it; use 'grouped_mm'"
    return f"the model cannot be captured as one graph: {reason} at {where}{hint}"


# --- torch.compile(backend="trace_compile") ---------------------------------------------------------------------------


class PackOnUse:
    """The runtime of plain ``torch.compile``: packs a parameter when it changed since it was last used."""

    _packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __init__(self, scheme: MoEScheme) -> None:
        self._scheme = scheme.weight

    def packed(self, region: Region, which: str, param: Master) -> Packed:
        assert self._scheme is not None
        expert, layout = region.weight(which)
        key = param[0] if isinstance(param, tuple) else param
        weights: PackedWeights = self._packed.setdefault(key, PackedWeights())
        return weights.get(expert.name, param, layout, self._scheme)

    def outer(self, sites: tuple[tuple[str, str], ...]) -> Tensor:
        raise GuidanceError("traced outer scales need a trace: use trace_compile(model) instead of torch.compile")

    def guidance(self, regions: tuple[str, ...]) -> Guidance:
        raise GuidanceError("guidance needs a trace: use trace_compile(model) instead of torch.compile")

    def routing(self, regions: tuple[str, ...]) -> Tensor:
        raise GuidanceError("replay needs a trace: use trace_compile(model) instead of torch.compile")

    def valid(self, tokens: int) -> Tensor:
        raise GuidanceError("statistics need a trace: use trace_compile(model) instead of torch.compile")

    def experts(self, region: str, part: str) -> Tensor:
        raise GuidanceError("expert pruning needs a twin: use trace_compile(model) instead of torch.compile")

    def noise(self, norms: tuple[str, ...], width: int) -> Tensor:
        raise GuidanceError("noise needs a twin: use trace_compile(model) instead of torch.compile")

    def emit(self, emits: Emits) -> None:
        raise GuidanceError("records need a trace: use trace_compile(model) instead of torch.compile")


def trace_compile_backend(
    gm: GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="trace_compile", options={...})``: quantization-aware, without traces or guidance.

    Options: ``scheme``, a ``MoEScheme`` key (default: 4-bit weights and activations with row scales) or ``"none"``;
    ``compiler``, ``strict``, ``include``, ``ignore``, ``dump_dir``, ``disabled_passes`` as for :class:`Backend` and
    :class:`Mode`.
    """
    chosen = dict(options or {})
    key = chosen.pop("scheme", W4A4_ROW.key)
    scheme = None if key == "none" else MoEScheme.parse(key)
    include, ignore = (tuple(chosen.pop(name, ())) for name in ("include", "ignore"))
    strict = chosen.pop("strict", True)
    mode = Mode(scheme=scheme, train=torch.is_grad_enabled(), strict=strict, include=include, ignore=ignore)
    unknown = sorted(set(chosen) - {"compiler", "dump_dir", "disabled_passes"})
    if unknown:
        raise GraphCaptureError(
            f"no option {unknown[0]!r}; options: scheme, strict, include, ignore, compiler, dump_dir, disabled_passes"
        )
    chosen.setdefault("compiler", "inductor" if _on_accelerator(example_inputs) else "eager")
    return Backend(mode, PackOnUse(scheme or W4A4_ROW), **chosen)(gm, example_inputs)


def _on_accelerator(inputs: list[Any]) -> bool:
    return any(isinstance(t, Tensor) and t.device.type != "cpu" for t in inputs)


if "trace_compile" not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(trace_compile_backend, name="trace_compile")
