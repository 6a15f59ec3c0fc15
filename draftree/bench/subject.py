"""Our engine as a subject of measurement: token ids in, milliseconds out.

Used in the process of a bench command, and as a worker (`python -m draftree.bench.subject`) where
another subject is measured in turns with it.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from draftree.bench.window import make_window
from draftree.bench.worker import serve
from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.core import DraftTree, Request, Usage

PLAIN: Final[dict[str, Any]] = {"draft": "none", "budget": 0}
_WARM_TOKENS: Final = 4


class Subject:
    """An open engine, and a fresh sequence for every measurement."""

    def __init__(self, path: Path | str, config: EngineConfig) -> None:
        self.engine = Engine.open(str(path), config)
        self.tokens = self.engine.tokens
        self.target = self.engine.tokens.target

    def close(self) -> None:
        self.engine.close()

    def decode(self, ids: Sequence[int], num_tokens: int) -> float:
        """Milliseconds of num_tokens decoded tokens after the prompt."""
        self._generate(ids, _WARM_TOKENS)
        return self._generate(ids, num_tokens).decode_ms

    def prefill(self, ids: Sequence[int]) -> float:
        """Milliseconds from the prompt to its last logits and the token chosen from them."""
        self._generate(ids[:_WARM_TOKENS], _WARM_TOKENS)
        return self._generate(ids, 1).first_token_ms

    def decode_steps(self, ids: Sequence[int], num_tokens: int) -> list[float]:
        """Milliseconds of each decoded token after the prompt, without the first few."""
        self.tokens.reset()
        times = []
        last = time.perf_counter()
        for _ in self.tokens.generate(Request(tuple(ids), num_tokens + _WARM_TOKENS)):
            now = time.perf_counter()
            times.append((now - last) * 1000)
            last = now
        return times[_WARM_TOKENS:]

    def forward(self, num_tokens: int) -> float:
        """Milliseconds of one speculative pass with logits for every row."""
        state = self.target.state
        chain = DraftTree.chain(tuple(state.tokens[:num_tokens]))
        assert chain.num_nodes == num_tokens, "prefill at least as many tokens first"
        start = time.perf_counter()
        state.begin(chain)
        self.target.forward(range(num_tokens))
        elapsed = (time.perf_counter() - start) * 1000
        state.rollback()
        return elapsed

    def kv_type(self) -> str:
        """The formats of its keys and values."""
        return self.tokens.plan.kv

    def window(self, window_len: int) -> list[int]:
        return make_window(self.encode, window_len)

    def encode(self, text: str) -> list[int]:
        """The text alone: no token is added, and none is spelled out in it."""
        return self.engine.tokenizer.encode(text, add_special=False, parse_special=False)

    def _generate(self, ids: Sequence[int], num_tokens: int) -> Usage:
        self.tokens.reset()
        stream = self.tokens.generate(Request(tuple(ids), num_tokens))
        for _ in stream:
            pass
        return stream.usage


def serve_subject(kind: type[Subject], *verbs: str, **others: Callable[..., Any]) -> None:
    """Answer `load`, which takes a path and fields of EngineConfig, these methods of kind, and
    others.
    """
    opened: list[Subject] = []

    def load(path: str, **config: Any) -> float:
        """Returns the milliseconds it took."""
        start = time.perf_counter()
        opened.append(kind(path, EngineConfig(**config)))
        return (time.perf_counter() - start) * 1000

    def call(verb: str, **arguments: Any) -> Any:
        return getattr(opened[-1], verb)(**arguments)

    serve({"load": load, **others} | {verb: partial(call, verb) for verb in verbs})


if __name__ == "__main__":
    serve_subject(Subject, "kv_type", "window", "decode", "prefill")
