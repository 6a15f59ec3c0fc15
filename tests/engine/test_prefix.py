"""Prompts that begin like earlier ones are not read again, and nothing else changes: the same text
from the same rounds as on a fresh engine.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.core import FinishReason, Request, SamplingParams
from draftree.decode.decoder import Round
from draftree.engine.engine import TokenEngine
from draftree.models.target import Target
from tests.made import make_draft
from tests.tiny import tiny_path

KINDS = ("hybrid", "attention")
HOT = SamplingParams(temperature=3.0, seed=4)  # the noise decides: rounds of all lengths
COUNT = 12
LARGE = 1 << 30
Tokens = tuple[int, ...]


def _text(seed: int, length: int) -> Tokens:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


SYSTEM, ASK, NEXT = _text(1, 40), _text(2, 30), _text(3, 20)


def _again(kind: str, prompt: Tokens) -> int:
    """How much of a prompt is known when it comes again: a hybrid was marked before the end."""
    return len(prompt) - (13 if kind == "hybrid" else 1)


def _open(kind: str, **options: int) -> TokenEngine:
    settings = {"budget": 15, "max_ctx": 400, "threads": 1, "math": "exact", "chunk": 24}
    settings |= {"prefix_bytes": LARGE, "ngram": "off" if kind == "hybrid" else "on"} | options
    config = EngineConfig(**settings)
    if kind == "hybrid":
        return TokenEngine.open(tiny_path("qwen35-mtp"), config, make_draft())
    return TokenEngine.open(tiny_path("llama"), config)


@dataclass(frozen=True)
class Reply:
    ids: Tokens
    cached: int
    rounds: tuple[Round, ...]  # the trees show what was proposed, so what context a draft had
    num_read: int  # passes of the target besides the rounds
    accepted_by_depth: tuple[int, ...]

    def is_like(self, other: "Reply") -> bool:
        """The same text from the same rounds, and the same statistics."""
        return (self.ids, self.rounds, self.accepted_by_depth) == (
            *(other.ids, other.rounds, other.accepted_by_depth),
        )


def _reply(engine: TokenEngine, prompt: Tokens, count: int = COUNT, points: Tokens = ()) -> Reply:
    rounds: list[Round] = []
    engine.watch = rounds.append
    before = engine.target.num_forwards
    stream = engine.generate(Request(prompt, count, HOT, cache_points=points))
    ids = tuple(event.token for event in stream)
    engine.watch = None
    usage = stream.usage
    num_read = engine.target.num_forwards - before - len(rounds)
    assert engine.kept_bytes <= engine.plan.prefix_bytes
    depths = tuple(usage.rounds.accepted_by_depth)
    return Reply(ids, usage.cached_tokens, tuple(rounds), num_read, depths)


@cache
def _unused(kind: str) -> TokenEngine:
    return _open(kind, prefix_bytes=0)


@cache
def _fresh(kind: str, prompt: Tokens) -> Reply:
    engine = _unused(kind)
    engine.reset()
    reply = _reply(engine, prompt)
    assert reply.cached == 0
    return reply


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(kind: str) -> Iterator[TokenEngine]:
    engine = _open(kind)
    yield engine
    engine.close()


def test_the_rounds_differ_in_length(kind: str) -> None:
    """Otherwise equal rounds would say little."""
    accepted = {len(one.path) for one in _fresh(kind, SYSTEM + ASK).rounds}
    assert len(accepted) >= (3 if kind == "hybrid" else 1), accepted


def test_interleaved_conversations_go_on_where_they_were(engine: TokenEngine, kind: str) -> None:
    texts = {name: _text(name, 50) for name in (10, 11, 12)}
    for turn in range(3):
        for name, text in texts.items():
            reply = _reply(engine, text)
            assert reply.is_like(_fresh(kind, text)), (turn, name)
            if turn:
                assert reply.cached == len(text) - len(NEXT) - 1  # all that the target had read
                assert reply.num_read == 1  # one chunk of what is new
            texts[name] = (*text, *reply.ids, *NEXT)


def test_branches_of_one_prefix(engine: TokenEngine, kind: str) -> None:
    first = _reply(engine, SYSTEM + ASK)
    stem = (*SYSTEM, *ASK, *first.ids, 5)
    for seed in (20, 21, 20, 22, 21):
        branch = stem + _text(seed, 25)
        assert _reply(engine, branch).is_like(_fresh(kind, branch))
    # A hybrid comes back to where the branches part; what is new since then is one pass.
    known = _again(kind, stem if kind == "hybrid" else branch)
    assert _reply(engine, branch).cached >= known


def test_a_prompt_that_is_a_strict_prefix_of_a_known_one(engine: TokenEngine, kind: str) -> None:
    longest = SYSTEM + ASK + NEXT
    _reply(engine, longest)
    for length in (len(longest) - 1, 60, 41, 2, 1):
        reply = _reply(engine, longest[:length])
        assert reply.is_like(_fresh(kind, longest[:length]))
        if kind == "attention":
            assert reply.cached == length - 1
    assert _reply(engine, longest).is_like(_fresh(kind, longest))


def test_the_same_prompt_again(engine: TokenEngine, kind: str) -> None:
    prompt = SYSTEM + ASK
    for expected in (0, _again(kind, prompt), _again(kind, prompt)):
        reply = _reply(engine, prompt)
        assert reply.cached == expected and reply.is_like(_fresh(kind, prompt))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_follow_up_of_a_cancelled_request(engine: TokenEngine, kind: str, count: int) -> None:
    prompt = SYSTEM + ASK
    stream = engine.generate(Request(prompt, 40, HOT))
    seen = tuple(next(stream).token for _ in range(count))
    stream.close()
    assert stream.finish_reason == FinishReason.CANCELLED
    follow_up = (*prompt, *seen, *NEXT)
    reply = _reply(engine, follow_up)
    assert reply.is_like(_fresh(kind, follow_up))
    if count:
        assert reply.cached >= _again(kind, prompt)
    assert _reply(engine, prompt).is_like(_fresh(kind, prompt))


def test_cancelled_while_the_prompt_is_read(engine: TokenEngine, kind: str) -> None:
    prompt, forward = _text(30, 100), engine.target.forward
    stream = engine.generate(Request(prompt, 8, HOT))

    def cancelling(rows: range) -> object:
        stream.cancel()
        return forward(rows)

    engine.target.forward = cancelling
    assert list(stream) == [] and stream.finish_reason == FinishReason.CANCELLED
    del engine.target.forward
    reply = _reply(engine, prompt)
    assert reply.is_like(_fresh(kind, prompt)) and reply.cached > 0


def test_after_a_request_that_broke_off_inside_a_pass(
    engine: TokenEngine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sequence at hand holds is not trusted; what was kept before is."""
    prompt, other, forward = SYSTEM + ASK, _text(31, 60), Target.forward
    _reply(engine, prompt)
    stream = engine.generate(Request(other, 40, HOT))
    next(stream)

    def interrupted(self: Target, rows: range) -> None:
        forward(self, rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Target, "forward", interrupted)
        list(stream)
    reply = _reply(engine, prompt)
    assert reply.cached == _again(kind, prompt) and reply.is_like(_fresh(kind, prompt))
    assert _reply(engine, other).is_like(_fresh(kind, other))


