"""Older spellings of DFlash GGUF files open as the same draft."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftree.drafts.dflash_model import name_kind, read_draft_config
from draftree.errors import CheckpointError
from draftree.kernels.quant.formats import dequantize
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.dflash import default_target_layers, rename_tensor
from draftree.weights.file import open_checkpoint
from tests.golden import golden
from tests.made import make_draft
from tests.weights.gguf_bytes import GgufBytes, entry, string, tensor


def pack_value(value: Any) -> tuple[int, bytes]:
    """A value as a GGUF metadata entry would hold it."""
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, string(value)
    kinds = [pack_value(item) for item in value]
    return 9, struct.pack("<IQ", kinds[0][0], len(kinds)) + b"".join(data for _, data in kinds)


def rewrite(
    source: Checkpoint, path: Path, metadata: dict[str, Any], names: dict[str, str]
) -> Path:
    """The source's tensors under other names and metadata."""
    tensors, data = [], b""
    for old, info in source.tensors.items():
        dims = info.shape[::-1]
        tensors.append(tensor(names.get(old, old), dims, info.qtype.value, len(data)))
        data += source.raw(old).tobytes()
        data += bytes(-len(data) % 32)
    entries = [entry(key, *pack_value(value)) for key, value in metadata.items()]
    path.write_bytes(GgufBytes(entries, tensors, data).build())
    return path


def older_metadata(source: Checkpoint, architecture: str) -> dict[str, Any]:
    metadata = {"general.architecture": architecture}
    for key, value in source.metadata.items():
        if key.startswith("dflash."):
            metadata[f"{architecture}.{key.removeprefix('dflash.')}"] = value
    block_size = metadata.pop(f"{architecture}.block_size")
    metadata[f"{architecture}.dflash.block_size"] = block_size
    metadata[f"{architecture}.dflash.mask_token_id"] = 1023
    layers = metadata.pop(f"{architecture}.target_layers")
    metadata[f"{architecture}.dflash.target_layer_ids"] = [layer - 1 for layer in layers]
    return metadata


@pytest.mark.parametrize(
    ("architecture", "fc", "hidden_norm", "ffn_norm"),
    [
        ("dflash-draft", "dflash_fc", "dflash_hidden_norm", "post_attention_norm"),
        ("qwen35-dflash-draft", "dflash.fc", "dflash.hidden_norm", "ffn_norm"),
    ],
)
def test_older_gguf_is_the_same_draft(
    tmp_path: Path, architecture: str, fc: str, hidden_norm: str, ffn_norm: str
) -> None:
    source = open_checkpoint(golden("dflash/tiny-dflash-A-F16.gguf"))
    names = {"fc.weight": f"{fc}.weight", "enc.output_norm.weight": f"{hidden_norm}.weight"}
    names |= {f"blk.{i}.ffn_norm.weight": f"blk.{i}.{ffn_norm}.weight" for i in range(5)}
    metadata = older_metadata(source, architecture)
    older = open_checkpoint(rewrite(source, tmp_path / "older.gguf", metadata, names))
    assert older.architecture == older.metadata["general.architecture"] == "dflash"
    expected = {k: v for k, v in source.metadata.items() if k.startswith("dflash.")}
    assert {k: v for k, v in older.metadata.items() if k.startswith("dflash.")} == expected
    assert older.metadata["tokenizer.ggml.mask_token_id"] == 1023
    assert older.tensors == source.tensors
    for name in source.tensors:
        np.testing.assert_array_equal(older.raw(name), source.raw(name))


def test_older_gguf_without_layer_list_leaves_it_to_the_target(tmp_path: Path) -> None:
    source = open_checkpoint(golden("dflash/tiny-dflash-A-F16.gguf"))
    metadata = older_metadata(source, "qwen35-dflash-draft")
    del metadata["qwen35-dflash-draft.dflash.target_layer_ids"]
    older = open_checkpoint(
        rewrite(
            source,
            tmp_path / "older.gguf",
            metadata,
            {
                "fc.weight": "dflash.fc.weight",
                "enc.output_norm.weight": "dflash.hidden_norm.weight",
            },
        )
    )
    assert "dflash.target_layers" not in older.metadata


