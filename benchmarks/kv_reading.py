"""A model that reads a text with its keys and values rounded as one format rounds them, on the CPU
or a GPU: log-probabilities, needles that it finds, and what the formats would do to its own keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.kv_coder import decode, encode, rotate, rotate_back
from benchmarks.needle import Haystack
from benchmarks.score import Scores, score_logits
from draftree.core import DraftTree
from draftree.engine.centre import centre_keys
from draftree.kernels import ops
from draftree.kernels.cpu.kv_cache import KvCache
from draftree.kernels.cpu.ops import CpuOps
from draftree.kernels.cpu.thread_pool import ThreadPool
from draftree.kernels.cpu.workspace import Workspace
from draftree.kernels.ops import Columns
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS, KvFormat
from draftree.models.load import load_model
from draftree.models.target import Target
from draftree.weights.file import open_checkpoint

if TYPE_CHECKING:
    from draftree.kernels.cuda.compile import Gpu

ROWS: Final = 128  # of one pass
_QUERIES: Final = 64  # the last ones
_NUM_LAYERS: Final = 4  # evenly among those that attend
_MOST_KEYS: Final = 2048


@dataclass(slots=True)
class Reading:
    """log_probs and best: of the text's tokens. found: for each stop, whether each needle was."""

    log_probs: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    found: dict[str, list[bool]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FormatError:
    """Relative, as root mean squares: of keys, of values, and of what attention returns."""

    keys: float
    values: float
    output: float


def split_pair(pair: str) -> tuple[str, str]:
    """`q8_0/q4` are keys and values; `q4` is both."""
    key, _, value = pair.partition("/")
    return key, value or key


class TapedOps(CpuOps):
    """Keeps the queries of the last pass, layer by layer, beside what they are asked of."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.taped: list[tuple[np.ndarray, KvCache]] = []

    def attention(
        self, q: np.ndarray, cache: ops.KvState, *, window: int = 0, bidirectional: bool = False
    ) -> np.ndarray:
        kept = self.new_rows(q.shape[1])
        self.copy_columns(q, Columns(kept, 0))
        self.taped.append((kept, ops.narrow(cache, KvCache)))
        return super().attention(q, cache, window=window, bidirectional=bidirectional)


class KvReader:
    """One model for all formats: they share its weights."""

    rows = ROWS

    def __init__(self, path: Path, threads: int, max_ctx: int) -> None:
        self._pool, self._workspace, self._max_ctx = ThreadPool(threads), Workspace(), max_ctx
        self._model = load_model(open_checkpoint(path), self._new_ops("f16"))

    def _open(self, pair: str) -> tuple[Target, TapedOps]:
        recorded = self._new_ops(pair)
        target = Target(self._model, recorded, self._max_ctx)
        centre_keys(target, self.rows, self._max_ctx)
        return target, recorded

    def close(self) -> None:
        self._pool.close()

    def _new_ops(self, pair: str) -> TapedOps:
        key, value = split_pair(pair)
        return TapedOps(
            self._pool,
            max_tokens=ROWS,
            max_nodes=ROWS,
            max_ctx=self._max_ctx,
            kv_dtype=np.float16,
            key_format=KEY_FORMATS[key],
            value_format=VALUE_FORMATS[value],
            workspace=self._workspace,
        )

    def read(
        self, pair: str, hay: Haystack, pairs: Sequence[str] = ()
    ) -> tuple[Reading, dict[str, FormatError]]:
        """pairs: whose errors on this model's keys and values are wanted."""
        target, recorded = self._open(pair)
        reading, ids = Reading(), hay.ids
        stops = sorted({*range(0, len(ids), self.rows), *hay.stops, len(ids)})
        for start, end in pairwise(stops):
            chain = DraftTree.chain(tuple(ids[start:end]))
            target.state.begin(chain, is_committed=True)
            rows = range(chain.num_nodes)
            scores = self._score(target.forward(rows).logits, ids[start + 1 : end + 1])
            target.state.commit(rows)
            _keep(reading, scores, hay.is_text[start + 1 : end + 1])
            if end == stops[-1]:
                errors = self._measure_errors(target, recorded, chain.num_nodes, pairs)
            if end in hay.stops:
                reading.found[str(end)] = [
                    _is_found(target, needle.question, needle.answer)
                    for needle in hay.asked_at(end)
                ]
        return reading, errors

    @staticmethod
    def _score(logits: np.ndarray, next_ids: Sequence[int]) -> Scores:
        return score_logits(logits, next_ids)

    def _measure_errors(
        self, target: Target, recorded: TapedOps, num_rows: int, pairs: Sequence[str]
    ) -> dict[str, FormatError]:
        """On the keys and values that lie there, and the queries of the pass's last rows."""
        if not pairs:
            return {}
        taped, length = recorded.taped, target.state.committed
        chosen = np.unique(np.linspace(0, len(taped) - 1, _NUM_LAYERS).round().astype(int))
        found: dict[str, list[FormatError]] = {pair: [] for pair in pairs}
        others = {pair: self._open(pair)[1].taped for pair in pairs}
        for layer in chosen:
            rows, cache = taped[layer]
            queries = rows[:num_rows][-_QUERIES:]
            first = max(length - _MOST_KEYS, 0)
            keys, values = cache.read_keys(length)[:, first:], _values(cache, first, length)
            for pair, errors in found.items():
                other, centre = others[pair][layer][1], np.zeros(1, np.float32)
                if other.centre is not None and other.rope is not None:
                    shared = np.tile(other.centre.reshape(len(keys), 1, -1), (1, length, 1))
                    centre = turn_rows(shared, other.rope)[:, first:]
                errors.append(_error_of(queries, keys, values, pair, centre))
        return {pair: _mean(errors) for pair, errors in found.items()}


class GpuKvReader(KvReader):
    """On a GPU. Its cache cannot be looked into, so errors are not measured."""

    rows = 64  # of the longest pass that has logits for each

    def __init__(self, path: Path, max_ctx: int, device: "Gpu | None" = None) -> None:
        """device: the first GPU if not given."""
        from draftree.kernels.cuda.compile import gpu
        from draftree.kernels.cuda.store import WeightStore

        self._store, self._max_ctx = WeightStore(device or gpu(0)), max_ctx
        self._model = load_model(open_checkpoint(path), self._new_ops("f16"))

    def close(self) -> None:
        """The memory is given back with the reader."""

    def _new_ops(self, pair: str) -> Any:
        from draftree.kernels.cuda.ops import CudaOps

        key, value = split_pair(pair)
        return CudaOps(
            self._store,
            max_tokens=self.rows,
            max_nodes=self.rows,
            max_ctx=self._max_ctx,
            key_format=KEY_FORMATS[key],
            value_format=VALUE_FORMATS[value],
        )

    @staticmethod
    def _score(logits: np.ndarray, next_ids: Sequence[int]) -> Scores:
        """In torch, which takes all cores for it."""
        import torch

        rows = torch.from_numpy(logits)
        targets = torch.tensor(next_ids, dtype=torch.int64)[:, None]
        scored = rows[: len(targets)]
        total = torch.logsumexp(scored.double(), 1)
        log_probs = scored.gather(1, targets)[:, 0] - total
        return Scores(log_probs.tolist(), rows.argmax(1).tolist())

    def _measure_errors(
        self, target: Target, recorded: TapedOps, num_rows: int, pairs: Sequence[str]
    ) -> dict[str, FormatError]:
        return {}


def _keep(reading: Reading, scores: Scores, is_text: Sequence[bool]) -> None:
    for log_prob, best, is_kept in zip(scores.log_probs, scores.best, is_text, strict=False):
        if is_kept:
            reading.log_probs.append(round(log_prob, 6))
            reading.best.append(best)


def _is_found(target: Target, question: Sequence[int], answer: Sequence[int]) -> bool:
    chain = DraftTree.chain((*question, *answer[:-1]))
    target.state.begin(chain)
    rows = range(len(question) - 1, chain.num_nodes)
    chosen = target.forward(rows).logits.argmax(axis=1).tolist()
    target.state.rollback()
    return chosen == list(answer)


def _values(cache: KvCache, start: int, end: int) -> np.ndarray:
    """float32 [kv_heads, positions, head_dim]."""
    return cache.copy(0, end)[1][:, start:end, : cache.head_dim].astype(np.float32)


def turn_rows(keys: np.ndarray, rope: ops.Rope) -> np.ndarray:
    """float32 [..., positions, head_dim], turned by the angles of positions 0 ..."""
    cosines, sines = (rope.table[: keys.shape[-2], i] for i in range(2))
    half, turned = cosines.shape[1], keys.copy()
    firsts, seconds = slice(half), slice(half, 2 * half)
    if rope.interleaved:
        firsts, seconds = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = keys[..., firsts], keys[..., seconds]
    turned[..., firsts] = a * cosines - b * sines
    turned[..., seconds] = b * cosines + a * sines
    return turned


def round_rows(rows: np.ndarray, form: KvFormat) -> np.ndarray:
    """As a cache in this format returns them, in the directions they had."""
    turned = rotate(rows) if form.is_rotated else rows
    coded = decode(encode(turned, form), rows.shape[-1], form)
    return rotate_back(coded) if form.is_rotated else coded


def _error_of(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, pair: str, centre: np.ndarray
) -> FormatError:
    key_name, value_name = split_pair(pair)
    k = round_rows(keys - centre, KEY_FORMATS[key_name]) + centre
    v = round_rows(values, VALUE_FORMATS[value_name])
    # [kv_heads, group, queries, head_dim]
    heads = q.reshape(len(q), len(keys), -1, keys.shape[-1]).transpose(1, 2, 0, 3)
    return FormatError(
        _relative(k, keys),
        _relative(v, values),
        _relative(_attend(heads, k, v), _attend(heads, keys, values)),
    )


def _attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The last queries see all keys but those of the queries after them."""
    scores = q @ keys[:, None].swapaxes(-1, -2) * np.float32(keys.shape[-1] ** -0.5)
    num_queries, num_keys = scores.shape[-2:]
    later = np.arange(num_keys) > np.arange(num_keys - num_queries, num_keys)[:, None]
    scores[..., later] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ values[:, None]


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def _mean(errors: Sequence[FormatError]) -> FormatError:
    def mean(name: str) -> float:
        return round(float(np.mean([getattr(error, name) for error in errors])), 6)

    return FormatError(mean("keys"), mean("values"), mean("output"))


def errors_of(raw: Mapping[str, Mapping[str, float]]) -> dict[str, FormatError]:
    return {pair: FormatError(**values) for pair, values in raw.items()}
