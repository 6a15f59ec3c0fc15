"""No kind of draft changes a text or a state, greedy or sampled, on dense and hybrid targets."""

from collections import Counter
from functools import cache, partial

import pytest

from draftree.config import EngineConfig
from draftree.core import Request, SamplingParams
from draftree.decode.host_round import SpeculationOptions
from draftree.drafts import draft_vocab
from draftree.drafts.registry import find_kind, read_draft_size
from draftree.engine.engine import TokenEngine
from draftree.models.target import Target
from draftree.weights.file import open_checkpoint
from tests.decode.oracle import check_lossless, count_kinds, run_plain
from tests.drafts.pairs import PAIRS
from tests.tiny import new_ops, open_target, tiny_path

SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.8, seed=3),
    "hot": SamplingParams(temperature=3.0, seed=3),  # the noise decides, and any draft knows it
}
PROMPT = (5, 9, 200, 31, 77, 12)


@pytest.fixture(autouse=True)
def _few_spare_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a draft of a listed vocabulary lacks some tokens, as with a large one."""
    monkeypatch.setattr(draft_vocab, "NUM_SPARE", 64)


@cache
def _target(name: str) -> Target:
    pair = PAIRS[name]
    layers = read_draft_size(pair.open_draft()).feature_layers
    return open_target(tiny_path(pair.target), num_threads=1, feature_layers=layers)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", PAIRS)
def test_text_and_state(name: str, sampling: str) -> None:
    target, draft, kinds = _target(name), PAIRS[name].open_draft(), Counter[str]()
    kind, ops = find_kind(draft), new_ops(exact=True, num_threads=1)
    kind.check_fit(draft, open_checkpoint(tiny_path(PAIRS[name].target)), target.model)
    drafter = kind.load(draft, target.model, ops, block_len=0, use_draft_vocab=True)
    plain = run_plain(target, PROMPT, SAMPLINGS[sampling], 24)
    for budget, use_lookup in ((1, False), (7, True), (22, False)):
        options = SpeculationOptions(budget, is_auto=False, use_lookup=use_lookup)
        kinds += count_kinds(check_lossless(target, plain, drafter, options))
    assert kinds["zero"] > 0
    assert kinds["partial"] + kinds["whole"] > 0 or sampling != "hot"


@pytest.mark.parametrize("name", PAIRS)
def test_engines_and_conversations(name: str) -> None:
    """As a user has it: with a prefix cache, going on, forking, and an automatic budget."""
    checkpoint, draft = open_checkpoint(tiny_path(PAIRS[name].target)), PAIRS[name].open_draft()
    config = partial(EngineConfig, device="cpu", max_ctx=256, threads=1, chunk=16)
    plain = TokenEngine(checkpoint, config(budget=0))
    for engine in (
        TokenEngine(checkpoint, config(budget=7), draft),
        TokenEngine(checkpoint, config(budget="auto"), draft),
    ):
        for sampling in (SAMPLINGS["greedy"], SAMPLINGS["warm"]):
            prompt = PROMPT * 6
            for turn in range(3):
                request = Request(prompt, 12, sampling)
                stream = engine.generate(request)
                reply = [event.token for event in stream]
                assert reply == [event.token for event in plain.generate(request)]
                assert stream.usage.rounds.host_reason is None
                prompt = (*prompt[: len(prompt) - 4 * turn], *reply[:9], 4, 8, 15, 16)
        engine.close()
    plain.close()
