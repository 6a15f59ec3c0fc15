"""The rounds of a reply as events of its stream: every tree, what of it was accepted, the bonus.

In: calls on the engine and the Wire of their replies. Out: the same, with the trees noted on the
way and written between the chunks. Only for requests that ask; knows no API.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from draftree.serve.queue import Call, Job
from draftree.serve.reply import Wire
from draftree.serve.wire import event, to_json

if TYPE_CHECKING:
    from draftree.chat import Delta, Engine, Generation, Round
    from draftree.text.tokenizer import Tokenizer

KIND: Final = "draftree.rounds"


class WatchedCall:
    """A call whose trees are noted: by the engine's thread, for the event loop to take."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._rounds: deque[Round] = deque()
        self._started: tuple[Generation, Tokenizer] | None = None

    def __call__(self, engine: "Engine") -> "Generation":
        generation = self._call(engine)
        generation.watch_trees(self._rounds.append)
        self._started = (generation, engine.tokenizer)
        return generation

    def take(self, index: int) -> str:
        """An event of the rounds since the last call."""
        if self._started is None:
            return ""
        generation, tokenizer = self._started
        rounds = [self._rounds.popleft() for _ in range(len(self._rounds))]
        data = {
            "object": KIND,
            "choices": [],  # clients look for them in everything that comes
            "index": index,
            "completion_tokens": generation.usage.completion_tokens,
            "rounds": [render_round(one, tokenizer) for one in rounds],
        }
        return event(to_json(data))


def render_round(one: "Round", tokenizer: "Tokenizer") -> dict[str, Any]:
    """A node's chance is the draft's, of all of its path; parents come before their children."""
    end = one.tree.find_child(one.path[-1], one.bonus)  # a guess that ended the reply
    tree, path = one.tree, {*one.path, end}
    chances = [1.0, *map(math.exp, one.path_log_probs)] if one.path_log_probs else []
    nodes = [
        {
            **_render_token(token, tokenizer),
            "parent": tree.parents[node],
            "source": tree.sources[node],
            "accepted": node in path,
            "chance": round(chances[node], 4) if chances else None,
        }
        for node, token in enumerate(tree.tokens)
    ]
    return {"nodes": nodes, "bonus": _render_token(one.bonus, tokenizer) if end is None else None}


def _render_token(token: int, tokenizer: "Tokenizer") -> dict[str, Any]:
    """Bytes that are no whole character are spelled out."""
    text = tokenizer.written_bytes(token).decode("utf-8", "backslashreplace")
    return {"id": token, "text": text}


class RoundsWire:
    """Writes what another wire does, and the rounds before the text that they gave."""

    def __init__(self, wire: Wire, calls: Sequence[WatchedCall]) -> None:
        self._wire, self._calls = wire, calls
        self.opening, self.ending = wire.opening, wire.ending
        self.failure, self.whole = wire.failure, wire.whole

    def chunk(self, index: int, deltas: "Sequence[Delta]") -> str:
        return self._calls[index].take(index) + self._wire.chunk(index, deltas)

    def closing(self, index: int, job: Job) -> str:
        return self._calls[index].take(index) + self._wire.closing(index, job)


def show_rounds(calls: Sequence[Call], wire: Wire) -> tuple[list[Call], Wire]:
    watched = [WatchedCall(call) for call in calls]
    return list(watched), RoundsWire(wire, watched)
