"""Fully sharded data parallelism with prefetch (ZeRO-3 and ZeRO-2).

    layout      where parameters lie in a flat buffer that is cut into shards (arithmetic)
    flat        a layer's parameters as such a buffer: pieces, leaves, gradients
    unit        a layer with its flat buffers; gathered together, reduced together
    order       in which order layers run: learned, predicted, checked
    scatter     reduce-scatters in flight, and the all-reduce over replicas behind them
    schedule    what is gathered, freed and reduced when
    wrapper     FullySharded: the hooks and the public methods
    state       state dicts

Read schedule first.
"""

from slipstream.runtime.sharded.groups import Groups
from slipstream.runtime.sharded.memory import MemoryUse
from slipstream.runtime.sharded.wrapper import FullySharded

__all__ = ["FullySharded", "Groups", "MemoryUse"]
