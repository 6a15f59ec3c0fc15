"""Checkpoint -> Model: picks the architecture, reads every tensor, and accounts for all of them."""

from dataclasses import replace

from draftree.errors import CheckpointError, ModelError
from draftree.kernels.ops import Ops
from draftree.layers.attention import Attention
from draftree.layers.block import Block
from draftree.models.metadata import Metadata
from draftree.models.model import Model
from draftree.models.registry import READERS
from draftree.models.source import TensorSource
from draftree.weights.checkpoint import Checkpoint


def check_architecture(checkpoint: Checkpoint) -> None:
    """Refuse what cannot be run, before anything is allocated for it."""
    if checkpoint.architecture not in READERS:
        raise ModelError(
            f"{checkpoint.path} is a '{checkpoint.architecture}' model; "
            f"supported architectures are {', '.join(sorted(READERS))}."
        )


def load_model(checkpoint: Checkpoint, ops: Ops, window: int = 0) -> Model:
    """window: positions that attention looks back at most; 0: as the file has it."""
    check_architecture(checkpoint)
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{checkpoint.path} has no token embedding.")
    source = TensorSource(checkpoint, ops)
    model = READERS[checkpoint.architecture](
        ops, Metadata(checkpoint), source, vocab_size=embedding.shape[0]
    )
    source.finish()
    if not window:
        return model
    return replace(model, blocks=tuple(_limit(block, window) for block in model.blocks))


def _limit(block: Block, window: int) -> Block:
    mixer = block.mixer
    if not isinstance(mixer, Attention):
        return block
    return replace(block, mixer=replace(mixer, window=min(mixer.window or window, window)))
