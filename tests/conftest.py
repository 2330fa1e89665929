"""Settings that all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# How long an example takes depends on the machine, and no test of ours asserts a time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
