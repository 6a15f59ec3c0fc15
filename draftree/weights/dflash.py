"""DFlash drafts come in several spellings; this turns each into that of `dflash` GGUF files.

In: a z-lab or speculators config and its tensor names, or a GGUF of an older converter. Out: GGUF
metadata keys and tensor names. Feature layers are counted as in GGUF: n means the input of target
layer n. Knows no file format and none of the arithmetic.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from draftree.errors import CheckpointError
from draftree.weights.checkpoint import Checkpoint

# Converters older than llama.cpp's own wrote these; the same draft, other names.
OTHER_ARCHITECTURES = frozenset({"dflash-draft", "qwen35-dflash-draft"})

ZLAB_MODEL_TYPE = "qwen3"  # what config.json calls the layers of a draft, whatever its target

_WHOLE = MappingProxyType(
    {
        "fc": "fc",
        "hidden_norm": "enc.output_norm",
        "norm": "output_norm",
        "embed_tokens": "token_embd",
        "lm_head": "output",
        "dflash.fc": "fc",
        "dflash_fc": "fc",
        "dflash.hidden_norm": "enc.output_norm",
        "dflash_hidden_norm": "enc.output_norm",
        "output_norm": "output_norm",
        "token_embd": "token_embd",
        "output": "output",
        "candidate_selector.predecessor_codebook": "selector_predecessor",
        "candidate_selector.successor_codebook": "selector_successor",
        "candidate_selector.hidden_projection": "selector_hidden",
        "markov_head.markov_w1": "markov_w1",
        "markov_head.markov_w2": "markov_w2",
        "confidence_head.proj": "conf_proj",
    }
)
_IN_LAYER = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_attention_norm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "attention_conv.base_kernel": "attn_conv_base",
        "attention_conv.kernel_projection": "attn_conv_proj",
        "mlp_conv.base_kernel": "ffn_conv_base",
        "mlp_conv.kernel_projection": "ffn_conv_proj",
    }
)
_FLAGS = MappingProxyType(
    {
        "causal": "attention.causal",
        "causal_head": "attention.causal",
        "sample_from_anchor": "sample_from_anchor",
        "selector_by_head_token": "selector_by_head_token",
    }
)
_FACTORS = MappingProxyType(
    {
        "output_multiplier": "logit_scale",
        "final_logit_softcapping": "final_logit_softcapping",
        "input_embedding_scale": "input_embedding_scale",
    }
)
_LAYER_NAMES = frozenset(_IN_LAYER.values())
_NAME = re.compile(
    r"(?:(?:layers|blk)\.(?P<layer>\d{1,4})\.)?(?P<stem>.+?)(?:\.(?P<kind>weight|bias))?"
)


def default_target_layers(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """The feature layers of a draft that does not list them, in GGUF numbering."""
    if num_draft_layers == 1:
        return [num_target_layers // 2 + 1]
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_draft_layers - 1)
    return [round(first + index * step) + 1 for index in range(num_draft_layers)]


def rename_tensor(name: str) -> str | None:
    """The `dflash` GGUF name of a draft's tensor in any spelling; None for one we do not know."""
    match = _NAME.fullmatch(name.removeprefix("model."))
    if match is None:
        return None
    layer, stem, kind = match["layer"], match["stem"], match["kind"]
    is_bare = stem.endswith(("_codebook", "_base", ".base_kernel"))  # needs no kind
    if kind is None and not is_bare:
        return None
    if layer is None:
        return f"{_WHOLE[stem]}.{kind or 'weight'}" if stem in _WHOLE else None
    stem = _IN_LAYER.get(stem, stem)
    suffix = "" if is_bare else f".{kind}"
    return f"blk.{int(layer)}.{stem}{suffix}" if stem in _LAYER_NAMES else None


def zlab_name(name: str) -> str:
    """The name in a z-lab folder of a draft's tensor in a `dflash` GGUF."""
    first, _, rest = name.partition(".")
    layer, _, stem = rest.partition(".") if first == "blk" else ("", "", name)
    stem, _, kind = stem.rpartition(".")
    spellings = _IN_LAYER if layer else _WHOLE
    zlab = next(zlab for zlab, ours in spellings.items() if ours == stem)
    return f"layers.{layer}.{zlab}.{kind}" if layer else f"{zlab}.{kind}"


