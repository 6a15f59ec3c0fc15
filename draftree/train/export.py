"""A trained draft as files: a z-lab checkpoint folder, and a `dflash` GGUF.

In: a DraftModule. Out: files that draftree, and other programs that read these formats, open. The
target's embedding and head are not part of them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree.errors import ModelError
from draftree.kernels.quant.formats import QuantType
from draftree.train.draft import DraftModule, DraftSpec
from draftree.train.rounding import round_weights
from draftree.weights.dflash import ZLAB_MODEL_TYPE, rename_tensor

FORMATS = ("bf16", "f16", "f32", "q8", "q4")  # of matrices in a GGUF; vectors are always float32


def check_formats(names: Sequence[str]) -> None:
    for name in names:
        if name not in FORMATS:
            raise ModelError(f"A draft is written as {', '.join(FORMATS)}, not as {name}.")


def export_folder(draft: DraftModule, folder: Path) -> None:
    """config.json and model.safetensors in bfloat16."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(zlab_config(draft.spec), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in draft.used_weights().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def zlab_config(spec: DraftSpec) -> dict[str, Any]:
    kind = "sliding_attention" if spec.sliding_window else "full_attention"
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": ZLAB_MODEL_TYPE,
        "block_size": spec.block_size,
        "dflash_config": {
            "mask_token_id": spec.mask_token,
            "target_layer_ids": list(spec.feature_layers),
            "causal": False,  # vLLM and SGLang take layers with a window for causal ones
        },
        "is_causal": False,
        "num_target_layers": spec.num_target_layers,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": spec.eps,
        "rope_theta": spec.rope_base,
        "max_position_embeddings": spec.context_length,
        "vocab_size": spec.vocab_size,
        "layer_types": [kind] * spec.num_layers,
        "sliding_window": spec.sliding_window or None,
        "use_sliding_window": bool(spec.sliding_window),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def export_gguf(
    draft: DraftModule,
    path: Path,
    format_name: str,
    name: str,
    draft_vocab: Sequence[int] = (),
) -> None:
    """One file; format_name is one of FORMATS. draft_vocab: what to propose on a CPU, rising; none
    for all tokens.
    """
    import gguf

    check_formats([format_name])
    types = {
        "bf16": gguf.GGMLQuantizationType.BF16,
        "f16": gguf.GGMLQuantizationType.F16,
        "f32": gguf.GGMLQuantizationType.F32,
        "q8": gguf.GGMLQuantizationType(8),
        "q4": gguf.GGMLQuantizationType(3),
    }
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_name(name)
    _add_metadata(writer, draft.spec)
    if draft_vocab:
        writer.add_array("dflash.head_tokens", list(draft_vocab))
    for zlab_name, value in draft.used_weights().items():
        gguf_name = rename_tensor(zlab_name)
        if gguf_name is None:
            raise ModelError(f"The draft's tensor {zlab_name} has no name in GGUF files.")
        array = np.ascontiguousarray(value.detach().float().cpu().numpy())
        qtype = types[format_name] if array.ndim > 1 else types["f32"]
        if array.shape[-1] % QuantType(int(qtype)).block_len:
            qtype = types["f16"]
        if qtype == types["q4"]:  # from the weights before rounding: twice would be another one
            raw = round_weights(draft.state_dict()[zlab_name]).pack()
        else:
            raw = gguf.quants.quantize(array, qtype)
        writer.add_tensor(gguf_name, raw, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: Any, spec: DraftSpec) -> None:
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.ffn_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_rope_freq_base(spec.rope_base)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_uint32("dflash.block_size", spec.block_size)
    # The file counts the inputs of layers, the spec their outputs.
    writer.add_array("dflash.target_layers", [layer + 1 for layer in spec.feature_layers])
    writer.add_uint32("tokenizer.ggml.mask_token_id", spec.mask_token)
    if spec.sliding_window:
        writer.add_uint32("dflash.attention.sliding_window", spec.sliding_window)
        pattern = [True] * spec.num_layers
        writer.add_array("dflash.attention.sliding_window_pattern", pattern)
