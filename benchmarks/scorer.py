"""Our engine as a subject whose words count: log-probabilities, greedy texts, and the memory of its
process. Run as a worker: `python -m benchmarks.scorer`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.score import Scores, score_logits
from benchmarks.window import make_windows
from draftree.bench.subject import Subject, serve_subject
from draftree.core import DraftTree, Request

SCORED_ROWS: Final = 128  # logits of one pass while scoring
WIDE: Final[dict[str, Any]] = {"draft": "none", "budget": SCORED_ROWS - 1, "ngram": "off"}


class Scorer(Subject):
    """Opened with the options WIDE, so that there is room for the logits of many rows."""

    def windows(self, num_windows: int, window_len: int) -> list[list[int]]:
        return make_windows(self.encode, num_windows, window_len)

    def score(
        self, ids: Sequence[int], pairs: Sequence[Sequence[Sequence[int]]] = ()
    ) -> dict[str, Any]:
        """What the model says of a text, in passes as large as the logits' buffer, as Scores."""
        state = self.target.state
        state.reset()
        scores = Scores()
        step = min(self.tokens.plan.max_nodes, SCORED_ROWS)
        for start in range(0, len(ids), step):
            chain = DraftTree.chain(tuple(ids[start : start + step]))
            rows = range(chain.num_nodes)
            state.begin(chain, is_committed=True)
            logits = self.target.forward(rows).logits
            state.commit(rows)
            scores.extend(
                score_logits(logits, ids[start + 1 : start + 1 + step], pairs[start : start + step])
            )
        return asdict(scores)

    def greedy(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        self.tokens.reset()
        return [event.token for event in self.tokens.generate(Request(tuple(ids), num_tokens))]


def resident_bytes() -> dict[str, int]:
    """Bytes of this process in memory: now (of those anonymous, of files), and at its peak."""
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


if __name__ == "__main__":
    serve_subject(Scorer, "kv_type", "windows", "score", "greedy", resident=resident_bytes)
