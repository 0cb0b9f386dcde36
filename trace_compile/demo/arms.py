"""One arm of the comparison: a trainer under one recipe, and the rollout twin that lags behind it.

The demo's only contact with the library under test. Everything an arm does goes through the public interface: compile,
twin, trace, guide, refit, diagnose.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trace_compile.api import trace_compile
from trace_compile.demo.drift import InputProbe, Inputs
from trace_compile.demo.grpo import group_advantages, policy_loss
from trace_compile.demo.optimizer import MasterAdamW
from trace_compile.demo.presets import Preset
from trace_compile.demo.rollouts import Rollouts, TrainBatch, sample, token_log_probs, train_batch
from trace_compile.demo.sft import supervised_batch
from trace_compile.demo.task import PAD, Problem
from trace_compile.losses import GapStats, gap_stats
from trace_compile.recipes import Recipe, get_recipe
from trace_compile.state.ranges import RangeWarning

_CALIBRATIONS = 8  # at most; each can only reach as deep as the first saturated site


@dataclass(frozen=True)
class Generated:
    """A batch of rollouts, what was recorded with it, and the trainer's optimizer step that its weights come from.

    ``trace`` holds whole codes and raw inputs, to measure with; ``guidance`` what the recipe replays; ``inputs`` stands
    in for the trace where nothing is quantized. ``seconds``: wall time of generating.
    """

    rollouts: Rollouts
    trace: Any | None
    guidance: Any | None
    inputs: Inputs | None
    version: int
    seconds: float


@dataclass(frozen=True)
class Alignment:
    """Means over the recorded sites; see ``diagnose.SiteReport``. Where the arm quantizes nothing, drift alone."""

    mismatch_before: float | None = None
    mismatch_after: float | None = None
    adjacent: float | None = None
    drift: float | None = None
    distance: float | None = None


class Arm:
    """A trainer and its rollout twin under a recipe. ``model`` is compiled in place and is the arm's.

    ``recipe``: the arm's name, by default. ``options``: further arguments of ``trace_compile``. ``replay``: which of
    the trainer's forwards are guided, ``"always"`` or only those of the ``"old"`` log-probabilities.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        preset: Preset,
        *,
        recipe: str | None = None,
        options: Mapping[str, Any] | None = None,
        replay: Literal["always", "old"] = "always",
    ) -> None:
        self.name = name
        self.recipe: Recipe = get_recipe(recipe or name)
        self.preset = preset
        self.model = trace_compile(model, recipe=self.recipe, **{"compiler": preset.compiler, **(options or {})})
        self.twin = self.model.rollout(copy=True)
        self.updates = 0
        self.optimizer: MasterAdamW | None = None
        self._fitted = 0
        self._replay = replay
        self._probe = None if self.quantizes else InputProbe(preset)

    @property
    def quantizes(self) -> bool:
        """Whether the rollout quantizes activations, so that there are outcomes to compare."""
        return self.recipe.rollout is not None and self.recipe.rollout.act is not None

    def _calibrate(self) -> None:
        """Trace ranges of worked-out solutions, so that outer scales are traced ones from the first rollout on.

        Scales of earlier, smaller weights can saturate, and what lies behind a saturated site is then seen too small:
        so it is done again until nothing saturates.
        """
        ids, _ = supervised_batch(self.preset.task, 0, 0, self.preset.sft.batch, random.Random(0))
        ids = ids.to(self.preset.device)
        with warnings.catch_warnings():
            # Of that, and of a few small experts that see no token of this batch and take their layer's scale.
            warnings.simplefilter("ignore", RangeWarning)
            for _ in range(_CALIBRATIONS):
                with self.model.trace(record="ranges") as trace:
                    self.twin(input_ids=ids, attention_mask=(ids != PAD).long(), use_cache=False)
                self.twin.refit(progress=self._progress)
                if not trace.ranges.stale():
                    return

    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Back to ``weights`` on both sides, with a fresh optimizer and these weights' scales; compiled graphs stay."""
        self.load(weights)
        self.optimizer = MasterAdamW(list(self.model.parameters()), self.preset.rl.learning_rate)
        self.updates = 0
        self.refit()
        if self.recipe.outer == "traced":
            self._calibrate()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Put ``weights`` into the trainer, in place; the twin keeps its own."""
        self.model.load_state_dict(weights)

    def refit(self) -> None:
        """Bring the twin up to the trainer."""
        self.twin.refit(progress=self._progress)
        self._fitted = self.updates

    @property
    def _progress(self) -> float:
        """The finished fraction of a run."""
        return min(1.0, self.updates / self.preset.rl.steps)

    def generate(
        self, problems: list[Problem], seed: int, forced: Tensor | None = None, *, measure: bool = True
    ) -> Generated:
        """Sample one response to each problem from the twin while recording; the same ``seed`` draws the same numbers.

        ``forced`` i64 ``[B, R]``: responses to score instead of sampling, through the same decoding. ``measure``:
        record whole codes and raw inputs as well, which ``align`` needs, and not only what the recipe uses.
        """
        torch.manual_seed(seed)
        start = time.perf_counter()
        with self._recording(measure) as trace:
            rollouts = sample(self.twin, self.preset.task, problems, self.preset.device, forced=forced)
        seconds = time.perf_counter() - start
        inputs = None
        if self._probe is not None and measure:
            inputs = self._probe.decoded(self.twin.state_dict(), problems, rollouts)
        guidance = None if self.recipe.guidance == "none" else trace
        if guidance is not None and self.recipe.guidance == "bit" and measure:
            guidance = guidance.compact()
        return Generated(rollouts, trace if measure else None, guidance, inputs, self._fitted, seconds)

    def _recording(self, measure: bool) -> Any:
        if not self.quantizes:
            return nullcontext()
        if measure:
            return self.model.trace(record="code", inputs=True)
        return self.model.trace(record="ranges" if self.recipe.guidance == "none" else self.recipe.guidance)

    def batches(self, generated: Generated, advantages: Tensor, shuffle: torch.Generator) -> list[TrainBatch]:
        """The rollouts in shuffled micro-batches."""
        rows = torch.randperm(len(advantages), generator=shuffle).to(self.preset.device)
        return [train_batch(generated.rollouts, advantages, part) for part in rows.chunk(self.preset.rl.microbatches)]

    def score(self, generated: Generated, batches: list[TrainBatch]) -> list[Tensor]:
        """The trainer's log-probabilities of the rollouts' tokens, f32 ``[b, L]`` per micro-batch, guided if it is.

        Runs with gradients on and drops them: the graph is then the one that the update compiles anyway.
        """
        self.model.guide(generated.guidance)
        return [token_log_probs(self.model, batch).detach() for batch in batches]

    def step(self, generated: Generated, shuffle: torch.Generator) -> tuple[GapStats, Alignment]:
        """One GRPO step on ``generated``; returns how the trainer before the step compares with the rollout."""
        rl = self.preset.rl
        assert self.optimizer is not None, "restart() comes first"
        advantages = group_advantages(generated.rollouts.rewards, rl.group_size)
        batches = self.batches(generated, advantages, shuffle)
        tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        old = self.score(generated, batches)
        measured = generated.trace is not None or generated.inputs is not None
        alignment = self.align(generated, batches) if measured else Alignment()
        self.model.guide(generated.guidance if self._replay == "always" else None)
        for batch, before in zip(batches, old):
            new = token_log_probs(self.model, batch)
            rollout, weight = batch.rollout_log_probs, batch.advantages
            loss = policy_loss(new, before, rollout, weight, batch.loss_mask, clip=rl.clip, truncate=rl.truncate)
            (loss / tokens).backward()
        self.optimizer.step()
        self.updates += 1
        return self.gap(batches, old), alignment

    def gap(self, batches: list[TrainBatch], scores: list[Tensor]) -> GapStats:
        """Statistics of ``log pi_train - log pi_rollout`` over all sampled tokens."""
        gaps = [(score - batch.rollout_log_probs)[batch.loss_mask] for batch, score in zip(batches, scores)]
        return gap_stats(torch.cat(gaps), self.preset.rl.truncate)

    def align(self, generated: Generated, batches: list[TrainBatch]) -> Alignment:
        """How far the trainer's operands are from the recorded ones, with the guidance of ``generated`` in force."""
        if self._probe is not None and generated.inputs is not None:
            drift = self._probe.drift(self.model.state_dict(), generated.rollouts, generated.inputs)
            return Alignment(drift=drift)
        self.model.guide(generated.guidance)
        reports = [
            report
            for batch in batches
            for report in self.model.diagnose(
                generated.trace, input_ids=batch.ids, attention_mask=batch.attention, use_cache=False
            )
        ]

        def mean(name: str) -> float:
            values = [float(getattr(report, name)) for report in reports]
            return sum(values) / len(values)

        return Alignment(
            mean("mismatch_before"), mean("mismatch_after"), mean("adjacent"), mean("drift"), mean("d_after")
        )