def _step_bytes(engine: TokenEngine) -> int:
    """What one conversation of one turn costs."""
    _reply(engine, _text(50, 60))
    engine.offload()
    return engine._prefix.store.num_bytes


def test_little_memory_keeps_the_newest(kind: str) -> None:
    probe = _open(kind)
    room = int(2.5 * _step_bytes(probe))
    probe.close()
    engine = _open(kind, prefix_bytes=room)
    texts = [_text(seed, 60) for seed in range(50, 56)]
    for text in texts:
        assert _reply(engine, text).is_like(_fresh(kind, text))
        engine.offload()
    assert 0 < engine._prefix.store.num_bytes <= room
    oldest, newest = _reply(engine, texts[0]), _reply(engine, texts[-1])
    assert oldest.cached == 0 and newest.cached == _again(kind, texts[-1])
    assert oldest.is_like(_fresh(kind, texts[0])) and newest.is_like(_fresh(kind, texts[-1]))
    engine.close()


def test_copies_are_made_while_there_is_time(engine: TokenEngine, kind: str) -> None:
    store = engine._prefix.store
    first = _reply(engine, SYSTEM + ASK)
    assert store.num_bytes == 0  # a conversation that goes on is never copied
    follow_up = (*SYSTEM, *ASK, *first.ids, *NEXT)
    stream = engine.generate(Request(follow_up, COUNT, HOT))
    next(stream)
    engine.offload()  # not now
    assert store.num_bytes == 0
    list(stream)
    engine.offload()
    kept = store.num_bytes
    assert kept > 0
    engine.offload()
    assert store.num_bytes == kept
    other = _text(60, 30)
    assert _reply(engine, other).is_like(_fresh(kind, other))
    assert store.num_bytes == kept
    reply = _reply(engine, follow_up)
    start = len(follow_up) - len(NEXT) - 1  # where a hybrid was marked before so short a turn
    expected = start if kind == "hybrid" else _again(kind, follow_up)
    assert reply.cached == expected and reply.is_like(_fresh(kind, follow_up))


