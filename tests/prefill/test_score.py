"""Texts of any length have a score for each of their chunks, window by window."""

import numpy as np

from draftree.kernels.heads import CHUNK_LEN
from draftree.models.key_reader import KeyReader
from draftree.models.load import load_model
from draftree.prefill.score import AttentionScorer
from draftree.weights.file import open_checkpoint
from tests.tiny import MAX_CTX, new_ops, tiny_path

TEXT = np.random.default_rng(5).integers(5, 400, 301).tolist()
QUESTION = np.random.default_rng(4).integers(5, 400, 12).tolist()


class RecordingReader(KeyReader):
    """Remembers what it read."""

    def read(self, ids) -> None:
        self.windows = [*getattr(self, "windows", []), list(ids)]
        super().read(ids)


def open_scorer(max_ctx: int) -> tuple[AttentionScorer, RecordingReader]:
    ops = new_ops(exact=True)
    model = load_model(open_checkpoint(tiny_path("llama")), ops)
    reader = RecordingReader(model, ops, max_ctx, 64)
    return AttentionScorer(reader, ops), reader


def test_long_texts_are_read_in_windows_of_one_length() -> None:
    scorer, reader = open_scorer(140 + 64)
    scores = scorer.score(TEXT, QUESTION)
    assert scores.shape == (10,) and np.isfinite(scores).all()
    assert [window[:-12] for window in reader.windows] == [TEXT[:192], TEXT[128:]]
    assert all(window[-12:] == QUESTION for window in reader.windows)
    assert np.array_equal(scorer.score(TEXT, QUESTION), scores)
    whole, _ = open_scorer(MAX_CTX)
    assert np.array_equal(whole.score(TEXT[:192], QUESTION), scores[:6])
    assert np.array_equal(whole.score(TEXT[128:], QUESTION)[2:], scores[6:])


def test_the_last_window_is_as_long_as_the_others() -> None:
    """But for the rest of a lead."""
    scorer, reader = open_scorer(204)
    text = np.random.default_rng(6).integers(5, 400, 193 + 128).tolist()
    scores = scorer.score(text, QUESTION)
    assert [len(window) - 12 for window in reader.windows] == [192, 192, 129]
    lengths = [len(text[i : i + CHUNK_LEN]) for i in range(0, len(text), CHUNK_LEN)]
    assert len(scores) == len(lengths)


def test_of_a_long_question_the_end_is_read() -> None:
    scorer, reader = open_scorer(MAX_CTX)
    long = np.random.default_rng(7).integers(5, 400, 300).tolist()
    scorer.score(TEXT[:100], long)
    assert reader.windows == [[*TEXT[:100], *long[-256:]]]
