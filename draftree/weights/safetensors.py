"""A DFlash draft as z-lab publishes it or the speculators library saves it: a folder with
config.json and safetensors files.

In: the folder. Out: a Checkpoint in the spelling of `dflash` GGUF files, its tensors views of the
memory-mapped files. numpy has no bfloat16, so the header is read here and the bytes stay raw.
"""

import json
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from draftree.errors import CheckpointError
from draftree.kernels.quant.formats import QuantType
from draftree.weights.checkpoint import Checkpoint, TensorInfo
from draftree.weights.dflash import flatten_speculators, rename_tensors, translate_config
from draftree.weights.mapping import map_file

_MAX_JSON_BYTES = 4 << 20  # a draft's header takes a few kilobytes
_MAX_DIMS = 4
_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel")
_INDEX = "model.safetensors.index.json"
# Copies of the target's that speculators saves with a draft, and maps of a smaller vocabulary.
_OF_TARGET = (
    *("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"),
    *("t2d", "d2t"),
)


class _Refused(ValueError):
    """JSON that is valid but says a name twice."""


def _is_draft(config: dict[str, Any]) -> bool:
    names = config.get("architectures", ["DFlashDraftModel"])
    return isinstance(names, list) and len(names) == 1 and names[0] in _ARCHITECTURES


def open_dflash_folder(folder: Path) -> Checkpoint:
    """Open a folder with config.json and model.safetensors, or several files and their index."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is a folder without config.json; give a .gguf file, "
            "or a DFlash draft folder with config.json and *.safetensors."
        )
    config = _read_json_file(folder / "config.json")
    skipped: tuple[str, ...] = ()
    if "speculators_model_type" in config:
        config, skipped = flatten_speculators(folder, config), _OF_TARGET
    elif not _is_draft(config):
        raise CheckpointError(
            f"{folder} is not a DFlash draft; models that are not drafts are read from .gguf files."
        )
    metadata = translate_config(folder, config)
    tensors: dict[str, TensorInfo] = {}
    views: dict[str, np.ndarray] = {}
    for path in _find_files(folder):
        if skipped and (tokens := _read_draft_vocab(path)):
            metadata["dflash.head_tokens"] = tokens
        for info, view in read_safetensors(path, skipped):
            if info.name in tensors:
                raise CheckpointError(f"{path} repeats tensor {info.name[:80]!r} of another file.")
            if info.name.endswith("rotary_emb.inv_freq"):
                continue  # a constant of the rope that some trainers save
            tensors[info.name] = info
            views[info.name] = view
    names = rename_tensors(folder, tensors)
    renamed = {
        new: TensorInfo(new, tensors[old].shape, tensors[old].qtype, tensors[old].nbytes)
        for old, new in names.items()
    }
    return Checkpoint(folder, metadata, renamed, {new: views[old] for old, new in names.items()})


def read_safetensors(
    path: Path, skipped: tuple[str, ...] = ()
) -> list[tuple[TensorInfo, np.ndarray]]:
    """The tensors of one file under their own names, with views uint8 [rows, row_bytes]."""
    header, body = _read_header(path)
    header = {name: entry for name, entry in header.items() if name not in skipped}
    found = [_read_entry(path, name, entry, len(body)) for name, entry in header.items()]
    end, previous = 0, ""
    for info, start in sorted(found, key=lambda pair: pair[1]):
        if start < end:
            _fail(path, f"tensor {info.name[:80]!r} overlaps tensor {previous[:80]!r}")
        end, previous = start + info.nbytes, info.name
    return [
        (info, body[start : start + info.nbytes].reshape(prod(info.shape[:-1]), -1))
        for info, start in found
    ]


def _read_header(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """What the file says of its tensors, and the bytes that offsets count in."""
    data = map_file(path)
    if len(data) < 8:
        _fail(path, "the file ends inside the length of its header")
    header_len = int.from_bytes(data[:8].tobytes(), "little")
    if header_len > _MAX_JSON_BYTES:
        _fail(path, f"its header claims {header_len} bytes, more than {_MAX_JSON_BYTES}")
    if header_len > len(data) - 8:
        _fail(path, "the file ends inside its header; it may be a partial download")
    header = _parse_json(path, data[8 : 8 + header_len].tobytes())
    header.pop("__metadata__", None)
    return header, data[8 + header_len :]


def _read_draft_vocab(path: Path) -> list[int] | None:
    """The target's tokens that a draft of a smaller vocabulary can propose: a mask of bytes."""
    header, body = _read_header(path)
    entry = header.get("t2d")
    if entry is None:
        return None
    offsets = _int_list(entry.get("data_offsets")) if isinstance(entry, dict) else []
    if len(offsets) != 2 or entry.get("dtype") != "BOOL" or not 0 <= offsets[0] <= offsets[1]:
        _fail(path, "tensor 't2d' is not a mask")
    found: list[int] = np.flatnonzero(body[offsets[0] : offsets[1]]).tolist()
    return found


