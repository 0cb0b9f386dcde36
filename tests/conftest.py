"""What every test shares: Hypothesis has no deadline (machines are busy) and, in CI, leaves nothing to chance."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")
