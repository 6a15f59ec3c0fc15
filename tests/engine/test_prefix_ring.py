"""A draft whose context is a ring: texts of several times its length, and returns within them."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from draftree.config import EngineConfig
from draftree.core import Request, SamplingParams
from draftree.decode.decoder import Round
from draftree.drafts.dflash import BlockDrafter
from draftree.engine import device
from draftree.engine.engine import TokenEngine
from draftree.kernels.cpu.kv_cache import KvCache
from tests.engine.turns import Reply, alone
from tests.examples import mark_long
from tests.made import make_draft
from tests.tiny import tiny_path

KINDS = {"dense": ("llama", (0, 1, 2)), "hybrid": ("qwen35-mtp", (0, 1, 3))}
WINDOW, RING = 90, 256
HOT = SamplingParams(temperature=3.0, seed=4)  # the noise decides: rounds of all lengths
Tokens = tuple[int, ...]


def _text(seed: int, length: int) -> Tokens:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


def _open(kind: str, window: int = WINDOW, **options: int | str) -> TokenEngine:
    model, layers = KINDS[kind]
    settings = {"budget": 15, "max_ctx": 1000, "threads": 1, "chunk": 100, "ngram": "off"}
    config = EngineConfig(**{**settings, "prefix_bytes": 1 << 30, **options})
    return TokenEngine.open(
        tiny_path(model), config, make_draft(feature_layers=layers, window=window)
    )


@dataclass(frozen=True)
class Answer:
    ids: Tokens
    rounds: tuple[Round, ...]
    cached: int


def _reply(
    engine: TokenEngine, prompt: Tokens, count: int, sampling: SamplingParams = HOT
) -> Answer:
    rounds: list[Round] = []
    engine.watch = rounds.append
    stream = engine.generate(Request(prompt, count, sampling, cache_points=(len(prompt) - 1,)))
    ids = tuple(event.token for event in stream)
    engine.watch = None
    return Answer(ids, tuple(rounds), stream.usage.cached_tokens)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(kind: str) -> Iterator[TokenEngine]:
    with closing(_open(kind)) as engine:
        assert isinstance(engine.drafter, BlockDrafter)
        assert engine.drafter._ops.ring_len == RING
        yield engine


def _check_fresh(engine: TokenEngine, reply: Reply, prompt: Tokens, count: int) -> None:
    """The rounds are those of an engine that has read the prompt from its beginning."""
    engine.reset()
    fresh = _reply(engine, prompt, count)
    assert fresh.cached == 0
    assert (reply.ids, reply.rounds) == (fresh.ids, fresh.rounds)


@pytest.mark.parametrize("sampling", mark_long((SamplingParams(), HOT), but=(HOT,)))
@pytest.mark.parametrize("length", mark_long((60, 400, 700), but=(60, 700)))
def test_a_text_longer_than_the_ring(
    kind: str, length: int, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that of plain decoding, the rounds are those of a cache of all positions."""
    prompt, count, replies = _text(1, length), max(100, 350 - length), []
    with closing(_open(kind, budget=0)) as plain:
        text = _reply(plain, prompt, count, sampling).ids
    for ring_len in (RING, 0):
        monkeypatch.setattr(device, "_ring_len", lambda *args, ring_len=ring_len: ring_len)
        with closing(_open(kind)) as engine:
            replies.append(_reply(engine, prompt, count, sampling))
    assert replies[0].ids == replies[1].ids == text
    assert replies[0].rounds == replies[1].rounds
    if sampling is HOT:
        assert len({len(one.path) for one in replies[0].rounds}) >= 3, "rounds say little"


def test_the_next_turn_after_another_conversation(engine: TokenEngine) -> None:
    prompt, other = _text(2, 500), _text(3, 450)
    first = _reply(engine, prompt, 40)
    _reply(engine, other, 10)
    follow_up = (*prompt, *first.ids, *_text(4, 20))
    reply = _reply(engine, follow_up, 40)
    assert reply.cached >= len(prompt) + len(first.ids) - 1
    _check_fresh(engine, reply, follow_up, 40)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_the_last_reply_once_more(engine: TokenEngine, is_offloaded: bool) -> None:
    prompt = _text(5, 500)
    first = _reply(engine, prompt, 60)
    if is_offloaded:
        engine.offload()
        _reply(engine, _text(6, 300), 10)
    again = _reply(engine, prompt, 60)
    assert again.cached == len(prompt) - 1 and again.ids == first.ids
    assert again.rounds == first.rounds
    _check_fresh(engine, again, prompt, 60)


def test_back_to_the_end_of_a_system_prompt(engine: TokenEngine, kind: str) -> None:
    """A conversation that is shorter than the ring, and one that was saved turn by turn."""
    system = _text(7, 80)
    text: Tokens = system
    for turn in range(6):
        text += _text(20 + turn, 40)
        text += _reply(engine, text, 20).ids
        engine.offload()
        if turn in (0, 5):
            assert (len(text) > RING) == (turn == 5)
            prompt = system + _text(30 + turn, 30)
            reply = _reply(engine, prompt, 20)
            if kind == "dense":
                assert reply.cached >= len(system)
            fresh = _open(kind)
            expected = _reply(fresh, prompt, 20)
            fresh.close()
            assert (reply.ids, reply.rounds) == (expected.ids, expected.rounds)


def test_where_context_is_lost_the_text_is_the_same(engine: TokenEngine, kind: str) -> None:
    prompt = _text(8, 600)
    _reply(engine, prompt, 10)
    engine.offload()  # too late for the beginning of the text
    shorter = prompt[:300] if kind == "dense" else (*prompt[:599], 5)
    reply = _reply(engine, shorter, 60)
    assert reply.cached > 250
    if kind == "dense":
        drafter = engine.drafter
        assert isinstance(drafter, BlockDrafter) and drafter._first == 299
    engine.reset()
    assert reply.ids == _reply(engine, shorter, 60).ids


def test_memory_does_not_grow_with_the_context(kind: str) -> None:
    sizes = []
    for max_ctx in (300, 600, 1000):
        with closing(_open(kind, max_ctx=max_ctx)) as engine:
            assert isinstance(engine.drafter, BlockDrafter)
            stores = engine.drafter._kv._stores
            arrays = [a for s in stores if isinstance(s, KvCache) for a in (s.keys, s.values)]
            assert len(arrays) == 4
            sizes.append([array.nbytes for array in arrays])
    assert sizes[0] == sizes[1] == sizes[2]


def test_a_context_no_longer_than_the_ring_needs_none() -> None:
    with closing(_open("dense", window=900)) as engine:
        assert isinstance(engine.drafter, BlockDrafter)
        assert engine.drafter._ops.ring_len == 0 and engine.drafter.first == 0


def test_turns_keep_the_context_of_a_draft(kind: str) -> None:
    """Of prompts longer than the ring, first copied when all of them is read."""
    requests = [Request(_text(seed, 400 + seed), 30, HOT) for seed in range(2)]
    with closing(_open(kind, parallel=2, batching="off", prefix_bytes=0)) as engine:
        expected = [alone(engine, request).rounds for request in requests]
        engine.reset()
        live = replies = [Reply.start(engine, request) for request in requests]
        for reply in replies:
            reply.stream.should_pause = partial(bool, reply.events)
        while live:
            live = [reply for reply in live if reply.advance()]
    assert [reply.rounds for reply in replies] == expected
    assert min(reply.num_pauses for reply in replies) > 5
