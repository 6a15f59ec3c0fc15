"""Trees of the host, for grammars and lookup, in rounds of a GPU, real or emulated: what the host
alone would write, token by token.
"""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import DraftTree, FinishReason, Request, SamplingParams, TokenSource
from draftree.decode.decoder import Round
from draftree.decode.device_tree import (
    DeviceTreeDecoder,
    check_choices,
    fill_masks,
)
from draftree.kernels.cuda.compile import Gpu
from draftree.text.constraint import CallTrigger, ReplyGrammar
from draftree.text.grammar import FormatKind, ResponseFormat
from tests.decode.device_oracle import FEW_NODES, HOT, PROMPT, check_kind, decode_on_host
from tests.decode.rule import RuleGrammar, TriggerGrammar
from tests.examples import mark_long
from tests.text.test_constraint import CALL, COMPILER, STOP, TOKENIZER, reasoning

VOCAB = 512  # of the model; its text knows fewer tokens
REPEATING = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=-2.0, seed=5)
KINDS = {
    "greedy": {"sampling": SamplingParams()},
    "hot": {"sampling": HOT},
    "filtered": {"sampling": SamplingParams(temperature=1.0, top_k=40, seed=2)},
    "all": {"sampling": REPEATING, "logit_bias": ((7, 3.0), (9, 2.0)), "logprobs": 4},
}


@pytest.mark.parametrize("kind", mark_long(KINDS, but=("greedy", "all")))
def test_the_text_of_the_host(open_engine, any_gpu: Gpu, kind: str) -> None:
    engine, count = open_engine(22), 100 if any_gpu.is_real else 9
    vocab_size = engine.model_config.vocab_size
    asked = Request(PROMPT, count, grammar=RuleGrammar(vocab_size, seed=1), **KINDS[kind])
    assert check_kind(engine, asked, (8, 22) if any_gpu.is_real else FEW_NODES) > 1.5
    free = [one.token for one in decode_on_host(engine, replace(asked, grammar=None))]
    assert not asked.grammar.follows(free)


def test_kinds_take_turns_on_one_engine(open_engine) -> None:
    """What one request leaves on the device is nothing to the next."""
    engine, texts = open_engine(7), {}
    grammar = RuleGrammar(engine.model_config.vocab_size, seed=1)
    for name in ("all", "greedy", "all", "greedy"):
        asked = Request(PROMPT, 4, grammar=grammar, **KINDS[name])
        found = [(event.token, event.scores) for event in engine.generate(asked)]
        if name not in texts:
            wanted = [event.token for event in decode_on_host(engine, asked)]
            assert [token for token, _ in found] == wanted, name
        assert texts.setdefault(name, found) == found


@pytest.mark.parametrize("length", mark_long((1, 2, 5, 9), but=(2, 5)))
def test_a_complete_grammar_ends_the_reply(open_engine, length: int) -> None:
    """Inside a path that was drafted right, or behind the tree."""
    engine = open_engine(7)
    grammar = RuleGrammar(engine.model_config.vocab_size, seed=3, length=length)
    asked = Request(PROMPT, 30, HOT, grammar=grammar)
    check_kind(engine, asked, FEW_NODES)
    stream = engine.generate(asked)
    tokens = [event.token for event in stream]
    assert len(tokens) == length and stream.finish_reason is FinishReason.STOP
    assert engine.target.state.tokens == [*PROMPT, *tokens[:-1]]


@pytest.mark.parametrize(
    ("length", "span"), [pytest.param(1, None, marks=pytest.mark.long), (4, 3)]
)
def test_triggers_begin_constrained_segments(
    open_engine, any_gpu: Gpu, length: int, span: int | None
) -> None:
    """Free text that ends at a trigger, or that must be asked about again after a while."""
    engine, count = open_engine(22), 100 if any_gpu.is_real else 11
    free = [one.token for one in decode_on_host(engine, Request(PROMPT, count, HOT))]
    rules = RuleGrammar(engine.model_config.vocab_size, seed=2, share=0.2)
    grammar = TriggerGrammar(rules, frozenset(free[2:5]), length, span)
    asked = Request(PROMPT, count, HOT, grammar=grammar)
    assert check_kind(engine, asked, (22,) if any_gpu.is_real else FEW_NODES) > 1.2
    assert engine.target.state.tokens != [*PROMPT, *free[:-1]]


