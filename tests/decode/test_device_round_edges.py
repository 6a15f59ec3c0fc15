"""Rounds on a GPU, real or emulated, whose draft scores candidates by the one before: the text of
plain decoding, and the trees that rounds of the host have.
"""

import math
from dataclasses import replace
from itertools import islice

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import Request, SamplingParams, TokenSource
from draftree.decode import sampler
from draftree.decode.decoder import Round
from draftree.decode.device_decoder import DeviceDecoder
from draftree.decode.device_tree import DeviceTreeDecoder
from draftree.decode.host_round import SpeculativeDecoder
from draftree.drafts.dflash import BlockDrafter
from draftree.kernels.cuda.compile import Gpu
from tests.decode.device_oracle import HOT, PROMPT, decode_on_host, request
from tests.decode.rule import RuleGrammar
from tests.decode.test_device_round import REPEATING
from tests.engine.turns import alone, take_turns
from tests.examples import mark_long

VOCAB = 512
RELATIVES = ("selector", "listed selector", "dflash2")
KINDS = {
    "greedy": {"sampling": SamplingParams()},
    "warm": {"sampling": SamplingParams(temperature=0.8, seed=3)},
    "hot": {"sampling": HOT},
    "penalties": {"sampling": replace(REPEATING, temperature=1.0), "logit_bias": ((7, 3.0),)},
    "grammar": {"sampling": SamplingParams(), "grammar": RuleGrammar(VOCAB, seed=1)},
    "masks": {"sampling": replace(HOT, top_k=40), "grammar": RuleGrammar(VOCAB, seed=1)},
}


@pytest.mark.parametrize("relative", mark_long(RELATIVES, but=("selector",)))
def test_drafting_changes_no_text(open_engine, any_gpu: Gpu, relative: str) -> None:
    engine = open_engine(7, relative=relative)
    for name, options in KINDS.items():
        asked = Request(PROMPT, 100 if any_gpu.is_real else 6, **options)
        wanted = [one.token for one in decode_on_host(engine, asked)]
        engine.reset()
        decoder = engine._use.decoders.new(asked, None)
        has_trees = "grammar" in options
        assert type(decoder) is (DeviceTreeDecoder if has_trees else DeviceDecoder)
        stream = engine.generate(asked)
        assert [event.token for event in stream] == wanted, name
        assert stream.usage.rounds.host_reason is None
        assert engine.target.state.tokens == [*PROMPT, *wanted[:-1]]
        if name == "hot":
            assert stream.usage.acceptance_length > 1.2


def rounds_of(engine, asked: Request, count: int) -> list[Round]:
    """The first rounds, the trees of which do not know of the end."""
    rounds: list[Round] = []
    engine.reset()
    engine.watch = rounds.append
    stream = engine.generate(asked)
    list(islice(stream, count))
    stream.close()
    return rounds


@pytest.mark.parametrize("kind", ["greedy", "warm"])
@pytest.mark.parametrize("relative", mark_long(RELATIVES, but=("selector", "dflash2")))
def test_trees_are_those_of_the_host(
    open_engine, any_gpu: Gpu, relative: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_NOISE_REACH", math.inf)  # as far as a device looks
    asked = Request(PROMPT, 60, **KINDS[kind])
    count, budget = 16 if any_gpu.is_real else 4, 15  # more than the block has
    found = rounds_of(open_engine(budget, relative=relative, ngram="off"), asked, count)
    monkeypatch.setattr(BlockDrafter, "programs", lambda self: None)
    engine = open_engine(budget, relative=relative, ngram="off")
    assert type(engine._use.decoders.new(asked, None)) is SpeculativeDecoder
    wanted = rounds_of(engine, asked, count)
    num_rounds = min(len(found), len(wanted))
    assert num_rounds >= 2
    branches = 0
    for ours, theirs in zip(found[:num_rounds], wanted[:num_rounds], strict=True):
        assert (ours.tree.tokens, ours.tree.parents) == (theirs.tree.tokens, theirs.tree.parents)
        assert (ours.path, ours.bonus) == (theirs.path, theirs.bonus)
        branches += list(ours.tree.parents) != list(range(-1, ours.tree.num_nodes - 1))
    assert branches > 0


def test_text_that_is_looked_up(open_engine) -> None:
    looping = SamplingParams(frequency_penalty=-10.0)  # soon one token is all that follows
    asked = Request((5, 9, 7) * 4, 16, looping)
    engine = open_engine(7, ngram="on", relative="selector")
    wanted = [one.token for one in decode_on_host(engine, asked)]
    rounds: list[Round] = []
    engine.reset()
    engine.watch = rounds.append
    assert [event.token for event in engine.generate(asked)] == wanted
    sources = [one.tree.sources[node] for one in rounds for node in one.path[1:]]
    assert TokenSource.NGRAM in sources


def test_tokens_without_a_row_are_not_proposed(open_engine, monkeypatch) -> None:
    """Only the first tokens compete, however large the others' logits are."""
    engine = open_engine(7, relative="selector")
    head = engine.drafter._head
    monkeypatch.setattr(engine.drafter, "_head", replace(head, num_tokens=100))
    monkeypatch.setattr(engine._use.decoders, "_rounds", engine.rounds_of(7))
    found = rounds_of(engine, request(SamplingParams(), 20), 2)
    proposed = [token for one in found for token in one.tree.tokens[1:]]
    assert len(proposed) > 5 and max(proposed) < 100


def test_requests_take_turns(open_engine) -> None:
    """A pause after every round: text, rounds and statistics are those of each request alone."""
    engine = open_engine(7, relative="selector", prefix_bytes=0, parallel=4)
    kinds = ("hot", "penalties", "grammar")
    requests = [Request((i, *PROMPT), 4, **KINDS[name]) for i, name in enumerate(kinds)]
    expected = []
    for one in requests:
        engine._use.decoders.reset()  # trees depend on what grammars refused before
        expected.append(alone(engine, one).facts)
    engine.reset()
    engine._use.decoders.reset()
    replies = take_turns(engine, requests)
    assert [reply.facts for reply in replies] == expected
    assert sum(reply.num_pauses for reply in replies) > 4
