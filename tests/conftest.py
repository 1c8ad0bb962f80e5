"""Test-wide settings."""

from hypothesis import settings

# A loaded machine makes a single example slow; that says nothing about the code.
settings.register_profile("slipstream", deadline=None)
settings.load_profile("slipstream")
