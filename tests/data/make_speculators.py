"""Makes dflash/speculators.npz: block logits of the tiny draft by the speculators library's own
module, from the folder that `draftree export` writes.

    python -m tests.data.make_speculators

It needs speculators 0.9.0 and transformers. The module and its mask are theirs; here they are given
a context, an anchor and the target's embedding and head.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from speculators import SpeculatorModel, SpeculatorModelConfig

from draftree.drafts.export import export_draft
from draftree.kernels.quant.formats import dequantize
from draftree.weights.file import open_checkpoint
from tests.golden import golden
from tests.tiny import tiny_path

OUT = Path(__file__).parent / "dflash" / "speculators.npz"
CONTEXTS = {"full": (1, 7, 40), "sliding": (7, 40)}


def load_module(folder: Path) -> torch.nn.Module:
    """Their module with the draft's weights; plain attention, which a CPU has."""
    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = None  # the target is a GGUF file
    model = SpeculatorModel.from_pretrained(str(folder), config=config, dtype=torch.float32)
    target = open_checkpoint(tiny_path("qwen35"))
    for module, name in ((model.embed_tokens, "token_embd"), (model.lm_head, "output")):
        name = f"{name}.weight" if f"{name}.weight" in target.tensors else "token_embd.weight"
        values = dequantize(target.raw(name), target.tensors[name].qtype)
        module.weight.data = torch.from_numpy(values.copy())
    return model.eval()


@torch.no_grad()
def block_logits(model: torch.nn.Module, features: np.ndarray, anchor: int) -> np.ndarray:
    """All rows of the block after a context: [block_size, vocab_size]. The last row of the base
    sequence is the anchor's own place, which their mask hides.
    """
    length, block = len(features), model.block_size
    padded = np.concatenate([features, np.full_like(features[:1], 1e4)])
    base = torch.from_numpy(padded)[None]
    ids = torch.tensor([[anchor, *[model.mask_token_id] * (block - 1)]])
    places = torch.cat([torch.arange(length + 1), length + torch.arange(block)])[None]
    context, x = model.hidden_norm(model.fc(base)), model.embed_tokens(ids)
    turns = model.rotary_emb(x, places)
    for index, layer in enumerate(model.layers):
        is_sliding = index in model.sliding_window_indices
        mask = model._create_attention_mask(
            document_ids=torch.zeros(1, length + 1, dtype=torch.long),
            total_seq_len=length + 1,
            anchor_positions=torch.tensor([length]),
            device=torch.device("cpu"),
            sliding_window=model.sliding_window if is_sliding else None,
            sliding_window_non_causal=model.sliding_window_non_causal,
        )
        x = layer(
            hidden_states=x,
            target_hidden=context,
            attention_mask=mask,
            position_ids=places,
            position_embeddings=turns,
        )
    logits: np.ndarray = model.lm_head(model.norm(x))[0].numpy()
    return logits


def export_tiny(kind: str, folder: Path) -> Path:
    """The tiny draft in their form, with and without windows."""
    source = folder / f"zlab-{kind}"
    source.mkdir()
    name = "config_sliding_window.json" if kind == "sliding" else "config.json"
    (source / "config.json").write_bytes(golden(f"dflash/zlab/{name}").read_bytes())
    weights = golden("dflash/zlab/model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights)
    draft, target = open_checkpoint(source), open_checkpoint(tiny_path("qwen35"))
    export_draft(draft, target, "speculators", folder / kind, "org/tiny")
    return folder / kind


def make(kinds: Sequence[str]) -> dict[str, np.ndarray]:
    features, anchor = np.load(golden("dflash/dflash.npz"))["target_features"], 5
    found: dict[str, np.ndarray] = {"anchor": np.array(anchor)}
    with TemporaryDirectory() as name:
        for kind in kinds:
            model = load_module(export_tiny(kind, Path(name)))
            for length in CONTEXTS[kind]:
                logits = block_logits(model, features[:length], anchor)
                found[f"{kind}.ctx{length}"] = logits[1:].astype(np.float32)
    return found


if __name__ == "__main__":
    np.savez_compressed(OUT, **make(tuple(CONTEXTS)))
