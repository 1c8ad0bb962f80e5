"""The order in which layers run: learned in the first pass, predicted and checked in each later one.

Prefetch must know which layer comes next. A wrong guess costs time and memory on one rank, and mixes up the collectives
of two layers where ranks guess differently; so an order that changes is an error, unless the user asks otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from zlib import crc32

from slipstream.core.errors import UsageError

OnChange = Literal["raise", "gather"]
"""When layers run in another order than before: raise, or gather each on demand and learn the new order."""


class Order:
    """One phase's sequence of layer names (a layer that runs twice stands there twice)."""

    def __init__(self, phase: str, on_change: OnChange = "raise") -> None:
        self.phase = phase
        self.on_change = on_change
        self.learned: tuple[str, ...] | None = None
        self.seen: list[str] = []
        self._guess: Sequence[str] = ()

    @property
    def learning(self) -> bool:
        """Nothing to check against yet, or no more since this pass has gone another way."""
        return self.learned is None

    def start(self, guess: Sequence[str] = ()) -> None:
        """Begin a pass. `guess` predicts while nothing is learned yet, and is not checked."""
        self.seen = []
        self._guess = self.learned if self.learned is not None else guess

    def visit(self, layer: str) -> bool:
        """Take note that `layer` runs now; False when something else was predicted (on_change "gather").

        Raises UsageError when this is not the order of the first pass (on_change "raise").
        """
        at = len(self.seen)
        self.seen.append(layer)
        if list(self._guess[at : at + 1]) == [layer]:
            return True
        self._guess = ()  # what follows cannot be known
        self._changed(layer, at)
        return False

    def upcoming(self, count: int) -> list[str]:
        """Name the layers of the next `count` runs, as far as they are known."""
        at = len(self.seen)
        return list(self._guess[at : at + count])

    def finish(self) -> bool:
        """End the pass; True when it taught an order that was not known before.

        Raises UsageError when layers of the first pass did not run (on_change "raise").
        """
        seen = tuple(self.seen)
        if self.learned == seen:
            return False
        self._changed(None, len(seen))
        self.learned = seen
        return True

    def fingerprint(self) -> int:
        """Name the order of this pass in 32 bits, to compare it across ranks."""
        return crc32("\n".join(self.seen).encode())

    def _changed(self, layer: str | None, at: int) -> None:
        if self.learned is None:
            return
        if self.on_change == "gather":
            self.learned = None
            return
        expected = f"'{self.learned[at]}'" if at < len(self.learned) else "the end of the pass"
        after = f"after '{self.seen[at - 1]}'" if at else "first"
        found = f"'{layer}' ran" if layer is not None else "the pass ended"
        raise UsageError(
            f"layers ran in another order than in the first pass: {expected} was to come {after}, but {found}",
            where=self.phase,
            do='run the same layers in each pass, or pass on_order_change="gather" to gather them on demand',
        )
