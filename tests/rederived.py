"""A second implementation of everything the product computes, written from the contracts alone.

Nothing here comes from ``trace_compile``: NVFP4 quantization and guided rounding in float64 against tables, experts
whose products are explicit per-expert matrix products with a hand-written straight-through gradient, records kept under
tuples of token ids, and a reader of safetensors files. ``Reference`` puts them into a plain transformers Qwen3-MoE and
plays both sides, trainer and generator, on one set of parameters.

Invariants: a ``Reference`` computes in float32 with operands dequantized in float64 (exact, since outer scales are
powers of two); its rows stand in (token, slot) order within each expert, as everywhere in the product.

Shapes: T tokens, E experts, K slots per token (or the reduction dimension), H hidden, I expert width.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 16
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
SIGNED = torch.cat([-E2M1[1:].flip(0), E2M1])
LOWEST_SCALE = 8
"""Byte of 2^-6, the smallest block scale."""
SCALES = torch.tensor(
    [(1 + (b & 7) / 8) * 2.0 ** ((b >> 3) - 7) for b in range(LOWEST_SCALE, 127)], dtype=torch.float64
)
OUTERS = torch.tensor([2.0**k for k in range(-100, 117)], dtype=torch.float64)

Prefix = tuple[int, ...]
Site = tuple[int, str]


def nearest(x: Tensor, table: Tensor, first: int = 0) -> Tensor:
    """Index of the entry of an ascending ``table`` nearest to each x; ties to an even ``first + index``; saturating."""
    middle = (table[1:] + table[:-1]) / 2
    below, above = torch.searchsorted(middle, x), torch.searchsorted(middle, x, right=True)
    return torch.where((below + first) % 2 == 0, below, above)


def outer_scale(amax: Tensor) -> Tensor:
    """Smallest power of two g within the contract's exponents that has amax <= 6 * 448 * g; 1 for amax 0."""
    index = torch.searchsorted(OUTERS * 2688, amax.double()).clamp(max=len(OUTERS) - 1)
    return torch.where(amax == 0, 1.0, OUTERS[index])


@dataclass(frozen=True)
class Quantized:
    """codes 0..15 int64 [..., K], scale bytes int64 [..., K/16], outer float64 [...]."""

    codes: Tensor
    scales: Tensor
    outer: Tensor

    def value(self) -> Tensor:
        """float32 [..., K]; raises where float32 cannot hold it exactly."""
        unit = SCALES[self.scales - LOWEST_SCALE].repeat_interleave(BLOCK, -1) * self.outer[..., None]
        exact = torch.where(self.codes >= 8, -1.0, 1.0) * E2M1[self.codes % 8] * unit
        assert torch.equal(exact.float().double(), exact)
        return exact.float()

    def __getitem__(self, index: Any) -> Quantized:
        return Quantized(self.codes[index], self.scales[index], self.outer[index])

    def record(self, kind: str, *, with_outer: bool) -> bytes:
        """The bytes of one row's record: bits or codes, block scales, the exponent of the row's own outer scale."""
        group, bits = (8, 1) if kind == "bit" else (2, 4)
        digits = (self.codes % (1 << bits)).reshape(-1, group)
        payload = [sum(int(d) << (bits * i) for i, d in enumerate(row)) for row in digits]
        exponent = [int(torch.log2(self.outer)) + 127] if with_outer else []
        return bytes(payload + self.scales.tolist() + exponent)


def quantize(x: Tensor, outer: Tensor | None = None) -> Quantized:
    """Own block scales, nearest even. ``outer [...]`` is given or each row's own."""
    x = x.detach().double()
    g = outer_scale(x.abs().amax(-1)) if outer is None else outer.double().expand(x.shape[:-1])
    y = x / g[..., None]
    scales = nearest(y.unflatten(-1, (-1, BLOCK)).abs().amax(-1) / 6, SCALES, LOWEST_SCALE)
    codes = nearest((y / SCALES[scales].repeat_interleave(BLOCK, -1)).abs(), E2M1)
    return Quantized(codes + 8 * torch.signbit(x), scales + LOWEST_SCALE, g)


