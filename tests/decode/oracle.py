"""Drafts that know the text, and the check that drafting never changes it.

A `PlainRun` is what plain decoding gives: tokens, the state after each, features. `check_lossless`
decodes the same request speculatively and compares everything after every round.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftree.core import SamplingParams, TokenScores, TokenSource
from draftree.decode.controller import SpeculationController
from draftree.decode.cost import CostModel
from draftree.decode.decoder import Round
from draftree.decode.host_round import SpeculationOptions, SpeculativeDecoder
from draftree.decode.plain import PlainDecoder
from draftree.decode.sampler import Sampler
from draftree.drafts.drafter import Proposal, Proposer
from draftree.models.target import Target
from draftree.prefill.chunked import prefill
from draftree.state.sequence import SequenceState, Snapshot
from tests.tiny import same_state

NUM_POSITIONS = 15  # that a block fills after the anchor


@dataclass(frozen=True)
class PlainRun:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: tuple[int, ...]  # what follows the prompt
    states: tuple[Snapshot, ...]  # states[i]: when i tokens are out, the newest the anchor
    features: np.ndarray | None  # [committed positions, width], where the target captures them
    scores: tuple[TokenScores | None, ...] = ()  # of each token, where they are asked for

    @property
    def text(self) -> tuple[int, ...]:
        return self.prompt + self.tokens

    def first(self, count: int) -> "PlainRun":
        """The same run, broken off after that many tokens."""
        return replace(self, tokens=self.tokens[:count])


NewSampler = Callable[[SamplingParams, int, Sequence[int]], Sampler]


def run_plain(
    target: Target,
    prompt: Sequence[int],
    sampling: SamplingParams,
    count: int,
    new_sampler: NewSampler = Sampler,
    chunk: int = 64,
) -> PlainRun:
    """At most count tokens; fewer where a grammar is complete before. chunk: of the prompt."""
    prompt = tuple(int(token) for token in prompt)
    decoder = PlainDecoder(target, new_sampler(sampling, target.model.vocab_size, prompt))
    target.state.reset()
    given: list[object] = []
    prefill(target, prompt[:-1], chunk, given.append)
    decoder.start(prompt[-1])
    tokens, scores, states = [], [], [target.state.snapshot()]
    for _ in range(count):
        (emitted,) = decoder.step(1)
        tokens.append(emitted.token)
        scores.append(emitted.scores)
        states.append(target.state.snapshot())
        if emitted.is_last:
            break
    features: list[np.ndarray] = []
    if given:
        target.state.reset()

        def keep(rows: np.ndarray) -> None:
            on_host = getattr(rows, "cpu", lambda: rows)()  # a GPU's rows are tensors
            features.append(np.array(on_host))

        prefill(target, (*prompt, *tokens)[:-1], 64, keep)
    rows = np.concatenate(features) if features else None
    return PlainRun(prompt, sampling, tuple(tokens), tuple(states), rows, tuple(scores))


class OracleDrafter:
    """Proposes the true continuation to a random depth, at random ranks, and wrong tokens below.

    sure: the chance that a true token is first at its position; else it is among the next three.
    """

    def __init__(
        self,
        state: SequenceState,
        text: Sequence[int],
        vocab_size: int,
        seed: int,
        *,
        sure: float = 0.75,
        is_perfect: bool = False,
    ) -> None:
        self._state, self._text, self._vocab_size = state, text, vocab_size
        self._rng = np.random.default_rng(seed)
        self._sure, self._is_perfect = (1.0, True) if is_perfect else (sure, False)

    def reset(self) -> None: ...
    def extend_text(self, tokens: Sequence[int]) -> None: ...
    def extend_context(self, features: np.ndarray) -> None: ...

    def propose(
        self, anchor: int, sampler: Sampler, num_candidates: int, num_positions: int
    ) -> Proposal:
        rng, position = self._rng, self._state.committed
        assert self._text[position] == anchor
        width = min(num_candidates, self._vocab_size - 1)
        truth = self._text[position + 1 : position + 1 + NUM_POSITIONS]
        # a third of the blocks are wrong from the start, the others anywhere or nowhere
        depth = 0 if rng.random() < 0.33 else int(rng.integers(1, NUM_POSITIONS + 1))
        depth = min(NUM_POSITIONS if self._is_perfect else depth, len(truth))
        rows = np.empty((NUM_POSITIONS, width), dtype=np.int64)
        for i in range(NUM_POSITIONS):
            rows[i] = rng.choice(self._vocab_size, width, replace=False)
            if i < len(truth) and truth[i] in rows[i]:  # by chance
                wrong = next(t for t in range(self._vocab_size) if t not in rows[i])
                rows[i][rows[i] == truth[i]] = wrong
            if i < depth:
                rank = 0 if rng.random() < self._sure else int(rng.integers(1, 4))
                rows[i, min(rank, width - 1)] = truth[i]
        # Every second block is sure of itself, so that its tree goes deep.
        spread = np.full(width, rng.choice((0.4, 0.02)))
        probs = -np.sort(-rng.dirichlet(spread, NUM_POSITIONS), axis=1)
        return Proposal(rows, np.log(probs + 1e-9))


class RandomDrafter:
    """Random logits for every block, ranked by the sampler as a real draft's are."""

    def __init__(self, state: SequenceState, vocab_size: int, seed: int) -> None:
        self._state, self._vocab_size = state, vocab_size
        self._rng = np.random.default_rng(seed)

    def reset(self) -> None: ...
    def extend_text(self, tokens: Sequence[int]) -> None: ...
    def extend_context(self, features: np.ndarray) -> None: ...

    def propose(
        self, anchor: int, sampler: Sampler, num_candidates: int, num_positions: int
    ) -> Proposal:
        logits = self._rng.standard_normal((NUM_POSITIONS, self._vocab_size), dtype=np.float32) * 3
        return sampler.rank(logits, self._state.committed + 1, num_candidates)


