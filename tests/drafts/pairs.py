"""A tiny target and a draft for each kind of draft, and each kind of target that it can have."""

from dataclasses import dataclass
from functools import cache, partial

from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint
from draftree.weights.mtp import split_mtp
from tests.made import make_draft
from tests.tiny import tiny_path

RELATIVES = ("dflash2", "dspark", "dspark bonus", "jetspec")
SELECTORS = ("selector", "listed selector")
RELATIVE_LAYERS = (0, 1, 2)  # which both targets have


@cache
def _mtp(target: str) -> Checkpoint:
    checkpoint = split_mtp(open_checkpoint(tiny_path(target)))
    assert checkpoint is not None
    return checkpoint


@dataclass(frozen=True)
class Pair:
    target: str
    open_draft: partial[Checkpoint]


@cache
def _relative(kind: str) -> Checkpoint:
    return open_checkpoint(make_draft(feature_layers=RELATIVE_LAYERS, relative=kind))


PAIRS = {
    "mtp, hybrid": Pair("qwen35-mtp", partial(_mtp, "qwen35-mtp")),
    **{
        f"{kind}, {target}": Pair(name, partial(_relative, kind))
        for kind in (*RELATIVES, *SELECTORS)
        for target, name in (("dense", "llama"), ("hybrid", "qwen35-mtp"))
    },
}
