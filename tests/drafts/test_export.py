"""Drafts in other systems' forms: the same weights to the bit, there and back, and the block logits
that the speculators library computes from what we write.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from draftree.drafts.dflash import BlockDrafter
from draftree.drafts.dflash_model import load_draft, read_draft_config
from draftree.drafts.export import SYSTEMS, export_draft
from draftree.errors import CheckpointError, ModelError
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint
from tests.drafts.pairs import PAIRS, RELATIVES, SELECTORS
from tests.golden import golden
from tests.needs import needs_package
from tests.tiny import new_ops, open_target, tiny_path

FOLDERS = tuple(system for system in SYSTEMS if system != "llama.cpp")
TOLERANCE = 1e-4
PACKAGED = Path(__file__).parents[2] / "draftree/data/smollm2-135m-dflash.q4_1.gguf"


def decode(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {
        name: dequantize(checkpoint.raw(name), info.qtype).reshape(info.shape)
        for name, info in checkpoint.tensors.items()
    }


def own_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a draft says of itself; a target's vocabulary may come in by the way."""
    mask = "tokenizer.ggml.mask_token_id"
    found = {k: v for k, v in checkpoint.metadata.items() if k.startswith("dflash.") or k == mask}
    return {k: v for k, v in found.items() if k != "dflash.vocab_size"}


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    ours, theirs = decode(found), decode(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].shape == value.shape
        np.testing.assert_array_equal(ours[name].view(np.uint32), value.view(np.uint32), name)
    assert own_keys(found) == own_keys(expected)


@pytest.fixture
def target() -> Checkpoint:
    return open_checkpoint(tiny_path("qwen35"))


def make_draft(path: Path, kind: str, *, sliding: bool = True) -> Checkpoint:
    """The tiny draft in one block format, with norms that no 16 bits hold."""
    source = open_checkpoint(golden("dflash/zlab"))
    qtype = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "dflash")
    for key, value in source.metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    if sliding:
        writer.add_uint32("dflash.attention.sliding_window", 24)
        pattern = [True, True, True, True, False]
        writer.add_array("dflash.attention.sliding_window_pattern", pattern)
    writer.add_array("dflash.head_tokens", [1, 5, 9, 1000])
    for name, value in decode(source).items():
        if value.ndim == 1:
            writer.add_tensor(name, value * np.float32(1 / 3))
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


@pytest.mark.parametrize("system", FOLDERS)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_there_and_back_changes_no_weight(
    kind: str, system: str, target: Checkpoint, tmp_path: Path
) -> None:
    draft = make_draft(tmp_path / "draft.gguf", kind)
    export_draft(draft, target, system, tmp_path / "folder", "org/tiny")
    folder = open_checkpoint(tmp_path / "folder")
    assert {info.qtype for info in folder.tensors.values()} == {QuantType.F32}
    assert_same(folder, draft)
    export_draft(folder, target, "llama.cpp", tmp_path / "back.gguf", "org/tiny")
    assert_same(open_checkpoint(tmp_path / "back.gguf"), draft)


@pytest.mark.parametrize("system", FOLDERS)
def test_a_folder_is_as_small_as_its_weights_allow(
    system: str, target: Checkpoint, tmp_path: Path
) -> None:
    """The golden file holds bfloat16 weights in 16-bit floats."""
    draft = open_checkpoint(golden("dflash/tiny-dflash-A-F16.gguf"))
    export_draft(draft, target, system, tmp_path / "folder", "org/tiny")
    folder = open_checkpoint(tmp_path / "folder")
    assert {info.qtype for info in folder.tensors.values()} == {QuantType.BF16}
    assert_same(folder, draft)


