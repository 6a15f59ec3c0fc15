"""Text that every machine with Python has: the language reference inside pydoc. Out: token ids."""

from collections.abc import Callable, Iterator

from draftree.errors import BenchError

Encode = Callable[[str], list[int]]


def make_window(encode: Encode, window_len: int) -> list[int]:
    """The reference up to so many tokens."""
    ids: list[int] = []
    for piece in read_prose():
        ids += encode(piece)
        if len(ids) >= window_len:
            return ids[:window_len]
    raise BenchError(f"There are {len(ids)} tokens of text, not {window_len}; ask for fewer.")


def read_prose() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"{topics[name].strip()}\n\n"
