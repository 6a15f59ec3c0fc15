"""What a draft makes of text that its target wrote: for every row of its blocks the candidates, the
hidden state behind them, and the token that came.

In: an open engine with a block draft, texts. Out: `BlockRows`, for what learns on top of a draft
that stays as it is. Knows nothing of what that is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftree.drafts.dflash import BlockDrafter
from draftree.engine.engine import TokenEngine
from draftree.kernels.ops import Array
from draftree.prefill.chunked import prefill
from draftree.train.corpus import Arrays, Corpus

_PART_TEXTS = 128  # whose rows are one file


@dataclass(frozen=True, slots=True)
class BlockRows(Arrays):
    """A block fills the places after an anchor. tokens: the anchor and what came after it, -1
    behind the end of the text.
    """

    hidden: np.ndarray  # float16 [num_blocks, num_positions, hidden_size], after the final norm
    candidates: np.ndarray  # int32 [num_blocks, num_positions, num_candidates], best first
    log_probs: np.ndarray  # float16, the same shape
    tokens: np.ndarray  # int32 [num_blocks, 1 + num_positions]
    is_greedy: np.ndarray  # bool [num_blocks]
    is_held_out: np.ndarray  # bool [num_blocks]

    def select(self, blocks: np.ndarray) -> "BlockRows":
        return BlockRows(*(getattr(self, name)[blocks] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """What stands between a block's hidden states and the head."""

    weight: np.ndarray  # float32 [hidden_size]
    eps: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        scale = 1.0 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self.eps)
        normed: np.ndarray = x * scale * self.weight
        return normed


def read_rows(
    engine: TokenEngine,
    drafter: BlockDrafter,
    corpus: Corpus,
    norm: FinalNorm,
    num_candidates: int,
    folder: Path,
    report: Callable[[int], None],
) -> BlockRows:
    """A block at every token of the replies. A part that is in the folder is not read again. report
    gets the texts read so far.
    """
    parts = []
    for start in range(0, corpus.num_sequences, _PART_TEXTS):
        stop = min(start + _PART_TEXTS, corpus.num_sequences)
        path = folder / f"rows-{start:06d}-{stop:06d}.npz"
        if not path.is_file():
            readers = (_Reader(drafter, norm, num_candidates) for _ in range(start, stop))
            texts = [_read_text(engine, r, corpus, i) for i, r in enumerate(readers, start)]
            _join(texts).save(path)
        parts.append(BlockRows.load(path))
        report(stop)
    return _join(parts)


class _Reader:
    """Fills a block at every token of a reply, as soon as the features before it are there."""

    def __init__(self, drafter: BlockDrafter, norm: FinalNorm, num_candidates: int) -> None:
        self._drafter, self._norm, self._num_candidates = drafter, norm, num_candidates
        self._text, self._first = np.empty(0, dtype=np.int32), 0
        self.num_positions = drafter.block_len - 1
        self.hidden: list[np.ndarray] = []
        self.candidates: list[np.ndarray] = []
        self.log_probs: list[np.ndarray] = []

    def begin(self, text: np.ndarray, first: int) -> None:
        """first: the place of the first anchor."""
        self._text, self._first = text, first
        self._drafter.reset()
        self._drafter.extend_text(text[:first].tolist())

    def take(self, features: Array) -> None:
        """Of the next tokens of the text."""
        drafter = self._drafter
        num_before = min(max(self._first - drafter.position, 0), len(features))
        drafter.extend_context(features[:num_before])
        for row in range(num_before, len(features)):
            self._fill(int(self._text[drafter.position]))
            drafter.extend_context(features[row : row + 1])

    def _fill(self, anchor: int) -> None:
        self._drafter.extend_text((anchor,))
        logits = self._drafter.block_logits(anchor)
        found, log_probs = _best(logits, self._num_candidates)
        tokens = self._drafter.draft_vocab
        hidden = self._norm(self._drafter.read_hidden(len(logits)))
        self.hidden.append(hidden.astype(np.float16))
        self.candidates.append(found if tokens is None else tokens[found])
        self.log_probs.append(log_probs)


def _read_text(engine: TokenEngine, reader: _Reader, corpus: Corpus, index: int) -> BlockRows:
    text, first = corpus.sequence(index), int(corpus.prompt_lens[index]) - 1
    reader.begin(text, first)
    engine.reset()
    prefill(engine.target, text[:-1].tolist(), engine.plan.chunk, reader.take)
    num_blocks, num_positions = len(text) - 1 - first, reader.num_positions
    padded = np.concatenate([text, np.full(num_positions, -1, dtype=np.int32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 1 + num_positions)
    shape = num_blocks, num_positions, -1
    return BlockRows(
        np.array(reader.hidden, dtype=np.float16).reshape(shape),
        np.array(reader.candidates, dtype=np.int32).reshape(shape),
        np.array(reader.log_probs, dtype=np.float16).reshape(shape),
        windows[first : first + num_blocks].copy(),
        np.full(num_blocks, corpus.is_greedy[index]),
        np.full(num_blocks, corpus.is_held_out[index]),
    )


def _best(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The best columns of each row, falling, and their log-probabilities."""
    found = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(logits, found, 1), axis=1, kind="stable")
    found = np.take_along_axis(found, order, 1)
    top = logits.max(axis=1, keepdims=True)
    total = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return found, np.take_along_axis(logits, found, 1) - total


def _join(parts: Sequence[BlockRows]) -> BlockRows:
    columns = zip(
        *([getattr(part, name) for name in BlockRows.__slots__] for part in parts), strict=True
    )
    return BlockRows(*(np.concatenate(column) for column in columns))
