"""Our engine as a subject of measurement: token ids in, milliseconds, log-probabilities and bytes
out.

Used in the process of a bench command, and as a worker (`python -m draftree.bench.subject`) where
the other subject or the process itself is measured.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from draftree.bench.corpus import make_windows
from draftree.bench.score import Scores, score_logits
from draftree.bench.worker import serve
from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.core import DraftTree, Request, Usage

_WARM_TOKENS: Final = 4
_SCORED_ROWS: Final = 128  # logits of one pass while scoring


class Subject:
    """An open engine, and a fresh sequence for every measurement."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
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
        self.tokens.forget()
        times = []
        last = time.perf_counter()
        for _ in self.tokens.generate(Request(tuple(ids), num_tokens + _WARM_TOKENS)):
            now = time.perf_counter()
            times.append((now - last) * 1000)
            last = now
        return times[_WARM_TOKENS:]

    def forward(self, num_tokens: int) -> float:
        """Milliseconds of one tentative pass with logits for every row, as verification runs it."""
        state = self.target.state
        chain = DraftTree.chain(tuple(state.tokens[:num_tokens]))
        assert chain.num_nodes == num_tokens, "prefill at least as many tokens first"
        start = time.perf_counter()
        state.begin(chain)
        self.target.forward(range(num_tokens))
        elapsed = (time.perf_counter() - start) * 1000
        state.rollback()
        return elapsed

    def score(self, ids: Sequence[int], pairs: Sequence[Sequence[Sequence[int]]] = ()) -> Scores:
        """What the model says of a text, in passes as large as the logits' buffer."""
        state = self.target.state
        state.reset()
        scores = Scores()
        step = min(self.tokens.plan.max_nodes, _SCORED_ROWS)
        for start in range(0, len(ids), step):
            chain = DraftTree.chain(tuple(ids[start : start + step]))
            rows = range(chain.num_nodes)
            state.begin(chain, certain=True)
            logits = self.target.forward(rows).logits
            state.commit(rows)
            scores.extend(
                score_logits(logits, ids[start + 1 : start + 1 + step], pairs[start : start + step])
            )
        return scores

    def greedy(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        self.tokens.forget()
        return [event.token for event in self.tokens.generate(Request(tuple(ids), num_tokens))]

    def windows(self, num_windows: int, window_len: int) -> list[list[int]]:
        return make_windows(self.encode, num_windows, window_len)

    def encode(self, text: str) -> list[int]:
        """The text alone: no token is added, and none is spelled out in it."""
        return self.engine.tokenizer.encode(text, add_special=False, parse_special=False)

    def _generate(self, ids: Sequence[int], num_tokens: int) -> Usage:
        self.tokens.forget()
        stream = self.tokens.generate(Request(tuple(ids), num_tokens))
        for _ in stream:
            pass
        return stream.usage


def plain_config(threads: int, max_ctx: int, *, exact: bool = False) -> EngineConfig:
    """One token a pass, nothing drafted."""
    math = "exact" if exact else "auto"
    return EngineConfig(draft="none", budget=0, math=math, threads=threads, max_ctx=max_ctx)


def wide_config(threads: int, max_ctx: int, *, exact: bool = False) -> EngineConfig:
    """Nothing drafted either, but room for the logits of many rows."""
    math = "exact" if exact else "auto"
    return EngineConfig(
        draft="none",
        budget=_SCORED_ROWS - 1,
        ngram="off",
        math=math,
        threads=threads,
        max_ctx=max_ctx,
    )


class SubjectWorker:
    def __init__(self) -> None:
        self._subject: Subject | None = None

    def load(self, path: str, threads: int, max_ctx: int, kind: str) -> float:
        """kind: plain, wide, exact (wide as well) or default. Returns the milliseconds it took."""
        configs = {
            "plain": plain_config(threads, max_ctx),
            "wide": wide_config(threads, max_ctx),
            "exact": wide_config(threads, max_ctx, exact=True),
            "default": EngineConfig(threads=threads, max_ctx=max_ctx),
        }
        start = time.perf_counter()
        self._subject = Subject(Path(path), configs[kind])
        return (time.perf_counter() - start) * 1000

    def kv_type(self) -> str:
        """The number format of its keys and values."""
        return self._opened().tokens.plan.kv_type

    def resident(self) -> dict[str, int]:
        """Bytes of this process in memory: now (of those anonymous, of files), and at its peak."""
        return resident_bytes()

    def windows(self, num_windows: int, window_len: int) -> list[list[int]]:
        return self._opened().windows(num_windows, window_len)

    def encode(self, text: str) -> list[int]:
        return self._opened().encode(text)

    def decode(self, ids: list[int], num_tokens: int) -> float:
        return self._opened().decode(ids, num_tokens)

    def prefill(self, ids: list[int]) -> float:
        return self._opened().prefill(ids)

    def score(self, ids: list[int], pairs: Sequence[Any] = ()) -> dict[str, Any]:
        return asdict(self._opened().score(ids, pairs))

    def greedy(self, ids: list[int], num_tokens: int) -> list[int]:
        return self._opened().greedy(ids, num_tokens)

    def _opened(self) -> Subject:
        assert self._subject is not None, "load comes first"
        return self._subject


def resident_bytes() -> dict[str, int]:
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="utf-8").splitlines()
        values = dict(line.split(":", 1) for line in lines if line.endswith("kB"))
        names = {"now": "VmRSS", "anonymous": "RssAnon", "file": "RssFile", "peak": "VmHWM"}
        return {name: int(values[key].split()[0]) * 1024 for name, key in names.items()}
    import resource
    import sys

    # Elsewhere only the peak is known, which is what it is after filling the context as well.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"now": peak, "anonymous": 0, "file": 0, "peak": peak}


def main() -> None:
    worker = SubjectWorker()
    verbs = (
        *(worker.load, worker.kv_type, worker.resident, worker.windows, worker.encode),
        *(worker.decode, worker.prefill, worker.score, worker.greedy),
    )
    serve({verb.__name__: verb for verb in verbs})


if __name__ == "__main__":
    main()