def test_free_text_asks_nothing(open_engine) -> None:
    engine = open_engine(7)
    free = [event.token for event in engine.generate(Request(PROMPT, 8, HOT))]
    absent = next(token for token in range(VOCAB) if token not in free)
    grammar = TriggerGrammar(RuleGrammar(VOCAB, seed=2), frozenset({absent}), 4)
    asked = Request(PROMPT, 8, HOT, grammar=grammar)
    decoder = engine._use.decoders.new(asked, None)
    assert isinstance(decoder, DeviceTreeDecoder)
    engine.reset()
    stream = engine.generate(asked)
    rounds = []
    stream.watch = rounds.append
    assert [event.token for event in stream] == free
    assert max(one.tree.num_nodes for one in rounds) > 1


def test_what_a_grammar_forces_needs_no_draft(open_engine) -> None:
    """Without a draft, forced tokens are the tree."""
    engine = open_engine(7)
    grammar = RuleGrammar(engine.model_config.vocab_size, seed=6, share=0.02)
    engine._use.decoders._parts = replace(engine._use.decoders._parts, drafter=None)
    engine._prefix._drafter = engine.drafter = None
    rounds: list[Round] = []
    engine.watch = rounds.append
    asked = Request(PROMPT, 16, HOT, grammar=grammar)
    stream = engine.generate(asked)
    tokens = [event.token for event in stream]
    assert grammar.follows(tokens) and stream.usage.rounds.off_reason is None
    accepted = [one.tree.sources[node] for one in rounds for node in one.path[1:]]
    assert accepted.count(TokenSource.GRAMMAR) > 2 and len(rounds) < len(tokens)


LOOPING = SamplingParams(frequency_penalty=-10.0)  # soon one token is all that follows
LOOKUPS = {
    "plain": {"sampling": LOOPING},
    "scores": {"sampling": replace(LOOPING, temperature=0.5, top_p=0.9), "logprobs": 2},
    "grammar": {"sampling": LOOPING, "grammar": RuleGrammar(VOCAB, seed=4, share=0.97)},
}
LONG_LOOKUPS = (("plain", True), ("scores", False), ("grammar", False))


@pytest.mark.parametrize(
    ("kind", "has_draft"),
    [
        *(("plain", False), ("scores", True), ("grammar", True)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_LOOKUPS),
    ],
)
def test_text_that_is_looked_up(open_engine, kind: str, has_draft: bool) -> None:
    """By the device where a draft's tree takes it in, else by the host."""
    engine = open_engine(7, ngram="on")
    if not has_draft:
        engine._use.decoders._parts = replace(engine._use.decoders._parts, drafter=None)
        engine._prefix._drafter = engine.drafter = None
    asked = Request((5, 9, 7) * 4, 14, **LOOKUPS[kind])
    rounds: list[Round] = []
    engine.watch = rounds.append
    events = list(engine.generate(asked))
    wanted = decode_on_host(engine, asked)
    assert [event.token for event in events] == [one.token for one in wanted]
    assert all((event.scores is None) == ("logprobs" not in LOOKUPS[kind]) for event in events)
    sources = [one.tree.sources[node] for one in rounds for node in one.path[1:]]
    decoder = engine._use.decoders.new(asked, None)
    is_host_tree = kind == "grammar" or not has_draft
    assert isinstance(decoder, DeviceTreeDecoder) == is_host_tree
    drafted = (kind == "grammar") * has_draft  # which may have said it all
    assert sources.count(TokenSource.NGRAM) >= 1 - drafted


WRITABLE = tuple((token, -100.0) for token in range(TOKENIZER.vocab_size, VOCAB))
JSON = ResponseFormat(FormatKind.JSON_SCHEMA, {"type": "array", "items": {"enum": ["red", 1]}})
REPLIES = {
    "json": {"content": COMPILER.compile(JSON.write_rules("start"))},
    "thoughts, then json": {
        "content": COMPILER.compile(JSON.write_rules("start")),
        "reasoning": reasoning(is_open=True, budget=3),
    },
    "calls in text": {
        "reasoning": reasoning(is_open=True, budget=4),
        "trigger": CallTrigger(CALL, COMPILER.compile('start: "(" /[a-c]{1,3}/ ")"'), False),
    },
}