def test_a_gguf_keeps_its_blocks_and_takes_the_targets_tokens(
    target: Checkpoint, tmp_path: Path
) -> None:
    draft = make_draft(tmp_path / "draft.gguf", "Q4_1")
    export_draft(draft, target, "llama.cpp", tmp_path / "out.gguf", "org/tiny")
    found = open_checkpoint(tmp_path / "out.gguf")
    assert found.tensors == draft.tensors
    for name in draft.tensors:
        assert found.raw(name).tobytes() == draft.raw(name).tobytes()
    assert list(found.metadata["tokenizer.ggml.tokens"]) == list(
        target.metadata["tokenizer.ggml.tokens"]
    )
    assert found.metadata["general.base_model.0.name"] == "org/tiny"
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    unsigned = ("dflash.block_size", "tokenizer.ggml.mask_token_id", "dflash.block_count")
    assert all(fields[key].types == [gguf.GGUFValueType.UINT32] for key in unsigned)


def test_vectors_of_a_gguf_are_float32(target: Checkpoint, tmp_path: Path) -> None:
    folder = open_checkpoint(golden("dflash/zlab"))
    export_draft(folder, target, "llama.cpp", tmp_path / "out.gguf", "org/tiny")
    found = open_checkpoint(tmp_path / "out.gguf")
    for info in found.tensors.values():
        assert info.qtype == (QuantType.F32 if len(info.shape) == 1 else QuantType.BF16)
    assert_same(found, folder)


def test_layers_with_a_window_are_not_taken_for_causal(target: Checkpoint, tmp_path: Path) -> None:
    draft = make_draft(tmp_path / "draft.gguf", "F16")
    for system in FOLDERS:
        export_draft(draft, target, system, tmp_path / system, "org/tiny")
    for system in ("vllm", "sglang"):
        config = json.loads((tmp_path / system / "config.json").read_text())
        assert config["is_causal"] is False and config["dflash_config"]["causal"] is False
        assert config["dflash_config"]["target_layer_ids"] == [1, 2, 3, 4, 5]
        assert config["target_model_name_or_path"] == "org/tiny"
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["sliding_window_non_causal"] is True
    assert config["aux_hidden_state_layer_ids"] == [2, 3, 4, 5, 6]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 15


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_block_logits_are_those_of_the_speculators_module(
    kind: str, target: Checkpoint, tmp_path: Path
) -> None:
    """The reference was computed by their module from the folder that is written here. Their window
    is counted from the anchor for every row of a block, ours from the row itself, so only a context
    within the window is compared for layers that have one.
    """
    expected = np.load(golden("dflash/speculators.npz"))
    features = np.load(golden("dflash/dflash.npz"))["target_features"]
    source = tmp_path / "zlab"
    shutil.copytree(golden("dflash/zlab"), source)
    if kind == "sliding":
        shutil.copy(source / "config_sliding_window.json", source / "config.json")
    export_draft(open_checkpoint(source), target, "speculators", tmp_path / "out", "org/tiny")
    ops = new_ops(exact=True, num_threads=1)
    model = open_target(tiny_path("qwen35"), feature_layers=(1, 2, 3, 4, 5), num_threads=1).model
    drafter = BlockDrafter(load_draft(open_checkpoint(tmp_path / "out"), ops), model, ops)
    for length in (1, 7, 40) if kind == "full" else (7,):
        drafter.reset()
        drafter.extend_context(features[:length])
        logits = drafter.block_logits(int(expected["anchor"]))
        assert np.abs(logits - expected[f"{kind}.ctx{length}"]).max() < TOLERANCE


