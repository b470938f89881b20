"""Settings for the tests of the contract."""

from __future__ import annotations

from hypothesis import settings

# A deadline for each example measures the machine, which other tests share; a hang is caught by the test's own limit.
settings.register_profile("contract", deadline=None)
settings.load_profile("contract")
