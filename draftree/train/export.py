"""A trained draft as files: a z-lab checkpoint folder, and a `dflash` GGUF.

In: a DraftModule. Out: files that draftree, and other programs that read these formats, open. The
target's embedding and head are not part of them.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from draftree.drafts.export import write_gguf
from draftree.errors import ModelError
from draftree.kernels.quant.formats import QuantType
from draftree.train.draft import DraftModule, DraftSpec
from draftree.train.rounding import round_weights
from draftree.weights.dflash import ZLAB_MODEL_TYPE, rename_tensors, translate_config

_FOUR_BIT: Final = QuantType(3)
FORMATS: Final = {  # of matrices in a GGUF; vectors are always float32
    "bf16": QuantType.BF16,
    "f16": QuantType.F16,
    "f32": QuantType.F32,
    "q8": QuantType(8),
    "q4": _FOUR_BIT,
}


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
    check_formats([format_name])
    entries = translate_config(path, zlab_config(draft.spec))
    del entries["general.architecture"]
    entries["general.name"] = name
    if draft_vocab:
        entries["dflash.head_tokens"] = list(draft_vocab)
    write_gguf(path, entries, _encode_weights(draft, path, FORMATS[format_name]))


def _encode_weights(
    draft: DraftModule, path: Path, matrix_type: QuantType
) -> Iterator[tuple[str, np.ndarray, QuantType]]:
    import gguf

    weights = draft.used_weights()
    for zlab_name, gguf_name in rename_tensors(path, weights).items():
        array = np.ascontiguousarray(weights[zlab_name].detach().float().cpu().numpy())
        qtype = matrix_type if array.ndim > 1 else QuantType.F32
        if array.shape[-1] % qtype.block_len:
            qtype = QuantType.F16
        if qtype == _FOUR_BIT:  # from the weights before rounding: twice would be another one
            raw = round_weights(draft.state_dict()[zlab_name]).pack()
        else:
            raw = gguf.quants.quantize(array, gguf.GGMLQuantizationType(qtype.value))
        yield gguf_name, raw, qtype
