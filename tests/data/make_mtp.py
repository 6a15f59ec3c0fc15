"""Makes drafts/mtp.npz: multi-token prediction as the `speculators` package computes it.

Its layer (on transformers, float32) gets the weights of the tiny hybrid's own block and the hidden
states that transformers gave for the target. Run with both packages installed:
python -m tests.data.make_mtp
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from speculators.models.mtp.model_definitions import Qwen35MTPLayer
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from draftree.weights.dflash import rename_tensor

HERE = Path(__file__).parent
BLOCK = 4
OWN_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "hidden_layernorm": "nextn.hnorm",
    "token_layernorm": "nextn.enorm",
    "input_proj": "nextn.eh_proj",
    "final_layernorm": "nextn.shared_head_norm",
}
NUM_STEPS = 5


def main() -> None:
    path = HERE / "qwen35/tiny-qwen35-C-mtp-F16.gguf"
    weights = {
        tensor.name: torch.from_numpy(
            gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        )
        for tensor in gguf.GGUFReader(path).tensors
    }
    layer, rotary = build_layer(weights)
    known = np.load(HERE / "qwen35/logits_C_mtp.npz")
    ids, hidden = known["len33.ids"].astype(np.int64), torch.from_numpy(known["len33.final_norm"])
    found = {"ids": ids, "residual": known["len33.layer_out"][-1], "embed": known["len33.embed"]}
    for length in (1, 7, 32):
        tokens, logits = draft(layer, rotary, weights, ids[: length + 1], hidden[:length])
        found[f"ctx{length}.tokens"], found[f"ctx{length}.logits"] = tokens, logits
    np.savez_compressed(HERE / "drafts/mtp.npz", **found)


def build_layer(
    weights: dict[str, torch.Tensor],
) -> tuple[torch.nn.Module, torch.nn.Module]:
    config = Qwen3_5TextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        rms_norm_eps=1e-6,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    config._attn_implementation = "eager"
    layer = Qwen35MTPLayer(config).float().eval()
    state = {}
    for name in layer.state_dict():
        own = OWN_NAMES.get(name.removesuffix(".weight"))
        stored = f"blk.{BLOCK}.{own}.weight" if own else rename_tensor(f"layers.{BLOCK}.{name}")
        # Files hold 1 + weight.
        state[name] = weights[stored] - 1 if "norm" in name else weights[stored]
    layer.load_state_dict(state)
    return layer, Qwen3_5TextRotaryEmbedding(config)


def draft(
    layer: torch.nn.Module,
    rotary: torch.nn.Module,
    weights: dict[str, torch.Tensor],
    tokens: np.ndarray,
    hidden: torch.Tensor,
) -> tuple[np.ndarray, np.ndarray]:
    """The greedy chain after the tokens, whose last is the anchor; hidden: of those before it."""
    chain, logits, text = [], [], tokens.tolist()
    for _ in range(NUM_STEPS):
        embedded = weights["token_embd.weight"][torch.tensor(text[1:])]
        count = len(hidden)
        positions = torch.arange(count)[None, None].expand(3, 1, count)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            out = layer(
                hidden_states=hidden[None],
                token_embeddings=embedded[None],
                attention_mask=mask,
                position_embeddings=rotary(hidden[None], positions),
            )[0]
        logits.append((out[-1] @ weights["output.weight"].T).numpy())
        chain.append(int(logits[-1].argmax()))
        hidden = torch.cat([hidden, out[-1:]])
        text.append(chain[-1])
    return np.array(chain), np.stack(logits)


if __name__ == "__main__":
    main()
