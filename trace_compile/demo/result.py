"""What a demo run leaves behind: the schema of ``result.json``.

Frozen dataclasses, written as JSON field by field. A number that does not apply to an arm (the mismatch rate of an arm
that quantizes nothing, the guidance bytes of an arm without guidance) is ``null``, never 0 and never absent. Numbers
that are not finite are ``null`` too: the file is strict JSON. Per-step lists have one entry per RL step.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class StepRecord:
    """One RL step of one run. Gaps are ``log pi_train - log pi_rollout`` on sampled response tokens, in nats.

    Attributes:
        reward: mean reward of the batch, in [0, 1].
        gap_max, gap_mean: largest and mean absolute gap. k1: mean of ``-gap``. k3: mean of
            ``rho - log rho - 1`` with ``rho = exp(gap)``.
        entropy: mean of ``-log pi_rollout`` on the sampled tokens.
        staleness: optimizer steps between the rollout's weights and the trainer's.
        clip_fraction: share of response tokens whose importance weight was truncated.
        mismatch_before, mismatch_after: share of values whose code differs from the rollout's, by the trainer's own
            rounding and after guidance. adjacent: share of those mismatches that are one codeword apart.
        drift: relative difference between the trainer's and the rollout's inputs of the experts.
        distance: relative difference D of the quantized inputs. hit_rate: share of looked-up tokens with a record.
        guidance_bytes_per_token: bytes recorded per token for guidance.
        seconds: wall time of the step; rollout_seconds: the part spent generating.
    """

    reward: float
    gap_max: float
    gap_mean: float
    k1: float
    k3: float
    entropy: float
    staleness: int
    clip_fraction: float
    seconds: float
    rollout_seconds: float
    mismatch_before: float | None = None
    mismatch_after: float | None = None
    adjacent: float | None = None
    drift: float | None = None
    distance: float | None = None
    hit_rate: float | None = None
    guidance_bytes_per_token: float | None = None


@dataclass(frozen=True)
class ArmResult:
    """One arm. Per-step lists aggregate the seeds: the largest for ``gap_max``, the mean for all others.

    ``runs`` holds each seed's own per-step lists under the names of ``StepRecord``. ``drift`` is the mean over steps of
    the measured drift. ``held_out_reward``: the rollout's mean reward on problems that are never trained on, before and
    after. ``seconds``: wall time of the arm, compilation and measurements included.
    """

    name: str
    seeds: list[int]
    reward: list[float | None]
    gap_max: list[float | None]
    gap_mean: list[float | None]
    mismatch_before: list[float | None]
    mismatch_after: list[float | None]
    guidance_bytes_per_token: float | None
    guidance_hit_rate: float | None
    drift: float | None
    held_out_reward: list[float]
    seconds: float
    runs: list[dict[str, list[float | None]]]


@dataclass(frozen=True)
class SweepPoint:
    """The same tokens, scored by a trainer that is ``steps`` optimizer steps ahead of the rollout."""

    arm: str
    steps: int
    drift: float | None
    gap_mean: float
    gap_max: float
    k3: float
    mismatch_before: float | None
    mismatch_after: float | None


@dataclass(frozen=True)
class ExportCheck:
    """One exported checkpoint, reloaded and compared with the model that it came from.

    ``logits_max_error`` and ``logits_relative_error`` (RMS of the difference over RMS of the logits) compare the
    reloaded model with ``against``; ``top1_agreement`` is the share of positions with the same most likely token.
    """

    format: str
    against: str
    bytes: int
    logits_max_error: float
    logits_relative_error: float
    top1_agreement: float


@dataclass(frozen=True)
class DemoResult:
    """The whole run."""

    schema: int
    preset: str
    task: str
    model: dict[str, Any]
    warm_start: dict[str, Any]
    compute_dtype: str
    device: str
    versions: dict[str, str]
    steps: int
    seconds: float
    arms: list[ArmResult]
    sweep: list[SweepPoint]
    exports: list[ExportCheck]

    def write(self, path: Path) -> None:
        """Write strict JSON; the file appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("w") as file:
            json.dump(_strict(asdict(self)), file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def combine(
    name: str, runs: dict[int, list[StepRecord]], held_out: list[tuple[float, float]], seconds: float
) -> ArmResult:
    """Aggregate the runs of one arm, keyed by seed and of equal length; ``held_out``: rewards before and after each."""
    columns = {
        seed: {f.name: [getattr(r, f.name) for r in run] for f in fields(StepRecord)} for seed, run in runs.items()
    }

    def per_step(column: str) -> list[list[float]]:
        return [[v for v in values if _real(v)] for values in zip(*(run[column] for run in columns.values()))]

    def average(column: str) -> list[float | None]:
        return [_mean(values) for values in per_step(column)]

    def overall(column: str) -> float | None:
        return _mean([v for values in per_step(column) for v in values])

    return ArmResult(
        name=name,
        seeds=list(runs),
        reward=average("reward"),
        gap_max=[max(values, default=None) for values in per_step("gap_max")],
        gap_mean=average("gap_mean"),
        mismatch_before=average("mismatch_before"),
        mismatch_after=average("mismatch_after"),
        guidance_bytes_per_token=overall("guidance_bytes_per_token"),
        guidance_hit_rate=overall("hit_rate"),
        drift=overall("drift"),
        held_out_reward=[sum(rewards) / len(rewards) for rewards in zip(*held_out)],
        seconds=seconds,
        runs=[{"seed": [seed], **columns[seed]} for seed in runs],
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _real(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _strict(value: Any) -> Any:
    """``value`` with non-finite floats replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value
