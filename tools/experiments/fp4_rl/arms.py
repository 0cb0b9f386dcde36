"""What the experiment compares: arms, their recipes, and where guidance is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trace_compile.demo import sft
from trace_compile.demo.arms import Arm
from trace_compile.demo.presets import Preset

HERE = Path(__file__).parent
WARM_START = HERE / "warmstart"
MAIN = ("bf16", "naive", "qat", "trace")


@dataclass(frozen=True)
class Spec:
    """One arm. ``options`` go to ``trace_compile``; ``replay``: which of the trainer's forwards are guided."""

    name: str
    recipe: str
    options: Mapping[str, Any] = field(default_factory=dict)
    replay: Literal["always", "old"] = "always"

    def build(self, preset: Preset) -> Arm:
        """The arm, with the model of the preset's shape on its device."""
        model = sft.build_model(preset, 0, preset.dtype)
        return Arm(self.name, model, preset, recipe=self.recipe, options=self.options, replay=self.replay)


SPECS = {
    spec.name: spec
    for spec in (
        Spec("bf16", "bf16"),
        Spec("naive", "naive"),
        Spec("w4a16", "w4a16"),
        Spec("qat", "qat"),
        Spec("static", "static"),
        Spec("trace", "trace"),
        Spec("trace_all", "trace", {"last": 1.0}),
        Spec("trace_quarter", "trace", {"last": 0.25}),
        Spec("trace_full", "trace_full"),
        Spec("asymmetric", "asymmetric"),
        Spec("quads", "quads"),
        Spec("resq_2of4", "qat+resq_2of4"),
        Spec("four_over_six", "qat+four_over_six"),
        Spec("qat_mxfp4", "qat+mxfp4"),
        Spec("trace_mxfp4", "trace+mxfp4"),
        Spec("trace_old", "trace", replay="old"),
        Spec("trace_fresh", "trace", {"max_staleness": 1}),
        Spec("bf16_r3", "bf16", {"replay_routing": True}),
        Spec("qat_r3", "qat", {"replay_routing": True}),
        Spec("trace_r3", "trace", {"replay_routing": True}),
    )
}
"""``*_r3``: routing replay. ``trace_old``: guidance in the old log-probabilities alone. ``trace_fresh``: records of at
most one version back."""
