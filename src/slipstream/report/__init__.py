"""Results drawn: for the terminal, as JSON, and as files that other programs read."""
