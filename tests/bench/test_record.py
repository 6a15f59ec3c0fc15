"""Result files: whose bytes were measured, and what a file looks like."""

import hashlib
import json
from dataclasses import dataclass

from draftree.bench.median import Samples, summarize
from draftree.bench.record import ModelId, identify_model, name_model, write_result


def test_model_is_known_by_its_bytes(tmp_path):
    path = tmp_path / "Some_Model-Q4_1.gguf"
    path.write_bytes(b"weights")
    model = identify_model(path)
    assert model.sha256 == hashlib.sha256(b"weights").hexdigest()
    assert (model.name, model.file, model.num_bytes) == ("some-model-q4-1", path.name, 7)


@dataclass(frozen=True)
class Measures:
    forward_ms: Samples

    def headline(self):
        return {"forward_ms": self.forward_ms.median}


def test_files_are_plain_json(tmp_path):
    model = ModelId("m", "M.gguf", 3, "ab")
    measures = Measures(summarize([13.0, 15.0, 14.0], "ms"))
    line = write_result(tmp_path, "decode", model, {"rounds": 3}, lambda: measures)
    path = tmp_path / "decode-m.json"
    assert (line["file"], line["model"], line["forward_ms"]) == (str(path), "m", 14.0)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert (data["kind"], data["settings"]["rounds"]) == ("decode", 3)
    assert data["machine"]["kernels"] and data["machine"]["gpu_kernels"]
    assert data["measures"]["forward_ms"] == {"unit": "ms", "median": 14.0, "low": 13.0} | {
        "high": 15.0,
        "samples": [13.0, 15.0, 14.0],
    }


def test_a_servers_model_has_no_bytes():
    assert name_model("Some/Model 7B") == ModelId("some-model-7b", "Some/Model 7B", 0, "")
