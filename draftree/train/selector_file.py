"""Where a selector begins and ends: a module over a target's embeddings, and the draft's file with
its tables in it.

In: checkpoints of a target and its draft. Knows nothing of how it learns.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from draftree.drafts.export import draft_entries, draft_tensors, write_gguf
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.train.selector import SelectorModule, SelectorTables
from draftree.train.settings import SelectorPlan
from draftree.weights.checkpoint import Checkpoint

_TABLES = "selector_predecessor.weight", "selector_successor.weight"
_PROJECTION = "selector_hidden.weight"
_EIGHT_BIT = QuantType(8)


def new_module(
    checkpoint: Checkpoint, listed: Sequence[int], plan: SelectorPlan, seed: int
) -> SelectorModule:
    """For a target. listed: the tokens that its tables have a row for, rising."""
    torch.manual_seed(seed)
    vocab_size = checkpoint.tensors["token_embd.weight"].shape[0]
    row_of = torch.full((vocab_size,), len(listed))
    row_of[list(listed)] = torch.arange(len(listed))
    embedding = _read_rows(checkpoint, "token_embd.weight", listed)
    has_head = "output.weight" in checkpoint.tensors
    head = _read_rows(checkpoint, "output.weight", listed) if has_head else embedding
    return SelectorModule(embedding, head, row_of, plan)


def _read_rows(checkpoint: Checkpoint, name: str, tokens: Sequence[int]) -> torch.Tensor:
    raw = np.ascontiguousarray(checkpoint.raw(name)[list(tokens)])
    values = dequantize(raw, checkpoint.tensors[name].qtype)
    return torch.from_numpy(values.reshape(len(tokens), -1).astype(np.float32))


def write_selector(
    draft: Checkpoint,
    tables: SelectorTables,
    plan: SelectorPlan,
    listed: Sequence[int],
    path: Path,
) -> None:
    """The draft's own tensors byte for byte, and the tables in 8 bits. A selector that it has is
    replaced.
    """
    import gguf

    kept = [part for part in draft_tensors(draft) if not part[0].startswith("selector_")]
    entries = draft_entries(draft) | {
        "dflash.selector_rank": plan.rank,
        "dflash.selector_top_k": plan.top_k,
        "dflash.selector_by_head_token": True,
        "dflash.head_tokens": list(listed),
    }
    added = zip(
        (*_TABLES, _PROJECTION), (tables.before, tables.after, tables.projection), strict=True
    )
    for name, values in added:
        qtype = _EIGHT_BIT if values.shape[1] % _EIGHT_BIT.block_len == 0 else QuantType.F16
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType(qtype.value))
        kept.append((name, raw.view(np.uint8), qtype))
    write_gguf(path, entries, kept)