def rename_gguf(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF draft of an older converter, as `dflash`."""
    path, prefix = checkpoint.path, checkpoint.architecture + "."
    metadata: dict[str, Any] = {"general.architecture": "dflash"}
    for key, value in checkpoint.metadata.items():
        if key == "general.architecture":
            continue
        if not key.startswith(prefix):
            metadata[key] = value
            continue
        match key.removeprefix(prefix).removeprefix("dflash."):
            case "mask_token_id":
                metadata["tokenizer.ggml.mask_token_id"] = value
            case "target_layer_ids":
                metadata["dflash.target_layers"] = _shift_layer_ids(path, value)
            case rest:
                metadata[f"dflash.{rest}"] = value
    names = rename_tensors(path, checkpoint.tensors)
    return Checkpoint(
        path,
        metadata,
        {new: replace(checkpoint.tensors[old], name=new) for old, new in names.items()},
        {new: checkpoint.raw(old) for old, new in names.items()},
    )


def rename_tensors(path: Path, names: Mapping[str, object]) -> dict[str, str]:
    """Old name -> new name for all tensors of a draft."""
    renamed: dict[str, str] = {}
    taken: set[str] = set()
    for old in names:
        new = rename_tensor(old)
        if new is None:
            raise CheckpointError(
                f"{path} holds tensor {old[:80]!r}, which is not part of a DFlash, DFlash2 or "
                "DSpark draft."
            )
        if new in taken:
            raise CheckpointError(f"{path} holds tensor {new!r} twice, under two spellings.")
        taken.add(new)
        renamed[old] = new
    return renamed


def flatten_speculators(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of the speculators library in the fields of a z-lab config."""
    kind, layers = config.get("speculators_model_type"), config.get("transformer_layer_config")
    layer_ids = config.get("aux_hidden_state_layer_ids")
    if kind != "dflash" or not isinstance(layers, dict):
        reason = f"is a speculators draft of kind {str(kind)[:40]!r}; only dflash is supported"
    elif not isinstance(layer_ids, list) or not all(_is_count(i, 1) for i in layer_ids):
        reason = "lists no usable aux_hidden_state_layer_ids"
    elif config.get("sample_from_anchor"):
        reason = "predicts from the anchor's own row (sample_from_anchor), which is not supported"
    elif "sliding_attention" in str(layers.get("layer_types")) and not config.get(
        "sliding_window_non_causal"
    ):
        reason = "has causal blocks (sliding_window_non_causal is off), which is not supported"
    else:
        own = {name: config.get(name) for name in ("block_size", "mask_token_id", "head_tokens")}
        return {**layers, **own, "target_layer_ids": [i - 1 for i in layer_ids]}
    raise CheckpointError(f"{path} {reason}.")


def translate_config(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """A z-lab config.json as `dflash` GGUF metadata."""
    reader = _Config(path, config)
    num_layers = reader.count("num_hidden_layers")
    num_heads = reader.count("num_attention_heads")
    hidden_dim = reader.count("hidden_size")
    head_dim = reader.count("head_dim", hidden_dim // num_heads)
    metadata: dict[str, Any] = {
        "general.architecture": "dflash",
        "dflash.block_count": num_layers,
        "dflash.context_length": reader.count("max_position_embeddings"),
        "dflash.embedding_length": hidden_dim,
        "dflash.feed_forward_length": reader.count("intermediate_size"),
        "dflash.attention.head_count": num_heads,
        "dflash.attention.head_count_kv": reader.count("num_key_value_heads", num_heads),
        "dflash.attention.key_length": head_dim,
        "dflash.attention.value_length": head_dim,
        "dflash.attention.layer_norm_rms_epsilon": reader.number("rms_norm_eps", 1e-6),
        "dflash.rope.freq_base": reader.rope_base(),
        "dflash.block_size": reader.count("block_size"),
        "tokenizer.ggml.mask_token_id": reader.count("mask_token_id", least=0),
    }
    if reader.find("vocab_size") is not None:
        metadata["dflash.vocab_size"] = reader.count("vocab_size")
    if (tokens := reader.find("head_tokens")) is not None:
        metadata["dflash.head_tokens"] = tokens
    if (layer_ids := reader.find("target_layer_ids")) is not None:
        metadata["dflash.target_layers"] = _shift_layer_ids(path, layer_ids)
    elif reader.find("num_target_layers") is not None:
        num_target_layers = reader.count("num_target_layers", least=5)
        metadata["dflash.target_layers"] = default_target_layers(num_target_layers, num_layers)
    return metadata | reader.window(num_layers) | reader.relatives()


def _shift_layer_ids(path: Path, layer_ids: Any) -> list[int]:
    """Outputs of layers -> inputs of layers."""
    is_list = isinstance(layer_ids, list) and 0 < len(layer_ids) <= _MAX_COUNT
    if not is_list or not all(_is_count(layer_id, 0) for layer_id in layer_ids):
        raise CheckpointError(f"{path} lists no usable target_layer_ids.")
    return [layer_id + 1 for layer_id in layer_ids]


_MAX_COUNT = 1 << 30


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MAX_COUNT


class _Config:
    """A config.json with checked fields; those of dflash_config come first."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        own = config.get("dflash_config")
        self._path = path
        self._fields = {**config, **own} if isinstance(own, dict) else dict(config)

    def find(self, name: str) -> Any:
        return self._fields.get(name)

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._fields.get(name)
        value = default if value is None else value
        if not _is_count(value, least):
            what = "does not give" if value is None else "has no usable"
            raise CheckpointError(f"{self._path / 'config.json'} {what} {name}.")
        return int(value)  # type: ignore[arg-type]

    def number(self, name: str, default: float | None = None) -> float:
        """A positive float32, as a GGUF file would hold it."""
        value = self._fields.get(name)
        return self._positive(name, default if value is None else value)

    def rope_base(self) -> float:
        """Newer configs nest it; a scaled rope would need more than a base."""
        for name in ("rope_parameters", "rope_scaling"):
            rope = self._fields.get(name)
            if not isinstance(rope, dict):
                continue
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise CheckpointError(
                    f"{self._path / 'config.json'} asks for rope scaling {str(kind)[:40]!r}, "
                    "which is not supported for drafts."
                )
            if "rope_theta" in rope:
                return self._positive("rope_theta", rope["rope_theta"])
        return self.number("rope_theta")

    def window(self, num_layers: int) -> dict[str, Any]:
        """The keys of a draft with sliding layers; none when every layer sees all."""
        kinds, window = self._fields.get("layer_types"), self._fields.get("sliding_window")
        if kinds is None or window is None or self._fields.get("use_sliding_window") is False:
            return {}
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise CheckpointError(f"{self._path / 'config.json'} needs {num_layers} layer_types.")
        if any(kind not in known for kind in kinds):
            raise CheckpointError(f"{self._path / 'config.json'} has an unknown layer type.")
        pattern = [kind == "sliding_attention" for kind in kinds]
        if not any(pattern):
            return {}
        return {
            "dflash.attention.sliding_window": self.count("sliding_window"),
            "dflash.attention.sliding_window_pattern": pattern,
        }

    def relatives(self) -> dict[str, Any]:
        """What DFlash2, DSpark and JetSpec say of themselves."""
        found: dict[str, Any] = {}
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if self.find(name) is not None:
                found[f"dflash.{name}"] = self.count(name)
        for name, key in _FLAGS.items():
            flag = self.find(name)
            if flag is not None and (flag or name == "sample_from_anchor"):  # others are off
                found[f"dflash.{key}"] = bool(flag)
        for name, key in _FACTORS.items():
            if self.find(name) is not None:
                found[f"dflash.{key}"] = self.find(name)
        return found

    def _positive(self, name: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 1e-30 < value < 1e30:
            raise CheckpointError(f"{self._path / 'config.json'} has no usable {name}.")
        return float(np.float32(value))
