"""The one family of errors. Each class maps to one exit code of the command line.

A message is one paragraph: what went wrong, where, what was expected, what was found, what to do.
"""

from __future__ import annotations


class K3Error(Exception):
    """Base of every error that this package raises on purpose; a failure while working (exit code 1)."""

    exit_code = 1


class ReadError(K3Error):
    """Bytes of the trunk, the head or the embedding could not be read: nothing can go on."""


class UsageError(K3Error):
    """A request that can't be carried out as asked: an argument, an option, a file that is not there."""

    exit_code = 2


class ConfigError(K3Error):
    """`config.json` is malformed, incomplete, or describes a model that this engine does not compute."""

    exit_code = 2


class CheckpointError(K3Error):
    """The index, a shard header or a tensor is missing, damaged or contradicts the config."""

    exit_code = 2


class TokenizerError(K3Error):
    """The tokenizer's files are missing or not the expected kind."""

    exit_code = 2


class MachineError(K3Error):
    """The machine lacks something asked for: an instruction set, or memory."""

    exit_code = 2


class StateFileError(K3Error):
    """A state file is foreign, damaged, cut off or from a newer version, or the state can't be saved as it is."""

    exit_code = 2


class InterruptedRunError(K3Error):
    """The user stopped the run."""

    exit_code = 3


class InvalidGenerationError(K3Error):
    """A sequence is void: its ids must not be used (exit code 4)."""

    exit_code = 4


class ExpertReadError(InvalidGenerationError):
    """An expert that a sequence needs could not be read."""


class NonFiniteError(InvalidGenerationError):
    """A value that must be finite is not: in a logit, a router score or an expert."""


class VoidSequenceError(InvalidGenerationError):
    """A sequence that failed earlier was used again."""