class EdgeDrafter:
    """True tokens among others, with random edges between them."""

    def __init__(
        self, state: SequenceState, text: Sequence[int], vocab_size: int, seed: int
    ) -> None:
        self._state, self._text, self._vocab_size = state, text, vocab_size
        self._rng = np.random.default_rng(seed)

    def reset(self) -> None: ...
    def extend_text(self, tokens: Sequence[int]) -> None: ...
    def extend_context(self, features: np.ndarray) -> None: ...

    def propose(
        self, anchor: int, sampler: Sampler, num_candidates: int, num_positions: int
    ) -> Proposal:
        rng, start = self._rng, self._state.committed + 1
        logits = 2 * rng.standard_normal((NUM_POSITIONS, self._vocab_size)).astype(np.float32)
        for i, token in enumerate(self._text[start : start + NUM_POSITIONS]):
            logits[i, token] += rng.choice([0.0, 6.0, 12.0])
        ranked = sampler.rank(logits, start, min(num_candidates, 16))
        shape = *ranked.tokens.shape, ranked.tokens.shape[1]
        return sampler.rank_edges(ranked, 3 * rng.standard_normal(shape).astype(np.float32))


class RecordingDrafter:
    """Passes everything on, and keeps the features that it was told."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self._rows: list[np.ndarray] = []

    def reset(self) -> None:
        self._rows.clear()
        self._inner.reset()

    def extend_text(self, tokens: Sequence[int]) -> None:
        self._inner.extend_text(tokens)

    def extend_context(self, features: np.ndarray) -> None:
        self._rows.append(features.copy())
        self._inner.extend_context(features)

    def propose(
        self, anchor: int, sampler: Sampler, num_candidates: int, num_positions: int
    ) -> Proposal:
        return self._inner.propose(anchor, sampler, num_candidates, num_positions)

    def features(self) -> np.ndarray:
        """What was observed since the last reset: [positions, width]."""
        return np.concatenate(self._rows)


def check_lossless(
    target: Target,
    plain: PlainRun,
    drafter: Proposer | None,
    options: SpeculationOptions,
    *,
    cost: CostModel | None = None,
    new_sampler: NewSampler = Sampler,
) -> list[Round]:
    """Decode with a draft: the same tokens and, after every round, the same state and features.

    What a grammar ends, ends at the same token.
    """
    recorder = RecordingDrafter(drafter) if drafter is not None else None
    rounds: list[Round] = []
    target.state.restore(plain.states[0])
    if recorder is not None:
        recorder.reset()
        if plain.features is not None:
            recorder.extend_context(plain.features[: len(plain.prompt) - 1])
    sampler = new_sampler(plain.sampling, target.model.vocab_size, plain.prompt)
    controller = SpeculationController(cost=cost)
    decoder = SpeculativeDecoder(target, sampler, recorder, options, controller, rounds.append)
    decoder.start(plain.prompt[-1])
    found: list[int] = []
    while len(found) < len(plain.tokens):
        emitted = decoder.step(room := len(plain.tokens) - len(found))
        assert 1 <= len(emitted) <= room
        scores = tuple(e.scores for e in emitted)
        assert scores == plain.scores[len(found) : len(found) + len(emitted)], "the scores differ"
        found += [e.token for e in emitted]
        assert tuple(found) == plain.tokens[: len(found)], "the text differs from plain decoding"
        assert not any(e.is_last for e in emitted[:-1])
        state = target.state.snapshot()
        assert same_state(state, plain.states[len(found)]), f"the state differs at {len(found)}"
        if recorder is not None and plain.features is not None:
            expected = plain.features[: len(state.tokens)]
            assert np.array_equal(recorder.features(), expected), "the features differ"
    return rounds


def count_kinds(rounds: Sequence[Round]) -> Counter[str]:
    """How often each kind of acceptance occurred in rounds that drafted."""
    kinds: Counter[str] = Counter()
    for one in rounds:
        if one.tree.num_nodes == 1:
            kinds["plain"] += 1
            continue
        accepted, depth = len(one.path) - 1, max(one.tree.depths)
        kinds["zero"] += accepted == 0
        kinds["partial"] += 0 < accepted < depth
        kinds["whole"] += accepted == depth
        kinds["deep"] += accepted >= 8
        sources = [one.tree.sources[node] for node in one.path[1:]]
        kinds["sibling"] += TokenSource.SIBLING in sources
        kinds["lookup"] += TokenSource.NGRAM in sources
        kinds["after a sibling"] += TokenSource.SIBLING in sources[:-1]
        kinds["moved"] += one.path != tuple(range(len(one.path)))
    return kinds
