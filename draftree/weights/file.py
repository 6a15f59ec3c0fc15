"""A path -> Checkpoint: which of the readers a file or folder is for."""

from pathlib import Path

from draftree.weights.checkpoint import Checkpoint
from draftree.weights.dflash import OTHER_ARCHITECTURES, rename_gguf
from draftree.weights.gguf import open_gguf
from draftree.weights.safetensors import open_dflash_folder


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a GGUF file, the first part of a split GGUF, or a DFlash folder."""
    path = Path(path)
    if path.is_dir():
        return open_dflash_folder(path)
    checkpoint = open_gguf(path)
    if checkpoint.architecture in OTHER_ARCHITECTURES:
        return rename_gguf(checkpoint)
    return checkpoint
