"""The measurements of synthetic shapes, at toy scale on a CPU: all parts run, and say what they
should.
"""

import json
import weakref
from dataclasses import replace

import pytest

from benchmarks import gpu_shape, synthetic_text
from benchmarks.compress_session import ReplayOptions
from benchmarks.gpu_shape import ShapeBench, ShapeOptions, all_parts
from benchmarks.parts import Deadline, PartResult, run_parts
from draftree.bench import synthetic
from draftree.bench.agent import AgentOptions
from draftree.bench.record import ModelId
from draftree.weights.file import open_checkpoint

VOCAB = 49_408  # more than the tokenizer has


@pytest.fixture(scope="module")
def metadata(smollm2_path):
    return dict(open_checkpoint(smollm2_path).metadata)


@pytest.fixture
def bench(metadata, tmp_path, monkeypatch):
    target = replace(synthetic.SHAPES["tiny"][0], num_layers=4, vocab=VOCAB)
    draft = replace(synthetic.SHAPES["tiny"][1], num_layers=1, num_features=2)
    monkeypatch.setitem(synthetic.SHAPES, "toy", (target, draft))
    scorer = replace(synthetic_text.SCORERS["tiny"], num_layers=1)
    monkeypatch.setitem(synthetic_text.SCORERS, "toy", scorer)
    options = ShapeOptions(
        *("toy", tmp_path, 0.0, "cpu"),
        prompt_len=24,
        num_tokens=120,
        short_len=12,
        long_len=700,
        lengths=(1600,),
        room=1024,
        repeats=1,
        agent=AgentOptions(num_tokens=24, pause_s=0.0, num_turns=3),
        replay=ReplayOptions("auto", 4, 2, 1, 1, is_judged=False),
    )
    bench = ShapeBench(options, metadata, Deadline(600), lambda text: None)
    yield bench
    bench.close()


def test_every_row_of_the_head_is_a_token(metadata) -> None:
    tokenizer = synthetic_text.extend_tokenizer(metadata, VOCAB)
    assert tokenizer.vocab_size == VOCAB
    words = {tokenizer.token_bytes(token) for token in range(VOCAB - 100, VOCAB)}
    assert len(words) == 100 and all(word.decode().strip().isalpha() for word in words)
    text = "def f(x):\n    return x\n"
    known = synthetic_text.extend_tokenizer(metadata, 49_152)
    assert tokenizer.encode(text) == known.encode(text)


def test_no_two_long_texts_are_alike(metadata) -> None:
    texts = synthetic_text.LongTexts(synthetic_text.extend_tokenizer(metadata, VOCAB))
    first, second = texts.ids(300), texts.ids(300)
    assert len(first) == len(second) == 300 and first != second
    asked = texts.question(500)
    assert asked.endswith("?") and 500 <= len(texts._tokenizer.encode(asked)) < 1500


def test_clients_share_an_engine_that_stays_open(bench) -> None:
    found = gpu_shape.measure_clients(bench)
    assert found["num_clients"] == 4 and found["ratio"]["value"] > 0
    assert [len(found["first_ms"][n]["samples"]) for n in ("1", "4")] == [1, 4]
    beside = gpu_shape.measure_beside(bench)
    assert len(beside["first_s"]["samples"]) == 2 and beside["first_s"]["low"] > 0
    behind = gpu_shape.measure_behind(bench)
    assert set(behind["by_share"]) == {"0.1", "0.8"}


def test_an_agents_session_is_served_by_an_engine_that_stays_open(bench) -> None:
    found = gpu_shape.measure_session(bench)
    assert len(found["turns"]) == 3 and found["first_over_cold"]["median"] > 0
    assert all(turn["cached_tokens"] > 0 for turn in found["turns"][1:])
    assert next(bench.open_wide().complete((1, 2, 3), max_tokens=1)).text
    kept = weakref.ref(bench.open_wide().tokens)
    bench.close()
    assert kept() is None, "the next engine needs its memory"


def test_a_session_is_read_in_four_ways(bench) -> None:
    found = gpu_shape.measure_replay(bench)
    rows = found["ways"]
    assert rows["both"]["prompt_tokens"] == rows["plain"]["prompt_tokens"], "no text is long"
    assert rows["cached"]["cached_tokens"] > 0 and not rows["plain"]["num_calls"]


def test_a_schema_is_compared_with_free_rounds(bench) -> None:
    kinds = gpu_shape.measure_schema(bench)["kinds"]
    assert kinds["free"]["over_free"] == 1.0 and kinds["schema"]["over_free"] > 0
    assert set(kinds) == {"free", "free, T = 0.8", "schema", "schema, T = 0.8"}


def test_long_prompts_are_shortened_before_they_are_read(bench) -> None:
    for scorer in ("self", str(bench.write_scorer())):
        found = gpu_shape.measure_compress(bench, scorer)["lengths"]["1600"]
        assert found["prompt_tokens"] < 0.5 * found["tokens_before"]
        assert found["first_s"]["median"] >= found["prepared_s"] >= found["score_s"] > 0
        parts = [found[f"{name}_s"] for name in ("load", "read", "select")]
        assert sum(parts) == pytest.approx(found["score_s"], abs=1e-3) and min(parts[1:]) > 0
    full = gpu_shape.measure_full(bench)["lengths"]["1600"]
    assert full["score_s"] == 0 and full["prompt_tokens"] > 1600


def test_parts_come_in_an_order_and_are_written_one_by_one(bench, tmp_path) -> None:
    names = list(all_parts(bench))
    assert names[:3] == ["clients", "beside", "behind"] and names[-1] == "full"
    model = ModelId("toy", "toy.gguf", 1, "0")
    result = PartResult(tmp_path / "r", "gpu-shapes", model, bench.options.settings(), "CPU")
    parts = {name: all_parts(bench)[name] for name in ("schema",)}
    line = run_parts(result, parts, bench.deadline, lambda text: None)
    assert line["figures"]["schema"]["kinds"]["free"]["over_free"] == 1.0
    written = json.loads((tmp_path / "r" / "gpu-shapes-toy.json").read_text())
    assert list(written["measures"]["parts"]) == ["schema"]