def _read_entry(path: Path, name: str, entry: Any, num_bytes: int) -> tuple[TensorInfo, int]:
    """One header entry: the tensor and where its bytes start."""
    what = f"tensor {name[:80]!r}"
    if not isinstance(entry, dict):
        _fail(path, f"{what} has no description")
    dtype = entry.get("dtype")
    shape, offsets = _int_list(entry.get("shape")), _int_list(entry.get("data_offsets"))
    if not 1 <= len(shape) <= _MAX_DIMS or min(shape) < 1:
        _fail(path, f"{what} has an unusable shape")
    if len(offsets) != 2:
        _fail(path, f"{what} has unusable data_offsets")
    if dtype not in ("F32", "F16", "BF16"):
        raise CheckpointError(f"{path} stores {what} as {str(dtype)[:20]!r}; not supported.")
    qtype = QuantType[dtype]
    nbytes = qtype.block_bytes * prod(shape)
    start, stop = offsets
    if not 0 <= start <= stop or stop - start != nbytes:
        _fail(path, f"{what} has data_offsets that do not match its shape")
    if stop > num_bytes:
        _fail(path, f"{what} goes past the end of the file; it may be a partial download")
    return TensorInfo(name, tuple(shape), qtype, nbytes), start


def _find_files(folder: Path) -> list[Path]:
    """The weight files of a folder, by its index where there is one."""
    if (folder / _INDEX).is_file():
        weight_map = _read_json_file(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            _fail(folder / _INDEX, "it has no weight_map")
        names = {name if isinstance(name, str) else "" for name in weight_map.values()}
        for name in names:
            # A name with folders in it could lead anywhere on the disk.
            if not name.endswith(".safetensors") or "/" in name or "\\" in name or "\0" in name:
                _fail(folder / _INDEX, f"it names the file {name[:80]!r}")
    elif (folder / "model.safetensors").is_file():
        names = {"model.safetensors"}
    else:
        names = {path.name for path in folder.glob("*.safetensors")}
    if not names:
        raise CheckpointError(f"{folder} has a config.json but no *.safetensors.")
    for name in sorted(names):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is incomplete: {name} is missing.")
    return [folder / name for name in sorted(names)]


def _read_json_file(path: Path) -> dict[str, Any]:
    data = map_file(path)
    if len(data) > _MAX_JSON_BYTES:
        _fail(path, f"it has {len(data)} bytes, more than {_MAX_JSON_BYTES}")
    return _parse_json(path, data.tobytes())


def _parse_json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except _Refused as error:
        _fail(path, str(error))
    except (ValueError, RecursionError):
        _fail(path, "its JSON cannot be read")
    if not isinstance(value, dict):
        _fail(path, "its JSON is not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Refused(f"it says {name[:80]!r} twice")
        found[name] = value
    return found


def _int_list(value: Any) -> list[int]:
    """The value if it is a list of whole numbers, else an empty list."""
    is_valid = isinstance(value, list) and all(type(item) is int for item in value)
    return value if is_valid else []


def _fail(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path} is damaged: {reason}.")
