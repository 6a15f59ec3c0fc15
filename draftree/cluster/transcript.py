"""A stream of server-sent events that may have to begin again: what of it the client has already.

In: pieces of the body, of one run after another. Out: what is new in them, and the tokens that
they told, from which another run can go on. Runs of one request have the same events, which is
checked by a hash; comments and counts may differ.
"""

import hashlib
from typing import Final

from draftree.serve.reply import TOKENS
from draftree.serve.rounds import KIND

_TOKENS: Final = TOKENS.encode()
_END: Final = b"\n\n"
_ROUNDS: Final = f'"object":"{KIND}"'.encode()
# What a run cost differs; quotes in text are escaped.
_COSTS: Final = (b'"usage":{', b'"prompt_progress":{')
_TIMINGS: Final = b',"timings":{'  # at the end of an event


class ReplyChanged(Exception):
    """Another run gave another text."""


class Transcript:
    def __init__(self) -> None:
        self._num_sent = self._num_seen = 0
        self._sent = self._seen = hashlib.sha256()
        self._rest = b""
        self._tokens: list[list[int]] = []

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Of each reply, as far as they were told."""
        return tuple(map(tuple, self._tokens))

    def restart(self) -> None:
        """Another run begins."""
        self._num_seen, self._seen, self._rest = 0, hashlib.sha256(), b""

    def pass_on(self, data: bytes) -> bytes:
        """The events of this piece that have not been sent."""
        *events, self._rest = (self._rest + data).split(_END)
        return b"".join(event + _END for event in events if self._is_new(event))

    def _is_new(self, event: bytes) -> bool:
        is_repeated = self._num_seen < self._num_sent
        if event.startswith(_TOKENS):
            self._note_tokens(*map(int, event.removeprefix(_TOKENS).split()))
            return False
        if event.startswith(b":") or _ROUNDS in event:  # when these come is chance
            return not is_repeated
        self._num_seen += 1
        if not any(cost in event for cost in _COSTS):
            self._seen.update(event.partition(_TIMINGS)[0])
        if not is_repeated:
            self._num_sent, self._sent = self._num_seen, self._seen.copy()
        elif self._num_seen == self._num_sent and self._seen.digest() != self._sent.digest():
            raise ReplyChanged
        return not is_repeated

    def _note_tokens(self, index: int, start: int, *ids: int) -> None:
        while len(self._tokens) <= index:
            self._tokens.append([])
        if start + len(ids) > len(self._tokens[index]):  # else a later run that begins with them
            self._tokens[index][start:] = ids
