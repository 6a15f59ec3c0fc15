"""Does our arithmetic say the same as llama.cpp's? Perplexity, first choices, and greedy texts.

Same token ids for all, windows of 512, every token but a window's first is scored. The reference is
our exact arithmetic (float32 on decoded weights), run on a part. Noise is how far rounding
activations moves the gap between the two likeliest tokens; a disagreement is explained if the exact
gap is within both noises together.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any, Final

from benchmarks.score import Scores
from benchmarks.scorer import WIDE
from draftree.bench.median import Report, Samples, summarize
from draftree.bench.peers import open_wheel
from draftree.bench.record import Json
from draftree.bench.worker import Child
from draftree.errors import BenchError

WINDOW: Final = 512
NUM_TOKENS: Final = 20_480
EXACT_WINDOWS: Final = 4
GREEDY_TOKENS: Final = 64
_PERCENTILE: Final = 0.99
_PROMPT_LENS: Final = (24, 48, 96, 32, 64, 128, 40, 80)


@dataclass(frozen=True, slots=True)
class Noise:
    """How far gaps moved, in logits."""

    median: float
    percentile_99: float
    largest: float


@dataclass(frozen=True, slots=True)
class Noises:
    ours: Noise
    llama: Noise

    @property
    def limit(self) -> float:
        """The widest exact gap that the two may hide from one another, rare cases left aside."""
        return self.ours.percentile_99 + self.llama.percentile_99


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Two first choices that differ; exact_gap: how far apart exact arithmetic sees them."""

    where: str
    position: int
    ours: int
    theirs: int
    exact_gap: float
    is_explained: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    num_positions: int
    num_equal: int
    num_explained: int  # of those that differ
    disagreements: list[Disagreement]


@dataclass(frozen=True, slots=True)
class ParityMeasures:
    """Samples are the windows' perplexities. x_over_y is a ratio minus 1: 0.001 is 0.1 % above."""

    ours: Samples
    llama: Samples
    exact: Samples  # on the exact part
    perplexity: dict[str, float]  # ours, llama; ours_part, llama_part, exact_part
    ours_over_llama: float
    ours_over_exact: float
    llama_over_exact: float
    noise: Noises
    equal_share: float  # first choices of ours and llama.cpp that are equal, on all windows
    first_choices: Agreement  # on the exact part
    greedy: Agreement  # up to each text's first divergence
    ids_sha256: str
    peer: dict[str, str]
    kv_type: str  # the format of our keys and values; peer has llama.cpp's
    peer_threads: int  # others than ours where its readings were kept from an earlier run

    def headline(self) -> dict[str, Any]:
        names = ("perplexity", "ours_over_llama", "equal_share")
        groups = (self.first_choices, self.greedy)
        unexplained = sum(len(g.disagreements) - g.num_explained for g in groups)
        return {name: getattr(self, name) for name in names} | {"unexplained": unexplained}


@dataclass(frozen=True, slots=True)
class ParityOptions:
    """cache: where llama.cpp's readings are kept; they are the same every time."""

    threads: int
    python: str
    cache: Path
    num_tokens: int = NUM_TOKENS
    exact_windows: int = EXACT_WINDOWS
    num_prompts: int = len(_PROMPT_LENS)
    greedy_tokens: int = GREEDY_TOKENS

    def settings(self) -> Json:
        return {
            "threads": self.threads,
            "num_tokens": self.num_tokens,
            "window": WINDOW,
            "exact_windows": self.exact_windows,
            "greedy_prompts": self.num_prompts,
            "greedy_tokens": self.greedy_tokens,
            "text": "language reference (pydoc) and standard library sources, in turns",
            "peer_method": "libllama's C functions, logits of all positions of a window at once",
        }


@dataclass(frozen=True, slots=True)
class Questions:
    """What both are asked: scores of the windows, and greedy texts after the prompts."""

    windows: list[list[int]]
    prompts: list[list[int]]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Readings:
    windows: list[Scores]
    texts: list[list[int]]
    threads: int  # that they were taken with


