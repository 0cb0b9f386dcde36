"""The FX passes: from a Dynamo graph to one whose expert blocks are ops of this package. Imported as
``trace_compile.passes``."""

from .lower import Choice
from .match_moe import Match, match_moe
from .mode import Mode
from .pipeline import PIPELINE
from .region import PROJECTIONS, Emit, ExpertParam, Feed, MoERegion, NoMatch
from .runner import Pass, PassRunner, PassTiming

__all__ = [
    "PIPELINE",
    "PROJECTIONS",
    "Choice",
    "Emit",
    "ExpertParam",
    "Feed",
    "Match",
    "MoERegion",
    "Mode",
    "NoMatch",
    "Pass",
    "PassRunner",
    "PassTiming",
    "match_moe",
]
