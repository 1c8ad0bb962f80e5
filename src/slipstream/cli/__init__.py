"""The command: one file a verb, each with `add_arguments(parser)` and `run(arguments) -> int`."""
