"""What every test shares: Hypothesis without a deadline (machines here are slow and busy) and, in CI, without chance."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")
