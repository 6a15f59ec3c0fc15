"""A selector for a draft that is there already, in one folder: text, rows, record, file, card.

In: a target, its draft, prompts. Out: a folder that holds the draft's file with a selector in it.
Text is written and drafts are read by the engine itself, so a CPU is enough.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree.config import EngineConfig
from draftree.drafts.dflash import BlockDrafter
from draftree.engine.engine import TokenEngine
from draftree.errors import ModelError
from draftree.kernels.quant.formats import dequantize
from draftree.models.metadata import Metadata
from draftree.text.tokenizer import Tokenizer
from draftree.train.block_row import BlockRows, FinalNorm, read_rows
from draftree.train.card import make_selector_card
from draftree.train.corpus import Corpus
from draftree.train.engine_writer import EngineWriter
from draftree.train.prompt import Prompt
from draftree.train.run import (
    HEAD_TOKENS,
    Watcher,
    claim_folder,
    save_record,
    watch_selector,
    write_text,
)
from draftree.train.selector import SelectorPoint, StoredBlocks
from draftree.train.selector_file import new_module, write_selector
from draftree.train.settings import SelectorConfig
from draftree.weights.checkpoint import Checkpoint

_OTHER_HEAD = "markov_w1.weight"  # a bias for the token before


def add_selector(
    checkpoint: Checkpoint,
    draft: Checkpoint,
    prompts: Sequence[Prompt],
    config: SelectorConfig,
    folder: Path,
    device: str,
    watcher: Watcher,
    source: str = "",
) -> Path:
    """The draft's file with a selector; one that it has is replaced. source says in the card where
    the prompts come from.
    """
    watcher.phase("reading the target", 0)
    settings = EngineConfig(device=device, max_ctx=config.text.max_len, prefix_bytes=0)
    engine = TokenEngine(checkpoint, settings, draft)
    try:
        drafter = engine.drafter
        if not isinstance(drafter, BlockDrafter) or _OTHER_HEAD in draft.tensors:
            raise ModelError(f"{draft.path} cannot take a selector; give a DFlash draft.")
        folder.mkdir(parents=True, exist_ok=True)
        claim_folder(folder, config, checkpoint, prompts, draft)
        corpus = write_text(
            lambda _, max_len, stop_ids: EngineWriter(engine, max_len, stop_ids),
            Tokenizer.from_metadata(checkpoint.metadata),
            *(prompts, config, folder, watcher),
            "{:,} tokens".format,
        )
        watcher.phase("reading what the draft makes of it", corpus.num_sequences)
        rows = read_rows(
            *(engine, drafter, corpus, _final_norm(draft), config.plan.top_k, folder),
            lambda done: watcher.advance(done, f"{done:,} texts"),
        )
    finally:
        engine.close()
    listed = _listed_tokens(draft, corpus, engine.model_config.vocab_size)
    where = torch.device("cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda")
    plan, seed = config.plan, config.seed
    module = new_module(checkpoint, listed, plan, seed).to(where)
    blocks = StoredBlocks(rows, plan.batch_blocks, seed, where)
    curve = watch_selector(module, blocks, plan, seed, watcher)
    path = folder / f"{draft.path.stem}-selector.gguf"
    write_selector(draft, module.tables(), plan, listed, path)
    record = _make_record(checkpoint, draft, config, corpus, rows, curve, source)
    save_record(record, folder)
    (folder / "README.md").write_text(make_selector_card(record, path.stem), encoding="utf-8")
    return path


def _final_norm(draft: Checkpoint) -> FinalNorm:
    info = draft.tensors["output_norm.weight"]
    weight = dequantize(draft.raw(info.name), info.qtype).reshape(-1)
    eps = Metadata(draft).number("attention.layer_norm_rms_epsilon")
    return FinalNorm(weight.astype(np.float32), eps)


def _listed_tokens(draft: Checkpoint, corpus: Corpus, vocab_size: int) -> list[int]:
    """The tokens that the tables have a row for: all, or of a large vocabulary those that the draft
    lists or that the text holds most of.
    """
    if vocab_size <= 2 * HEAD_TOKENS:
        return list(range(vocab_size))
    listed = draft.metadata.get("dflash.head_tokens")
    return sorted(listed) if listed is not None else corpus.frequent_tokens(HEAD_TOKENS)


def _make_record(
    checkpoint: Checkpoint,
    draft: Checkpoint,
    config: SelectorConfig,
    corpus: Corpus,
    rows: BlockRows,
    curve: Sequence[SelectorPoint],
    source: str,
) -> dict[str, Any]:
    return {
        "target": str(checkpoint.metadata.get("general.name") or checkpoint.path.stem),
        "target_file": checkpoint.path.name,
        "draft_file": draft.path.name,
        "config": asdict(config),
        "text": {
            "source": source,
            "num_sequences": corpus.num_sequences,
            "num_held_out": int(corpus.is_held_out.sum()),
            "num_greedy": int(corpus.is_greedy.sum()),
            "num_written": corpus.num_written,
            "num_blocks": len(rows.tokens),
        },
        "torch": torch.__version__,
        "curve": [asdict(point) for point in curve],
    }
