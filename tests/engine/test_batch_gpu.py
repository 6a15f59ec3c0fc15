"""Requests whose plain steps share passes on a GPU: the host chooses there, the device in rounds of
its own, and texts are those of requests alone.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.config import EngineConfig, GpuInfo, resolve
from draftree.core import Request, SamplingParams
from draftree.engine import parts as parts_module
from draftree.engine.engine import TokenEngine
from draftree.kernels.cuda import compile as cuda_compile
from draftree.kernels.cuda.compile import Gpu
from tests.decode.rule import RuleGrammar
from tests.engine.turns import HOT, KINDS, Reply, alone, make_prompt, open_engine, take_turns
from tests.examples import mark_long
from tests.tiny import tiny_path

REQUESTS = (
    Request(make_prompt(20, 1), 6, HOT),
    Request(make_prompt(12, 2), 8),
    Request(make_prompt(9, 3), 6, SamplingParams(temperature=0.7, presence_penalty=1.0)),
)
SCORED = Request(make_prompt(7, 4), 6, HOT, logprobs=2)
SETTINGS: dict[str, Any] = {"chunk": 16, "max_ctx": 64, "prefix_bytes": 1 << 30, "math": "auto"}


def _said(reply: Reply) -> list[tuple[object, ...]]:
    return [(event.token, event.position, event.scores) for event in reply.events]


@pytest.fixture
def _on_gpu(any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compile, "gpu", lambda index: any_gpu)
    monkeypatch.setattr(parts_module, "find_gpu", lambda device: GpuInfo(0, "a GPU", 2**36))
    monkeypatch.setattr("draftree.engine.batch._FRAME_S", 0.0)
    monkeypatch.setattr("draftree.engine.batch._SLICE_S", 0.0)


def _check(engine: TokenEngine) -> None:
    assert engine.plan.batch == 4
    grammar = RuleGrammar(engine.model_config.vocab_size, 3, length=7)
    constrained = Request(make_prompt(11, 5), 10, HOT, grammar=grammar)
    stop = alone(engine, REQUESTS[1]).events[4].token
    stopped = replace(REQUESTS[1], stop_ids=frozenset({stop}))
    requests = REQUESTS[0], stopped, REQUESTS[2], constrained, SCORED
    expected = [_said(alone(engine, request)) for request in requests]
    engine.reset()
    replies = take_turns(engine, requests[:4]) + take_turns(engine, requests[1:])
    expected = expected[:4] + expected[1:]
    assert [_said(reply) for reply in replies] == expected
    *batched, scored = (reply.stream.usage.rounds.num_batched for reply in replies)
    assert min(batched) > 0 and scored == 0
    assert engine.swapped_bytes == 0
    engine.close()


@pytest.mark.parametrize(
    "kind, ngram",
    mark_long(
        product(KINDS, ("off", "on")),
        but=(("dense", "off"), ("dense, drafted", "on"), ("hybrid, drafted", "off")),
    ),
)
@pytest.mark.usefixtures("_on_gpu")
def test_batched_requests_give_what_they_give_alone(kind: str, ngram: str) -> None:
    _check(open_engine(kind, batching="always", ngram=ngram, **SETTINGS))


@pytest.mark.parametrize("kv", mark_long(("q8_0", "q4"), but=("q4",)))
@pytest.mark.usefixtures("_on_gpu")
def test_formats_of_keys(kv: str) -> None:
    """With what keys have in common, where a format takes it from them."""
    config = EngineConfig(kv_k=kv, kv_v=kv, parallel=4, batching="always", **SETTINGS)
    _check(TokenEngine.open(tiny_path("qwen3"), config))


def test_the_plan_leaves_room_for_sequences() -> None:
    engine = open_engine("hybrid")
    model, gpu = engine.model_config, GpuInfo(0, "a GPU", 2**32)
    engine.close()
    plans = {mode: resolve(EngineConfig(batching=mode), model, gpu=gpu) for mode in ("off", "auto")}
    assert (plans["off"].batch, plans["auto"].batch) == (0, 8)
    kept = 8 * (plans["auto"].memory.kv + model.recurrent_bytes)
    asked = plans["auto"].prefix_bytes + plans["auto"].swapped_bytes
    left = gpu.memory_bytes - plans["auto"].memory.total
    assert plans["auto"].copy_bytes == min((left - kept) // 2, asked)
    small = GpuInfo(0, "a GPU", plans["off"].memory.total)
    assert resolve(EngineConfig(), model, gpu=small).batch == 0
    assert resolve(EngineConfig(persistent=True), model, gpu=gpu).batch == 0