def write_speculators(folder: Path, target: Checkpoint, **changes: Any) -> Path:
    """The tiny draft in their form, with some fields of its config replaced."""
    draft = make_draft(folder.with_suffix(".gguf"), "F16")
    export_draft(draft, target, "speculators", folder, "org/tiny")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_draft_that_carries_the_targets_matrices_and_a_small_vocabulary(
    target: Checkpoint, tmp_path: Path
) -> None:
    """As the library saves one: copies of embedding and head, and which tokens the head has."""
    from safetensors.numpy import load_file, save_file

    folder = write_speculators(tmp_path / "draft", target, draft_vocab_size=3)
    tensors = load_file(folder / "model.safetensors")
    mask = np.zeros(1024, dtype=bool)
    mask[[2, 3, 700]] = True
    tensors |= {"t2d": mask, "d2t": np.array([2, 2, 698])}
    tensors |= {"lm_head.weight": np.ones((3, 256), np.float32)}
    save_file(tensors | {"embed_tokens.weight": np.ones((1024, 256), np.float32)}, folder / "x")
    (folder / "x").replace(folder / "model.safetensors")
    found = open_checkpoint(folder)
    assert found.tensors.keys() == open_checkpoint(tmp_path / "draft.gguf").tensors.keys()
    assert read_draft_config(found).draft_vocab == (2, 3, 700)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculators_model_type": "eagle3"}, "only dflash"),
        ({"transformer_layer_config": None}, "only dflash"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"sliding_window_non_causal": False}, "causal blocks"),
        ({"aux_hidden_state_layer_ids": [0, "1"]}, "aux_hidden_state_layer_ids"),
        ({"block_size": None}, "block_size"),
        ({"head_tokens": "all"}, "head tokens"),
    ],
)
def test_other_speculators_are_refused(
    changes: dict[str, Any], words: str, target: Checkpoint, tmp_path: Path
) -> None:
    folder = write_speculators(tmp_path / "draft", target, **changes)
    with pytest.raises(CheckpointError, match=words):
        read_draft_config(open_checkpoint(folder))


def test_nothing_is_overwritten(target: Checkpoint, tmp_path: Path) -> None:
    draft = open_checkpoint(golden("dflash/zlab"))
    for system in SYSTEMS:
        with pytest.raises(ModelError, match="exists"):
            export_draft(draft, target, system, tmp_path, "org/tiny")


def test_a_draft_of_another_target_is_refused(tmp_path: Path, target: Checkpoint) -> None:
    with pytest.raises(ModelError, match="does not fit"):
        export_draft(open_checkpoint(PACKAGED), target, "vllm", tmp_path / "out", "org/tiny")
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@needs_package("speculators")
def test_speculators_loads_and_saves_the_folder(tmp_path: Path) -> None:
    """Their classes validate the config, take every tensor, give the stored logits, and save what
    is the same draft again.
    """
    from tests.data.make_speculators import export_tiny, load_module, make

    expected = np.load(golden("dflash/speculators.npz"))
    found = make(("full", "sliding"))
    assert found.keys() == set(expected.files)
    for name, value in found.items():
        assert np.abs(value - expected[name]).max() < TOLERANCE
    folder = export_tiny("sliding", tmp_path)
    load_module(folder).save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    assert_same(open_checkpoint(tmp_path / "saved"), open_checkpoint(folder))


@pytest.mark.parametrize("kind", RELATIVES)
def test_kinds_that_others_read_otherwise_are_refused(kind: str, tmp_path: Path) -> None:
    pair = PAIRS[f"{kind}, hybrid"]
    args = pair.open_draft(), open_checkpoint(tiny_path(pair.target))
    with pytest.raises(ModelError, match="only DFlash drafts can be exported"):
        export_draft(*args, "vllm", tmp_path / "out", "a model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", SELECTORS)
def test_a_selector_stays_behind(kind: str, tmp_path: Path) -> None:
    """What is left is a DFlash draft, which other systems know."""
    pair = PAIRS[f"{kind}, hybrid"]
    draft, target = pair.open_draft(), open_checkpoint(tiny_path(pair.target))
    export_draft(draft, target, "llama.cpp", tmp_path / "out.gguf", "a model")
    found, expected = decode(open_checkpoint(tmp_path / "out.gguf")), decode(draft)
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    assert {name for name in expected if name not in found} == {
        f"selector_{name}.weight" for name in ("predecessor", "successor", "hidden")
    }
    assert not any("selector" in key for key in open_checkpoint(tmp_path / "out.gguf").metadata)
