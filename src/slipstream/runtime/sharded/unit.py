"""A layer (or the root: what is in no layer) with its parameters: gathered together, reduced together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from slipstream.runtime.sharded.flat import Flat
from slipstream.runtime.sharded.lanes import Lane, Pending
from slipstream.runtime.sharded.memory import Ledger

Observer = Callable[[str, str], None]
"""Told what happens on the host, in order: (event, layer)."""


@dataclass(eq=False)
class Call:
    """One forward call of a layer, as backward meets it.

    `ends`: some input gets a gradient, which tells when backward is done with the call.
    """

    unit: Unit
    ends: bool = False


class Unit:
    """State of one layer: sharded, gathering (`pending`), or unsharded."""

    def __init__(
        self, name: str, module: nn.Module, flats: Sequence[Flat], ledger: Ledger, observe: Observer, *, root: bool
    ) -> None:
        self.name, self.module, self.flats, self.root = name, module, tuple(flats), root
        self.backward = BackwardState(expected=self.trainable)
        self._ledger, self._observe = ledger, observe
        self._pending: list[Pending] = []
        self._unsharded = False

    @property
    def live(self) -> bool:
        """Memory is held for whole parameters, be they here or still under way."""
        return self._unsharded or bool(self._pending)

    @property
    def gathering(self) -> bool:
        """Launched, and not waited for yet."""
        return bool(self._pending)

    @property
    def trainable(self) -> frozenset[tuple[int, int]]:
        """Name the parameters that can get a gradient: (index of the flat, index in it)."""
        return frozenset(
            (which, index)
            for which, flat in enumerate(self.flats)
            if flat.trainable
            for index in range(len(flat.slots))
        )

    def launch(self, lane: Lane) -> None:
        """Start to gather, unless that has been done."""
        if self.live or not self.flats:
            return
        self._observe("gather", self.name)
        self._pending = [lane.start(f"gather {self.name}", flat.gather) for flat in self.flats]
        if not self.root:
            self._ledger.layers.add(1)

    def ready(self, lane: Lane) -> None:
        """Wait until the modules can compute with whole parameters; gather now if nobody has asked before."""
        self.launch(lane)
        if not self._pending:
            return
        for pending in self._pending:
            pending.wait()
        self._pending, self._unsharded = [], True
        self._observe("gathered", self.name)
        for flat in self.flats:
            flat.hold_leaves()

    def reshard(self, lane: Lane) -> None:
        """Free the whole parameters; what is under way is waited for first."""
        if not self.live:
            return
        self.ready(lane)
        lane.after_compute()
        for flat in self.flats:
            flat.hold_pieces()
            flat.free()
        self._unsharded = False
        self._observe("free", self.name)
        if not self.root:
            self._ledger.layers.add(-1)

    def drop_gradients(self) -> None:
        """Forget gradients that were collected and not reduced."""
        for flat in self.flats:
            if flat.has_gradient:
                flat.release_gradient(flat.take_gradient())

    def collect(self, which: int, index: int) -> None:
        """Take the gradient that has arrived at a parameter."""
        self.flats[which].collect(index)
        self.backward.arrived.add((which, index))


@dataclass
class BackwardState:
    """What the running backward has done to a layer. `expected` are the gradients that the last one brought."""

    expected: frozenset[tuple[int, int]]
    arrived: set[tuple[int, int]] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Some call is under way that will say when it is done with the parameters."""
        return any(call.ends for call in self.calls)

    @property
    def complete(self) -> bool:
        """Nothing needs the parameters any more, and all gradients are there."""
        return not self.busy and bool(self.arrived) and self.arrived >= self.expected

    def finish(self) -> None:
        """Remember which gradients came, and be ready for the next backward."""
        self.expected = frozenset(self.arrived) or self.expected
        self.arrived.clear()
        self.calls.clear()
