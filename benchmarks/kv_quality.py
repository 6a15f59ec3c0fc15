"""What a format of cached keys and values costs a model, against 16 bits: perplexity of real text,
needles found in it, and errors of its own keys, values and attention.

On the CPU, which rounds keys and values as the GPU's cache does, or on a GPU. What one text gave in
one format is kept on disk by the hash of model, kernels and text, so that a long run can be broken
off.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.kv_reading import (
    FormatError,
    GpuKvReader,
    KvReader,
    Reading,
    errors_of,
    split_pair,
)
from benchmarks.needle import Haystack, hide_needles
from benchmarks.window import make_windows
from draftree.bench.machine import describe_machine
from draftree.bench.median import Report, Samples, summarize
from draftree.bench.record import Json
from draftree.errors import BenchError
from draftree.kernels.cpu.kernel import code_dir
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS
from draftree.models.model_config import read_model_config
from draftree.text.tokenizer import Tokenizer
from draftree.weights.file import open_checkpoint

PAIRS: Final = ("f16", "q8_0", "q4", "tq3_0", "q8_0/q4")
_ROOM: Final = 64  # tokens of a question
BASE: Final = "f16"


@dataclass(frozen=True, slots=True)
class FormatQuality:
    """over_f16 is a ratio of perplexities minus 1, stderr its standard error over tokens.
    needles: by length of the text before the question, [asked, found, as with f16].
    """

    perplexity: float
    texts: Samples  # the perplexity of each
    over_f16: float
    stderr: float
    same_choices: float  # share of positions whose likeliest token is that of f16
    needles: dict[str, list[int]]
    error: FormatError | None  # of the usual formats but f16


@dataclass(frozen=True, slots=True)
class LengthQuality:
    """Texts of one length."""

    num_tokens: int  # that were scored, in each format
    formats: dict[str, FormatQuality]


@dataclass(frozen=True, slots=True)
class KvQualityMeasures:
    lengths: dict[str, LengthQuality]

    def headline(self) -> dict[str, Any]:
        percent = {
            length: {name: round(100 * q.over_f16, 3) for name, q in item.formats.items()}
            for length, item in self.lengths.items()
        }
        return {"percent_over_f16": percent}


@dataclass(frozen=True, slots=True)
class KvQualityOptions:
    """num_tokens: of each length and format, a whole text at least."""

    threads: int
    lengths: tuple[int, ...]
    num_tokens: int
    pairs: tuple[str, ...]
    cache: Path
    gpu: str = ""  # its name; "": on the CPU

    def settings(self) -> Json:
        return {
            **({"gpu": self.gpu} if self.gpu else {"threads": self.threads}),
            "num_tokens": self.num_tokens,
            "text": "language reference (pydoc) and standard library sources, in turns",
        }


def check_pairs(pairs: Sequence[str], head_dim: int) -> None:
    for pair in pairs:
        key, value = split_pair(pair)
        if key not in KEY_FORMATS or value not in VALUE_FORMATS:
            raise BenchError(f"{pair} is no format; known are {', '.join(KEY_FORMATS)}.")
        if not (KEY_FORMATS[key].can_hold(head_dim) and VALUE_FORMATS[value].can_hold(head_dim)):
            raise BenchError(f"{pair} cannot hold heads of {head_dim} dimensions.")


def measure_kv_quality(
    path: Path, sha256: str, options: KvQualityOptions, report: Report
) -> KvQualityMeasures:
    """sha256: of the model's file."""
    pairs = [BASE, *(pair for pair in options.pairs if pair != BASE)]
    check_pairs(pairs, read_model_config(open_checkpoint(path)).head_dim)
    tokenizer = Tokenizer.from_metadata(open_checkpoint(path).metadata)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False)

    stacks = {}
    for length in options.lengths:
        windows = make_windows(encode, max(options.num_tokens // length, 1), length)
        stacks[length] = [hide_needles(ids, encode, i) for i, ids in enumerate(windows)]
    longest = max(len(hay.ids) for members in stacks.values() for hay in members)
    reader: KvReader
    if options.gpu:
        reader = GpuKvReader(path, longest + _ROOM)
    else:
        reader = KvReader(path, options.threads, longest + _ROOM)
    try:
        found = {
            str(length): _read_all(reader, sha256, members, pairs, options, report)
            for length, members in stacks.items()
        }
    finally:
        reader.close()
    return KvQualityMeasures(found)


def _read_all(
    reader: KvReader,
    sha256: str,
    stacks: Sequence[Haystack],
    pairs: Sequence[str],
    options: KvQualityOptions,
    report: Report,
) -> LengthQuality:
    readings: dict[str, list[Reading]] = {pair: [] for pair in pairs}
    errors: list[dict[str, FormatError]] = []
    for index, hay in enumerate(stacks):
        for pair in pairs:
            report(f"{pair}, {len(hay.ids)} tokens: text {index + 1} of {len(stacks)}")
            wanted = PAIRS[1:] if pair == BASE and index == 0 else ()
            kernels = describe_machine().gpu_kernels if options.gpu else code_dir().name
            key = json.dumps([sha256, kernels, pair, wanted, asdict(hay)])
            kept = options.cache / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
            reading, found = _read(reader, pair, hay, wanted, kept)
            readings[pair].append(reading)
            errors += [found] if found else []
            report(_so_far(pair, readings))
    return LengthQuality(
        sum(len(reading.log_probs) for reading in readings[BASE]),
        {
            pair: judge(readings[BASE], readings[pair], stacks, _mean_error(errors, pair))
            for pair in pairs
        },
    )


def _read(
    reader: KvReader, pair: str, hay: Haystack, wanted: Sequence[str], kept: Path
) -> tuple[Reading, dict[str, FormatError]]:
    if kept.exists():
        raw = json.loads(kept.read_text(encoding="utf-8"))
        return Reading(**raw["reading"]), errors_of(raw["errors"])
    reading, errors = reader.read(pair, hay, wanted)
    raw = {"reading": asdict(reading), "errors": {k: asdict(v) for k, v in errors.items()}}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(raw), encoding="utf-8")
    return reading, errors


def _so_far(pair: str, readings: Mapping[str, Sequence[Reading]]) -> str:
    over, stderr = _compare(readings[BASE][: len(readings[pair])], readings[pair])
    return f"{pair}: {100 * over:+.3f} % (± {100 * stderr:.3f}) over {BASE} so far"


def _compare(base: Sequence[Reading], other: Sequence[Reading]) -> tuple[float, float]:
    """Perplexity over the base's, minus 1, and its standard error: token by token, as both read
    the same text.
    """
    lost = np.array([p for r in base for p in r.log_probs])
    lost -= np.array([p for r in other for p in r.log_probs])
    return exp(lost.mean()) - 1.0, float(lost.std() / len(lost) ** 0.5)


def judge(
    base: Sequence[Reading],
    other: Sequence[Reading],
    stacks: Sequence[Haystack],
    error: FormatError | None,
) -> FormatQuality:
    over, stderr = _compare(base, other)
    log_probs = [p for reading in other for p in reading.log_probs]
    choices = [np.array([b for reading in side for b in reading.best]) for side in (base, other)]
    needles: dict[str, list[int]] = {}
    for usual, reading, hay in zip(base, other, stacks, strict=True):
        for stop in map(str, hay.stops):
            found, expected = reading.found[stop], usual.found[stop]
            counts = needles.setdefault(stop, [0, 0, 0])
            counts[0] += len(found)
            counts[1] += sum(found)
            counts[2] += sum(a == b for a, b in zip(found, expected, strict=True))
    return FormatQuality(
        perplexity=round(exp(-float(np.mean(log_probs))), 4),
        texts=summarize([exp(-float(np.mean(r.log_probs))) for r in other], "perplexity"),
        over_f16=round(over, 6),
        stderr=round(stderr, 6),
        same_choices=round(float(np.mean(choices[0] == choices[1])), 4),
        needles=needles,
        error=error,
    )


def _mean_error(errors: Sequence[Mapping[str, FormatError]], pair: str) -> FormatError | None:
    found = [asdict(by_pair[pair]) for by_pair in errors if pair in by_pair]
    if not found:
        return None
    return FormatError(
        **{name: round(float(np.mean([e[name] for e in found])), 6) for name in found[0]}
    )
