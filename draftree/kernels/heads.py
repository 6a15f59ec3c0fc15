"""How queries and keys of attention layers become scores of a text, whatever the device."""

from typing import Final

CHUNK_LEN: Final = 32  # tokens that have one score
QUERY_LEN: Final = 8  # last positions of a question, which are the ones that ask
POOL_LEN: Final = 13  # positions over which scores are smoothed


def count_queries(num_text: int, length: int) -> int:
    """Rows that ask: none of the text's own, where a question is short."""
    return max(1, min(QUERY_LEN, length - num_text))
