"""The FX passes: from a Dynamo graph to one whose expert blocks are ops of this package. Imported as
``trace_compile.passes``."""

from .lower import Choice
from .match_moe import match_moe
from .matching import Match
from .mode import Mode
from .pipeline import PIPELINE
from .region import Emit, ExpertParam, Feed, LinearRegion, MoERegion, NoMatch, Region
from .runner import Pass, PassRunner, PassTiming

__all__ = [
    "PIPELINE",
    "Choice",
    "Emit",
    "ExpertParam",
    "Feed",
    "LinearRegion",
    "Match",
    "MoERegion",
    "Mode",
    "NoMatch",
    "Pass",
    "PassRunner",
    "PassTiming",
    "Region",
    "match_moe",
]
