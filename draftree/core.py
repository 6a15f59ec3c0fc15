"""The nouns that every part shares: sampling settings, requests, trees, events, statistics.

Plain frozen data; knows nothing of tensors, text or devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token, a stop string or end of text
    LENGTH = "length"  # max_tokens or the context is used up
    TOOL_CALLS = "tool_calls"  # the reply ended, and calls are to be answered
    CANCELLED = "cancelled"


class TokenSource(StrEnum):
    """Who proposed a token that the target then confirmed."""

    PLAIN = "plain"  # decoded without a draft
    CHAIN = "chain"  # the draft's first choice at every depth so far
    SIBLING = "sibling"  # a branch of the tree
    NGRAM = "ngram"  # looked up in the text so far
    GRAMMAR = "grammar"  # all, or nearly all, that the request's grammar lets follow
    BONUS = "bonus"  # the target's own token after the path


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. temperature 0 is greedy; every filter has an off value."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            (0.0 <= self.temperature <= 100.0, "temperature must be between 0 and 100"),
            (self.top_k >= 0, "top_k must be 0 (off) or more"),
            (0.0 < self.top_p <= 1.0, "top_p must be above 0 and at most 1"),
            (0.0 <= self.min_p < 1.0, "min_p must be at least 0 and below 1"),
            (0.0 < self.repetition_penalty <= 10.0, "repetition_penalty must be between 0 and 10"),
            (abs(self.presence_penalty) <= 10.0, "presence_penalty must be between -10 and 10"),
            (abs(self.frequency_penalty) <= 10.0, "frequency_penalty must be between -10 and 10"),
            (0 <= self.seed < 2**63, "seed must be between 0 and 2^63 - 1"),
        )
        for is_valid, sentence in checks:
            if not is_valid:
                raise ValueError(sentence)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class FreeSpan:
    """Text that a grammar asks nothing of, and does not end: so many tokens, or up to one of these,
    which is the last.
    """

    end_ids: frozenset[int] = frozenset()
    max_tokens: int | None = None


class TokenMatcher(Protocol):
    """Where one reply stands in its grammar."""

    def copy(self) -> "TokenMatcher":
        """The same place, from which to go on apart."""
        ...

    def find_free(self) -> FreeSpan | None:
        """Where every token may follow, for how long at least it need not be asked."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing may follow: the reply ends without a stop token."""
        ...

    def fill_mask(self, bits: "np.ndarray") -> bool:
        """Set exactly the bits of the tokens that may follow: uint32 [ceil(vocab_size / 32)].

        False: every token may, and the bits were left alone.
        """
        ...

    def count_valid(self, tokens: Sequence[int]) -> int:
        """How many of the tokens may follow, one after another. Exact for one token; a longer
        answer may be too high.
        """
        ...

    def propose_forced(self) -> Sequence[int]:
        """Tokens that must or are very likely to follow; often none."""
        ...

    def advance(self, token: int) -> None: ...


class TokenGrammar(Protocol):
    """What a reply may look like, token by token."""

    def new_matcher(self) -> TokenMatcher:
        """At the start of a reply."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids to continue. stop_ids end the reply and are not part of it."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_ids: frozenset[int] = frozenset()
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, what is added to its logit
    logprobs: int | None = None  # how many alternatives to report with each token; None: off
    grammar: TokenGrammar | None = None
    cache_points: tuple[int, ...] = ()  # lengths of prefixes that later prompts are likely to share
    sink_len: int = 0  # tokens at the beginning that a window leaves: system prompt and tools


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Tokens to run in one target pass. Node 0 is the root (the anchor); a chain has no
    branches.

    parents[i] < i for every node but the root, whose parent is -1. Siblings carry distinct
    tokens.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    sources: tuple[TokenSource, ...] = ()

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def find_child(self, parent: int, token: int) -> int | None:
        edges = zip(self.parents, self.tokens, strict=True)
        return next((i for i, edge in enumerate(edges) if edge == (parent, token)), None)

    @staticmethod
    def chain(tokens: "tuple[int, ...] | list[int]") -> "DraftTree":
        length = len(tokens)
        return DraftTree(tuple(tokens), tuple(range(-1, length - 1)), tuple(range(length)))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What planning needs to know of a model, read from metadata alone."""

    name: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    context_length: int
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_kv_layers: int  # layers with keys and values; the others are recurrent
    num_kv_heads: int
    head_dim: int  # of keys and values
    recurrent_bytes: int  # fixed state of all recurrent layers
    stash_width: int  # floats that a speculative node keeps in all recurrent layers
    is_quantized: bool
    window_bytes: int = 0  # of recurrent_bytes, those of convolutions
    embedding_bytes: int = 0  # of the token embedding, where the head is a matrix of its own
    has_even_keys: bool = False  # 8 bits of keys and values were measured to do no harm
    has_key_bias: bool = False  # what all keys share is large beside what tells them apart
    rotary_dim: int = 0  # of head_dim, those that turn with the position; 0: not known


