"""What the target has written: sequences in order, which of them are held out, and their files.

In: prompts. Out: a Corpus, whose parts are stored as they are written, so that a run that was
interrupted goes on where it stopped. Knows nothing of drafts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from draftree.train.settings import TextPlan
from draftree.train.writer import Task, TextWriter


class Arrays:
    """A dataclass of arrays, which may be a file."""

    __slots__: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        partial = path.with_name(f"{path.stem}.partial.npz")
        np.savez(partial, **{name: getattr(self, name) for name in self.__slots__})
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        with np.load(path) as arrays:
            return cls(**arrays)


@dataclass(frozen=True, slots=True)
class Corpus(Arrays):
    """sequence i is ids[starts[i]:starts[i + 1]], its first prompt_lens[i] tokens a prompt."""

    ids: np.ndarray  # int32 [num_tokens]
    starts: np.ndarray  # int64 [num_sequences + 1]
    prompt_lens: np.ndarray  # int32 [num_sequences]
    is_greedy: np.ndarray  # bool [num_sequences]
    is_held_out: np.ndarray  # bool [num_sequences]

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_lens)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def num_written(self) -> int:
        """Tokens of the target's own."""
        return int(self.starts[-1] - self.prompt_lens.sum(dtype=np.int64))

    def sequence(self, index: int) -> np.ndarray:
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def frequent_tokens(self, count: int) -> list[int]:
        """The tokens that occur most often, at most so many, rising."""
        counts = np.bincount(self.ids)
        best = np.argsort(-counts, kind="stable")[:count]
        return sorted(best[counts[best] > 0].tolist())


def join_corpora(parts: Sequence[Corpus]) -> Corpus:
    lengths = np.concatenate([part.lengths for part in parts])
    return Corpus(
        ids=np.concatenate([part.ids for part in parts]),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_lens=np.concatenate([part.prompt_lens for part in parts]),
        is_greedy=np.concatenate([part.is_greedy for part in parts]),
        is_held_out=np.concatenate([part.is_held_out for part in parts]),
    )


def write_corpus(
    writer: TextWriter,
    prompts: Sequence[np.ndarray],
    plan: TextPlan,
    seed: int,
    folder: Path,
    report: Callable[[int], None],
) -> Corpus:
    """Batch after batch until there is text enough. A part that is in the folder is not written
    again. report gets the tokens written so far.
    """
    first_turn = np.concatenate(_plan_turn(prompts, plan.batch_size, seed, 0))
    # Every so many of those that come first, so that even a short run holds something out.
    held_out = set(first_turn[:: max(2, round(1 / plan.held_out_share))].tolist())
    deadline = time.monotonic() + 60 * plan.max_minutes if plan.max_minutes else None
    is_over = folder / "text-over"  # time was up before there was text enough
    parts: list[Corpus] = []
    num_written = 0
    while num_written < plan.num_tokens:
        path = folder / f"text-{len(parts):04d}.npz"
        if path.is_file():
            part = Corpus.load(path)
        elif parts and deadline is not None and (time.monotonic() > deadline or is_over.exists()):
            is_over.touch()
            break
        else:
            part = _write_part(writer, prompts, held_out, plan, seed, len(parts))
            part.save(path)
        parts.append(part)
        num_written += part.num_written
        report(num_written)
    return join_corpora(parts)


def _plan_turn(
    prompts: Sequence[np.ndarray], batch_size: int, seed: int, turn: int
) -> list[np.ndarray]:
    """All prompts once, in batches of similar length; the order is drawn anew for each turn."""
    rng = np.random.default_rng((seed, 4, turn))
    lengths = np.array([len(prompt) for prompt in prompts])
    num_batches = -(-len(prompts) // batch_size)
    group = max(1, num_batches // 4) * batch_size  # sorted by length within four groups
    order = rng.permutation(len(prompts))
    pieces = [order[i : i + group] for i in range(0, len(order), group)]
    order = np.concatenate([piece[np.argsort(lengths[piece], kind="stable")] for piece in pieces])
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [batches[i] for i in rng.permutation(num_batches)]


def _write_part(
    writer: TextWriter,
    prompts: Sequence[np.ndarray],
    held_out: set[int],
    plan: TextPlan,
    seed: int,
    number: int,
) -> Corpus:
    """One batch of a turn through the prompts. From the second turn on, the first tokens of a reply
    are sampled, so that it becomes another one.
    """
    turn, place = divmod(number, -(-len(prompts) // plan.batch_size))
    chosen = _plan_turn(prompts, plan.batch_size, seed, turn)[place].tolist()
    rng = np.random.default_rng((seed, 5, turn, place))
    tasks = []
    for index in chosen:
        is_greedy = rng.random() < plan.greedy_share
        temperature = 0.0 if is_greedy else rng.uniform(*plan.temperatures)
        burn_in = int(rng.integers(1, plan.max_burn_in + 1)) if turn else 0
        tasks.append(Task(prompts[index], temperature, burn_in))
    written = writer.write(tasks, seed=int(rng.integers(2**31)))
    return Corpus(
        ids=np.concatenate(written).astype(np.int32),
        starts=np.concatenate([[0], np.cumsum([len(ids) for ids in written])]).astype(np.int64),
        prompt_lens=np.array([len(task.prompt) for task in tasks], dtype=np.int32),
        is_greedy=np.array([task.temperature == 0.0 for task in tasks]),
        is_held_out=np.array([index in held_out for index in chosen]),
    )
