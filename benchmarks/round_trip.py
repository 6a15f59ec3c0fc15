"""`python -m benchmarks.round_trip`: a draft exported for every system and read back.

In: a model that has a draft. Out: results/draft/export/NAME.json, how many weights there are and
how many are others afterwards, by system. No machine changes that, and no time is measured.
"""

import argparse
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from benchmarks.target import EXPORT_KIND
from draftree.bench.machine import describe_machine
from draftree.bench.record import Json, identify_model
from draftree.drafts.export import SYSTEMS, export_draft, without_selector
from draftree.errors import BenchError
from draftree.kernels.quant.formats import dequantize
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint
from draftree.weights.hub import draft_for, resolve

_FOLDER: Final = Path("results/draft/export")


def read_weights(draft: Checkpoint) -> dict[str, np.ndarray]:
    """All of them as float32, by name."""
    return {
        name: np.asarray(dequantize(draft.raw(name), info.qtype)).reshape(info.shape)
        for name, info in draft.tensors.items()
    }


def count_changed(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> int:
    """Weights that are others, missing or new; every bit counts."""
    num_changed = sum(found[name].size for name in found.keys() - expected.keys())
    for name, weights in expected.items():
        other = found.get(name)
        if other is None or other.shape != weights.shape:
            num_changed += weights.size
        else:
            num_changed += int((other.view(np.uint32) != weights.view(np.uint32)).sum())
    return num_changed


def measure(target: Path, draft: Path) -> Json:
    """Every system's form read back, and written as a GGUF again where it is none. A selector stays
    behind.
    """
    source, model = without_selector(open_checkpoint(draft)), open_checkpoint(target)
    weights = read_weights(source)
    changed = {}
    with TemporaryDirectory() as scratch:
        for system in SYSTEMS:
            out, back = Path(scratch) / system, Path(scratch) / f"{system}.back.gguf"
            export_draft(source, model, system, out, target.stem)
            there = open_checkpoint(out)
            export_draft(there, model, "llama.cpp", back, target.stem)
            trips = (there, open_checkpoint(back))
            changed[system] = max(count_changed(read_weights(trip), weights) for trip in trips)
    return {"num_weights": sum(each.size for each in weights.values()), "num_changed": changed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--results", type=Path, default=_FOLDER)
    options = parser.parse_args()
    target, draft = resolve(options.model), draft_for(options.model)
    if draft is None:
        raise BenchError(f"{options.model} has no draft.")
    result = {
        "kind": EXPORT_KIND,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(describe_machine()),
        "model": asdict(identify_model(target)),
        "draft": asdict(identify_model(draft)),
        "measures": measure(target, draft),
    }
    path = options.results / f"{options.model}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["measures"]))


if __name__ == "__main__":
    main()
