"""A window with sinks: drafting changes nothing, and nothing read under other sinks is used."""

from collections import Counter
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import pytest

from draftree.config import EngineConfig
from draftree.core import Request, SamplingParams
from draftree.decode.host_round import SpeculationOptions
from draftree.engine.engine import TokenEngine
from draftree.engine.stream import PAUSE
from draftree.models.target import Target
from tests.decode.oracle import OracleDrafter, check_lossless, count_kinds, run_plain
from tests.examples import mark_long
from tests.made import make_draft
from tests.tiny import same_state, tiny_path

if TYPE_CHECKING:
    from draftree.kernels.cuda.compile import Gpu

WINDOW, SINKS = 128, 20
CPU = EngineConfig(device="cpu", max_ctx=512, chunk=64, window=WINDOW)
HOT = SamplingParams(temperature=3.0, seed=4)  # the noise decides, and any draft knows the noise
PROMPT = tuple(int(t) for t in np.random.default_rng(5).integers(0, 250, 200))


def open_on_cpu(name: str, **options: object) -> TokenEngine:
    draft = make_draft("F16") if name == "qwen35-mtp" else None
    return TokenEngine.open(tiny_path(name), replace(CPU, **options), draft=draft)


def text_of(engine: TokenEngine, request: Request) -> list[int]:
    return [event.token for event in engine.generate(request)]


@pytest.mark.parametrize("sampling", [SamplingParams(), HOT], ids=["greedy", "hot"])
def test_drafting_changes_nothing(sampling: SamplingParams) -> None:
    name = "qwen35-mtp"
    request = Request(PROMPT, 40, sampling, sink_len=SINKS, logprobs=2)
    plain = open_on_cpu(name, budget=0)
    wanted = [(event.token, event.scores) for event in plain.generate(request)]
    drafted = open_on_cpu(name, budget=22, ngram="on")
    stream = drafted.generate(request)
    assert [(event.token, event.scores) for event in stream] == wanted
    assert stream.usage.rounds.num_drafted > 0
    assert stream.usage.rounds.num_accepted > 0 or sampling.is_greedy
    assert same_state(drafted.target.state.snapshot(), plain.target.state.snapshot())
    assert (stream.usage.window, stream.usage.sinks) == (WINDOW, SINKS)


SAMPLINGS = SamplingParams(temperature=0.8, seed=3), SamplingParams()


def check_oracle(
    target: Target,
    count: int,
    budgets: tuple[int, ...],
    samplings: tuple[SamplingParams, ...] = SAMPLINGS,
    chunk: int = 64,
) -> None:
    """A draft that knows the text, and some that is wrong."""
    for sampling in samplings:
        target.state.set_sinks(SINKS)
        plain, kinds = run_plain(target, PROMPT, sampling, count, chunk=chunk), Counter[str]()
        for budget in budgets:
            oracle = OracleDrafter(target.state, plain.text, target.model.vocab_size, budget)
            options = SpeculationOptions(budget, is_auto=False, use_lookup=False)
            kinds += count_kinds(check_lossless(target, plain, oracle, options))
        assert kinds["partial"] > 0 or kinds["whole"] > 0, kinds


@pytest.mark.parametrize("kv", mark_long(("f32", "f16", "q8_0"), but=("f16", "q8_0")))
@pytest.mark.parametrize("name", mark_long(("llama", "qwen3", "qwen35"), but=("llama", "qwen35")))
def test_an_oracle_changes_nothing(name: str, kv: str) -> None:
    engine = open_on_cpu(name, budget=40, kv_k=kv, kv_v=kv)
    check_oracle(engine.target, 48, (8, 22, 40))


@pytest.mark.parametrize("name", ["llama", "qwen35-mtp"])
def test_an_oracle_changes_nothing_on_a_gpu(name: str, any_gpu: "Gpu") -> None:
    from tests.cuda import CudaPlace

    target = CudaPlace(any_gpu).open_target(tiny_path(name), window=WINDOW)
    if any_gpu.is_real:
        check_oracle(target, 200, (8, 22, 40))
    else:
        check_oracle(target, 5, (7,), SAMPLINGS[:1], chunk=len(PROMPT))


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_window_and_sinks_have_a_say_where_the_text_is_longer(name: str) -> None:
    states = {}
    for window in (0, WINDOW, 300):
        for sinks in (0, SINKS):
            engine = open_on_cpu(name, window=window, budget=0)
            stream = engine.generate(Request(PROMPT, 30, HOT, sink_len=sinks))
            assert len(list(stream)) == 30
            assert stream.usage.sinks == (max(sinks, 4) if window else 0)
            states[window, sinks] = engine.target.state.snapshot()
    whole = states[0, 0]
    assert all(same_state(states[n, s], whole) for n in (0, 300) for s in (0, SINKS))
    assert not same_state(states[WINDOW, 0], whole) and not same_state(states[WINDOW, SINKS], whole)
    assert not same_state(states[WINDOW, 0], states[WINDOW, SINKS])


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_what_was_read_under_other_sinks_is_not_used(name: str) -> None:
    first, other = (Request(PROMPT, 12, sink_len=n, cache_points=(150,)) for n in (SINKS, 60))
    longer = replace(first, prompt_ids=(*PROMPT, 3, 1, 4, 1, 5))
    wanted = {}
    for request in (first, other, longer):
        wanted[request] = text_of(open_on_cpu(name, budget=0), request)
    engine, cached = open_on_cpu(name, budget=0), []
    for request in (first, other, first, longer, other):
        stream = engine.generate(request)
        assert [event.token for event in stream] == wanted[request]
        cached.append(stream.usage.cached_tokens)
    assert cached[:2] == [0, 0] and min(cached[2:]) >= 150  # each finds its own


def test_requests_of_other_sinks_take_turns() -> None:
    requests = [Request(PROMPT, 12, HOT, sink_len=n) for n in (SINKS, 60, SINKS)]
    wanted = [text_of(open_on_cpu("qwen35-mtp", budget=8), request) for request in requests]
    engine = open_on_cpu("qwen35-mtp", budget=8, parallel=3)
    streams = [engine.generate(request) for request in requests]
    found: list[list[int]] = [[] for _ in requests]
    for stream in streams:
        stream.should_pause = lambda: True
    live = set(range(len(streams)))
    while live:
        for i in sorted(live):
            events = list(takewhile(lambda event: event is not PAUSE, streams[i]))
            found[i] += [event.token for event in events]
            if streams[i].finish_reason is not None:
                live.discard(i)
    assert found == wanted


@pytest.mark.parametrize("window", [1, 127, -5, True])
def test_windows_that_are_refused(window: int) -> None:
    with pytest.raises(ValueError, match="window must be at least 128"):
        EngineConfig(window=window)
    with pytest.raises(ValueError, match="more than the budget"):
        EngineConfig(window=200, budget=200)
