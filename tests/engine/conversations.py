"""Random conversations of several clients, each reply compared with a fresh engine's.

Clients share system prompts, go on, regenerate, edit earlier turns, return to older branches, take
turns, and break off. Compared are text, rounds, statistics, and what target and draft hold
afterwards. Where a draft looks back no further than a window, rounds may differ after context was
lost, the text never.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from draftree.config import EngineConfig
from draftree.core import FinishReason, Request, SamplingParams
from draftree.decode.decoder import Round
from draftree.engine.engine import TokenEngine
from draftree.engine.stream import PAUSE, TokenStream
from draftree.state.sequence import Snapshot
from draftree.state.span import Span
from tests.tiny import same_state

_MAX_CTX = 288
_LONGEST = 200  # tokens of a conversation that is still gone on with
_TILE = 16  # positions whose keys are copied together
_VOCAB = 256
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """One request and what came of it: the tokens that a next turn can begin with."""

    prompt: Tokens
    reply: Tokens = ()

    @property
    def text(self) -> Tokens:
        return self.prompt + self.reply


@dataclass(frozen=True)
class Setting:
    """What a walk runs on. span_len: of the store, so that forks fall inside and between spans.
    window: of the draft, 0 if its context is all. scale: how many times as long texts are.
    batching: whether clients that write side by side share passes.
    """

    model: Path
    draft: Path | None
    prefix_bytes: int
    span_len: int = 512
    device: str = "cpu"
    budget: int = 7
    kv_type: str = "auto"
    window: int = 0
    scale: int = 1
    batching: str = "off"

    def open(self, prefix_bytes: int) -> TokenEngine:
        is_cpu = self.device == "cpu"
        config = EngineConfig(
            device=self.device,
            budget=self.budget,
            max_ctx=_MAX_CTX * self.scale,
            threads=1,
            math="exact" if is_cpu and self.kv_type == "auto" else "auto",
            kv_k=self.kv_type,
            kv_v=self.kv_type,
            chunk=24,
            prefix_bytes=prefix_bytes,
            ngram="off",
            batching=self.batching,
        )
        engine = TokenEngine.open(self.model, config, self.draft)
        engine._prefix.store._span_len = self.span_len
        return engine


@dataclass
class Walk:
    """Steps until a reply differs. `counts`: how often each action was taken."""

    setting: Setting
    seed: int
    num_clients: int = 3
    counts: Counter[str] = field(default_factory=Counter)
    num_cached: int = 0  # tokens that were not read again
    num_lost: int = 0  # replies that began with less context than a fresh engine's

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._engine = self.setting.open(self.setting.prefix_bytes)
        self._fresh = self.setting.open(0)
        systems = [self._random_tokens(20, 50) for _ in range(2)]
        self._clients: list[list[Turn]] = [[Turn(systems[i % 2])] for i in range(self.num_clients)]

    def close(self) -> None:
        self._engine.close()
        self._fresh.close()

    def run(self, num_steps: int) -> None:
        actions: list[tuple[int, Callable[[], None]]] = [
            (8, self._continue),
            (4, self._regenerate),
            (3, self._edit),
            (3, self._go_back),
            (2, self._cancel),
            (2, self._cancel_in_prompt),
            (2, self._break_off),
            (4, self._offload),
            (3, self._take_turns),
            (2, self._start_over),
        ]
        weights = np.array([weight for weight, _ in actions]) / sum(w for w, _ in actions)
        others = self._rng.choice(len(actions), max(num_steps - len(actions), 0), p=weights)
        for step, index in enumerate((*self._rng.permutation(len(actions)), *others)):
            action = actions[index][1]
            name = action.__name__.strip("_")
            try:
                action()
            except AssertionError as error:
                raise AssertionError(f"step {step} ({name}), seed {self.seed}: {error}") from error
            self.counts[name] += 1

    def _continue(self) -> None:
        turns = self._pick_client()
        self._ask(turns, turns[-1].text + self._random_tokens(1, 24))

    def _regenerate(self) -> None:
        turns = self._pick_client()
        if turns[-1].reply:
            self._ask(turns, turns[-1].prompt)

    def _edit(self) -> None:
        """An earlier turn is changed or cut short, and what follows goes."""
        turns = self._pick_client()
        text = turns[self._rng.integers(len(turns))].text
        kept = text[: self._rng.integers(1, len(text) + 1)]
        self._ask(turns, kept + self._random_tokens(1, 12))

    def _go_back(self) -> None:
        """An older branch goes on, as it ended or with the next one's first words."""
        turns = self._pick_client()
        turn = turns[self._rng.integers(len(turns))]
        later = turns[self._rng.integers(len(turns))].text[len(turn.text) :]
        self._ask(turns, turn.text + later[: self._rng.integers(0, 20)] + self._random_tokens(1, 4))

    def _cancel(self) -> None:
        """Some tokens of the reply are read, then it is closed; what was read is history."""
        turns = self._pick_client()
        prompt = self._fit(turns[-1].text + self._random_tokens(1, 12))
        stream = self._engine.generate(self._request(prompt, 16))
        seen = [next(stream).token for _ in range(self._rng.integers(0, 6))]
        stream.close()
        turns.append(Turn(prompt, tuple(seen)))

    def _cancel_in_prompt(self) -> None:
        turns = self._pick_client()
        prompt = self._fit(turns[-1].text + self._random_tokens(30, 60))
        stream = self._engine.generate(self._request(prompt, 4))
        stream.cancel()
        assert list(stream) == []

    def _break_off(self) -> None:
        """An exception inside a pass: what the sequence holds is unknown from there on."""
        turns = self._pick_client()
        forward, target = type(self._engine.target).forward, self._engine.target
        passes = self._rng.integers(1, 4)

        def failing(rows: range) -> object:
            nonlocal passes
            passes -= 1
            output = forward(target, rows)
            if passes == 0:
                raise KeyboardInterrupt
            return output

        prompt = self._fit(turns[-1].text + self._random_tokens(5, 40))
        target.forward = failing  # type: ignore[method-assign]
        try:
            list(self._engine.generate(self._request(prompt, 8)))
        except KeyboardInterrupt:
            pass
        finally:
            del target.forward

    def _take_turns(self) -> None:
        """Two or three clients at a time, interrupted anywhere; some leave in between."""
        clients = [self._pick_client() for _ in range(self._rng.integers(2, 4))]
        live: list[tuple[list[Turn], Request, TokenStream, list[int]]] = []
        for turns in clients:
            prompt = self._fit(turns[-1].text + self._random_tokens(1, 60))
            request = self._request(prompt, int(self._rng.integers(1, 12)))
            stream = self._engine.generate(request)
            stream.should_pause = lambda: bool(self._rng.random() < 0.7)
            live.append((turns, request, stream, []))
        while live:
            turns, request, stream, reply = live[self._rng.integers(len(live))]
            if self._rng.random() < 0.02:
                stream.close()
            for event in stream:
                if event is PAUSE:
                    break
                reply.append(event.token)
            else:
                live = [one for one in live if one[2] is not stream]
                if stream.finish_reason is not FinishReason.CANCELLED:
                    expected = _answer(self._fresh, request, is_fresh=True)[0][0]
                    assert tuple(reply) == expected, f"{reply} instead of {expected}"
                turns.append(Turn(request.prompt_ids, tuple(reply)))
        assert self._engine.kept_bytes <= self._engine.plan.prefix_bytes
        assert self._engine.swapped_bytes == 0

    def _offload(self) -> None:
        self._engine.offload()

    def _start_over(self) -> None:
        """A new conversation under somebody's system prompt."""
        system = self._clients[self._rng.integers(len(self._clients))][0]
        self._clients[self._rng.integers(len(self._clients))] = [Turn(system.prompt)]

    def _ask(self, turns: list[Turn], prompt: Tokens) -> None:
        """Both engines answer; then the turn is known to its client."""
        request = self._request(self._fit(prompt), int(self._rng.integers(1, 12)))
        reply, usage = _answer(self._engine, request)
        fresh_reply, fresh_usage = _answer(self._fresh, request, is_fresh=True)
        assert fresh_usage == 0
        is_lost = self._is_lost(usage)
        self.num_lost += is_lost
        is_same = reply[: 1 if is_lost else 2] == fresh_reply[: 1 if is_lost else 2]
        assert is_same, f"{usage} tokens cached: {reply[0]} instead of {fresh_reply[0]}"
        self._compare_states(f"{usage} tokens cached: another state")
        assert self._engine.kept_bytes <= self._engine.plan.prefix_bytes
        self.num_cached += usage
        turns.append(Turn(request.prompt_ids, reply[0]))

    def _is_lost(self, num_cached: int) -> bool:
        """Whether the draft looked at less than its window holds."""
        drafter, window = self._engine.drafter, self.setting.window
        return drafter is not None and drafter._first > max(num_cached - window + 1, 0)

    def _compare_states(self, sentence: str) -> None:
        engines = self._engine, self._fresh
        mine, fresh = (engine.target.state for engine in engines)
        assert same_state(mine.snapshot(), fresh.snapshot()), sentence
        drafters = [engine.drafter for engine in engines if engine.drafter is not None]
        start, end = max((d.first for d in drafters), default=0), mine.committed
        if start:  # whole tiles: what lies before and behind others is not state
            start, end = -(-start // _TILE) * _TILE, end // _TILE * _TILE
        copies = []
        for drafter in drafters:
            assert drafter.position == mine.committed
            span = Span(start, end, drafter.copy(start, end)) if start < end else Span(0, 0, ())
            copies.append(Snapshot(tuple(mine.tokens), (span,)))
        assert not copies or same_state(*copies), sentence

    def _request(self, prompt: Tokens, count: int) -> Request:
        """Greedy, or so hot that noise decides: then rounds of all lengths occur."""
        seed = int(self._rng.integers(3))
        sampling = SamplingParams(temperature=3.0, seed=seed) if seed else SamplingParams()
        points = tuple(sorted(self._rng.integers(1, len(prompt) + 1, self._rng.integers(0, 3))))
        return Request(prompt, count, sampling, cache_points=tuple(map(int, points)))

    def _pick_client(self) -> list[Turn]:
        turns = self._clients[self._rng.integers(len(self._clients))]
        if len(turns[-1].text) > _LONGEST * self.setting.scale:
            turns.append(Turn(turns[0].prompt))
        return turns

    def _fit(self, prompt: Tokens) -> Tokens:
        return prompt[: _MAX_CTX * self.setting.scale - 16]

    def _random_tokens(self, least: int, most: int) -> Tokens:
        """Of few kinds, so that texts often part later than at their first token."""
        length = self._rng.integers(least, most * self.setting.scale + 1)
        return tuple((self._rng.integers(0, 4, length) * (_VOCAB // 4) + 3).tolist())


def _answer(
    engine: TokenEngine, request: Request, *, is_fresh: bool = False
) -> tuple[tuple[Tokens, tuple[Round, ...]], int]:
    """Text and rounds, and how many tokens were cached."""
    if is_fresh:
        engine.reset()
    rounds: list[Round] = []
    stream = engine.generate(request)
    stream.watch = rounds.append
    reply = tuple(event.token for event in stream)
    return (reply, tuple(rounds)), stream.usage.cached_tokens