def quantize_experts(weight: Tensor) -> Quantized:
    """[E, N, K]: one outer scale per expert."""
    return quantize(weight, outer_scale(weight.detach().abs().amax((1, 2)))[:, None])


def guided_index(z: Tensor, rollout: Tensor, kind: str) -> Tensor:
    """Index into SIGNED: the member of z's bracket nearest the rollout's codeword ("code"), or with its lowest bit."""
    low = (torch.searchsorted(SIGNED, z.clamp(-6, 6), right=True) - 1).clamp(max=len(SIGNED) - 2)
    if kind == "bit":
        # SIGNED[7] is zero; the lowest code bit alternates from there in both directions.
        return low + ((low - 7) % 2 != rollout)
    return low + ((SIGNED[low + 1] - rollout).abs() < (SIGNED[low] - rollout).abs())


def guide(x: Tensor, rollout: Quantized, kind: str) -> Quantized:
    """Rounds x on the rollout's scales toward its outcome; only what ``kind`` records of it is looked at."""
    unit = SCALES[rollout.scales - LOWEST_SCALE].repeat_interleave(BLOCK, -1) * rollout.outer[..., None]
    z = x.detach().double() / unit
    told = rollout.codes % 2 if kind == "bit" else torch.where(rollout.codes >= 8, -1, 1) * E2M1[rollout.codes % 8]
    value = SIGNED[guided_index(z, told, kind)]
    codes = torch.searchsorted(E2M1, value.abs()) + 8 * torch.where(value == 0, torch.signbit(z), value < 0)
    return Quantized(codes, rollout.scales, rollout.outer)


