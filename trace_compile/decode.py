"""The twin's lean decode loop: a static cache, everything on the device, one CUDA graph per batch shape.

``generate()`` of transformers rebuilds masks and asks the device after every token. Here one decode step (forward,
sampling, token keys, recording, statistics) reads and writes only tensors that stay where they are. On a GPU it is
captured once and then replayed, and the host looks at the device every ``check_every`` tokens to see whether all
sequences have ended. On a CPU, and where a step cannot be captured, the same code runs as it is.

Sampling takes one uniform number per token, drawn before the loop, and inverts the cumulative distribution: the tokens
depend on the generator's state and the probabilities, not on whether a graph ran.

Invariants
- What a trace gets (keys, rows, ranges) is what ``generate()`` over a static cache of this length would have given it.
- A graph is replayed only while every tensor that it reads lies where it lay; ``refit()`` writes in place and keeps it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from trace_compile.errors import GuidanceError, TraceCompileError
from trace_compile.passes.mode import Mode
from trace_compile.runtime import Call, Emits
from trace_compile.session import RangeAccumulator, Recording, record_rows
from trace_compile.state.layout import RecordLayout
from trace_compile.state.prefix import PrefixState, prefix_keys
from trace_compile.tokens import Tokens, decoded_tokens, id_tuple

if TYPE_CHECKING:
    from trace_compile.rollout import Twin

_LENGTH_STEP = 64
"""Cache lengths are multiples of this, so that neighbouring lengths share a graph."""
_RING_BYTES = 64 << 20
_RING_STEPS = 64
_MAX_LOOPS = 4
"""Shapes whose caches and graphs are kept; the one longest unused goes first."""
_WARMUP_STEPS = 2
"""Steps that run before the capture: compilers compile and libraries allocate in them."""


@dataclass(frozen=True)
class Sample:
    """A decoded batch: B sequences, P prompt columns, R response columns (as many as the longest response has).

    Attributes:
        ids: int64 [B, P+R], padding behind the end of a response.
        attention: int64 [B, P+R], 1 on prompt tokens and on sampled ones.
        log_probs: float32 [B, R], log-softmax of the logits over the temperature (1 for greedy decoding) at the tokens;
            0 behind the end.
        sampled: bool [B, R], response tokens up to and including the one that ended it.
        entropy: float32 [B, R] of the same distribution in nats, 0 behind the end; ``None`` unless asked for.
        prompt_length: P.
    """

    ids: Tensor
    attention: Tensor
    log_probs: Tensor
    sampled: Tensor
    entropy: Tensor | None
    prompt_length: int

    @property
    def responses(self) -> Tensor:
        """int64 [B, R]."""
        return self.ids[:, self.prompt_length :]


@dataclass(frozen=True)
class _Choice:
    """How tokens are chosen; part of what a graph is captured for."""

    greedy: bool
    forced: bool
    entropy: bool
    eos: tuple[int, ...]
    pad: int
    trajectories: bool


_Key = tuple[int, int, torch.device, Mode, _Choice]


class Decoder:
    """The decode loops of one twin, kept by shape and mode."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._loops: OrderedDict[_Key, _Loop] = OrderedDict()
        self._pool: Any = None
        self.captures = 0
        """CUDA graphs captured so far."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def sample(
        self,
        module: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        forced: Tensor | None = None,
        eos_token_id: int | tuple[int, ...] | list[int] | None = None,
        pad_token_id: int | None = None,
        trajectory_ids: Tensor | None = None,
        entropy: bool = False,
        check_every: int = 16,
    ) -> Sample:
        """Decode one response per row of ``input_ids`` int64 [B, P], which are padded on the left.

        Args:
            attention_mask: bool or integer [B, P], nonzero = real token; default: every token is real.
            max_new_tokens: at most this many tokens per response.
            temperature: 0 is greedy.
            generator: where the uniform numbers come from, on the CPU or the model's device; default: the device's.
            forced: int64 [B, max_new_tokens] of tokens to take instead of sampling, for their log-probabilities.
            eos_token_id: what ends a response, and is its last token. Default: the model's generation config's; ``()``
                for none.
            pad_token_id: what stands behind the end. Default: the model's, else the first of ``eos_token_id``, else 0.
            trajectory_ids: int64 [B], join the keys of what is recorded, as they do in the forwards.
            entropy: also return the entropy of each token's distribution.
            check_every: tokens between two looks at whether all responses have ended.

        While a trace records, so does this. Raises ``TraceCompileError`` for arguments that do not fit.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        _check(input_ids, mask, max_new_tokens, temperature, forced, trajectory_ids, check_every)
        if not isinstance(module, PreTrainedModel):
            raise TraceCompileError(
                f"{type(module).__name__} is no transformers model, and only those have a static cache"
            )
        twin, device = self._twin, next(module.parameters()).device
        config = getattr(module, "generation_config", None) or module.config
        eos = id_tuple(getattr(config, "eos_token_id", None) if eos_token_id is None else eos_token_id)
        if pad_token_id is None:
            pad_token_id = getattr(config, "pad_token_id", None)
        pad = pad_token_id if pad_token_id is not None else (eos or (0,))[0]
        batch, prompt = input_ids.shape
        choice = _Choice(temperature == 0, forced is not None, entropy, eos, int(pad), trajectory_ids is not None)
        recording = twin.session.recording
        key = (
            batch,
            -(-(prompt + max_new_tokens) // _LENGTH_STEP) * _LENGTH_STEP,
            device,
            twin.mode(recording),
            choice,
        )
        loop = self._loops.pop(key, None) or _Loop(module, twin, *key)
        self._loops[key] = loop
        while len(self._loops) > _MAX_LOOPS:
            self._loops.popitem(last=False)
        loop.begin(max_new_tokens, temperature, generator, forced, trajectory_ids)
        return self._decode(loop, input_ids.to(device), mask.to(device), max_new_tokens, recording, check_every)

    def _decode(
        self, loop: _Loop, ids: Tensor, mask: Tensor, new: int, recording: Recording | None, check_every: int
    ) -> Sample:
        loop.prefill(ids, mask, recording)
        graph = loop.graph_of(loop.addresses()) if loop.capturable(recording) else None
        for step in range(1, new):
            if step % check_every == 0 and bool(loop.finished.all()):
                break
            if graph is not None:
                graph.replay()
            elif step <= _WARMUP_STEPS or not loop.capturable(recording):
                loop.step(recording)
            else:
                graph = self._capture(loop)
                graph.replay()
            loop.stepped(recording)
        return loop.finish(ids, mask, new, recording)

    def _capture(self, loop: _Loop) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loop.step(None)
        self._pool = graph.pool()  # loops run one after the other and keep nothing in it: they share its memory
        loop.captured = (loop.addresses(), graph)
        self.captures += 1
        return graph


class _Loop:
    """What one batch shape needs: the cache and every tensor that a step reads or writes."""

    def __init__(
        self, module: Any, twin: Twin, batch: int, length: int, device: torch.device, mode: Mode, how: _Choice
    ):
        self.module, self.twin, self.mode, self.how = module, twin, mode, how
        self.batch, self.length, self.device = batch, length, device
        self.cache = new_cache(module, batch, length, device)
        self.captured: tuple[tuple[int, ...], torch.cuda.CUDAGraph] | None = None

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.mask, self.token, self.position, self.index = ints(batch, length), ints(batch, 1), ints(batch, 1), ints(1)
        self.state = PrefixState(ints(batch), ints(batch), ints(batch))
        self.ended, self.finished = (torch.zeros(batch, dtype=torch.bool, device=device) for _ in range(2))
        self.eos = torch.tensor(how.eos, dtype=torch.int64, device=device) if how.eos else None
        self.trajectories = ints(batch) if how.trajectories else None
        self.temperature = torch.ones((), device=device)
        self.forced = ints(length, batch) if how.forced else None
        self.uniform = torch.zeros(length, batch, dtype=torch.float64, device=device)
        self.ids = ints(length, batch)
        self.log_probs, self.entropy = (torch.zeros(length, batch, device=device) for _ in range(2))
        self.accumulator = RangeAccumulator(twin.session.experts)
        self.ring: _Ring | None = None
        self.forward_options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in twin.session.signature.parameters:
            self.forward_options["logits_to_keep"] = 1

    # --- on the host, around the loop -------------------------------------------------------------------------------

    def begin(
        self,
        new: int,
        temperature: float,
        generator: torch.Generator | None,
        forced: Tensor | None,
        trajectory_ids: Tensor | None,
    ) -> None:
        """Everything that one call fixes."""
        self.temperature.fill_(temperature or 1.0)
        if self.forced is not None and forced is not None:
            self.forced[:new].copy_(forced.T)
        elif not self.how.greedy:
            where = self.device if generator is None else generator.device
            draw = torch.rand(new, self.batch, dtype=torch.float64, device=where, generator=generator)
            self.uniform[:new].copy_(draw)
        if self.trajectories is not None and trajectory_ids is not None:
            self.trajectories.copy_(trajectory_ids)
        self.accumulator.reset()
        self.index.zero_()
        self.finished.zero_()
        self.ended.zero_()
        self.cache.reset()

    def prefill(self, ids: Tensor, mask: Tensor, recording: Recording | None) -> None:
        """Feed the prompts and choose each response's first token."""
        width = ids.shape[1]
        self.mask.fill_(1)  # columns of tokens to come are hidden by causality
        self.mask[:, :width].copy_(mask != 0)
        real = self.mask[:, :width]
        positions = (real.cumsum(1) - 1).clamp_(min=0)
        keys, valid, state = prefix_keys(ids, real, None, self.trajectories)
        self._remember(state)
        tokens = Tokens(keys.reshape(-1), valid.reshape(-1))
        logits, emits = self._forward(ids, positions, tokens)
        if recording is not None:
            self.twin.store(recording, tokens, emits, decoding=ids.shape[1] == 1)
            layout = recording.trace.layout
            if self.ring is None or self.ring.layout != layout:
                self.ring, self.captured = _Ring.of(self.batch, layout, self.device), None
            self.ring.clear()
        self.position.copy_(positions[:, -1:] + 1)
        self._choose(logits)

    def capturable(self, recording: Recording | None) -> bool:
        """Whether a step is only work for the device: sliding windows count on the host, raw inputs are logged there,
        and expert GEMMs outside of bfloat16 read their offsets there."""
        sliding = any(getattr(self.cache, "is_sliding", ()))
        logging = recording is not None and recording.inputs is not None
        return self.device.type == "cuda" and not sliding and not logging and self.module.dtype == torch.bfloat16

    def addresses(self) -> tuple[int, ...]:
        """Where the tensors lie that a step reads and that are not this loop's own."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        packed = [t for p in self.twin.experts.values() for t in (p.codes, p.scales, p.outer)]
        return tuple(t.data_ptr() for t in (*tensors, *packed))

    def graph_of(self, addresses: tuple[int, ...]) -> torch.cuda.CUDAGraph | None:
        """The captured step, if it still reads the right memory."""
        return self.captured[1] if self.captured is not None and self.captured[0] == addresses else None

    def stepped(self, recording: Recording | None) -> None:
        """After each step: empty the ring when it is full."""
        if self.ring is not None and recording is not None:
            self.ring.filled += 1
            if self.ring.filled == self.ring.steps:
                self._flush(recording, self.ring)

    def finish(self, ids: Tensor, mask: Tensor, new: int, recording: Recording | None) -> Sample:
        """Collect what the loop wrote; the only other place where the host waits for the device."""
        if recording is not None:
            if self.ring is not None:
                self._flush(recording, self.ring)
            recording.accumulator.merge(self.accumulator)
        responses = self.ids[:new].T
        ends = torch.zeros_like(responses, dtype=torch.bool)
        if self.eos is not None:
            ends = torch.isin(responses, self.eos)
        steps = torch.arange(new, device=self.device)
        sampled = (ends.cumsum(1) - ends.long() == 0) & (steps < self.index)
        longest = int(sampled.sum(1).max())
        sampled, responses = sampled[:, :longest].clone(), responses[:, :longest].clone()
        values = [t[:longest].T.clone() for t in (self.log_probs, self.entropy)]
        return Sample(
            ids=torch.cat((ids, torch.where(sampled, responses, self.how.pad)), 1),
            attention=torch.cat(((mask != 0).long(), sampled.long()), 1),
            log_probs=torch.where(sampled, values[0], 0.0),
            sampled=sampled,
            entropy=torch.where(sampled, values[1], 0.0) if self.how.entropy else None,
            prompt_length=ids.shape[1],
        )

    def _flush(self, recording: Recording, ring: _Ring) -> None:
        if ring.filled:
            keys, valid, rows = (t[: ring.filled].flatten(0, 1) for t in (ring.keys, ring.valid, ring.rows))
            self.twin.append(recording, Tokens(keys, valid), rows)
        ring.clear()

    # --- on the device ----------------------------------------------------------------------------------------------

    def step(self, recording: Recording | None) -> None:
        """Feed the last tokens, record them, choose the next ones. ``recording`` only logs raw inputs here: rows go to
        the ring and statistics to the accumulator, whose tensors a graph can hold."""
        # generate() feeds nothing once all have ended, so such steps name no token.
        real = (~self.finished).any().expand(self.batch, 1)
        tokens, state, ended = decoded_tokens(self.token, real, self.state, self.ended, self.eos, self.trajectories)
        self._remember(state)
        self.ended.copy_(ended)
        logits, emits = self._forward(self.token, self.position, tokens)
        if self.ring is not None:
            self.ring.write(tokens, emits)
            self.accumulator.add(emits, tokens.valid, "decode")
            if recording is not None and recording.inputs is not None:
                recording.inputs.append(tokens.keys, tokens.valid, emits["input"])
        self.position.add_(1)
        self._choose(logits)

    def _forward(self, ids: Tensor, positions: Tensor, tokens: Tokens) -> tuple[Tensor, Emits]:
        """Logits float32 [B, V] behind the last column, and what the graph emits."""
        call = Call(valid=tokens.valid, decoding=ids.shape[1] == 1)
        inputs = {
            "input_ids": ids,
            "attention_mask": self.mask,
            "position_ids": positions,
            "past_key_values": self.cache,
            **self.forward_options,
        }
        outputs = self.twin.engine.run(self.module, self.mode, call, (), inputs)
        return outputs.logits[:, -1].float(), call.emits

    def _choose(self, logits: Tensor) -> None:
        log_p = (logits / self.temperature).log_softmax(-1)
        if self.forced is not None:
            token = self.forced.index_select(0, self.index)[0]
        elif self.how.greedy:
            token = logits.argmax(-1)
        else:
            token = self._invert(log_p)
        self.log_probs.index_copy_(0, self.index, log_p.gather(1, token[:, None]).T)
        token = torch.where(self.finished, self.how.pad, token)
        self.token.copy_(token[:, None])
        self.ids.index_copy_(0, self.index, token[None])
        if self.how.entropy:
            # xlogy's rule by hand: a token of probability 0 adds nothing.
            summands = torch.where(log_p.isneginf(), 0.0, log_p.exp() * log_p)
            self.entropy.index_copy_(0, self.index, -summands.sum(-1)[None])
        if self.eos is not None:
            self.finished.logical_or_(torch.isin(token, self.eos))
        self.index.add_(1)

    def _invert(self, log_p: Tensor) -> Tensor:
        """The token into whose share of the cumulative distribution this step's uniform number falls; in float64, where
        neither a small probability nor the last one is lost."""
        cumulative = log_p.double().exp().cumsum(-1)
        point = self.uniform.index_select(0, self.index)[0, :, None] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, point, right=True).clamp_(max=log_p.shape[-1] - 1)[:, 0]

    def _remember(self, state: PrefixState) -> None:
        self.state.total.copy_(state.total)
        self.state.count.copy_(state.count)
        self.state.position.copy_(state.position)


@dataclass
class _Ring:
    """Records of the last steps on the device: keys int64 and valid bool [n, B], rows uint8 [n, B, R] of ``layout``."""

    layout: RecordLayout
    keys: Tensor
    valid: Tensor
    rows: Tensor
    slot: Tensor
    filled: int = 0

    @classmethod
    def of(cls, batch: int, layout: RecordLayout, device: torch.device) -> _Ring:
        steps = max(1, min(_RING_STEPS, _RING_BYTES // max(batch * layout.row_bytes, 1)))
        keys = torch.zeros(steps, batch, dtype=torch.int64, device=device)
        rows = torch.zeros(steps, batch, layout.row_bytes, dtype=torch.uint8, device=device)
        return cls(layout, keys, keys.bool(), rows, torch.zeros(1, dtype=torch.int64, device=device))

    @property
    def steps(self) -> int:
        return self.keys.shape[0]

    def clear(self) -> None:
        self.slot.zero_()
        self.filled = 0

    def write(self, tokens: Tokens, emits: Emits) -> None:
        self.keys.index_copy_(0, self.slot, tokens.keys[None])
        self.valid.index_copy_(0, self.slot, tokens.valid[None])
        self.rows.index_copy_(0, self.slot, record_rows(self.layout, tokens, emits)[None])
        self.slot.add_(1)


def new_cache(module: nn.Module, batch: int, length: int, device: torch.device) -> StaticCache:
    """A static cache for ``length`` tokens, allocated now where the configuration says how large it is: a cache that is
    allocated by its first forward costs that forward a compilation of its own."""
    config: Any = module.config
    cache = StaticCache(config=config, max_cache_len=length)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None)
    latent = getattr(text, "kv_lora_rank", None)  # keys and values of different widths
    if heads and not latent:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        cache.early_initialization(batch, heads, head_dim, module.dtype, device)  # type: ignore[arg-type]
    return cache


def _check(
    ids: Tensor,
    mask: Tensor,
    new: int,
    temperature: float,
    forced: Tensor | None,
    trajectory_ids: Tensor | None,
    check_every: int,
) -> None:
    if ids.dim() != 2 or ids.is_floating_point() or ids.numel() == 0:
        raise TraceCompileError(f"prompts are integer ids [batch, length], got {ids.dtype} {tuple(ids.shape)}")
    if mask.shape != ids.shape:
        raise TraceCompileError(f"attention_mask {tuple(mask.shape)} does not fit prompts {tuple(ids.shape)}")
    if not bool((mask[:, -1] != 0).all()):
        raise TraceCompileError("a prompt ends in padding, and decoding continues its last column: pad on the left")
    if new < 1 or check_every < 1:
        raise TraceCompileError(f"max_new_tokens={new} and check_every={check_every} must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise TraceCompileError(f"temperature {temperature} must be finite and not negative; 0 is greedy")
    if forced is not None and tuple(forced.shape) != (ids.shape[0], new):
        raise TraceCompileError(f"forced tokens {tuple(forced.shape)} must be [{ids.shape[0]}, {new}]")
    if trajectory_ids is not None and tuple(trajectory_ids.shape) != (ids.shape[0],):
        raise GuidanceError(f"trajectory_ids {tuple(trajectory_ids.shape)} must be [{ids.shape[0]}]")