def test_strange_relatives_are_refused(tmp_path: Path) -> None:
    source = open_checkpoint(golden("dflash/tiny-dflash-A-F16.gguf"))
    metadata = older_metadata(source, "dflash-draft")
    names = {"blk.0.attn_norm.weight": "blk.0.gru.weight"}
    with pytest.raises(CheckpointError, match="not part of a DFlash, DFlash2 or DSpark draft"):
        open_checkpoint(rewrite(source, tmp_path / "other.gguf", metadata, names))


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    source = open_checkpoint(golden("dflash/tiny-dflash-A-F16.gguf"))
    metadata = older_metadata(source, "dflash-draft")
    names = {
        "fc.weight": "dflash_fc.weight",
        "enc.output_norm.weight": "dflash_hidden_norm.weight",
        "blk.0.attn_norm.weight": "blk.0.post_attention_norm.weight",
    }
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_norm\.weight' twice"):
        open_checkpoint(rewrite(source, tmp_path / "other.gguf", metadata, names))


def test_default_target_layers() -> None:
    assert default_target_layers(64, 5) == [2, 17, 32, 47, 62]
    assert default_target_layers(36, 5) == [2, 10, 18, 26, 34]
    assert default_target_layers(24, 1) == [13]
    # round() to even, as the original does: 1 + 2.5 and 1 + 7.5 are 3.5 -> 4 and 8.5 -> 8
    assert default_target_layers(14, 5) == [2, 5, 7, 9, 12]


def test_names_of_other_spellings() -> None:
    assert rename_tensor("model.layers.3.self_attn.o_proj.bias") == "blk.3.attn_output.bias"
    assert rename_tensor("embed_tokens.weight") == "token_embd.weight"
    assert rename_tensor("layers.0.mlp.experts.0.weight") is None
    assert rename_tensor("layers.1.attention_conv.base_kernel") == "blk.1.attn_conv_base"
    assert rename_tensor("confidence_head.proj.bias") == "conf_proj.bias"
    assert rename_tensor("fc") is None
    assert rename_tensor("layers.fc.weight") is None


ZLAB = {
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
}
OWN = {
    "dflash2": {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 16,
        "selector_top_k": 6,
    },
    "listed selector": {
        "selector_rank": 16,
        "selector_top_k": 6,
        "head_tokens": list(range(0, 512, 2)),
        "selector_by_head_token": True,
    },
    "dspark bonus": {"sample_from_anchor": False},
    "jetspec": {"causal_head": True},
}


def _zlab_name(name: str) -> str:
    """blk.0.attn_q.weight -> layers.0.self_attn.q_proj.weight."""
    layer, rest = "", name
    if name.startswith("blk."):
        _, index, rest = name.split(".", 2)
        layer = f"layers.{index}."
    for stem, own in ZLAB.items():
        if rest in (stem, f"{stem}.weight", f"{stem}.bias"):
            return layer + own + rest.removeprefix(stem)
    return name


@pytest.mark.parametrize("kind", OWN)
def test_relatives_as_folders(kind: str, tmp_path: Path) -> None:
    """z-lab's names and fields lead to what the GGUF says."""
    expected = open_checkpoint(make_draft(feature_layers=(0, 1, 2), relative=kind))
    arrays = {}
    for name, info in expected.tensors.items():
        values = dequantize(expected.raw(name), info.qtype).reshape(info.shape)
        arrays[_zlab_name(name)] = np.ascontiguousarray(values, dtype=np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 128,
        "head_dim": 32,
        "intermediate_size": 96,
        "block_size": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 511, **OWN[kind]},
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
    }
    if kind == "jetspec":
        config["layer_types"] = ["full_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(tmp_path)
    assert {name: info.shape for name, info in found.tensors.items()} == {
        name: info.shape for name, info in expected.tensors.items()
    }
    for key, value in found.metadata.items():
        if key.startswith("dflash.") and key != "dflash.vocab_size":
            assert expected.metadata[key] == pytest.approx(value), key
    assert name_kind(found) == name_kind(expected) != "DFlash"


@pytest.mark.parametrize("name", ["output_multiplier", "input_embedding_scale"])
def test_factors_that_nobody_applies_are_refused(name: str) -> None:
    source = open_checkpoint(golden("dflash/zlab"))
    key = {"output_multiplier": "logit_scale"}.get(name, name)
    other = Checkpoint(
        source.path,
        {**source.metadata, f"dflash.{key}": 0.5},
        source.tensors,
        {name: source.raw(name) for name in source.tensors},
    )
    with pytest.raises(CheckpointError, match=f"asks for {key}"):
        read_draft_config(other)
