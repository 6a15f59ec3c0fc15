"""The nouns that every part shares: sampling settings, requests, trees, events, statistics.

Plain frozen data; knows nothing of tensors, text or devices.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token, a stop string or end of text
    LENGTH = "length"  # max_tokens or the context is used up
    CANCELLED = "cancelled"


class TokenSource(StrEnum):
    """Who proposed a token that the target then confirmed."""

    PLAIN = "plain"  # decoded without a draft
    CHAIN = "chain"  # the draft's first choice at every depth so far
    SIBLING = "sibling"  # a branch of the tree
    NGRAM = "ngram"  # looked up in the text so far
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
class Request:
    """Token ids to continue. stop_ids end the reply and are not part of it."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_ids: frozenset[int] = frozenset()


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
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @staticmethod
    def chain(tokens: "tuple[int, ...] | list[int]") -> "DraftTree":
        length = len(tokens)
        return DraftTree(tuple(tokens), tuple(range(-1, length - 1)), tuple(range(length)))


@dataclass(frozen=True, slots=True)
class ModelFacts:
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
    kv_width: int  # floats of keys and values together, per token and kv layer
    recurrent_bytes: int  # fixed state of all recurrent layers
    stash_width: int  # floats that a tentative node keeps in all recurrent layers
    is_quantized: bool


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One committed token, in order. The last event of a request carries the reason and the
    usage.
    """

    token: int
    position: int  # absolute position in the sequence
    source: TokenSource
    round_index: int


@dataclass(slots=True)
class RoundStats:
    """What speculation did in one request; filled by the decoder, read by everyone."""

    num_rounds: int = 0
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

    @property
    def acceptance_length(self) -> float:
        """AL: tokens committed a round."""
        return self.completion_tokens / self.rounds.num_rounds if self.rounds.num_rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1000.0 * self.completion_tokens / self.decode_ms if self.decode_ms else 0.0
