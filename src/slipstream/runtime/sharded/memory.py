"""What the unsharded copies cost: bytes and layers that are live now, and the most that ever were."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that one rank holds for a FullySharded model; unsharded ones in the dtype that is gathered.

    `layers` counts the layers whose parameters are unsharded; the root's are in the bytes, not in this count, because
    they stay from the start of forward to the end of backward.
    """

    sharded_bytes: int
    unsharded_bytes: int
    peak_unsharded_bytes: int
    gradient_bytes: int
    peak_gradient_bytes: int
    layers: int
    peak_layers: int


class Ledger:
    """Counts what is allocated and freed."""

    def __init__(self) -> None:
        self.sharded = 0
        self.unsharded = Level()
        self.gradients = Level()
        self.layers = Level()

    def use(self) -> MemoryUse:
        """Read all counters."""
        return MemoryUse(
            sharded_bytes=self.sharded,
            unsharded_bytes=self.unsharded.now,
            peak_unsharded_bytes=self.unsharded.peak,
            gradient_bytes=self.gradients.now,
            peak_gradient_bytes=self.gradients.peak,
            layers=self.layers.now,
            peak_layers=self.layers.peak,
        )

    def reset_peaks(self) -> None:
        """Count peaks from now on."""
        for level in (self.unsharded, self.gradients, self.layers):
            level.peak = level.now


class Level:
    """A number that goes up and down, and its peak."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def add(self, amount: int) -> None:
        """Change the level by `amount`, which may be negative."""
        self.now += amount
        self.peak = max(self.peak, self.now)