@pytest.mark.parametrize("sampling", mark_long(("hot", "filtered"), but=("hot",)))
@pytest.mark.parametrize("reply", mark_long(REPLIES, but=tuple(REPLIES)[1:]))
def test_grammars_of_text(open_engine, any_gpu: Gpu, reply: str, sampling: str) -> None:
    engine = open_engine(22)
    count = 10 if "trigger" not in REPLIES[reply] else 16 if sampling == "hot" else 20
    count = 60 if any_gpu.is_real else count
    grammar = ReplyGrammar(TOKENIZER, **REPLIES[reply])
    bias = (*WRITABLE, (CALL, 16.0 if sampling == "hot" else 6.0), (STOP, -9.0))
    asked = Request(
        PROMPT,
        count,
        logit_bias=bias,
        stop_ids=TOKENIZER.stop_ids,
        grammar=grammar,
        **KINDS[sampling],
    )
    check_kind(engine, asked, (22,) if any_gpu.is_real else FEW_NODES)
    tokens = engine.target.state.tokens[len(PROMPT) :]
    assert "trigger" not in REPLIES[reply] or CALL in tokens[5:-2]


class CheckedRounds:
    """Choices that the host checks."""

    def __init__(self, chosen: list[int]) -> None:
        self.chosen, self.ends = np.array(chosen), np.zeros(len(chosen), dtype=np.int32)
        self.masks = np.zeros((len(chosen), 3), dtype=np.uint32)
        self.asked: list[int] = []
        self.best: list[int] = []

    def read_choices(self) -> tuple[np.ndarray, np.ndarray]:
        return self.chosen, self.ends

    def read_best(self, node: int) -> list[int]:
        return self.best

    def choose_again(self, node: int) -> int:
        self.asked.append(node)
        self.chosen[:] = -1
        bits = np.unpackbits(self.masks[node, :-1].view(np.uint8), bitorder="little")
        return int(bits.argmax())


def test_choices_are_checked_along_the_path() -> None:
    """A valid one stays, a single alternative needs no device, of several it chooses."""
    grammar = RuleGrammar(64, seed=7, share=0.5)
    path, state, tokens = [], 0, []
    while not any(grammar.allowed[s].sum() > 1 for s in path[1:]) or len(path) < 4:
        path.append(state)
        tokens.append(int(np.flatnonzero(grammar.allowed[state])[-1]))
        state = (5 * state + tokens[-1] + 1) % 16
    tree = DraftTree.chain([1, *tokens])
    chosen = [*tokens, 0]
    forced = path.index(0)  # its state allows one token only
    chosen[forced] = (tokens[forced] + 1) % 64
    rounds = CheckedRounds(chosen)
    check_choices(tree, grammar.new_matcher(), rounds)
    assert rounds.asked in ([], [len(tokens)]) and rounds.chosen[:-1].tolist() == tokens
    several = next(i for i, s in enumerate(path) if grammar.allowed[s].sum() > 1)
    chosen[several] = int(np.flatnonzero(~grammar.allowed[path[several]])[0])
    rounds = CheckedRounds(chosen)
    check_choices(tree, grammar.new_matcher(), rounds)
    first = int(np.flatnonzero(grammar.allowed[path[several]])[0])
    assert rounds.asked == [several]
    assert rounds.chosen[: several + 1].tolist() == [*tokens[:several], first]
    assert rounds.ends.sum() == (first == tokens[several])
    rounds = CheckedRounds(chosen)
    rounds.best = [chosen[several], tokens[several], first]
    check_choices(tree, grammar.new_matcher(), rounds)
    assert several not in rounds.asked and rounds.chosen[:-1].tolist() == tokens


def test_masks_of_a_tree() -> None:
    grammar = RuleGrammar(64, seed=7, share=0.5)
    matcher = grammar.new_matcher()
    matcher.advance(1)
    first, second = np.flatnonzero(grammar.allowed[matcher._state])[:2].tolist()
    wrong = int(np.flatnonzero(~grammar.allowed[matcher._state])[0])
    tree = DraftTree((1, first, wrong, second, 5), (-1, 0, 0, 0, 2), (0, 1, 1, 1, 2))
    rows = np.full((5, 3), 7, dtype=np.uint32)
    fill_masks(tree, matcher, rows)
    for node, path in ((0, ()), (1, (first,)), (3, (second,))):
        oracle, expected = matcher.copy(), np.zeros(2, dtype=np.uint32)
        for token in path:
            oracle.advance(token)
        assert oracle.fill_mask(expected)
        assert rows[node].tolist() == [*expected.tolist(), 0]
    assert (rows[[2, 4]] == 7).all()  # out of reach
