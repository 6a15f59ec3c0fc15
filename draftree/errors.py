"""Errors whose message is one sentence that a user can act on.

The command line prints the message alone and exits non-zero; the Python API raises the class.
"""


class DraftreeError(Exception):
    """Any failure that is the input's or the machine's, not a bug of ours."""


class CheckpointError(DraftreeError):
    """A weight file that is damaged, hostile, incomplete or of an unknown kind."""


class ModelError(DraftreeError):
    """A model that is not supported, or a draft that does not fit its target."""


class FetchError(DraftreeError):
    """A model that could not be found or downloaded."""


class TokenizerError(DraftreeError):
    """A tokenizer or chat template that is missing, unsupported or fails to render."""


class CapacityError(DraftreeError):
    """A request or a model that does not fit the memory or the context that was planned."""


class DeviceError(DraftreeError):
    """A GPU that was asked for and cannot be used."""


class GrammarError(DraftreeError):
    """A schema, pattern or grammar that cannot be used, or a reply that cannot go on under one."""


class ServeError(DraftreeError):
    """A server that cannot start, or cannot be stopped."""


class BenchError(DraftreeError):
    """Something that a measurement needs and that is missing, broken or not comparable."""