class StraightThrough(torch.autograd.Function):
    """``xq @ wq.T``, with the gradients of x and w as if both had been multiplied as they were quantized."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, xq: Tensor, wq: Tensor) -> Tensor:
        ctx.save_for_backward(xq, wq)
        return xq @ wq.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        xq, wq = ctx.saved_tensors
        return grads[0] @ wq, grads[0].T @ xq, None, None


@dataclass
class Records:
    """What one tracing block saw. rows: (version, prefix) -> layer -> outcome at gate/up; ids likewise; raw inputs."""

    rows: dict[tuple[int, Prefix], dict[int, Quantized]] = field(default_factory=dict)
    ids: dict[tuple[int, Prefix], dict[int, list[int]]] = field(default_factory=dict)
    inputs: dict[tuple[int, Prefix], dict[int, Tensor]] = field(default_factory=dict)
    amax: dict[Site, Tensor] = field(default_factory=dict)
    tokens: dict[int, Tensor] = field(default_factory=dict)

    def find(self, prefix: Prefix | None, newest: int, staleness: int) -> dict[int, Quantized] | None:
        for version in range(newest, newest - staleness - 1, -1):
            if prefix is not None and (version, prefix) in self.rows:
                return self.rows[version, prefix]
        return None


@dataclass(frozen=True)
class Recipe:
    """Which operands each side quantizes, what is replayed, and whether traced ranges set scales."""

    train_weights: bool
    train_acts: bool
    rollout_weights: bool
    rollout_acts: bool
    guidance: str | None = None
    traced: bool = False


RECIPES = {
    "naive": Recipe(False, False, True, True),
    "w4a16": Recipe(True, False, True, False),
    "qat": Recipe(True, True, True, True),
    "static": Recipe(True, True, True, True, None, True),
    "trace": Recipe(True, True, True, True, "bit", True),
    "trace_full": Recipe(True, True, True, True, "code", True),
}


class Reference:
    """A plain Qwen3-MoE with its experts replaced: ``train`` and ``decode`` are the two sides of ``recipe``."""

    def __init__(self, model: nn.Module, recipe: str, *, staleness: int = 3) -> None:
        self.model, self.recipe, self.staleness = model, RECIPES[recipe], staleness
        self.layers = [layer.mlp.experts for layer in model.model.layers]  # type: ignore[union-attr]
        self.guided = range(len(self.layers) // 2, len(self.layers))
        self.packed: list[tuple[Quantized, Quantized]] = []
        self.scales: dict[Site, Tensor] = {}
        self.version = 0
        self.fitted: list[Tensor] = []
        self.guiding: Records | None = None
        self.used: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.prefixes: list[Prefix | None] = []
        self._into: Records | None = None
        self._generating = False
        for number, experts in enumerate(self.layers):
            experts.forward = partial(self._experts, number)
        self.refit()

    def refit(self, records: Records | None = None) -> None:
        """Pack the weights for the generator; take the ranges of ``records`` with a factor of two to spare."""
        if records is not None and self.recipe.traced:
            self.scales = {site: outer_scale(2 * amax.max().double()) for site, amax in records.amax.items()}
        self.packed = [self._pack(experts) for experts in self.layers]
        weights = [p.detach().clone() for p in self.model.parameters()]
        if not self.fitted or not all(torch.equal(a, b) for a, b in zip(weights, self.fitted)):
            self.version += 1
        self.fitted = weights

    def _pack(self, experts: Any) -> tuple[Quantized, Quantized]:
        return quantize_experts(experts.gate_up_proj), quantize_experts(experts.down_proj)

    def train(self, batch: dict[str, Tensor], **more: Any) -> Any:
        """One training forward, guided where the records of ``guiding`` cover a prefix."""
        self.prefixes = prefixes(**{k: v for k, v in batch.items() if k != "labels"})
        return self.model(**batch, **more)

    @torch.no_grad()
    def decode(self, prompt: dict[str, Tensor], new: Tensor, eos: int, records: Records | None = None) -> Tensor:
        """Logits [B, N, V] before each of the ``new`` tokens [B, N], from cached decoding with packed experts."""
        mask, ids, logits, cache = prompt["attention_mask"], prompt["input_ids"], [], None
        known: list[Prefix] = [()] * len(ids)
        ended = [False] * len(ids)
        with self._as_generator(records):
            for step in range(new.shape[1]):
                self.prefixes = []
                for row, tokens in enumerate(ids.tolist()):
                    for token, real in zip(tokens, mask[row, -len(tokens) :].tolist()):
                        counts = bool(real) and not ended[row]
                        known[row] = (*known[row], token) if counts else known[row]
                        self.prefixes.append(known[row] if counts else None)
                    ended[row] |= step > 0 and eos in tokens
                position = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)[:, -ids.shape[1] :]
                out = self.model(
                    input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
                )
                cache, ids = out.past_key_values, new[:, step : step + 1]
                logits.append(out.logits[:, -1])
                mask = torch.cat([mask, torch.ones_like(ids)], 1)
        return torch.stack(logits, 1)

    @contextmanager
    def _as_generator(self, records: Records | None) -> Iterator[None]:
        self._generating, self._into = True, records
        yield
        self._generating, self._into = False, None

    def _experts(self, number: int, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """The experts of one layer. x [T, H], ids int64 [T, K], gates [T, K] -> [T, H]."""
        experts, r = self.layers[number], self.recipe
        masters = experts.gate_up_proj, experts.down_proj
        weights, acts = (r.rollout_weights, r.rollout_acts) if self._generating else (r.train_weights, r.train_acts)
        packed = self.packed[number] if self._generating else self._pack(experts)
        used13, used2 = (q.value() if weights else w for q, w in zip(packed, masters))
        rows = [(ids == e).nonzero().unbind(1) for e in range(len(used13))]
        self.inputs[number] = x.detach()

        xq = self._input(number, x) if acts else None
        x_used = x.detach() if xq is None else xq.value()
        self.used[number] = x_used
        pre = torch.cat(
            [StraightThrough.apply(x[t], masters[0][e], x_used[t], used13[e].detach()) for e, (t, _) in enumerate(rows)]
        )
        gate, up = pre.chunk(2, -1)
        h = F.silu(gate) * up
        h_used = quantize(h, self.scales.get((number, "down"))).value() if acts else h.detach()
        out = x.new_zeros(*ids.shape, x.shape[-1])
        parts = torch.arange(len(h)).split([len(t) for t, _ in rows])
        for e, ((t, k), part) in enumerate(zip(rows, parts)):
            o = StraightThrough.apply(h[part], masters[1][e], h_used[part], used2[e].detach())
            out = out.index_put((t, k), o * gates[t, k, None])
        if self._into is not None:
            self._record(number, x, h, ids, rows, xq)
        return out.sum(1)

    def _input(self, number: int, x: Tensor) -> Quantized:
        """Own rounding, or guided where this layer is guided and there is a record."""
        own = quantize(x, self.scales.get((number, "gate_up")))
        if self._generating or self.guiding is None or self.recipe.guidance is None or number not in self.guided:
            return own
        codes, scales, outer = own.codes.clone(), own.scales.clone(), own.outer.clone()
        for t, prefix in enumerate(self.prefixes):
            found = self.guiding.find(prefix, self.version, self.staleness)
            if found is not None:
                row = guide(x[t], found[number], self.recipe.guidance)
                codes[t], scales[t], outer[t] = row.codes, row.scales, row.outer
        return Quantized(codes, scales, outer)

    def _record(
        self, number: int, x: Tensor, h: Tensor, ids: Tensor, rows: list[tuple[Tensor, ...]], xq: Quantized | None
    ) -> None:
        into = self._into
        assert into is not None
        for t, prefix in enumerate(self.prefixes):
            key = (self.version, prefix or ())
            # The first record of a prefix stays; each layer adds its part once.
            if prefix is not None and number not in into.ids.setdefault(key, {}):
                into.ids[key][number] = ids[t].tolist()
                if number in self.guided and xq is not None:
                    into.rows.setdefault(key, {})[number] = xq[t]
                    into.inputs.setdefault(key, {})[number] = x[t].clone()
        counted = torch.tensor([prefix is not None for prefix in self.prefixes])
        into.tokens.setdefault(number, torch.zeros(len(rows), dtype=torch.int64))
        for name in ("gate_up", "down"):
            into.amax.setdefault((number, name), torch.zeros(len(rows)))
        parts = torch.arange(len(h)).split([len(t) for t, _ in rows])
        for e, ((token, _), part) in enumerate(zip(rows, parts)):
            here = counted[token]
            into.tokens[number][e] += here.sum()
            for name, values in (("gate_up", x[token]), ("down", h[part])):
                largest = values[here].abs().amax() if here.any() else torch.zeros(())
                into.amax[number, name][e] = torch.maximum(into.amax[number, name][e], largest)


def prefixes(
    input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> list[Prefix | None]:
    """The real tokens up to each position, row by row; None at padding. A position 0 starts a packed sequence."""
    found: list[Prefix | None] = []
    for row, tokens in enumerate(input_ids.tolist()):
        known: Prefix = ()
        for column, token in enumerate(tokens):
            real = attention_mask is None or bool(attention_mask[row, column])
            if position_ids is not None and int(position_ids[row, column]) == 0:
                known = ()
            known = (*known, token) if real else known
            found.append(known if real else None)
    return found


_64 = (1 << 64) - 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64
    return x ^ (x >> 31)


def prefix_key(prefix: Prefix) -> int:
    """The documented 64-bit key of a prefix, as a signed number."""
    terms = (_mix((_mix(token) + 0x9E3779B97F4A7C15 * (j + 1)) & _64) for j, token in enumerate(prefix))
    key = _mix(sum(terms) & _64)
    return key - (1 << 64) if key >> 63 else key


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of every safetensors file of a folder; 8-bit floats as bytes."""
    kinds = {"U8": np.uint8, "F8_E4M3": np.uint8, "F32": np.float32, "I64": np.int64}
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")):
        data = file.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in entry["data_offsets"])
                array = np.frombuffer(data[begin:end], kinds[entry["dtype"]])
                assert name not in tensors
                tensors[name] = array.reshape(entry["shape"])
    return tensors
