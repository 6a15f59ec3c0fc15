"""The events of one request, as its caller sees them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from draftree.core import FinishReason, TokenEvent, TokenSource, Usage
from draftree.decode.decoder import Round

PAUSE: Final = TokenEvent(-1, -1, TokenSource.PLAIN, 0)  # in place of an event; see should_pause


class TokenStream:
    """The events of one request. Closing it (or leaving the loop) cancels; then usage and
    finish_reason are set. Only `cancel` may be called from another thread.
    """

    def __init__(self, events: Iterator[TokenEvent], usage: Usage) -> None:
        self._events = events
        self.usage = usage
        self.finish_reason: FinishReason | None = None
        self.is_cancelled = False
        self.tokens: list[int] = []  # of the events so far; none where scores are asked for
        self.begun: Sequence[int] = ()  # see `resume`
        self.on_chunk: Callable[[], None] = lambda: None  # called when more of the prompt was read
        self.on_round: Callable[[], None] = lambda: None  # called when a round's events are read
        self.watch: Callable[[Round], None] | None = None  # instead of the engine's, if set in time
        # Asked between two chunks of the prompt and between two rounds. If so, PAUSE comes next,
        # and until the event after it is asked for, other requests may use the engine.
        self.should_pause: Callable[[], bool] | None = None

    def __iter__(self) -> "TokenStream":
        return self

    def __next__(self) -> TokenEvent:
        return next(self._events)

    def resume(self, tokens: Sequence[int]) -> None:
        """Begin with tokens that another engine wrote to the same request: they are read and said,
        not decoded. The last one is chosen again, which tells whether the reply ends with it.
        """
        self.begun = tokens[:-1]

    def cancel(self) -> None:
        """End after the round, or the chunk of the prompt, that is being computed."""
        self.is_cancelled = True

    def close(self) -> None:
        self._events.close()  # type: ignore[attr-defined]
        if self.finish_reason is None:
            self.finish_reason = FinishReason.CANCELLED
