"""A compiler pass pipeline that makes an NVFP4 rollout and its trainer agree. Start at ``trace_compile()``."""

from trace_compile.api import trace_compile
from trace_compile.passes.mode import Unquantized
from trace_compile.recipes import RECIPES, Recipe
from trace_compile.state.trace import Trace

__version__ = "0.1.0"

__all__ = ["RECIPES", "Recipe", "Trace", "Unquantized", "__version__", "trace_compile"]
