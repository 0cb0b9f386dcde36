"""The product against ``tests.rederived``, a second implementation written from the contracts: both sides of the loop.

Each recipe plays its history once, product and reference in lockstep on equal weights; the tests then look at one thing
each. Codes, scales, records, ranges and files have to be equal byte for byte. So do forwards: both add up each product
in the same order, and anything less would let a rounding flip hide. Gradients differ in the order of summation only,
within ``LIMIT``.

One recipe runs with the fast tests; the others are as thorough, and marked slow because compiling takes their time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rederived import (
    RECIPES,
    SIGNED,
    Quantized,
    Records,
    Reference,
    guide,
    guided_index,
    outer_scale,
    prefix_key,
    quantize,
    quantize_experts,
    read_safetensors,
)
from tests.tiny import EOS, PAD, prompts, qwen3, right_padded
from trace_compile import numerics, trace_compile
from trace_compile.diagnose import SiteReport
from trace_compile.state.ranges import RangeWarning
from trace_compile.state.trace import Trace

LAYERS, NEW, STALENESS = 4, 8, 2
LIMIT = 2 * 2.0**-24 * math.sqrt(128 * 4 * LAYERS)
"""Two implementations, each rounding to float32, after sums of at most 128 terms in 4 products per layer, with errors
that are independent. Relative, of the root mean square and of the largest error."""
FULL = {"trace": "bit", "trace_full": "code"}


# --- numerics --------------------------------------------------------------------------------------------------------


def inputs() -> Iterator[Tensor]:
    """[4, 3, 64] each: smooth, full of ties, far apart in scale, with zeros of both signs, beyond the exponents."""
    generator = torch.Generator().manual_seed(5)
    smooth = torch.randn(4, 3, 64, generator=generator)
    yield smooth
    yield torch.randint(-24, 25, smooth.shape, generator=generator) / 4
    yield smooth * 2.0 ** torch.randint(-40, 20, smooth.shape, generator=generator)
    yield torch.where(smooth.abs() < 1, 0.0 * smooth, smooth).masked_fill(torch.arange(64) < 16, -0.0)
    yield smooth.bfloat16().float() * torch.tensor([2.0**-120, 1.0, 2.0**120])[:, None]


@pytest.mark.parametrize("x", list(inputs()), ids=["smooth", "ties", "spread", "zeros", "extreme"])
def test_quantizer(x: Tensor) -> None:
    given = outer_scale(2 * x.abs().amax() / 16)  # small enough for some elements to saturate
    for outer, mine in (
        ("row", quantize(x)),
        ("expert", quantize_experts(x)),
        (given.float().reshape(()), quantize(x, given)),
    ):
        theirs = numerics.quantize(x, "nvfp4", outer=outer)
        assert torch.equal(theirs.codes.long(), mine.codes)
        assert torch.equal(theirs.scales.long(), mine.scales)
        wide = theirs.outer.double().reshape(theirs.outer.shape + (1,) * (2 - theirs.outer.dim()))
        assert torch.equal(wide.expand(4, 3), mine.outer)
        assert torch.equal(theirs.dequantize().signbit(), mine.codes >= 8)


def test_guided_rounding() -> None:
    z = torch.cat([torch.linspace(-7, 7, 1793), torch.tensor([-0.0])])
    for index, codeword in enumerate(SIGNED):
        mine = SIGNED[guided_index(z.double(), codeword, "code")].float()
        theirs = numerics.guided_round(z, q_roll=codeword.float().expand_as(z))
        assert torch.equal(theirs, mine) and torch.equal(theirs.signbit(), z.signbit() & (mine <= 0))
        bit = abs(index - 7) % 2
        mine = SIGNED[guided_index(z.double(), torch.tensor(bit), "bit")].float()
        assert torch.equal(numerics.guided_round(z, bit=torch.full(z.shape, bit, dtype=torch.uint8)), mine)


# --- two histories in lockstep ---------------------------------------------------------------------------------------


@dataclass
class Step:
    """One training step of both: logits, loss and gradients by name, product first; hits of the lookup."""

    logits: tuple[Tensor, Tensor]
    loss: tuple[Tensor, Tensor]
    grads: dict[str, tuple[Tensor, Tensor]]
    hits: tuple[int, int]


@dataclass
class Generation:
    """Rollouts of both: logits, the product's trace and the reference's records, and what was generated."""

    kind: str
    logits: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    records: Records = field(default_factory=Records)
    batch: dict[str, Tensor] = field(default_factory=dict)
    trace: Trace | None = None


class Pair:
    """Product and reference with equal weights."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.model = trace_compile(qwen3(num_hidden_layers=LAYERS), recipe=recipe, max_staleness=STALENESS)
        self.reference = Reference(qwen3(num_hidden_layers=LAYERS), recipe, staleness=STALENESS)
        self.rollout = self.model.rollout()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.steps: dict[str, Step] = {}
        self.generations: list[Generation] = []
        self.unguided = torch.empty(0)
        self.reports: tuple[SiteReport, ...] = ()
        self.expected_reports: list[SiteReport] = []

    def train(self, name: str, batch: dict[str, Tensor], generation: Generation | None = None) -> None:
        """Forward and backward of both on ``batch``, guided by ``generation``."""
        trace = None if generation is None else generation.trace
        if trace is not None and generation is not None and FULL.get(self.recipe) != generation.kind:
            trace = trace.compact() if self.recipe in FULL else None
        self.model.guide(trace)
        self.reference.guiding = None if generation is None else generation.records
        before = 0 if trace is None else trace.counters.hits
        self.optimizer.zero_grad()
        self.reference.model.zero_grad()
        mine, theirs = self.model(**batch), self.reference.train(batch)
        mine.loss.backward()
        theirs.loss.backward()
        grads: dict[str, Any] = {
            name: (p.grad, q.grad)
            for (name, p), (_, q) in zip(self.model.named_parameters(), self.reference.model.named_parameters())
        }
        found = 0
        if trace is not None and generation is not None:
            keys = [generation.records.find(p, self.reference.version, STALENESS) for p in self.reference.prefixes]
            found = sum(key is not None for key in keys)
        hits = 0 if trace is None else trace.counters.hits - before
        self.steps[name] = Step((mine.logits, theirs.logits), (mine.loss, theirs.loss), grads, (hits, found))

    def generate(self, generation: Generation, seed: int) -> None:
        """Both generate from the same prompts; the reference is fed the tokens that the product sampled."""
        prompt = prompts(seed=seed)
        torch.manual_seed(seed)
        out = self.rollout.generate(
            **prompt, max_new_tokens=NEW, do_sample=True, return_dict_in_generate=True, output_logits=True
        )
        new = out.sequences[:, prompt["input_ids"].shape[1] :]
        logits = self.reference.decode(prompt, new, EOS, generation.records)
        generation.logits.append((torch.stack(out.logits, 1), logits))
        ended = (new == EOS).cumsum(1) - (new == EOS).long()
        mask = torch.cat([prompt["attention_mask"], (ended == 0).long()], 1)
        batch = right_padded(out.sequences, mask)
        generation.batch = joined(generation.batch, batch) if generation.batch else batch

    def traced(self, kind: str, seed: int) -> Generation:
        generation = Generation(kind)
        with self.model.trace(record=kind, inputs=kind == "code") as generation.trace:
            self.generate(generation, seed)
        self.generations.append(generation)
        return generation

    def update(self) -> None:
        """One optimizer step of the product, copied to the reference."""
        self.optimizer.step()
        self.reference.model.load_state_dict(self.model.state_dict())

    def refit(self, generation: Generation | None = None) -> None:
        self.rollout.refit()
        self.reference.refit(None if generation is None else generation.records)

    def diagnose(self, generation: Generation, batch: dict[str, Tensor]) -> None:
        """Reports under the guidance now in force, and what they should be from the reference's operands."""
        assert generation.trace is not None
        self.reports = self.model.diagnose(generation.trace, **batch)
        self.reference.train(batch)
        for layer in self.reference.guided:
            rows = [generation.records.find(p, self.reference.version, STALENESS) for p in self.reference.prefixes]
            self.expected_reports.append(self._report(generation.records, layer, rows))

    def _report(self, records: Records, layer: int, rows: list[Any]) -> SiteReport:
        hit = [t for t, row in enumerate(rows) if row is not None]
        x, used = self.reference.inputs[layer][hit], self.reference.used[layer][hit].double()
        own = quantize(x, self.reference.scales.get((layer, "gate_up"))).value().double()
        roll = [rows[t][layer] for t in hit]
        rollout = torch.stack([row.value() for row in roll]).double()
        full = torch.stack([guide(x[i], row, "code").value() for i, row in enumerate(roll)]).double()
        raw = torch.stack(
            [records.inputs[self.reference.version, self.reference.prefixes[t]][layer] for t in hit]  # type: ignore[index]
        ).double()
        differ = own != rollout
        return SiteReport(
            region=f"model.layers.{layer}.mlp.experts",
            tokens=len(hit),
            mismatch_before=float(differ.double().mean()),
            mismatch_after=float((used != rollout).double().mean()),
            adjacent=float((full == rollout)[differ].double().mean()),
            d_before=float((own - rollout).norm() / rollout.norm()),
            d_after=float((used - rollout).norm() / rollout.norm()),
            drift=float((x.double() - raw).norm() / raw.norm()),
        )


