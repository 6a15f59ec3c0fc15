"""Errors whose message is one sentence that a user can act on.

The command line prints the message alone and exits non-zero; the Python API raises the class.
"""

from importlib.util import find_spec


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
    """A request or a model that does not fit the memory or the context that was planned.

    num_tokens: of a prompt that is too long, or more than it has at least; None for all else.
    """

    def __init__(self, message: str, num_tokens: int | None = None) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens


class DeviceError(DraftreeError):
    """A GPU or a kernel variant that was asked for and cannot be used."""


class EngineError(DraftreeError):
    """An engine that is closed, or busy with another reply of the same thread."""


class MissingPackageError(DraftreeError):
    """A package that only some uses need, and that is not installed."""


class GrammarError(DraftreeError):
    """A schema, pattern or grammar that cannot be used, or a reply that cannot go on under one."""


class ServeError(DraftreeError):
    """A server that cannot start, or cannot be stopped."""


def require_packages(purpose: str, extra: str, *names: str) -> None:
    """Refuse to go on without packages that an extra of ours installs."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"{purpose} needs {', '.join(missing)}; run `pip install 'draftree[{extra}]'`."
        )


class BenchError(DraftreeError):
    """Something that a measurement needs and that is missing, broken or not comparable."""
