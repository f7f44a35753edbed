"""The command line: one module a command, each with `add_arguments(parser)` and `execute(arguments) -> int`.

What is heavy is imported in `execute`, so that help is there at once and without an engine.
"""