def joined(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of both right-padded batches."""
    length = max(a["input_ids"].shape[1], b["input_ids"].shape[1])
    return {k: torch.cat([F.pad(x[k], (0, length - x[k].shape[1]), value=PAD) for x in (a, b)]) for k in a}


def scored(batch: dict[str, Tensor], order: list[int] | None = None) -> dict[str, Tensor]:
    """A training batch: the rows in another order, padding moved to the left, labels on real tokens."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if order is not None:
        where = torch.argsort(mask, dim=1, stable=True)
        ids, mask = ids.gather(1, where)[order], mask.gather(1, where)[order]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def play(recipe: str) -> Pair:
    """Every recipe trains alone, generates, and trains on what was generated, before and after an optimizer step."""
    pair = Pair(recipe)
    acts, guided = RECIPES[recipe].rollout_acts, recipe in FULL
    pair.train("alone", scored(prompts(seed=7)))
    first = pair.traced("code" if acts else "ranges", seed=1)
    batch = scored(first.batch)
    pair.train("guided", batch, first)
    pair.update()
    pair.train("moved", batch, first)
    if acts:
        pair.diagnose(first, {k: v for k, v in batch.items() if k != "labels"})
    pair.update()
    pair.refit(first)
    pair.train("switched", scored(first.batch, [2, 0, 3, 1]), first)
    if not (guided or recipe == "static"):
        return pair

    second = Generation(FULL.get(recipe, "ranges"))
    with pair.model.trace() as second.trace:
        pair.generate(second, seed=2)
        pair.update()
        pair.refit()
        # The same prompts under newer weights: records of two versions, which part where the samples do.
        pair.generate(second, seed=2)
    pair.generations.append(second)
    both = scored(second.batch, [1, 3, 0, 2, 7, 4, 6, 5])
    pair.update()
    pair.train("two_versions", both, second)
    pair.refit(second)
    pair.update()
    pair.refit()
    pair.train("stale", both, second)
    pair.update()
    pair.refit()
    pair.train("too_stale", both, second)
    pair.reference.guiding = None
    pair.unguided = pair.reference.train(both).logits
    return pair


@pytest.fixture(
    scope="module",
    params=[name if name == "trace" else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RangeWarning)
        return play(request.param)


def test_training_forwards_are_bitwise_equal(pair: Pair) -> None:
    for name, step in pair.steps.items():
        assert torch.equal(*step.logits), f"{name}: {(step.logits[0] - step.logits[1]).abs().max()}"
        assert torch.equal(*step.loss), name


def test_every_gradient(pair: Pair) -> None:
    for step_name, step in pair.steps.items():
        for name, (mine, theirs) in step.grads.items():
            assert theirs.abs().max() > 0, name
            error, expected = (mine.double() - theirs.double()).abs(), theirs.double().abs()
            assert error.square().mean().sqrt() <= LIMIT * expected.square().mean().sqrt(), f"{step_name}: {name}"
            assert error.max() <= LIMIT * expected.max(), f"{step_name}: {name}"


def test_generation_is_bitwise_equal(pair: Pair) -> None:
    for generation in pair.generations:
        for mine, theirs in generation.logits:
            assert mine.shape[1] > 1 and torch.equal(mine, theirs)


def site_names() -> list[tuple[str, str]]:
    return [(f"model.layers.{i}.mlp.experts", p) for i in range(LAYERS) for p in ("gate_up", "down")]


def test_ranges(pair: Pair) -> None:
    for generation in pair.generations:
        assert generation.trace is not None
        found = generation.trace.ranges
        assert set(found.sites) == set(site_names())
        for i in range(LAYERS):
            for projection in ("gate_up", "down"):
                site = found.sites[f"model.layers.{i}.mlp.experts", projection]
                assert torch.equal(site.amax, generation.records.amax[i, projection])
                assert torch.equal(site.tokens, generation.records.tokens[i])
        amax = torch.stack([generation.records.amax[i, p].max() for i in range(LAYERS) for p in ("gate_up", "down")])
        assert torch.equal(found.outer_scales(site_names()).double(), outer_scale(2 * amax))


def test_records(pair: Pair) -> None:
    """Same prefixes, same versions, same bytes; whole codes, and bits recorded as such or by compaction."""
    for index, generation in enumerate(pair.generations):
        trace = generation.trace
        assert trace is not None
        traced = index > 0 and RECIPES[pair.recipe].traced
        check_records(trace, generation.kind, generation.records, traced)
        if generation.kind == "code":
            check_records(trace.compact(), "bit", generation.records, traced)


def check_records(trace: Trace, kind: str, records: Records, traced: bool) -> None:
    found = {}
    for run in trace.runs:
        for key, row in zip(run.keys.tolist(), run.rows):
            found[run.version, key] = bytes(row.tolist()), run.outer.tolist()
    expected = {}
    for (version, prefix), ids in records.ids.items():
        rows = list(records.rows.get((version, prefix), {}).values()) if kind != "ranges" else []
        guidance = b"".join(row.record(kind, with_outer=not traced) for row in rows)
        routing = b"".join(int(e).to_bytes(2, "little") for i in range(LAYERS) for e in ids[i])
        table = [float(row.outer) for row in rows] if traced else [1.0] * len(rows)
        expected[version, prefix_key(prefix)] = guidance + routing, table
    assert found == expected and len(found) > 20


def test_lookups_find_what_was_recorded(pair: Pair) -> None:
    hits = {name: step.hits for name, step in pair.steps.items()}
    assert all(mine == theirs for mine, theirs in hits.values())
    if pair.recipe in FULL:
        assert hits["guided"] == hits["moved"] == hits["switched"] and hits["guided"][0] > 20
        assert hits["two_versions"][0] > 20 and hits["stale"][0] > 0
        assert hits["too_stale"] == (0, 0)
        assert torch.equal(pair.steps["too_stale"].logits[0], pair.unguided)
        assert not torch.equal(pair.steps["stale"].logits[0], pair.unguided)


def test_diagnosis(pair: Pair) -> None:
    if not RECIPES[pair.recipe].rollout_acts:
        assert pair.reports == ()
        return
    assert len(pair.reports) == len(pair.expected_reports) == LAYERS // 2
    for mine, theirs in zip(pair.reports, pair.expected_reports):
        assert (mine.region, mine.tokens) == (theirs.region, theirs.tokens)
        assert mine.drift is not None and 0.001 < mine.drift < 0.2
        for name in ("mismatch_before", "mismatch_after", "adjacent", "d_before", "d_after", "drift"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=LIMIT, abs=LIMIT), name
        if pair.recipe in FULL:
            assert theirs.d_before is not None and theirs.d_after is not None
            assert theirs.d_after < theirs.d_before


def test_exported_checkpoint(pair: Pair, tmp_path: Path) -> None:
    """compressed-tensors, read without any library: codes, scales, outer scales both ways, and all other tensors."""
    pair.model.export(tmp_path / "out", format="compressed-tensors")
    found = read_safetensors(tmp_path / "out")
    scales = pair.reference.scales or {
        site: outer_scale(2 * amax.max()) for site, amax in pair.generations[-1].records.amax.items()
    }
    parameters = dict(pair.reference.model.named_parameters())
    for i in range(LAYERS):
        prefix = f"model.layers.{i}.mlp.experts"
        w13 = quantize_experts(parameters.pop(f"{prefix}.gate_up_proj"))
        w2 = quantize_experts(parameters.pop(f"{prefix}.down_proj"))
        half = w13.codes.shape[1] // 2
        for e in range(w13.codes.shape[0]):
            parts = {"gate_proj": w13[e, :half], "up_proj": w13[e, half:], "down_proj": w2[e]}
            for name, part in parts.items():
                stem = f"{prefix}.{e}.{name}."
                check_matrix({k: found.pop(stem + k) for k in list_suffixes(found, stem)}, part)
                if RECIPES[pair.recipe].rollout_acts:
                    g = scales[i, "down" if name == "down_proj" else "gate_up"]
                    assert found.pop(stem + "input_global_scale").tolist() == [1 / float(g)]
    assert set(found) <= set(parameters)
    for name, array in found.items():
        assert torch.equal(torch.from_numpy(array.copy()), parameters[name].detach()), name
    assert set(parameters) - set(found) <= {"lm_head.weight"}


def list_suffixes(found: dict[str, Any], stem: str) -> list[str]:
    return [k.removeprefix(stem) for k in found if k.startswith(stem) and not k.endswith("input_global_scale")]


def check_matrix(found: dict[str, Any], part: Quantized) -> None:
    codes = part.codes.unflatten(-1, (-1, 2))
    assert set(found) == {"weight_packed", "weight_scale", "weight_global_scale"}
    assert found["weight_packed"].tolist() == (codes[..., 0] + 16 * codes[..., 1]).tolist()
    assert found["weight_scale"].tolist() == part.scales.tolist()
    assert found["weight_global_scale"].tolist() == [1 / float(part.outer.unique())]
