"""Architecture string of a draft -> how it is read. A new kind is one file and one line here."""

from typing import Protocol

from draftree.core import DraftSize
from draftree.drafts.dflash import DFlashKind
from draftree.drafts.drafter import Drafter
from draftree.drafts.mtp import MtpKind
from draftree.errors import ModelError
from draftree.kernels.ops import Ops
from draftree.models.model import Model
from draftree.weights.checkpoint import Checkpoint


class DraftKind(Protocol):
    """One kind of draft file. All but `load` read metadata only."""

    def name(self, checkpoint: Checkpoint) -> str:
        """What people call a draft of this file."""
        ...

    def read_size(self, checkpoint: Checkpoint) -> DraftSize: ...
    def check_fit(self, checkpoint: Checkpoint, target: Checkpoint, model: Model) -> None:
        """Refuse a draft that was made for another target than this one, loaded as model."""
        ...

    def load(
        self,
        checkpoint: Checkpoint,
        target: Model,
        ops: Ops,
        *,
        block_len: int,
        use_draft_vocab: bool,
    ) -> Drafter:
        """block_len: positions that it fills with the anchor, 0 for the trained number.
        use_draft_vocab: propose what the draft lists, if it does, and tokens of the text.
        """
        ...


KINDS: dict[str, DraftKind] = {"dflash": DFlashKind(), "mtp": MtpKind()}


def is_draft(checkpoint: Checkpoint) -> bool:
    return checkpoint.architecture in KINDS


def find_kind(checkpoint: Checkpoint) -> DraftKind:
    if not is_draft(checkpoint):
        raise ModelError(
            f"{checkpoint.path} is a '{checkpoint.architecture}' model, not a draft; "
            f"kinds of drafts are {', '.join(sorted(KINDS))}."
        )
    return KINDS[checkpoint.architecture]


def read_draft_size(checkpoint: Checkpoint) -> DraftSize:
    """What planning needs to know."""
    return find_kind(checkpoint).read_size(checkpoint)
