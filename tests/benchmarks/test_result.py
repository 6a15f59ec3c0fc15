"""Result files: their form, and what is refused."""

import pytest

from benchmarks.result import KINDS, check_record, check_same_machine, read_records
from draftree.bench.record import write_record
from draftree.errors import BenchError
from tests.benchmarks import example


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_writing_and_reading(tmp_path, kind):
    record = example.record(kind)
    path = write_record(tmp_path, record)
    assert path.name == f"{kind}-smollm2.json"
    assert read_records(tmp_path) == {path.name: record}


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


def test_software_does_not_make_another_machine():
    here = example.record("start")
    newer = here | {"machine": here["machine"] | {"python": "9.9", "packages": {}, "isa": "newer"}}
    check_same_machine({"a.json": here, "b.json": newer})


@pytest.mark.parametrize(
    "change",
    [{"cpu": "Another"}, {"num_cores": 64}, {"architecture": "vax"}, {"memory_gib": 4096}],
)
def test_different_machines_are_refused(change):
    here = example.record("start")
    other = here | {"machine": here["machine"] | change}
    with pytest.raises(BenchError, match=r"b\.json are from different machines"):
        check_same_machine({"a.json": here, "b.json": other})
