"""Real jobs of a chosen mechanism, size and wire, and what of their communication was hidden. It needs torch."""
