"""What a failed collective means: another rank is the cause, and the message must say in what it was missed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.core.errors import MachineError


class PeerError(MachineError):
    """A collective failed: another rank raised, died, or did not come within the group's timeout."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn torch's error about a socket or a communicator into one that says `what` was being exchanged."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError too, and this rank's own
        raise
    except RuntimeError as error:  # torch.distributed's errors, of every backend
        reason = str(error).strip().partition("\n")[0]
        raise PeerError(
            f"{what} failed: {reason}", do="the cause is on the rank that stopped first: look for its error"
        ) from error
