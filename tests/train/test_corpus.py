"""What the target wrote: parts that survive an interruption, held-out prompts, shares."""

from dataclasses import replace

import numpy as np
import torch

from draftree.train.corpus import Corpus, join_corpora, write_corpus
from draftree.train.settings import TextPlan
from draftree.train.teacher import load_teacher
from draftree.train.writer import Writer
from draftree.weights.file import open_checkpoint
from tests.tiny import tiny_path

PLAN = TextPlan(600, 40, batch_size=8, greedy_share=0.5, held_out_share=0.25)


def _write(folder, plan=PLAN, seed=0):
    teacher = load_teacher(open_checkpoint(tiny_path("llama")), torch.device("cpu"))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 500, 3 + i % 7).astype(np.int32) for i in range(20)]
    seen: list[int] = []
    writer = Writer(teacher, plan.batch_size, plan.max_len, ())
    corpus = write_corpus(writer, prompts, plan, seed, folder, seen.append)
    return corpus, prompts, seen


def _same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in a.__slots__)


def test_there_is_text_enough_and_it_follows_its_prompts(tmp_path):
    corpus, prompts, seen = _write(tmp_path)
    assert corpus.num_written >= 600 and seen[-1] == corpus.num_written
    known = {tuple(prompt.tolist()) for prompt in prompts}
    for i in range(corpus.num_sequences):
        assert tuple(corpus.sequence(i)[: corpus.prompt_lens[i]].tolist()) in known
        assert len(corpus.sequence(i)) == 40
    assert 0 < corpus.is_greedy.mean() < 1


def test_frequent_tokens():
    parts = [np.array([5, 9, 9, 2, 5, 9], np.int32), np.array([0, 6], np.int64)]
    corpus = Corpus(*parts, *(np.zeros(1, np.int32) for _ in range(3)))
    assert corpus.frequent_tokens(2) == [5, 9]
    assert corpus.frequent_tokens(100) == [2, 5, 9]


def test_held_out_prompts_are_never_learned_from(tmp_path):
    corpus, _, _ = _write(tmp_path)
    groups: dict[bool, set] = {True: set(), False: set()}
    for i in range(corpus.num_sequences):
        prompt = tuple(corpus.sequence(i)[: corpus.prompt_lens[i]].tolist())
        groups[bool(corpus.is_held_out[i])].add(prompt)
    assert groups[True] and not groups[True] & groups[False]


def test_parts_are_kept_and_not_written_again(tmp_path):
    corpus, _, _ = _write(tmp_path)
    parts = sorted(tmp_path.glob("text-*.npz"))
    assert _same(join_corpora([Corpus.load(path) for path in parts]), corpus)
    parts[-1].unlink()
    times = {path: path.stat().st_mtime_ns for path in parts[:-1]}
    again, _, _ = _write(tmp_path)
    assert _same(again, corpus)  # the lost part came out the same
    assert times == {path: path.stat().st_mtime_ns for path in parts[:-1]}


def test_the_seed_decides(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    first, other = (_write(folder, seed=seed)[0] for seed, folder in enumerate(folders))
    assert not _same(first, other)


def test_writing_can_be_limited_in_time(tmp_path):
    corpus, _, _ = _write(tmp_path, replace(PLAN, num_tokens=10**9, max_minutes=1e-6))
    assert 0 < corpus.num_sequences <= 8
    again, _, _ = _write(tmp_path, replace(PLAN, num_tokens=10**9, max_minutes=10))
    assert _same(again, corpus)  # and going on does not start the clock again
