"""Result files: their form, and what is refused."""

import hashlib
import json

import pytest

from draftree.bench.fault import BenchError
from draftree.bench.headline import headline
from draftree.bench.record import KINDS, check_record, identify_model, read_records, write_record
from tests.bench import example


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_writing_and_reading(tmp_path, kind):
    record = example.record(kind)
    path = write_record(tmp_path, record)
    assert path.name == f"{kind}-smollm2.json"
    assert read_records(tmp_path) == {path.name: record}
    assert headline(record)


def test_model_is_known_by_its_bytes(tmp_path):
    path = tmp_path / "Some_Model-Q4_1.gguf"
    path.write_bytes(b"weights")
    model = identify_model(path)
    assert model.sha256 == hashlib.sha256(b"weights").hexdigest()
    assert (model.name, model.file, model.num_bytes) == ("some-model-q4-1", path.name, 7)


BREAKAGES = {
    "no machine": lambda r: r.pop("machine"),
    "no cpu": lambda r: r["machine"].pop("cpu"),
    "no hash": lambda r: r["model"].pop("sha256"),
    "no settings": lambda r: r.pop("settings"),
    "no timestamp": lambda r: r.update(timestamp="yesterday"),
    "no disturbance": lambda r: r.pop("disturbance"),
    "other schema": lambda r: r.update(schema=2),
    "other kind": lambda r: r.update(kind="guess"),
    "a flag for a number": lambda r: r["model"].update(num_bytes=True),
    "no raw samples": lambda r: r.update(measures={"decode": {"median": 3.0}}),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_broken_records_are_refused(name):
    record = example.record("peers")
    check_record(record, "x.json")
    BREAKAGES[name](record)
    with pytest.raises(BenchError, match=r"x\.json"):
        check_record(record, "x.json")


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_files_that_are_not_records_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(BenchError, match=r"a\.json"):
        read_records(tmp_path)


def test_files_are_plain_json(tmp_path):
    path = write_record(tmp_path, example.record("decode"))
    data = json.loads(path.read_text(encoding="utf-8"))
    samples = data["measures"]["forward_ms"]["8"]
    assert samples == {"unit": "ms", "median": 14.0, "low": 13.0, "high": 15.0} | {
        "samples": [13.0, 14.0, 15.0]
    }
