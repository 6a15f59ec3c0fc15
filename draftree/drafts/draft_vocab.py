"""The tokens that a draft proposes on a CPU, where the head is most of its pass: those that its
file lists, and in spare rows of its head others that the text holds.

In: the listed tokens, the target's head, tokens of the text as they come. Out: a packed head, and
the token that each of its rows stands for.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from draftree.kernels import ops
from draftree.kernels.cpu.form import F32
from draftree.kernels.cpu.pack import Weight, pack
from draftree.kernels.ops import Ops, narrow
from draftree.kernels.quant.formats import QuantType
from draftree.models.model import Embedding

NUM_SPARE: Final = 512
GROUP_ROWS: Final = 64  # packed together: whole strips of every kernel


class DraftVocab:
    """A token that has no row takes that of the one that was not seen for longest, so the last
    tokens of a text are there, and what conversations that take turns have in common stays.
    """

    def __init__(self, listed: Sequence[int], rows: Embedding, ops: Ops) -> None:
        """rows: of the target's head. Spare ones come first, so that their groups are strips, and
        begin with any tokens that are not listed.
        """
        is_listed = np.zeros(len(rows.raw), dtype=np.bool_)
        is_listed[list(listed)] = True
        others = np.flatnonzero(~is_listed)
        others = others[: min(NUM_SPARE, len(others)) // GROUP_ROWS * GROUP_ROWS]
        self.tokens = np.concatenate([others, listed])
        self.head = ops.pack(rows.raw[self.tokens], rows.qtype)
        self._rows, self._is_listed = rows, is_listed.tobytes()
        # The rows of tokens that are not listed, in the order in which these were last seen.
        self._spare = {token: row for row, token in enumerate(others.tolist())}

    def add(self, tokens: Sequence[int]) -> None:
        """Tokens of the text, in order; the last ones that are not listed stay."""
        is_listed, spare = self._is_listed, self._spare
        others = [token for token in tokens if not is_listed[token]]
        recent = list(dict.fromkeys(reversed(others)))[: len(spare)]
        missing = [token for token in recent if token not in spare]
        if missing:
            kept = set(recent)
            unseen = [token for token in spare if token not in kept]
            rows = [spare.pop(token) for token in unseen[: len(missing)]]
            spare.update(zip(missing, rows, strict=True))
            self.tokens[rows] = missing
            for group in {row // GROUP_ROWS for row in rows}:
                self._pack(group * GROUP_ROWS)
        for token in reversed(recent):
            spare[token] = spare.pop(token)

    def _pack(self, first: int) -> None:
        """The rows of a group, as their tokens are now."""
        tokens = self.tokens[first : first + GROUP_ROWS]
        replace_rows(self.head, first, self._rows.raw[tokens], self._rows.qtype)


def replace_rows(weight: ops.Weight, first: int, raw: np.ndarray, qtype: QuantType) -> None:
    """Other rows in the place of those from `first` on, whole groups, in a weight that a CPU packed
    of the same type. Programs that multiply with it read the new ones.
    """
    whole = narrow(weight, Weight)
    assert first % GROUP_ROWS == len(raw) % GROUP_ROWS == 0 and GROUP_ROWS % whole.strip_rows == 0
    part = pack(raw, qtype, exact=whole.form == F32, isa=whole.isa)
    strip = first // whole.strip_rows
    whole.data[strip : strip + len(part.data)] = part.data
