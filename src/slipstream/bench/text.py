"""Real text to train on, on every machine and without a network: Python's own reference documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch


def reference_text() -> torch.Tensor:
    """Bytes (uint8, about 700 kB) of the language reference that Python's help() shows. Differs between versions."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def batches(text: torch.Tensor, batch: int, sequence: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and targets (batch, sequence), int64, for ever: random windows, each byte's target the next one."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - sequence, (batch, 1), generator=generator)
        windows = text[starts + torch.arange(sequence + 1)].long()
        yield windows[:, :-1], windows[:, 1:]
