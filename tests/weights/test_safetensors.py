"""The z-lab draft folder: equal to the GGUF of the same draft, and strict with wrong files."""

import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.errors import CheckpointError
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint
from draftree.weights.safetensors import read_safetensors
from tests.examples import examples
from tests.golden import golden


def decode(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return dequantize(checkpoint.raw(name), checkpoint.tensors[name].qtype)


def write_folder(folder: Path, sliding: bool = False, **changes: Any) -> Path:
    """The golden draft with some fields of its config replaced; None removes a field."""
    folder.mkdir(exist_ok=True)
    name = "config_sliding_window.json" if sliding else "config.json"
    config = json.loads(golden(f"dflash/zlab/{name}").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(golden("dflash/zlab/model.safetensors"), folder / "model.safetensors")
    return folder


def test_folder_and_gguf_are_the_same_draft() -> None:
    folder = open_checkpoint(golden("dflash/zlab"))
    gguf = open_checkpoint(golden("dflash/tiny-dflash-A-F16.gguf"))
    assert folder.architecture == gguf.architecture == "dflash"
    theirs = {key: value for key, value in gguf.metadata.items() if key.startswith("dflash.")}
    ours = {key: value for key, value in folder.metadata.items() if key.startswith("dflash.")}
    assert ours.pop("dflash.vocab_size") == 1024  # a GGUF file lists its tokens
    assert ours == theirs
    mask_key = "tokenizer.ggml.mask_token_id"
    assert folder.metadata[mask_key] == gguf.metadata[mask_key] == 1023
    assert set(folder.tensors) == set(gguf.tensors)
    for name, info in folder.tensors.items():
        assert info.name == name
        assert info.shape == gguf.tensors[name].shape
        assert info.qtype == QuantType.BF16
        np.testing.assert_array_equal(decode(folder, name), decode(gguf, name))


def test_views_are_read_only_parts_of_the_file() -> None:
    view = open_checkpoint(golden("dflash/zlab")).raw("fc.weight")
    assert view.shape == (256, 2560) and view.dtype == np.uint8
    assert not view.flags.writeable and not view.flags.owndata


def test_sliding_layers(tmp_path: Path) -> None:
    metadata = open_checkpoint(write_folder(tmp_path, sliding=True)).metadata
    assert metadata["dflash.attention.sliding_window"] == 24
    pattern = metadata["dflash.attention.sliding_window_pattern"]
    assert pattern == [True, True, True, True, False]


@pytest.mark.parametrize(
    "changes",
    [{"use_sliding_window": False}, {"sliding_window": None}, {"layer_types": None}],
)
def test_window_needs_all_three_fields(tmp_path: Path, changes: dict[str, Any]) -> None:
    metadata = open_checkpoint(write_folder(tmp_path, sliding=True, **changes)).metadata
    assert "dflash.attention.sliding_window" not in metadata


def test_window_without_the_switch_follows_the_layer_types(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sliding=True, use_sliding_window=None)
    assert open_checkpoint(folder).metadata["dflash.attention.sliding_window"] == 24


def test_default_feature_layers(tmp_path: Path) -> None:
    own = {"mask_token_id": 7}
    folder = write_folder(tmp_path, dflash_config=own, num_target_layers=64)
    metadata = open_checkpoint(folder).metadata
    assert metadata["dflash.target_layers"] == [2, 17, 32, 47, 62]
    assert metadata["tokenizer.ggml.mask_token_id"] == 7
    folder = write_folder(tmp_path, dflash_config=own, num_target_layers=None)
    assert "dflash.target_layers" not in open_checkpoint(folder).metadata


def test_fields_in_their_other_places(tmp_path: Path) -> None:
    own = {"mask_token_id": 5, "target_layer_ids": [0, 3], "block_size": 8}
    folder = write_folder(
        tmp_path,
        dflash_config=own,
        block_size=None,
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6},
        head_dim=None,
        num_key_value_heads=None,
        rms_norm_eps=None,
    )
    metadata = open_checkpoint(folder).metadata
    assert metadata["dflash.block_size"] == 8
    assert metadata["dflash.target_layers"] == [1, 4]
    assert metadata["dflash.rope.freq_base"] == 5e6
    assert metadata["dflash.attention.key_length"] == 64
    assert metadata["dflash.attention.head_count_kv"] == 4
    assert metadata["dflash.attention.layer_norm_rms_epsilon"] == float(np.float32(1e-6))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "is not a DFlash draft"),
        ({"architectures": 5}, "is not a DFlash draft"),
        ({"hidden_size": None}, "does not give hidden_size"),
        ({"hidden_size": "256"}, "no usable hidden_size"),
        ({"hidden_size": True}, "no usable hidden_size"),
        ({"hidden_size": 10**400}, "no usable hidden_size"),
        ({"num_attention_heads": 0}, "no usable num_attention_heads"),
        ({"block_size": -1}, "no usable block_size"),
        ({"dflash_config": None}, "does not give mask_token_id"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": ["1"]}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 1}, "num_target_layers": 4}, "num_target_layers"),
        ({"rope_theta": None}, "no usable rope_theta"),
        ({"rope_theta": float("nan")}, "no usable rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope scaling 'yarn'"),
        ({"sliding_window": 24, "layer_types": ["full_attention"]}, "needs 5 layer_types"),
    ],
)
def test_wrong_configs_are_explained(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    folder = write_folder(tmp_path / "draft", sliding="sliding_window" in changes, **changes)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        open_checkpoint(folder)
    assert "draft" in str(caught.value)


def test_unknown_layer_type(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown layer type"):
        open_checkpoint(write_folder(tmp_path, sliding=True, layer_types=["ssm"] * 5))


def pack(header: Any, body: bytes = b"", header_len: int | None = None) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(data) if header_len is None else header_len) + data + body


def entry(shape: Any, start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HOSTILE = {
    "empty": (b"", "is empty"),
    "short": (b"\1\2", "inside the length of its header"),
    "header of 2^64": (pack(b"{}", header_len=2**64 - 1), "header claims"),
    "header past the end": (pack(b"{}", header_len=100), "ends inside its header"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "JSON cannot be read"),
    "not JSON": (pack(b"{oops}"), "JSON cannot be read"),
    "deep JSON": (pack(b'{"a":' + b"[" * 200_000), "JSON cannot be read"),
    "not an object": (pack([1, 2]), "not an object"),
    "same name twice": (pack(b'{"a": 1, "a": 2}'), "says 'a' twice"),
    "no description": (pack({"a": 1}), "has no description"),
    "no shape": (pack({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), "unusable shape"),
    "empty shape": (pack({"a": entry([], 0, 4)}, bytes(4)), "unusable shape"),
    "five dimensions": (pack({"a": entry([1] * 5, 0, 4)}, bytes(4)), "unusable shape"),
    "dimension 0": (pack({"a": entry([0], 0, 0)}), "unusable shape"),
    "negative dimensions": (pack({"a": entry([-1, -1], 0, 4)}, bytes(4)), "unusable shape"),
    "dimension a float": (pack({"a": entry([1.0], 0, 4)}, bytes(4)), "unusable shape"),
    "dimension true": (pack({"a": entry([True], 0, 4)}, bytes(4)), "unusable shape"),
    "huge dimensions": (pack({"a": entry([2**62, 4], 0, 2**66)}), "past the end"),
    "one offset": (
        pack({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}),
        "unusable data_offsets",
    ),
    "offsets reversed": (pack({"a": entry([1], 4, 0)}, bytes(4)), "do not match its shape"),
    "negative offset": (pack({"a": entry([1], -4, 0)}, bytes(4)), "do not match its shape"),
    "wrong length": (pack({"a": entry([2], 0, 4)}, bytes(4)), "do not match its shape"),
    "past the end": (pack({"a": entry([2], 0, 8)}, bytes(7)), "past the end of the file"),
    "overlap": (pack({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8)), "overlaps"),
    "other type": (pack({"a": entry([1], 0, 8, "F64")}, bytes(8)), "as 'F64'"),
    "type a list": (pack({"a": entry([1], 0, 8, [])}, bytes(8)), "not supported"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_gives_one_sentence(tmp_path: Path, name: str) -> None:
    data, sentence = HOSTILE[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=sentence) as caught:
            read_safetensors(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert "model.safetensors" in message and "\n" not in message and message.endswith(".")


def test_strange_tensor_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(pack({"markov.w": entry([1], 0, 4)}, bytes(4)))
    with pytest.raises(CheckpointError, match=r"'markov\.w'.*DSpark"):
        open_checkpoint(folder)


def split_in_two(folder: Path) -> Path:
    tensors = read_safetensors(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index, part in enumerate((tensors[:30], tensors[30:]), start=1):
        header, body = {"__metadata__": {"format": "pt"}}, b""
        for info, view in part:
            stop = len(body) + info.nbytes
            header[info.name] = entry(list(info.shape), len(body), stop, info.qtype.name)
            weight_map[info.name] = f"model-0000{index}-of-00002.safetensors"
            body += view.tobytes()
        (folder / f"model-0000{index}-of-00002.safetensors").write_bytes(pack(header, body))
    index_path = folder / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_sharded_folder(tmp_path: Path) -> None:
    whole = open_checkpoint(golden("dflash/zlab"))
    sharded = open_checkpoint(split_in_two(write_folder(tmp_path)))
    assert set(sharded.tensors) == set(whole.tensors)
    for name in whole.tensors:
        np.testing.assert_array_equal(sharded.raw(name), whole.raw(name))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = split_in_two(write_folder(tmp_path))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x.safetensors", "x.bin", 5])
def test_index_cannot_lead_out_of_the_folder(tmp_path: Path, name: Any) -> None:
    folder = write_folder(tmp_path)
    index = {"weight_map": {"fc.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="it names the file"):
        open_checkpoint(folder)


def test_repeated_tensor_across_shards(tmp_path: Path) -> None:
    folder = split_in_two(write_folder(tmp_path))
    first = folder / "model-00001-of-00002.safetensors"
    shutil.copy(first, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="repeats tensor"):
        open_checkpoint(folder)


def test_folder_without_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        open_checkpoint(folder)


VALID = pack({"a": entry([2, 2], 0, 16), "b": entry([3], 16, 22, "BF16")}, bytes(range(22)))


@examples(300)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=6
    ),
    cut=st.integers(0, len(VALID)),
)
def test_mutated_files_open_or_explain(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(VALID)
    for position, value in edits:
        data[position] = value
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    for variant in (bytes(data), bytes(data[:cut])):
        path.write_bytes(variant)
        try:
            for info, view in read_safetensors(path):
                assert view.nbytes == info.nbytes
        except CheckpointError:
            pass
