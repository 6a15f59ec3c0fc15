"""A draft as other systems read it: a folder for vLLM, SGLang and speculators, a GGUF file for
llama.cpp.

In: the checkpoints of a draft and its target. Out: files with the same weights, to the bit: a
folder has the smallest of bfloat16, float16 and float32 that holds them all, a GGUF file the
formats they came in. The target's embedding and head are not part of them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from draftree.core import ModelConfig
from draftree.drafts.dflash_model import check_fit, check_tokens, name_kind, read_draft_config
from draftree.errors import ModelError
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.models.metadata import Metadata
from draftree.models.model_config import read_model_config
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.dflash import ZLAB_MODEL_TYPE, zlab_name

SYSTEMS: Final = ("vllm", "sglang", "speculators", "llama.cpp")

_MASK_KEY: Final = "tokenizer.ggml.mask_token_id"
_SPECULATORS_VERSION: Final = "0.9.0"  # whose fields these are
_DTYPES: Final = (
    (QuantType.BF16, "bfloat16"),
    (QuantType.F16, "float16"),
    (QuantType.F32, "float32"),
)
# What Hugging Face calls the targets; a speculators folder says it, and nothing depends on it.
_TARGET_CLASSES: Final = (
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen35", "Qwen3_5ForConditionalGeneration"),
)


def export_draft(
    draft: Checkpoint, target: Checkpoint, system: str, out: Path, target_name: str
) -> None:
    """system: one of SYSTEMS. out: a folder, or the path of a GGUF file; it must not exist.
    target_name: what that system loads the target by.
    """
    draft = without_selector(draft)
    kind = name_kind(draft)
    if kind != "DFlash":
        raise ModelError(f"{draft.path} is a {kind} draft; only DFlash drafts can be exported.")
    config, model = read_draft_config(draft), read_model_config(target)
    check_fit(config, str(draft.path), model, model.name)
    check_tokens(draft, target)
    if out.exists():
        raise ModelError(f"{out} exists; choose another name or remove it.")
    if system == "llama.cpp":
        _write_gguf(draft, target, out, target_name)
        return
    values = {
        zlab_name(name): dequantize(draft.raw(name), info.qtype).reshape(info.shape)
        for name, info in draft.tensors.items()
    }
    qtype, dtype = next(
        (qtype, dtype)
        for qtype, dtype in _DTYPES
        if all(_is_exact(value, qtype) for value in values.values())
    )
    write_config = speculators_config if system == "speculators" else zlab_config
    text = json.dumps(write_config(draft, model, target_name, dtype), indent=2)
    out.mkdir(parents=True)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")
    _write_safetensors(out / "model.safetensors", values, qtype)


def without_selector(draft: Checkpoint) -> Checkpoint:
    """Other systems know selectors with DFlash2's convolutions alone; without one, what is left is
    a DFlash draft of its own.
    """
    if name_kind(draft) != "DFlash with selector":
        return draft
    names = [name for name in draft.tensors if not name.startswith("selector_")]
    metadata = {k: v for k, v in draft.metadata.items() if not k.startswith("dflash.selector_")}
    tensors = {name: draft.tensors[name] for name in names}
    return Checkpoint(draft.path, metadata, tensors, {name: draft.raw(name) for name in names})


def zlab_config(
    draft: Checkpoint, model: ModelConfig, target_name: str, dtype: str
) -> dict[str, Any]:
    """config.json as z-lab writes it, which vLLM and SGLang read. Both take layers with a window
    for causal ones unless told otherwise.
    """
    found = read_draft_config(draft)
    own: dict[str, Any] = {
        "mask_token_id": found.mask_token,
        "target_layer_ids": list(found.feature_layers),
        "causal": False,
    }
    if found.draft_vocab:
        own["head_tokens"] = list(found.draft_vocab)
    return {
        "architectures": ["DFlashDraftModel"],
        **_layer_config(draft, model, dtype),
        "block_size": found.block_size,
        "dflash_config": own,
        "is_causal": False,
        "num_target_layers": model.num_layers,
        "target_model_name_or_path": target_name,
    }


def speculators_config(
    draft: Checkpoint, model: ModelConfig, target_name: str, dtype: str
) -> dict[str, Any]:
    """config.json of the speculators library. It counts layers as GGUF files do."""
    found = read_draft_config(draft)
    method = {"proposal_type": "greedy", "speculative_tokens": found.block_size - 1}
    classes = [name for architecture, name in _TARGET_CLASSES if architecture == model.architecture]
    config: dict[str, Any] = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": classes},
        },
        "transformer_layer_config": _layer_config(draft, model, dtype),
        "draft_vocab_size": model.vocab_size,
        "block_size": found.block_size,
        "mask_token_id": found.mask_token,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in found.feature_layers],
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "dtype": dtype,
    }
    return config | ({"head_tokens": list(found.draft_vocab)} if found.draft_vocab else {})


def _layer_config(draft: Checkpoint, model: ModelConfig, dtype: str) -> dict[str, Any]:
    """The draft's layers in Hugging Face's words."""
    metadata = Metadata(draft)
    num_layers = metadata.count("block_count")
    num_heads = metadata.count("attention.head_count")
    window = metadata.optional("attention.sliding_window")
    pattern = metadata.optional("attention.sliding_window_pattern")
    has_window = bool(window) and isinstance(pattern, list) and any(pattern)
    sliding = pattern if has_window else [False] * num_layers
    return {
        "model_type": ZLAB_MODEL_TYPE,
        "num_hidden_layers": num_layers,
        "hidden_size": metadata.count("embedding_length"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", num_heads),
        "head_dim": metadata.count("attention.key_length"),
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": _shortest(metadata.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.number("rope.freq_base")),
        "max_position_embeddings": metadata.count("context_length"),
        "vocab_size": model.vocab_size,
        "layer_types": ["sliding_attention" if is_on else "full_attention" for is_on in sliding],
        "sliding_window": window if has_window else None,
        "use_sliding_window": has_window,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def _shortest(value: float) -> float:
    """The shortest decimal number that is the same in float32."""
    return float(str(np.float32(value)))


def _is_exact(value: np.ndarray, qtype: QuantType) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        back = dequantize(_encode(value, qtype), qtype).reshape(value.shape)
    return bool((back.view(np.uint32) == value.view(np.uint32)).all())


def _encode(value: np.ndarray, qtype: QuantType) -> np.ndarray:
    """float32 -> bytes, uint8 [1, num_bytes]; bfloat16 by cutting, which `_is_exact` catches."""
    value = np.ascontiguousarray(value, dtype="<f4")
    if qtype == QuantType.BF16:
        encoded = (value.view("<u4") >> 16).astype("<u2")
    else:
        encoded = value.astype("<f2" if qtype == QuantType.F16 else "<f4")
    return encoded.view(np.uint8).reshape(1, -1)


def _write_safetensors(path: Path, values: dict[str, np.ndarray], qtype: QuantType) -> None:
    """numpy has no bfloat16, and the format is a header and bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, value in values.items():
        stop = start + value.size * qtype.block_bytes
        shape = list(value.shape)
        header[name] = {"dtype": qtype.name, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in values.values():
            file.write(_encode(value, qtype).data)


def _write_gguf(draft: Checkpoint, target: Checkpoint, path: Path, target_name: str) -> None:
    """llama.cpp reads the tokens of a draft from its own file, and vectors as float32 alone."""
    entries = draft_entries(draft)
    entries |= {k: v for k, v in target.metadata.items() if k.startswith("tokenizer.ggml.")}
    entries |= {_MASK_KEY: draft.metadata[_MASK_KEY]}
    entries |= {"general.base_model.count": 1, "general.base_model.0.name": target_name}
    write_gguf(path, entries, draft_tensors(draft))


def draft_entries(draft: Checkpoint) -> dict[str, Any]:
    """The metadata of a draft's own file."""
    entries = {key: value for key, value in draft.metadata.items() if key.startswith("dflash.")}
    entries[_MASK_KEY] = draft.metadata[_MASK_KEY]
    entries["general.name"] = draft.metadata.get("general.name", draft.path.stem)
    return entries


def draft_tensors(draft: Checkpoint) -> Iterator[tuple[str, np.ndarray, QuantType]]:
    """Blocks byte for byte, vectors as float32: name, bytes, type."""
    for name, info in draft.tensors.items():
        raw, qtype = draft.raw(name), info.qtype
        if len(info.shape) == 1:
            raw, qtype = _encode(dequantize(raw, qtype), QuantType.F32)[0], QuantType.F32
        yield name, raw, qtype


def write_gguf(
    path: Path,
    entries: Mapping[str, Any],
    tensors: Iterable[tuple[str, np.ndarray, QuantType]],
) -> None:
    """A draft's file. tensors: bytes, uint8 [rows, row_bytes]."""
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "dflash")
    for key, value in {**entries, "general.quantization_version": 2}.items():
        kind = gguf.GGUFValueType
        if isinstance(value, int) and not isinstance(value, bool):
            writer.add_key_value(key, value, kind.UINT32 if value >= 0 else kind.INT32)
        elif isinstance(value, str | bool | float):
            writer.add_key_value(key, value, kind.get_type(value))
        else:
            writer.add_array(key, list(value))
    for name, raw, qtype in tensors:
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType(qtype.value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
