"""Does our arithmetic say the same as llama.cpp's? Perplexity, first choices, and greedy texts.

Same token ids for all, windows of 512, every token but a window's first is scored. The reference
for both is our exact arithmetic (float32 on decoded weights), run on a part. Noise is how far
rounding activations moves the gap between the exact path's two likeliest tokens; a disagreement is
explained if the exact gap is within both noises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any, Final

from draftree.bench.corpus import hash_ids
from draftree.bench.fault import BenchError
from draftree.bench.peers import open_peer
from draftree.bench.record import Json
from draftree.bench.sample import Samples, summarize
from draftree.bench.score import Scores
from draftree.bench.worker import Child

Report = Callable[[str], None]

WINDOW: Final = 512
NUM_TOKENS: Final = 20_480
EXACT_WINDOWS: Final = 4
GREEDY_TOKENS: Final = 64
NOISE_PERCENTILE: Final = 99.0
_PROMPT_LENS: Final = (24, 48, 96, 32, 64, 128, 40, 80)


@dataclass(frozen=True, slots=True)
class Noise:
    """Moved gaps on the exact part, in logits."""

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
    first_choices: Agreement  # ours against llama.cpp's, on the exact part
    equal_share: float  # first choices of ours and llama.cpp that are equal, on all windows
    greedy: Agreement  # one position per prompt: the first divergence
    ids_sha256: str
    peer: dict[str, str]


@dataclass(frozen=True, slots=True)
class ParityOptions:
    threads: int
    python: str
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
class Readings:
    """What one arithmetic says of the windows and how it goes on after the prompts."""

    windows: list[Scores]
    texts: list[list[int]]


def measure_parity(path: Path, options: ParityOptions, report: Report) -> ParityMeasures:
    num_windows = options.num_tokens // WINDOW
    if not 1 <= options.exact_windows <= num_windows:
        raise BenchError(f"Parity needs at least one window of {WINDOW} tokens for the exact part.")
    peer, description = open_peer(options.python)
    load = {"path": str(path.resolve()), "threads": options.threads, "max_ctx": 2 * WINDOW}
    with peer, Child("draftree.bench.subject", "draftree, exact") as exact_child:
        report("loading, exact")
        exact_child.ask("load", kind="exact", **load)
        windows = exact_child.ask("windows", num_windows=num_windows, window_len=WINDOW)
        part = windows[: options.exact_windows]
        exact = _read_windows(exact_child, part, [], "exact", report)
        lens = enumerate(_PROMPT_LENS[: options.num_prompts])
        prompts = [windows[i % num_windows][:length] for i, length in lens]
        # Both are asked about the exact path's two likeliest tokens.
        pairs = [list(zip(s.best, s.second, strict=True)) for s in exact]
        with Child("draftree.bench.subject", "draftree") as child:
            child.ask("load", kind="wide", **load)
            ours = _read(child, windows, pairs, prompts, options, "ours", report)
        peer.ask("load", use_server=False, **load)
        theirs = _read(peer, windows, pairs, prompts, options, "llama.cpp", report)

        def ask_gaps(ids: list[int], wanted: list[tuple[int, int]]) -> list[float]:
            gaps: list[float] = exact_child.ask("score", ids=ids, pairs=wanted)["pair_gaps"]
            return gaps

        report("explaining disagreements")
        noise = Noises(measure_noise(exact, ours.windows), measure_noise(exact, theirs.windows))
        choices = compare_choices(part, ours.windows, theirs.windows, noise.limit, ask_gaps)
        greedy = compare_texts(prompts, ours.texts, theirs.texts, noise.limit, ask_gaps)
    count = len(part)
    return ParityMeasures(
        ours=_perplexities(ours.windows),
        llama=_perplexities(theirs.windows),
        exact=_perplexities(exact),
        perplexity={
            "ours": perplexity(ours.windows),
            "llama": perplexity(theirs.windows),
            "ours_part": perplexity(ours.windows[:count]),
            "llama_part": perplexity(theirs.windows[:count]),
            "exact_part": perplexity(exact),
        },
        ours_over_llama=_excess(ours.windows, theirs.windows),
        ours_over_exact=_excess(ours.windows[:count], exact),
        llama_over_exact=_excess(theirs.windows[:count], exact),
        noise=noise,
        first_choices=choices,
        equal_share=_equal_share(ours.windows, theirs.windows),
        greedy=greedy,
        ids_sha256=hash_ids(windows),
        peer=description,
    )


def perplexity(windows: Sequence[Scores]) -> float:
    log_probs = [value for window in windows for value in window.log_probs]
    return round(exp(-sum(log_probs) / len(log_probs)), 5)


def measure_noise(exact: Sequence[Scores], rounded: Sequence[Scores]) -> Noise:
    """How far the gap between the exact path's two likeliest tokens moves, position by position."""
    moved = sorted(
        abs(gap - before)
        for reference, scores in zip(exact, rounded, strict=False)
        for gap, before in zip(scores.pair_gaps, reference.gaps, strict=True)
    )
    index = min(int(len(moved) * NOISE_PERCENTILE / 100), len(moved) - 1)
    return Noise(round(moved[len(moved) // 2], 5), round(moved[index], 5), round(moved[-1], 5))


# Token ids and a pair of tokens for each: how far the first one's logit is above the second's.
AskGaps = Callable[[list[int], list[tuple[int, int]]], list[float]]


def compare_choices(
    windows: Sequence[Sequence[int]],
    ours: Sequence[Scores],
    theirs: Sequence[Scores],
    limit: float,
    ask_gaps: AskGaps,
) -> Agreement:
    """First choices after every known token; each difference is looked at with exact arithmetic."""
    found = []
    for index, ids in enumerate(windows):
        pairs = list(zip(ours[index].best, theirs[index].best, strict=True))
        if all(a == b for a, b in pairs):
            continue
        gaps = ask_gaps(list(ids), pairs)
        found += [
            _disagree(f"window {index}", position + 1, pair, gaps[position], limit)
            for position, pair in enumerate(pairs)
            if pair[0] != pair[1]
        ]
    return _agreement(sum(map(len, windows)), found)


def compare_texts(
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    limit: float,
    ask_gaps: AskGaps,
) -> Agreement:
    """Greedy texts up to their first difference; after that they are different questions."""
    found, num_positions = [], 0
    for index, prompt in enumerate(prompts):
        pairs = list(zip(ours[index], theirs[index], strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        num_positions += len(pairs) if first is None else first + 1
        if first is not None:
            ids = [*prompt, *ours[index][:first]]
            gaps = ask_gaps(ids, [(0, 0)] * (len(ids) - 1) + [pairs[first]])
            found.append(_disagree(f"prompt {index}", first, pairs[first], gaps[-1], limit))
    return _agreement(num_positions, found)


def _read(
    child: Child,
    windows: Sequence[list[int]],
    pairs: Sequence[Sequence[Sequence[int]]],
    prompts: Sequence[list[int]],
    options: ParityOptions,
    name: str,
    report: Report,
) -> Readings:
    scores = _read_windows(child, windows, pairs, name, report)
    report(f"{name}: greedy")
    texts = [child.ask("greedy", ids=ids, num_tokens=options.greedy_tokens) for ids in prompts]
    return Readings(scores, texts)


def _read_windows(
    child: Child,
    windows: Sequence[list[int]],
    pairs: Sequence[Sequence[Sequence[int]]],
    name: str,
    report: Report,
) -> list[Scores]:
    scores = []
    for index, ids in enumerate(windows):
        report(f"{name}: window {index + 1} of {len(windows)}")
        wanted: Any = pairs[index] if index < len(pairs) else []
        scores.append(Scores(**child.ask("score", ids=ids, pairs=wanted)))
    return scores


def _perplexities(windows: Sequence[Scores]) -> Samples:
    return summarize([perplexity([window]) for window in windows], "perplexity")


def _excess(windows: Sequence[Scores], others: Sequence[Scores]) -> float:
    return round(perplexity(windows) / perplexity(others) - 1, 6)


def _equal_share(ours: Sequence[Scores], theirs: Sequence[Scores]) -> float:
    pairs = [
        (a, b)
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(x.best, y.best, strict=True)
    ]
    return round(sum(a == b for a, b in pairs) / len(pairs), 5)


def _disagree(
    where: str, position: int, pair: tuple[int, int], gap: float, limit: float
) -> Disagreement:
    return Disagreement(where, position, *pair, round(abs(gap), 5), abs(gap) <= limit)


def _agreement(num_positions: int, found: list[Disagreement]) -> Agreement:
    num_explained = sum(item.is_explained for item in found)
    return Agreement(num_positions, num_positions - len(found), num_explained, found)
