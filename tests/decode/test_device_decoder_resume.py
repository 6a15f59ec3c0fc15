"""Replies that another engine began, in rounds of a GPU, real or emulated: penalties and grammars
count what was written there.
"""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import Request, SamplingParams
from draftree.kernels.cuda.compile import Gpu
from tests.decode.device_oracle import HOT, PROMPT
from tests.decode.rule import RuleGrammar

PENALTIES = SamplingParams(1.0, presence_penalty=2.0, frequency_penalty=2.0, seed=5)
KINDS = {"hot": (HOT, False), "penalties": (PENALTIES, False), "grammar": (HOT, True)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens(open_engine, any_gpu: Gpu, kind: str) -> None:
    sampling, has_grammar = KINDS[kind]
    engine, count = open_engine(7), 100 if any_gpu.is_real else 7
    grammar = RuleGrammar(engine.model_config.vocab_size, seed=1) if has_grammar else None
    asked = Request(PROMPT, count, sampling, grammar=grammar)
    whole = [event.token for event in engine.generate(asked)]
    for length in (1, count - 3):
        engine.reset()
        stream = engine.generate(asked)
        stream.begun = whole[:length]
        assert [event.token for event in stream] == whole
        assert stream.usage.rounds.host_reason is None
        assert engine.target.state.tokens == [*PROMPT, *whole[:-1]]
