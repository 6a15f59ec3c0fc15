"""Makes drafts/relatives.npz: DFlash2, DSpark and JetSpec as others compute them, in float32.

DFlash2 and DSpark by the modules of the `speculators` package, JetSpec by those of its authors. The
weights are those of `tests.made.make_draft`. Run with transformers and speculators installed:
python -m tests.data.make_relatives JETSPEC, where that is a checkout of JetSpec's repository.
"""

import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from speculators.models.dflash.model_definitions import Qwen3DFlashDecoderLayer
from speculators.models.dflash2.model_definitions import (
    CandidateSelector,
    Qwen3DFlash2DecoderLayer,
)
from speculators.models.dspark.model_definitions import MarkovHead
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from draftree.weights.dflash import rename_tensor
from tests.made import make_draft

HERE = Path(__file__).parent
LAYERS = (0, 1, 2)
LENGTHS = (1, 30)  # of the context; the second is longer than the window
BLOCK, WINDOW, MASK = 8, 24, 511
TARGET = HERE / "qwen35/tiny-qwen35-C-mtp-F16.gguf"
Weights = dict[str, torch.Tensor]


def read(path: Path) -> Weights:
    return {
        tensor.name: torch.from_numpy(
            gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        ).reshape(tuple(int(n) for n in tensor.shape)[::-1])
        for tensor in gguf.GGUFReader(path).tensors
    }


def new_config() -> Qwen3Config:
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=512,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=0,
    )
    config._attn_implementation = "eager"
    config.dflash_config = {"causal_head": True, "target_layer_ids": list(LAYERS)}
    config.block_size, config.num_target_layers = BLOCK, 4
    return config


def load_layer(layer: nn.Module, weights: Weights, index: int) -> nn.Module:
    names = {name: rename_tensor(f"layers.{index}.{name}") for name in layer.state_dict()}
    layer.load_state_dict({name: weights[stored] for name, stored in names.items()})
    return layer.float().eval()


def load_norm(weight: torch.Tensor) -> nn.Module:
    norm = Qwen3RMSNorm(len(weight), eps=1e-6)
    norm.load_state_dict({"weight": weight})
    return norm


def window_mask(length: int) -> torch.Tensor:
    """A key is hidden when it is as far from the query as the window, or further."""
    queries, keys = torch.arange(length, length + BLOCK), torch.arange(length + BLOCK)
    far = (queries[:, None] - keys[None]).abs() >= WINDOW
    return torch.zeros(far.shape).masked_fill(far, -torch.inf)[None, None]


def run_layers(
    layers: list[nn.Module], weights: Weights, features: torch.Tensor, embedded: torch.Tensor
) -> torch.Tensor:
    """The block's hidden states after the final norm: [BLOCK, hidden]."""
    context = load_norm(weights["enc.output_norm.weight"])(features @ weights["fc.weight"].T)
    length = len(features)
    positions = torch.arange(length + BLOCK)[None]
    rotary = Qwen3RotaryEmbedding(new_config())(embedded[None], positions)
    x = embedded[None]
    for layer, mask in zip(layers, (window_mask(length), None), strict=True):
        x = layer(
            target_hidden=context[None],
            hidden_states=x,
            attention_mask=mask,
            position_embeddings=rotary,
        )
    return load_norm(weights["output_norm.weight"])(x)[0]


def make_dflash2(hidden: torch.Tensor, logits: torch.Tensor, weights: Weights, anchor: int) -> dict:
    """Candidates of every position after the anchor, and the scores of all edges."""
    selector = CandidateSelector(vocab_size=512, hidden_size=128, rank=16, top_k=6)
    names = "predecessor_codebook", "successor_codebook", "hidden_projection.weight"
    stored = "selector_predecessor", "selector_successor", "selector_hidden"
    selector.load_state_dict(
        {name: weights[f"{s}.weight"] for name, s in zip(names, stored, strict=True)}
    )
    hidden, logits = hidden[1:], logits[1:]
    ids = logits.topk(6, dim=-1).indices
    before = torch.cat([torch.full_like(ids[:1], anchor), ids[:-1]])
    edges = [selector.score_candidates(logits, hidden, before[:, rank], ids) for rank in range(6)]
    return {"ids": ids, "edges": torch.stack(edges, dim=1)}


def make_dspark(
    hidden: torch.Tensor, logits: torch.Tensor, weights: Weights, anchor: int, first: int
) -> dict:
    """The greedy chain, each position's logits biased by the token before it."""
    head = MarkovHead(
        verifier_vocab_size=512, draft_vocab_size=512, markov_rank=16, hidden_size=128
    )
    head.load_state_dict(
        {f"{n}.weight": weights[f"{n}.weight"] for n in ("markov_w1", "markov_w2")}
    )
    tokens, rows = [anchor], []
    for i in range(first, BLOCK):
        bias = head.block_bias(
            prev_token_ids=torch.tensor([tokens[-1:]]), hidden_states=hidden[None, i : i + 1]
        )
        rows.append(logits[i] + bias[0, 0])
        tokens.append(int(rows[-1].argmax()))
    return {"tokens": torch.tensor(tokens[1:]), "logits": torch.stack(rows)}


def load_jetspec(checkout: Path, weights: Weights) -> nn.Module:
    sys.path.insert(0, str(checkout))
    from jetspec.models.draft_head import DFlashDraftModel

    model = DFlashDraftModel(new_config()).float().eval()
    model.load_state_dict({name: weights[rename_tensor(name)] for name in model.state_dict()})
    return model


def run_jetspec(model: nn.Module, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(features) + BLOCK)[None]
    return model(
        position_ids=positions, noise_embedding=embedded[None], target_hidden=features[None]
    )[0]


@torch.no_grad()
def main(checkout: Path) -> None:
    target = read(TARGET)
    known = np.load(HERE / "qwen35/logits_C_mtp.npz")
    ids = known["len33.ids"].astype(np.int64)
    features = np.concatenate([known["len33.layer_out"][i] for i in LAYERS], axis=1)
    found: dict[str, np.ndarray] = {"ids": ids, "features": features[: max(LENGTHS)]}
    embedding, head = target["token_embd.weight"], target["output.weight"]
    for kind in ("dflash2", "dspark", "dspark bonus", "jetspec"):
        weights = read(make_draft(feature_layers=LAYERS, relative=kind))
        config = new_config()
        sizes = {"block_size": BLOCK, "conv_kernel_size": 2, "conv_group_size": 16}
        layers = [
            load_layer(
                Qwen3DFlash2DecoderLayer(config, i, **sizes)
                if kind == "dflash2"
                else Qwen3DFlashDecoderLayer(config, i),
                weights,
                i,
            )
            for i in range(2)
        ]
        for length in LENGTHS:
            anchor, rows = int(ids[length]), torch.from_numpy(features[:length])
            embedded = embedding[torch.tensor([anchor] + [MASK] * (BLOCK - 1))]
            if kind == "jetspec":
                hidden = run_jetspec(load_jetspec(checkout, weights), rows, embedded)
            else:
                hidden = run_layers(layers, weights, rows, embedded)
            logits = hidden @ head.T
            results = {"block": logits[:: BLOCK - 1]}
            if kind == "dflash2":
                results |= make_dflash2(hidden, logits, weights, anchor)
            elif kind == "jetspec":
                results["block"] = logits
            else:
                first = 1 if kind == "dspark bonus" else 0
                results |= make_dspark(hidden, logits, weights, anchor, first)
            for name, values in results.items():
                found[f"{kind}.ctx{length}.{name}"] = values.numpy()
    np.savez_compressed(HERE / "drafts/relatives.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
