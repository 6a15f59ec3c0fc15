"""What attention layers ask and offer before positions enter: queries of a sequence's last rows and
keys of all, kept by a device for scores of a text.
"""

from typing import Final, Protocol

from draftree.kernels.ops import Array

CHUNK_LEN: Final = 32  # tokens that have one score
QUERY_LEN: Final = 8  # last positions of a question, which are the ones that ask
POOL_LEN: Final = 13  # positions over which scores are smoothed


class HeadStore(Protocol):
    """Filled by passes over what `Ops.keep_heads` recorded; the last pass has QUERY_LEN rows at
    least.
    """

    def collect(self, first: int, num_rows: int) -> None:
        """After a pass over so many rows from position first on."""
        ...

    def score(self, num_text: int, length: int) -> Array:
        """Of a text and a question behind it, length tokens in all: float32, one for each CHUNK_LEN
        tokens of the text. Softmax over all that a query sees, the largest of all layers, heads and
        queries, smoothed, and the mean of each chunk, in shares of an even spread.
        """
        ...


def count_queries(num_text: int, length: int) -> int:
    """Rows that ask: none of the text's own, where a question is short."""
    return max(1, min(QUERY_LEN, length - num_text))
