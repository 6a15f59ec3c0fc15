"""Phases of a reply: reasoning with a budget, a format behind it, calls in free text."""

import numpy as np
import pytest

from draftree.core import FreeSpan
from draftree.text.constraint import CallTrigger, Reasoning, ReplyGrammar, ReplyMatcher
from draftree.text.grammar import GrammarCompiler
from draftree.text.tokenizer import Tokenizer
from tests.text.metadata import byte_metadata

TAGS = (("<think>", 4), ("</think>", 4), ("<tool_call>", 4), ("<|im_end|>", 3))
TOKENIZER = Tokenizer.from_metadata(byte_metadata(*TAGS))
UNTAGGED = Tokenizer.from_metadata(byte_metadata(("<|im_end|>", 3)))
COMPILER = GrammarCompiler(TOKENIZER)
THINK, END_THINK, CALL = (TOKENIZER.find(tag) for tag, _ in TAGS[:3])
(STOP,) = TOKENIZER.stop_ids


def reasoning(*, is_open: bool = False, budget: int | None = None) -> Reasoning:
    return Reasoning(is_open, budget)


def compile_rules(rules: str):
    return COMPILER.compile(rules)


class Walk:
    """A matcher, and checks that its answers agree."""

    def __init__(self, grammar: ReplyGrammar) -> None:
        self.tokenizer = grammar.tokenizer
        self.matcher = grammar.new_matcher()

    def allowed(self) -> set[int]:
        size = self.tokenizer.vocab_size
        bits = np.zeros((size + 31) // 32, dtype=np.uint32)
        everything = set(range(size))
        if self.matcher.fill_mask(bits):
            flags = np.unpackbits(bits.view(np.uint8), bitorder="little", count=size)
            everything = set(np.flatnonzero(flags).tolist())
        assert {i for i in range(size) if self.matcher.count_valid((i,)) > 0} == everything
        return everything

    def say(self, text: str | int) -> "Walk":
        tokens = [text] if isinstance(text, int) else self.tokenizer.encode(text)
        for token in tokens:
            assert token in self.allowed(), self.tokenizer.token_bytes(token)
            self.matcher.advance(token)
        return self

    @property
    def is_free(self) -> bool:
        return len(self.allowed()) == self.tokenizer.vocab_size

    def forced(self) -> str:
        return self.tokenizer.decode(self.matcher.propose_forced())


def test_nothing_is_asked() -> None:
    walk = Walk(ReplyGrammar(TOKENIZER))
    assert walk.is_free and walk.say("anything").is_free and not walk.matcher.is_complete
    assert walk.forced() == ""


@pytest.mark.parametrize("tokenizer", [TOKENIZER, UNTAGGED], ids=["one token", "many tokens"])
@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_is_closed_when_the_budget_is_used_up(
    tokenizer: Tokenizer, budget: int, is_open: bool
) -> None:
    walk = Walk(ReplyGrammar(tokenizer, reasoning=reasoning(is_open=is_open, budget=budget)))
    if not is_open:
        walk.say("<think>")
    for _ in range(budget):
        assert walk.is_free
        walk.say("x")
    assert walk.forced() == "\n</think>\n\n"
    ending = list(walk.matcher.propose_forced())
    assert walk.matcher.count_valid([*ending, 65, 66]) == len(ending) + 2
    assert walk.matcher.count_valid([ending[0], 65]) == 1
    for token in ending:
        assert walk.allowed() == {token}
        walk.say(token)
    assert walk.is_free and not walk.matcher.is_complete


@pytest.mark.parametrize("tokenizer", [TOKENIZER, UNTAGGED], ids=["one token", "many tokens"])
def test_reasoning_that_ends_by_itself_is_left_alone(tokenizer: Tokenizer) -> None:
    grammar = ReplyGrammar(tokenizer, reasoning=reasoning(budget=20))
    walk = Walk(grammar).say("\n <think>hm</think>and now a long text, <think>more of it")
    assert walk.is_free and walk.forced() == ""


def test_text_that_only_looks_like_reasoning_costs_no_budget() -> None:
    for text in ("<thinking about a long text", "no, <think> comes too late"):
        walk = Walk(ReplyGrammar(UNTAGGED, reasoning=reasoning(budget=2))).say(text)
        assert walk.is_free


def test_a_format_applies_behind_the_reasoning() -> None:
    content = compile_rules('start: /\\n*/ "yes" | /\\n*/ "no"')
    grammar = ReplyGrammar(TOKENIZER, reasoning=reasoning(), content=content)
    walk = Walk(grammar)
    assert walk.allowed() == {THINK, *TOKENIZER.encode("\nyn")}
    walk.say(THINK)
    assert walk.allowed() == set(range(TOKENIZER.vocab_size)) - {STOP}
    walk.say("whatever, yes").say(END_THINK)
    assert walk.allowed() == set(TOKENIZER.encode("\nyn"))
    walk.say("\n\ny")
    assert walk.forced() == "es"
    assert walk.say("es").matcher.is_complete
    assert Walk(grammar).say("no").matcher.is_complete


def test_a_format_behind_reasoning_that_was_cut() -> None:
    content = compile_rules('start: "yes"')
    opened = reasoning(is_open=True, budget=3)
    walk = Walk(ReplyGrammar(TOKENIZER, reasoning=opened, content=content)).say("abc")
    assert walk.say("\n").say(END_THINK).say("\n\n").forced() == "yes"
    assert walk.say("yes").matcher.is_complete


@pytest.mark.parametrize("is_single", [False, True])
def test_a_call_follows_its_tag_and_text_is_free_again(is_single: bool) -> None:
    call = compile_rules('start: "f(" /[0-9]+/ ")"')
    trigger = CallTrigger(CALL, call, is_single)
    walk = Walk(ReplyGrammar(TOKENIZER, reasoning=reasoning(), trigger=trigger))
    walk.say("Let me see: ").say(CALL)
    assert walk.forced() == "f(" and walk.allowed() == set(TOKENIZER.encode("f"))
    walk.say("f(12")
    assert walk.allowed() == set(TOKENIZER.encode("0123456789)"))
    walk.say(")")
    assert walk.matcher.is_complete == is_single
    if not is_single:
        assert walk.is_free
        walk.say("\n").say(CALL).say("f(3)")
        assert walk.is_free and not walk.matcher.is_complete


def test_tags_within_reasoning_begin_no_call() -> None:
    trigger = CallTrigger(CALL, compile_rules('start: "f()"'), is_single=False)
    grammar = ReplyGrammar(TOKENIZER, reasoning=reasoning(is_open=True), trigger=trigger)
    walk = Walk(grammar).say("I could use ").say(CALL)
    assert walk.is_free
    assert walk.say(END_THINK).say(CALL).forced() == "f()"


def test_a_stop_token_ends_everything() -> None:
    walk = Walk(ReplyGrammar(TOKENIZER, content=compile_rules("start: /[0-9]+/"))).say("1")
    assert walk.allowed() == {*TOKENIZER.encode("0123456789"), STOP}
    assert walk.say(STOP).matcher.is_complete


def test_matchers_are_independent() -> None:
    grammar = ReplyGrammar(TOKENIZER, content=compile_rules('start: "ab"'))
    first, second = grammar.new_matcher(), grammar.new_matcher()
    assert isinstance(first, ReplyMatcher)
    first.advance(97)
    assert first.propose_forced() == [98] and second.propose_forced() == [97, 98]


@pytest.mark.parametrize("is_open", [False, True])
def test_rows_that_are_no_token_add_nothing_to_reasoning(is_open: bool) -> None:
    """A draft may propose one: models have more rows than there are tokens."""
    matcher = ReplyGrammar(TOKENIZER, reasoning=reasoning(is_open=is_open)).new_matcher()
    matcher.advance(TOKENIZER.vocab_size + 2)
    for token in TOKENIZER.encode("x</think>"):
        matcher.advance(token)
    assert not matcher.is_complete


def test_free_text_says_for_how_long() -> None:
    """Until the token that begins a call, or until reasoning may be over its budget."""
    call = CallTrigger(CALL, compile_rules('start: "ab"'), is_single=False)
    walk = Walk(ReplyGrammar(TOKENIZER, reasoning=reasoning(budget=3), trigger=call))
    ends = frozenset({CALL})
    assert walk.matcher.find_free() == FreeSpan(ends, 4)  # the tag, and three tokens
    assert walk.say(THINK).matcher.find_free() == FreeSpan(ends, 3)
    assert walk.say("x").matcher.find_free() == FreeSpan(ends, 2)
    assert walk.say("yz").matcher.find_free() is None  # the closing tag must follow
    for token in list(walk.matcher.propose_forced()):
        walk.say(token)
    assert walk.matcher.find_free() == FreeSpan(ends)
    assert walk.say(CALL).matcher.find_free() is None
    assert walk.say("ab").matcher.find_free() == FreeSpan(ends)
    assert Walk(ReplyGrammar(TOKENIZER)).matcher.find_free() == FreeSpan()
    content = ReplyGrammar(TOKENIZER, reasoning=reasoning(), content=compile_rules('start: "ab"'))
    assert Walk(content).say(THINK).matcher.find_free() is None  # it must not end here


def test_copies_go_on_apart() -> None:
    walk = Walk(ReplyGrammar(TOKENIZER, content=compile_rules('start: "ab" | "ac"'))).say("a")
    other = walk.matcher.copy()
    other.advance(TOKENIZER.encode("b")[0])
    assert other.is_complete and not walk.matcher.is_complete
    assert walk.say("c").matcher.is_complete
