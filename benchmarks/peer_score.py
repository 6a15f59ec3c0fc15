"""What llama.cpp says of a text: log-probabilities and greedy tokens, by its library's C functions.
Run as a worker, `python -m benchmarks.peer_score`, by any interpreter with xllamacpp and numpy.
"""

from dataclasses import asdict
from typing import Any

from benchmarks.score import score_logits
from draftree.bench.peer_wheel import WheelWorker, serve_wheel


class ScoreWorker(WheelWorker):
    def score(self, ids: list[int]) -> dict[str, Any]:
        """Scores of the text."""
        self.library.reset()
        return asdict(score_logits(self.library.forward(ids, 0, all_rows=True), ids[1:]))

    def greedy(self, ids: list[int], num_tokens: int) -> list[int]:
        self.library.reset()
        logits = self.library.forward(ids, 0, all_rows=False)
        tokens = [int(logits[0].argmax())]
        while len(tokens) < num_tokens:
            logits = self.library.forward(tokens[-1:], len(ids) + len(tokens) - 1, all_rows=False)
            tokens.append(int(logits[0].argmax()))
        return tokens


if __name__ == "__main__":
    serve_wheel(ScoreWorker(), "score", "greedy")
