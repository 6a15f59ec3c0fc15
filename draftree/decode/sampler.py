"""Choosing a token: a pure function of logits, history, seed and absolute position.

The noise is a counter-based function of (seed, position, token), so plain and speculative decoding,
in any batch, choose the same token at the same position. A draft's candidates are ranked with the
same noise. Bias, log-probabilities and grammars cost nothing where they are not asked for.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import numpy as np

from draftree.core import Request, SamplingParams, TokenMatcher, TokenScores
from draftree.drafts.drafter import Proposal
from draftree.kernels.cpu.sampling import SamplingArgs, SamplingScratch, choose
from draftree.kernels.cpu.select import choose_greedy, forbid, penalize, rank_rows

_ALL_TOKENS: Final = np.empty(0, dtype=np.int64)  # of the vocabulary, in order
_NOISE_REACH: Final = 6.0  # once in 400 times there is more; a draft need not look for it
_IMPOSSIBLE: Final = np.float32(-1e4)  # a log-probability that sums of it can be subtracted from


class RankWeights(NamedTuple):
    """Of a draft's logit and of T * noise, in a candidate's score."""

    logits: float
    noise: float


# The target takes the largest logit + T * noise, and of the first position a draft sees all that
# the target sees. Logits of later ones are spread over what may come before them: they say less,
# and the noise, which will be added to the logits after one beginning only, says much less.
# Fitted to acceptance length at temperatures from 0.3 to 1. Without noise all have their chances.
FIRST_WEIGHTS: Final = RankWeights(1.0, 1.0)
LATER_WEIGHTS: Final = RankWeights(0.8, 0.6)


class Sampler:
    """The choices of one request. Penalties count the reply; repetition counts the prompt too."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int] = (),
        *,
        logit_bias: Sequence[tuple[int, float]] = (),
        num_logprobs: int | None = None,
        matcher: TokenMatcher | None = None,
    ) -> None:
        self.scores: TokenScores | None = None  # of the last choice, if they are wanted
        self.matcher = matcher
        self._seed, self._vocab_size = params.seed, vocab_size
        names = SamplingArgs._fields
        self._filters = SamplingArgs(**{name: getattr(params, name) for name in names})
        self._later_weights = FIRST_WEIGHTS if params.is_greedy else LATER_WEIGHTS
        self._has_penalties = self._filters.has_penalties
        self._scratch = SamplingScratch(vocab_size)
        self._processor: _LogitsProcessor | None = None
        if logit_bias or num_logprobs is not None or matcher is not None:
            self._processor = _LogitsProcessor(
                self._filters, vocab_size, logit_bias, num_logprobs, matcher
            )
        is_free = not self._has_penalties and self._processor is None
        self._is_bare = is_free and params.is_greedy  # only the largest logit counts
        self._next_position = len(prompt_ids)
        self._slots: dict[int, int] = {}  # token -> place in the two arrays
        self._seen_ids = np.zeros(64, dtype=np.int64)
        self._seen_counts = np.zeros(64, dtype=np.int64)
        if self._has_penalties:
            for token in dict.fromkeys(prompt_ids):
                self._slot(token)

    @classmethod
    def for_request(cls, request: Request, vocab_size: int) -> Self:
        return cls(
            request.sampling,
            vocab_size,
            request.prompt_ids,
            logit_bias=request.logit_bias,
            num_logprobs=request.logprobs,
            matcher=request.grammar.new_matcher() if request.grammar is not None else None,
        )

    @property
    def is_complete(self) -> bool:
        """The grammar lets nothing follow."""
        return self.matcher is not None and self.matcher.is_complete

    def choose(self, logits: np.ndarray, position: int) -> int:
        """The token at an absolute position, given the logits float32 [vocab_size] before it."""
        if self._is_bare:
            return int(choose_greedy(logits))
        count = len(self._slots)
        if self._processor is not None:
            seen = self._seen_ids[:count], self._seen_counts[:count]
            noise = self._seed, position, self._scratch
            token, self.scores = self._processor.choose(logits, seen, noise)
            return token
        seen = self._seen_ids[:count], self._seen_counts[:count]
        return choose(logits, self._filters, self._seed, position, self._scratch, *seen)

    def accept(self, token: int) -> None:
        """The token is part of the text from now on; penalties count it."""
        if self._has_penalties:
            slot = self._slot(token)  # may replace the arrays
            self._seen_counts[slot] += 1
        if self.matcher is not None:
            self.matcher.advance(token)
        self._next_position += 1

    def rank(
        self,
        logits: np.ndarray,
        position: int,
        num_candidates: int,
        tokens: np.ndarray | None = None,
    ) -> Proposal:
        """Candidates for consecutive positions from `position` on: logits float32 [num_positions,
        vocab_size], or a column for each of the tokens. Only the first row may know the token
        before it.

        Scores are the draft's log-probabilities, or with a temperature those of logit + T * noise,
        so that what the noise favours comes first, as it will in the target's own choice.
        """
        if self._processor is not None:
            if tokens is not None:  # bias and grammar go by token
                every = np.full((len(logits), self._vocab_size), -np.inf, dtype=np.float32)
                every[:, tokens] = logits
                logits, tokens = every, None
            logits = self._processor.process_draft(logits, position == self._next_position)
        asked = min(num_candidates, logits.shape[1]), _ALL_TOKENS if tokens is None else tokens
        parts = [self._score(logits[:1], position, FIRST_WEIGHTS, *asked)]
        if len(logits) > 1:
            parts.append(self._score(logits[1:], position + 1, self._later_weights, *asked))
        ids, scores = (np.concatenate(part) for part in zip(*parts, strict=True))
        is_impossible = None
        if self._processor is not None:  # a grammar may allow nothing that the draft knows
            is_impossible = scores[:, 0] == -np.inf
            scores[is_impossible] = 0.0
        if self._filters.temperature > 0.0:
            scores -= scores[:, :1]
            scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        if is_impossible is not None:
            scores[is_impossible] = _IMPOSSIBLE
        return Proposal(ids, scores)

    def _score(
        self, logits: np.ndarray, position: int, by: RankWeights, count: int, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best tokens of each row, and their scores."""
        noise_size = np.float32(self._filters.temperature) * np.float32(by.noise)
        temperature = float(noise_size / np.float32(by.logits))
        noise = temperature, self._seed, position, _NOISE_REACH
        scores, ids, log_probs = rank_rows(logits, tokens, *noise, count)
        if noise_size > 0.0:
            return ids, scores * noise_size
        return ids, np.where(scores[:, :1] > -np.inf, log_probs, scores)

    def rank_edges(
        self, ranked: Proposal, corrections: np.ndarray, *, is_chain: bool = False
    ) -> Proposal:
        """The same candidates, with the chance of each after each candidate before it: its logit
        corrected by [position, parent, candidate], while all of them together keep their chance.

        is_chain: every row was ranked by itself, and knew the token before it.
        """
        later = (FIRST_WEIGHTS if is_chain else self._later_weights).logits
        weights = np.full((len(corrections), 1, 1), later, dtype=np.float32)
        weights[0] = FIRST_WEIGHTS.logits
        scores = ranked.log_probs[:, None] + weights * corrections
        scores += _log_sum(ranked.log_probs)[:, None] - _log_sum(scores)
        order = np.argsort(-scores[0, 0], kind="stable")
        tokens, log_probs = ranked.tokens.copy(), ranked.log_probs.copy()
        tokens[0], log_probs[0] = tokens[0, order], scores[0, 0, order]
        edges = scores[1:]
        if len(edges):
            edges[0] = edges[0, order]  # parents lie in the order of their row
        return Proposal(tokens, log_probs, edges)

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._seen_ids):
            more = np.zeros_like(self._seen_ids)
            self._seen_ids = np.concatenate([self._seen_ids, more])
            self._seen_counts = np.concatenate([self._seen_counts, more])
        self._seen_ids[slot] = token
        return slot


def _log_sum(log_probs: np.ndarray) -> np.ndarray:
    """log(sum(exp)) along the last axis, which stays."""
    top = log_probs.max(axis=-1, keepdims=True)
    total: np.ndarray = top + np.log(np.exp(log_probs - top).sum(axis=-1, keepdims=True))
    return total


class _LogitsProcessor:
    """Logits as the request wants them: bias, penalties, grammar; then the choice, scored."""

    def __init__(
        self,
        filters: SamplingArgs,
        vocab_size: int,
        logit_bias: Sequence[tuple[int, float]],
        num_logprobs: int | None,
        matcher: TokenMatcher | None,
    ) -> None:
        self._penalties = filters[4:] if filters.has_penalties else None
        self._filters = SamplingArgs(*filters[:4])
        self._bias_ids = np.array([token for token, _ in logit_bias], dtype=np.int64)
        self._bias = np.array([value for _, value in logit_bias], dtype=np.float32)
        self._num_logprobs = num_logprobs
        self._matcher = matcher
        self._row = np.empty(vocab_size, dtype=np.float32)
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
        is_filtered = filters.temperature > 0 and filters[1:4] != (0, 1.0, 0.0)
        # Where only the largest counts, a free choice that the grammar allows is its choice too.
        self._needs_mask = is_filtered or num_logprobs is not None

    def choose(
        self,
        logits: np.ndarray,
        seen: tuple[np.ndarray, np.ndarray],  # tokens, counts
        noise: tuple[int, int, SamplingScratch],  # seed, position, memory
    ) -> tuple[int, TokenScores | None]:
        row, matcher = self._row, self._matcher
        row[:] = logits
        row[self._bias_ids] += self._bias
        if self._penalties is not None and len(seen[0]) > 0:
            penalize(row, *seen, *self._penalties)
        if matcher is not None and self._needs_mask:
            self._mask(matcher, row)
        token = choose(row, self._filters, *noise)
        if matcher is not None and not self._needs_mask and matcher.count_valid((token,)) == 0:
            self._mask(matcher, row)
            token = choose(row, self._filters, *noise)
        return token, None if self._num_logprobs is None else self._score(token)

    def process_draft(self, logits: np.ndarray, is_next: bool) -> np.ndarray:
        """A draft's logits with the bias and, in the first row if it is the next position, the
        grammar.
        """
        logits = logits.copy()
        logits[:, self._bias_ids] += self._bias
        if self._matcher is not None and is_next:
            self._mask(self._matcher, logits[0])
        return logits

    def _mask(self, matcher: TokenMatcher, row: np.ndarray) -> None:
        if matcher.fill_mask(self._bits):
            forbid(row, self._bits)

    def _score(self, token: int) -> TokenScores:
        row = self._row
        count = min(max(self._num_logprobs or 0, 1), len(row))
        _, (ids,), (log_probs,) = rank_rows(row[None], _ALL_TOKENS, 0.0, 0, 0, _NOISE_REACH, count)
        found = zip(ids.tolist(), log_probs.tolist(), strict=True)
        top = tuple((i, value) for i, value in found if value > -np.inf)
        total = float(row[ids[0]]) - float(log_probs[0])  # log of the sum of e^logit
        logprob = dict(top).get(token, float(row[token]) - total)
        return TokenScores(logprob, top[: self._num_logprobs])
