"""Result files: what was measured, of which file, where, when and with which settings.

One JSON file per kind and model, written by the bench commands only. Reading checks the form.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from draftree.bench.fault import BenchError
from draftree.bench.machine import describe_machine

SCHEMA: Final = 1
KINDS: Final = (
    "peers",
    "decode",
    "prefill",
    "memory",
    "start",
    "parity",
    "suite",
    "context",
    "budget",
    "multiturn",
    "overhead",
    "http",
    "card",
)
_FIELDS: Final = {
    "schema": int,
    "kind": str,
    "timestamp": str,
    "machine": dict,
    "model": dict,
    "settings": dict,
    "measures": dict,
}
_MODEL_FIELDS: Final = {"name": str, "file": str, "num_bytes": int, "sha256": str}
_MACHINE_FIELDS: Final = {
    "cpu": str,
    "num_cores": int,
    "architecture": str,
    "isa": str,
    "memory_gib": int,
    "system": str,
    "python": str,
    "packages": dict,
    "kernels": str,
}
_SAMPLE_FIELDS: Final = {"unit", "median", "low", "high", "samples"}
_CHUNK_BYTES: Final = 4 << 20

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
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while chunk := data.read(_CHUNK_BYTES):
            digest.update(chunk)
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
    # What is checked is what a reader will see: tuples have become lists.
    return check_record(json.loads(json.dumps(record)), kind)


def write_record(folder: Path, record: Json) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['kind']}-{record['model']['name']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def read_records(folder: Path) -> dict[str, Json]:
    """Every result of a folder by file name, in order of name."""
    records = {}
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, UnicodeDecodeError) as error:
            raise BenchError(f"{path} is not JSON ({error}).") from error
        records[path.name] = check_record(data, str(path))
    return records


def read_places(folder: Path) -> dict[str, dict[str, Json]]:
    """The results of a folder by the name of their machine's folder: "" is the folder itself."""
    inner = sorted(path for path in folder.glob("*") if path.is_dir())
    places = {"": read_records(folder)} | {path.name: read_records(path) for path in inner}
    return {name: records for name, records in places.items() if records}


def check_record(data: Any, name: str) -> Json:
    """The record itself, if it has the form that every result file has."""
    if not isinstance(data, dict):
        raise BenchError(f"{name} is not a result file: it holds no JSON object.")
    _check_fields(data, _FIELDS, name)
    if data["schema"] != SCHEMA:
        raise BenchError(f"{name} has schema {data['schema']}, this version reads {SCHEMA}.")
    if data["kind"] not in KINDS:
        raise BenchError(f"{name} is of the unknown kind {data['kind']!r}.")
    if not isinstance(data.get("disturbance", ""), float | int | None):
        raise BenchError(f"{name} does not say how much others disturbed it.")
    _check_fields(data["machine"], _MACHINE_FIELDS, f"{name}: machine")
    _check_fields(data["model"], _MODEL_FIELDS, f"{name}: model")
    try:
        datetime.fromisoformat(data["timestamp"])
    except ValueError as error:
        raise BenchError(f"{name} has no valid timestamp ({error}).") from None
    if not _count_samples(data["measures"]):
        raise BenchError(f"{name} holds no raw samples.")
    return data


def _check_fields(data: Mapping[str, Any], fields: Mapping[str, type], name: str) -> None:
    for field, kind in fields.items():
        if not isinstance(data.get(field), kind) or isinstance(data.get(field), bool):
            raise BenchError(f"{name} has no {field} of type {kind.__name__}.")


def _count_samples(data: Any) -> int:
    """How many sets of raw samples are anywhere inside."""
    if isinstance(data, Mapping):
        if data.keys() >= _SAMPLE_FIELDS:
            return 1 if data["samples"] else 0
        return sum(_count_samples(value) for value in data.values())
    return sum(map(_count_samples, data)) if isinstance(data, list) else 0
