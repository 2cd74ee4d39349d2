"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# How long an example takes depends on what else the machine does; what hangs is ended by pytest's own limit. Continuous
# integration judges a change, so it tries the same examples each time; new ones are found by everybody else.
settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")
