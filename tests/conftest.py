"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes depends on what else the machine does; what hangs is ended by pytest's own limit.
settings.register_profile("project", deadline=None)
settings.load_profile("project")
