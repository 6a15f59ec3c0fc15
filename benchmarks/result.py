"""Reading result files: their form, whose machine they are from, and which are of older kernels."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from draftree.bench.record import SCHEMA, Json
from draftree.errors import BenchError

KINDS: Final = (
    *("peers", "decode", "prefill", "operations", "memory", "start", "parity"),
    *(
        "kv-quality",
        "suite",
        "suite-sampled",
        "context",
        "budget",
        "multiturn",
        "agent",
        "overhead",
    ),
    *("http", "gpu", "gpu-depth", "gpu-phases", "gpu-requests", "gpu-shapes", "cluster"),
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
_IDENTITY: Final = ("cpu", "num_cores", "architecture", "memory_gib")
_SAMPLE_FIELDS: Final = {"unit", "median", "low", "high", "samples"}


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


def check_same_machine(records: Mapping[str, Json]) -> None:
    """records by file name. Refuses results of two machines; software may differ."""
    found = {name: [r["machine"][key] for key in _IDENTITY] for name, r in records.items()}
    for name, other in found.items():
        first_name, first = next(iter(found.items()))
        if other != first:
            raise BenchError(
                f"{first_name} and {name} are from different machines ({_words(first)}; "
                f"{_words(other)}) and cannot be compared; measure both on one, or keep each "
                "machine's results in a folder of its own."
            )


def find_older(records: Mapping[str, Json]) -> list[str]:
    """The names of those that were taken with other kernels than the newest on the same device."""
    newest: dict[bool, tuple[str, Any]] = {}
    for record in records.values():
        on_gpu, kernels = _kernels_of(record)
        newest[on_gpu] = max(
            newest.get(on_gpu, ("", None)), (record["timestamp"], kernels), key=lambda pair: pair[0]
        )
    return [
        name
        for name, record in records.items()
        if _kernels_of(record)[1] != newest[_kernels_of(record)[0]][1]
    ]


def _kernels_of(record: Json) -> tuple[bool, Any]:
    """Whether a GPU ran it, and the digest of the kernels that did, where it is known."""
    device = record["measures"].get("device") or record["settings"].get("gpu") or "CPU"
    on_gpu = record["kind"].startswith("gpu") or device != "CPU"
    return on_gpu, record["machine"].get("gpu_kernels" if on_gpu else "kernels")


def is_of_one_kind(record: Json, other: Json) -> bool:
    """Whether their figures may stand in one file: of one machine, and of the same kernels."""
    one, two = record["machine"], other["machine"]
    is_alike = all(one.get(key) == two.get(key) for key in ("cpu", "num_cores"))
    return is_alike and _kernels_of(record) == _kernels_of(other)


def _words(identity: list[Any]) -> str:
    cpu, num_cores, architecture, memory_gib = identity
    return f"{cpu}, {num_cores} cores, {architecture}, {memory_gib} GiB"


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