def measure_parity(
    path: Path, sha256: str, options: ParityOptions, report: Report
) -> ParityMeasures:
    """sha256: of the model's file."""
    num_windows = options.num_tokens // WINDOW
    if not 1 <= options.exact_windows <= num_windows:
        raise BenchError(f"Parity needs at least one window of {WINDOW} tokens for the exact part.")
    load = {"path": str(path.resolve()), "threads": options.threads, "max_ctx": 2 * WINDOW}
    peer, description = open_wheel(options.python, "benchmarks.peer_score")
    with peer, Child("benchmarks.scorer", "draftree") as child:
        child.ask("load", **load, **WIDE)
        kv_type = child.ask("kv_type")
        windows = child.ask("windows", num_windows=num_windows, window_len=WINDOW)
        lens = enumerate(_PROMPT_LENS[: options.num_prompts])
        prompts = [windows[i % num_windows][:length] for i, length in lens]
        questions = Questions(windows, prompts, options.greedy_tokens)
        ours = _read(child, questions, options.threads, "ours", report)
        key = hashlib.sha256(json.dumps([sha256, description, asdict(questions)]).encode())
        kept = options.cache / f"llama-{key.hexdigest()[:24]}.json"
        theirs = _recall(kept)
        if theirs is None:
            peer.ask("load", use_server=False, **load)
            theirs = _read(peer, questions, options.threads, "llama.cpp", report)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(asdict(theirs)), encoding="utf-8")
    with Child("benchmarks.scorer", "draftree, exact") as child:
        child.ask("load", math="exact", **load, **WIDE)
        part = windows[: options.exact_windows]
        exact = []
        for index, ids in enumerate(part):
            report(f"exact: window {index + 1} of {len(part)}")
            pairs = pairs_to_ask(ours.windows[index], theirs.windows[index])
            exact.append(Scores(**child.ask("score", ids=ids, pairs=pairs)))
        noise = measure_noise(ours.windows, theirs.windows, exact)

        def ask_gap(ids: list[int], pair: tuple[int, int]) -> float:
            pairs: list[Any] = [[] for _ in ids[1:]] + [[pair]]
            return float(child.ask("score", ids=ids, pairs=pairs)["pair_gaps"][-1][0])

        report("greedy texts")
        greedy = compare_texts(prompts, ours.texts, theirs.texts, noise.limit, ask_gap)
    choices = compare_choices(ours.windows, theirs.windows, exact, noise.limit)
    ids_sha256 = hash_ids(windows)
    return _measures(ours, theirs, exact, noise, choices, greedy, ids_sha256, description, kv_type)


def hash_ids(windows: Sequence[Sequence[int]]) -> str:
    text = "\n".join(" ".join(map(str, window)) for window in windows)
    return hashlib.sha256(text.encode()).hexdigest()


def perplexity(windows: Sequence[Scores]) -> float:
    log_probs = [value for window in windows for value in window.log_probs]
    return round(exp(-sum(log_probs) / len(log_probs)), 5)


def pairs_to_ask(ours: Scores, theirs: Scores) -> list[list[tuple[int, int]]]:
    """For each position: our two likeliest tokens, theirs, and the two first choices."""
    rows = zip(ours.best, ours.second, theirs.best, theirs.second, strict=True)
    return [[(a, b), (c, d), (a, c)] for a, b, c, d in rows]


