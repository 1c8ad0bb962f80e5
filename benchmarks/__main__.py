"""Run every benchmark of this folder, one after the other."""

from __future__ import annotations

import sys

from benchmarks import analyze_speed

if __name__ == "__main__":
    sys.exit(analyze_speed.main(sys.argv[1:]))
