"""A tiny target and a draft for each kind of draft, and each kind of target that it can have."""

from dataclasses import dataclass
from functools import cache, partial

from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint
from draftree.weights.mtp import split_mtp
from tests.tiny import tiny_path


@cache
def _mtp(target: str) -> Checkpoint:
    checkpoint = split_mtp(open_checkpoint(tiny_path(target)))
    assert checkpoint is not None
    return checkpoint


@dataclass(frozen=True)
class Pair:
    target: str
    open_draft: partial[Checkpoint]


PAIRS = {
    "mtp, hybrid": Pair("qwen35-mtp", partial(_mtp, "qwen35-mtp")),
}
