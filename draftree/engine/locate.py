"""Names to open checkpoints: the model that was asked for, and the draft that goes with it."""

from dataclasses import dataclass

from draftree.drafts.registry import find_kind, is_draft, read_draft_size
from draftree.errors import ModelError
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint
from draftree.weights.hub import draft_for, resolve
from draftree.weights.mtp import split_mtp


@dataclass(frozen=True, slots=True)
class Located:
    checkpoint: Checkpoint
    draft_checkpoint: Checkpoint | None


def locate(model: str, draft: str) -> Located:
    """draft: a name or path, "none", "mtp" for the block in the model's own file, or "auto"
    for the draft that the catalogue pairs with the model, if downloaded.
    """
    checkpoint = open_checkpoint(resolve(model))
    if is_draft(checkpoint):
        raise ModelError(
            f"{checkpoint.path} is a draft; give its target as the model and this as --draft."
        )
    if draft == "none":
        return Located(checkpoint, None)
    if draft == "auto":
        path = draft_for(model)
        return Located(checkpoint, open_checkpoint(path) if path is not None else None)
    return Located(checkpoint, open_draft(draft, checkpoint))


def open_draft(draft: str, target: Checkpoint) -> Checkpoint:
    """draft: a name or path, or "mtp"."""
    if draft != "mtp":
        return open_checkpoint(resolve(draft))
    block = split_mtp(target)
    if block is None:
        raise ModelError(
            f"{target.path} has no block for multi-token prediction; "
            "give another --draft, or a file that has one."
        )
    return block


def name_draft(draft: Checkpoint) -> str:
    """What people call its kind."""
    return find_kind(draft).name(draft)


def count_block(draft: Checkpoint) -> int:
    """Positions that it was trained to fill, with the anchor."""
    return read_draft_size(draft).block_len
