"""What the package says of its speed is what was measured."""

import re
import tomllib
from pathlib import Path

from benchmarks.result import read_records

ROOT = Path(__file__).parents[2]


def speed_ups(folder):
    """Lowest and highest over the data sets, for the default model."""
    record = read_records(ROOT / "results" / folder)["suite-smollm2-135m-instruct.q4-1.json"]
    found = [item["speed_up"] for item in record["measures"]["sets"].values()]
    return record, f"{min(found):.1f} to {max(found):.1f} times"


def test_the_description_has_the_measured_speed_ups():
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    on_cpu, cpu = speed_ups("")
    on_gpu, gpu = speed_ups("gpu")
    assert on_cpu["machine"]["architecture"] == "x86_64" and on_cpu["measures"]["device"] == "CPU"
    assert "H200" in on_gpu["measures"]["device"]
    assert f"{cpu} as fast on an x86-64 CPU, {gpu} on an H200" in text
    assert len(re.findall(r"\d\.\d", text)) == 4, "a figure that no result has"
    for record in (on_cpu, on_gpu):
        sets = record["measures"]["sets"].values()
        assert all(item["num_equal"] == item["num_prompts"] for item in sets)