def test_a_short_turn_is_one_pass(kind: str) -> None:
    """What a hybrid may come back to is saved before it, or on the way where it is long."""
    with closing(_open(kind, chunk=96)) as engine:
        first = _reply(engine, SYSTEM + ASK)
        said = (*SYSTEM, *ASK, *first.ids)
        for new, num_passes in ((_text(70, 50), 1), (_text(71, 90), 1 + (kind == "hybrid"))):
            prompt = (*said, *new)
            before = engine.target.num_forwards
            stream = engine.generate(Request(prompt, COUNT, HOT))
            num_read: list[int] = []
            stream.on_chunk = lambda count=num_read: count.append(engine.target.num_forwards)
            said = (*prompt, *(event.token for event in stream))
            assert num_read[-1] - before == len(num_read) == num_passes
            again = _reply(engine, prompt)
            assert again.cached >= len(prompt) - len(new) - 1
            assert again.is_like(_fresh(kind, prompt))


def test_turns_that_part_near_the_end_take_few_passes() -> None:
    """Each prompt leaves out the last one's opening, as where a call comes back in other tokens."""
    with closing(_open("hybrid", chunk=96)) as engine:
        prompt, found = _text(72, 100), []
        for seed in range(90, 96):
            prompt = (*prompt[:-12], *_text(seed, 50))
            reply = _reply(engine, prompt)
            assert reply.is_like(_fresh("hybrid", prompt))
            found.append((len(prompt) - 1 - reply.cached, reply.num_read))
        unread, num_passes = zip(*found, strict=True)
        assert max(unread[1:]) <= 128
        assert num_passes[1:] == tuple(-(-count // 64) for count in unread[1:])
        assert {1, 2} == {*num_passes[1:]}


def test_without_memory_only_the_sequence_at_hand_goes_on(kind: str) -> None:
    engine = _open(kind, prefix_bytes=0)
    first = _reply(engine, SYSTEM + ASK)
    follow_up = (*SYSTEM, *ASK, *first.ids, *NEXT)
    assert _reply(engine, follow_up).cached == len(follow_up) - len(NEXT) - 1
    engine.offload()
    other = _reply(engine, _text(61, 50))
    again = _reply(engine, follow_up)
    assert other.cached == again.cached == 0 and again.is_like(_fresh(kind, follow_up))
    engine.close()


@pytest.mark.parametrize("is_named", [False, True])
def test_reasoning_that_is_left_out_later(is_named: bool) -> None:
    """The next prompt repeats this one without its last tokens, then goes on otherwise."""
    engine = _open("hybrid")
    point, header = len(SYSTEM + ASK), (9, 8, 7)
    prompt = SYSTEM + ASK + header
    _reply(engine, prompt, points=(point,) if is_named else ())
    follow_up = (*SYSTEM, *ASK, 9, *_text(70, 12), *NEXT)
    reply = _reply(engine, follow_up)
    assert reply.cached == (point if is_named else _again("hybrid", prompt))
    assert reply.is_like(_fresh("hybrid", follow_up))
    engine.close()


def test_where_conversations_part_is_learned() -> None:
    """Nobody says where the common beginning ends; the second conversation shows it."""
    engine = _open("hybrid")
    cached = []
    for seed in (80, 81, 82, 83):
        prompt = SYSTEM + _text(seed, 30)
        reply = _reply(engine, prompt)
        assert reply.is_like(_fresh("hybrid", prompt))
        cached.append(reply.cached)
    assert cached == [0, 0, len(SYSTEM), len(SYSTEM)]
    engine.close()


def test_a_long_sequence_can_go_back_without_room_to_copy_it() -> None:
    """Marks need the recurrent state alone: keys and values are still in place."""
    probe = _open("hybrid")
    _reply(probe, SYSTEM + ASK)
    checkpoint_bytes = probe._prefix.store.reserved_bytes
    probe.close()
    engine = _open("hybrid", prefix_bytes=2 * checkpoint_bytes + 100)
    prompt = SYSTEM + ASK
    _reply(engine, prompt)
    reply = _reply(engine, prompt)
    assert reply.cached == _again("hybrid", prompt) and reply.is_like(_fresh("hybrid", prompt))
    engine.close()


def test_random_requests(kind: str) -> None:
    """Continuations, cuts and branches of what came before, in any order, with little memory."""
    rng = np.random.default_rng(90)
    probe = _open(kind)
    room = 3 * _step_bytes(probe)
    probe.close()
    engine = _open(kind, prefix_bytes=room)
    known: list[Tokens] = [SYSTEM]
    num_cached = 0
    for step in range(40):
        base = known[rng.integers(len(known))]
        kept = base[: rng.integers(1, min(len(base), 300) + 1)]
        prompt = kept + _text(100 + step, rng.integers(1, 30))
        reply = _reply(engine, prompt)
        assert reply.is_like(_fresh(kind, prompt)), step
        num_cached += reply.cached > 0
        known.append(prompt + reply.ids)
        if rng.integers(2):
            engine.offload()
    assert num_cached >= 6
    engine.close()


@pytest.mark.parametrize("budget", [0, 22])
def test_the_default_pair(smollm2_path: Path, budget: int) -> None:
    """Two turns of a real conversation, another one between them: text, AL and depths are equal."""
    engine = Engine.open(str(smollm2_path), max_ctx=512, ngram="off", budget=budget)
    messages = [{"role": "user", "content": "Name three primes. Then explain what a prime is."}]

    def ask(conversation: list[dict[str, str]]) -> tuple[str, tuple[int, ...], int]:
        generation = engine.generate(conversation, max_tokens=24)
        for _ in generation:
            pass
        usage = generation.usage
        depths = usage.rounds.num_rounds, *usage.rounds.accepted_by_depth
        return generation.text, depths, usage.cached_tokens

    text, _, cached = ask(messages)
    assert cached == 0
    messages += [{"role": "assistant", "content": text}]
    messages += [{"role": "user", "content": "Is 91 one of them?"}]
    ask([{"role": "user", "content": "Write a haiku about rain."}])
    text, depths, cached = ask(messages)
    engine.tokens.reset()
    assert engine.tokens.kept_bytes == 0
    fresh_text, fresh_depths, fresh_cached = ask(messages)
    assert cached > 50 and fresh_cached == 0
    assert (text, depths) == (fresh_text, fresh_depths)
    engine.close()


def test_the_first_checkpoint_outlives_many_turns() -> None:
    """Of a session that nobody interrupted, nor offloaded: another one begins like it."""
    engine, text = _open("hybrid"), SYSTEM
    for turn in range(7):
        text += _text(90 + turn, 25)
        reply = _reply(engine, text, count=2, points=(len(SYSTEM),))
        text += reply.ids
    other = _reply(engine, SYSTEM + _text(99, 25))
    assert other.cached == len(SYSTEM)
    engine.close()