def measure_noise(
    ours: Sequence[Scores], theirs: Sequence[Scores], exact: Sequence[Scores]
) -> Noises:
    """How far each one's gap between its two likeliest tokens is from the exact gap of these."""

    def noise_of(rounded: Sequence[Scores], column: int) -> Noise:
        moved = sorted(
            abs(gap - before[column])
            for scores, reference in zip(rounded, exact, strict=False)
            for gap, before in zip(scores.gaps, reference.pair_gaps, strict=True)
        )
        index = min(int(len(moved) * _PERCENTILE), len(moved) - 1)
        return Noise(round(moved[len(moved) // 2], 5), round(moved[index], 5), round(moved[-1], 5))

    return Noises(noise_of(ours, 0), noise_of(theirs, 1))


def compare_choices(
    ours: Sequence[Scores], theirs: Sequence[Scores], exact: Sequence[Scores], limit: float
) -> Agreement:
    """First choices after every known token of the exact part."""
    found, num_positions = [], 0
    for index, reference in enumerate(exact):
        pairs = list(zip(ours[index].best, theirs[index].best, strict=True))
        num_positions += len(pairs)
        found += [
            _disagree(f"window {index}", position + 1, pair, gaps[2], limit)
            for position, (pair, gaps) in enumerate(zip(pairs, reference.pair_gaps, strict=True))
            if pair[0] != pair[1]
        ]
    return _agreement(num_positions, found)


def compare_texts(
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    limit: float,
    ask_gap: Callable[[list[int], tuple[int, int]], float],
) -> Agreement:
    """Greedy texts up to their first difference; after that they are different questions."""
    found, num_positions = [], 0
    for index, prompt in enumerate(prompts):
        pairs = list(zip(ours[index], theirs[index], strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        num_positions += len(pairs) if first is None else first + 1
        if first is not None:
            gap = ask_gap([*prompt, *ours[index][:first]], pairs[first])
            found.append(_disagree(f"prompt {index}", first, pairs[first], gap, limit))
    return _agreement(num_positions, found)


def _read(child: Child, questions: Questions, threads: int, name: str, report: Report) -> Readings:
    windows, texts = [], []
    for index, ids in enumerate(questions.windows):
        report(f"{name}: window {index + 1} of {len(questions.windows)}")
        windows.append(Scores(**child.ask("score", ids=ids)))
    for index, ids in enumerate(questions.prompts):
        report(f"{name}: text {index + 1} of {len(questions.prompts)}")
        texts.append(child.ask("greedy", ids=ids, num_tokens=questions.num_tokens))
    return Readings(windows, texts, threads)


def _recall(path: Path) -> Readings | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        windows = [Scores(**scores) for scores in data["windows"]]
        return Readings(windows, data["texts"], data["threads"])
    except (OSError, ValueError, TypeError, KeyError):
        return None  # not there, or broken off while it was written


def _measures(
    ours: Readings,
    theirs: Readings,
    exact: list[Scores],
    noise: Noises,
    choices: Agreement,
    greedy: Agreement,
    ids_sha256: str,
    peer: dict[str, str],
    kv_type: str,
) -> ParityMeasures:
    sets = {
        "ours": ours.windows,
        "llama": theirs.windows,
        "ours_part": ours.windows[: len(exact)],
        "llama_part": theirs.windows[: len(exact)],
        "exact_part": exact,
    }
    values = {name: perplexity(windows) for name, windows in sets.items()}
    both = zip(ours.windows, theirs.windows, strict=True)
    is_equal = [a == b for x, y in both for a, b in zip(x.best, y.best, strict=True)]
    return ParityMeasures(
        ours=_perplexities(ours.windows),
        llama=_perplexities(theirs.windows),
        exact=_perplexities(exact),
        perplexity=values,
        ours_over_llama=round(values["ours"] / values["llama"] - 1, 6),
        ours_over_exact=round(values["ours_part"] / values["exact_part"] - 1, 6),
        llama_over_exact=round(values["llama_part"] / values["exact_part"] - 1, 6),
        noise=noise,
        equal_share=round(sum(is_equal) / len(is_equal), 5),
        first_choices=choices,
        greedy=greedy,
        ids_sha256=ids_sha256,
        peer=peer,
        kv_type=kv_type,
        peer_threads=theirs.threads,
    )


def _perplexities(windows: Sequence[Scores]) -> Samples:
    return summarize([perplexity([window]) for window in windows], "perplexity")


def _disagree(
    where: str, position: int, pair: tuple[int, int], gap: float, limit: float
) -> Disagreement:
    return Disagreement(where, position, *pair, round(abs(gap), 5), abs(gap) <= limit)


def _agreement(num_positions: int, found: list[Disagreement]) -> Agreement:
    num_explained = sum(item.is_explained for item in found)
    return Agreement(num_positions, num_positions - len(found), num_explained, found)