@dataclass(frozen=True, slots=True)
class DraftSize:
    """What a draft adds to the plan."""

    weight_bytes: int
    kv_width: int  # floats of keys and values, per token and all layers
    feature_width: int  # floats of the target's features, per token
    block_len: int  # positions that it was trained to fill, with the anchor
    feature_layers: tuple[int, ...]  # the target's hidden state after each of these layers
    context_len: int  # positions that its layers look back, at most
    head_dim: int = 0  # 0: not known


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities at one position, after bias, penalties and grammar, before temperature."""

    logprob: float  # of the token that was chosen
    top: tuple[tuple[int, float], ...]  # the most probable tokens, best first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One committed token, in order. The last event of a request carries the reason and the
    usage.
    """

    token: int
    position: int  # absolute position in the sequence
    source: TokenSource
    round_index: int
    scores: TokenScores | None = None  # where the request asks for them


@dataclass(slots=True)
class RoundStats:
    """What speculation did in one request; filled by the decoder, read by everyone."""

    num_rounds: int = 0
    num_batched: int = 0  # of those, rows of passes that other requests shared
    num_drafted: int = 0  # nodes besides roots that were verified
    num_accepted: int = 0  # of those, on accepted paths
    verified_by_depth: list[int] = field(default_factory=list)  # trees that reached depth d + 1
    accepted_by_depth: list[int] = field(default_factory=list)  # paths that reached depth d + 1
    draft_ms: float = 0.0
    tree_ms: float = 0.0
    verify_ms: float = 0.0
    accept_ms: float = 0.0
    commit_ms: float = 0.0
    off_reason: str | None = None  # why speculation was off, when it was
    host_reason: str | None = None  # why the host ran the rounds, where the device could have

    def count(self, num_nodes: int, depth: int, num_accepted: int) -> None:
        """One more round: nodes and depth of its tree, and how many besides the root it kept."""
        self.num_rounds += 1
        self.num_drafted += num_nodes - 1
        self.num_accepted += num_accepted
        for counts, reached in (
            (self.verified_by_depth, depth),
            (self.accepted_by_depth, num_accepted),
        ):
            counts.extend([0] * (reached - len(counts)))
            for i in range(reached):
                counts[i] += 1


@dataclass(slots=True)
class Compression:
    """What was left out of long messages before the prompt was read. Tokens are the target's, of
    the texts that were shortened; marks count as kept.
    """

    num_texts: int = 0
    num_cached: int = 0  # of those, shortened in an earlier request
    num_spans: int = 0
    tokens_before: int = 0
    tokens_kept: int = 0
    score_ms: float = 0.0  # all of it:
    load_ms: float = 0.0  # opening the scoring model, once
    read_ms: float = 0.0  # its passes, until the scores are there
    select_ms: float = 0.0  # tokens, choosing and cutting

    @property
    def tokens_dropped(self) -> int:
        return self.tokens_before - self.tokens_kept


@dataclass(slots=True)
class Usage:
    """Counts and times of one request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from a prefix cache
    completion_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    first_token_ms: float = 0.0
    rounds: RoundStats = field(default_factory=RoundStats)
    read_tokens: int = 0  # of the prompt so far, with the cached ones
    window: int = 0  # positions that attention looked back; 0: all
    sinks: int = 0  # and so many at the beginning
    switch_ms: float = 0.0  # copying sequences, where requests take turns; in none of the others
    compression: Compression | None = None  # its time is in first_token_ms alone

    @property
    def acceptance_length(self) -> float:
        """AL: tokens committed a round."""
        return self.completion_tokens / self.rounds.num_rounds if self.rounds.num_rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1000.0 * self.completion_tokens / self.decode_ms if self.decode_ms else 0.0


_Items = TypeVar("_Items", str, tuple[int, ...])


def common_prefix_len(a: _Items, b: _Items) -> int:
    """How many items both begin with, by halves: whole slices are compared sooner than items."""
    equal, behind = 0, min(len(a), len(b))
    if a[:behind] == b[:behind]:
        return behind
    while behind - equal > 1:
        middle = (equal + behind) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            behind = middle
    return equal
