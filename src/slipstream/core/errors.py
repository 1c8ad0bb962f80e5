"""Every error that a user can meet, as one tree with three roots of blame.

SlipstreamError
├── UsageError    exit code 2   the request cannot be carried out as it was given
├── TraceError    exit code 3   the trace cannot be used
└── MachineError  exit code 4   this machine lacks something (a module, space, a permission)

A message is one line that says what is wrong, where or with which value, and what to do next.
`assert` is kept for our own mistakes.
"""


class SlipstreamError(Exception):
    """Root of all errors that are meant for the user; `exit_code` is what the command returns."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what = what
        self.where = where
        self.do = do
        message = f"{where}: {what}" if where else what
        super().__init__(f"{message}; {do}" if do else message)


class UsageError(SlipstreamError):
    """The user's input: a path that does not exist, an option with a bad value, a file that would be overwritten."""

    exit_code = 2


class TraceError(SlipstreamError):
    """A trace that cannot be used: not a trace, no device work in it, damaged beyond reading."""

    exit_code = 3


class MachineError(SlipstreamError):
    """The machine: a missing optional package, a full disk, a permission."""

    exit_code = 4
