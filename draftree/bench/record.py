"""Result files: what was measured, of which file, where, when and with which settings. One JSON
file per kind and model.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from draftree.bench.disturbance import foreign_share, look
from draftree.bench.machine import describe_machine
from draftree.memory import usable_cores

SCHEMA: Final = 1

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelId:
    """Which bytes were measured."""

    name: str
    file: str
    num_bytes: int
    sha256: str


def identify_model(path: Path) -> ModelId:
    """The file's own name and hash; no folder, since that is one machine's business."""
    with path.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256")
    return ModelId(_slug(path.stem), path.name, path.stat().st_size, digest.hexdigest())


def name_model(name: str) -> ModelId:
    """A model whose bytes are not here, as a server calls it."""
    return ModelId(_slug(name), name, 0, "")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "model"


def make_record(
    kind: str, model: ModelId, settings: Json, measures: Any, disturbance: float | None
) -> Json:
    """measures: a dataclass of what the kind measures. disturbance: what foreign_share said."""
    record = {
        "schema": SCHEMA,
        "kind": kind,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(describe_machine()),
        "model": asdict(model),
        "settings": settings,
        "disturbance": disturbance,
        "measures": asdict(measures),
    }
    # As a reader will see it: tuples have become lists.
    return dict(json.loads(json.dumps(record)))


def write_record(folder: Path, record: Json) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['kind']}-{record['model']['name']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def write_result(
    folder: Path, kind: str, model: ModelId, settings: Json, measure: Callable[[], Any]
) -> Json:
    """Measure, look how busy the machine was meanwhile, and write the file. Returns the line that a
    command ends with; what measure returns has its few figures as headline().
    """
    before = look()
    measures = measure()
    share = foreign_share(before, look(), usable_cores())
    path = write_record(folder, make_record(kind, model, settings, measures, share))
    line = {"kind": kind, "model": model.name, "file": str(path), "disturbance": share}
    return line | measures.headline()
