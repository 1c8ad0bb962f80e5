"""Speed as ratios within one run: against a peer, against a physical limit. `make bench` runs all of it."""
