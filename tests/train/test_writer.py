"""Batched writing: the reference's greedy text, stops, seeds, and rows that finish early."""

import numpy as np
import pytest
import torch

from draftree.config import EngineConfig
from draftree.core import Request
from draftree.engine.engine import TokenEngine
from draftree.train.teacher import load_teacher
from draftree.train.writer import Task, Writer
from draftree.weights.file import open_checkpoint
from tests.golden import golden
from tests.tiny import tiny_path

CPU = torch.device("cpu")
MAX_LEN = 100
NAMES = ("g1", "g5", "g33")
FILES = {"llama": "dense/llama-A.npz", "qwen35-mtp": "qwen35/logits_C_mtp.npz"}
both_kinds = pytest.mark.parametrize("model", FILES)


def _teacher(model="llama"):
    return load_teacher(open_checkpoint(tiny_path(model)), CPU)


def _golden_tasks(model="llama"):
    arrays = np.load(golden(FILES[model]))
    tasks = [Task(arrays[f"{name}.prompt"].astype(np.int32), 0.0) for name in NAMES]
    return tasks, [arrays[f"{name}.ids"] for name in NAMES]


@both_kinds
def test_greedy_text_is_the_references(model):
    tasks, texts = _golden_tasks(model)
    written = Writer(_teacher(model), 4, MAX_LEN, ()).write(tasks, seed=0)
    for task, text, ids in zip(tasks, texts, written, strict=True):
        assert len(ids) == MAX_LEN
        assert ids[: len(task.prompt)].tolist() == task.prompt.tolist()
        count = min(64, MAX_LEN - len(task.prompt))
        assert ids[len(task.prompt) :][:count].tolist() == text[:count].tolist()


def test_rows_end_at_a_stop_and_the_others_go_on():
    tasks, texts = _golden_tasks()
    stop = int(texts[1][40])
    written = Writer(_teacher(), 4, MAX_LEN, (stop,)).write(tasks, seed=0)
    for task, text, ids in zip(tasks, texts, written, strict=True):
        own = ids[len(task.prompt) :].tolist()
        full = text[: len(own)].tolist()
        assert own[: len(full)] == full
        if stop in own:
            assert own.index(stop) == len(own) - 1  # and nothing behind it
        else:
            assert len(ids) == MAX_LEN
    assert len(written[1]) - len(tasks[1].prompt) <= 41


@both_kinds
def test_a_row_does_not_depend_on_its_batch(model):
    """Most rows stop at once, so the batch is halved on the way."""
    tasks, _ = _golden_tasks(model)
    teacher = _teacher(model)
    fillers = [Task(np.array([i, i + 1], dtype=np.int32), 0.0) for i in range(13)]
    alone = Writer(teacher, 1, MAX_LEN, ()).write(tasks[2:], seed=0)[0]
    keep = set(alone[len(tasks[2].prompt) :].tolist())
    stops = [token for token in range(512) if token not in keep]
    batch = Writer(teacher, 16, MAX_LEN, stops).write([*fillers, *tasks[2:]], seed=0)
    assert batch[-1].tolist() == alone.tolist()
    assert sum(len(ids) < MAX_LEN for ids in batch) >= 8


def test_a_hybrid_writes_what_the_engine_does():
    """Prompts of many lengths in one batch, and the same cache again for others."""
    rng, path = np.random.default_rng(4), tiny_path("qwen35-mtp")
    writer = Writer(_teacher("qwen35-mtp"), 4, 72, ())
    engine = TokenEngine.open(path, EngineConfig(max_ctx=256, math="exact", threads=1, budget=0))
    for lengths in ((1, 2, 3, 40), (60, 5)):
        prompts = [rng.integers(0, 500, length).astype(np.int32) for length in lengths]
        written = writer.write([Task(prompt, 0.0) for prompt in prompts], seed=0)
        for prompt, ids in zip(prompts, written, strict=True):
            stream = engine.generate(Request(tuple(prompt.tolist()), 72 - len(prompt)))
            assert [event.token for event in stream] == ids[len(prompt) :].tolist()
    engine.close()


def test_sampling_follows_the_seed_and_burn_in_is_sampled():
    prompt = np.array([5, 6, 7], dtype=np.int32)
    writer = Writer(_teacher(), 8, 40, ())
    sampled = [Task(prompt, 1.0)] * 4
    first, again, other = (writer.write(sampled, seed=seed) for seed in (1, 1, 2))
    assert [ids.tolist() for ids in first] == [ids.tolist() for ids in again]
    assert [ids.tolist() for ids in first] != [ids.tolist() for ids in other]
    assert len({tuple(ids.tolist()) for ids in first}) > 1
    burnt = writer.write([Task(prompt, 0.0, burn_in=3)] * 4, seed=1)
    assert len({tuple(ids[:6].tolist()) for ids in burnt}) > 1
    greedy = writer.write([Task(np.array(burnt[0][:6]), 0.0)], seed=9)[0]
    assert greedy.tolist() == burnt[0].tolist()  # greedy again after it
