"""How byte-level vocabularies cut text into words, by the name that GGUF files use for it.

Each scheme is a list of patterns: every match of one is a word of its own, and the later patterns
work on the words of the earlier ones. It does not know about tokens.
"""

from dataclasses import dataclass

from draftree.errors import TokenizerError

_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_TAIL}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_TAIL}"
# Combining marks belong to the letters before them.
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """One way of cutting text into words."""

    patterns: tuple[str, ...]
    # A word that is itself a token becomes that token, whatever the merges would make of it.
    whole_words_first: bool = False
    adds_bos: bool = False  # unless the file says otherwise


_DIGIT_WORDS = Pretokenizer((r"\p{N}", _GPT2))
_WORDS = Pretokenizer((_GPT2,))
_LLAMA3_WORDS = Pretokenizer((_LLAMA3,), whole_words_first=True, adds_bos=True)
_QWEN2_WORDS = Pretokenizer((_QWEN2,))

PRETOKENIZERS = {
    "default": Pretokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-r1-qwen": _QWEN2_WORDS,
    "gpt-2": _WORDS,
    "llama-bpe": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "phi-2": _WORDS,
    "qwen2": _QWEN2_WORDS,
    "qwen35": Pretokenizer((_QWEN35,)),
    "refact": _DIGIT_WORDS,
    "smollm": _DIGIT_WORDS,
    "starcoder": _DIGIT_WORDS,
}


def find_pretokenizer(name: str) -> Pretokenizer:
    try:
        return PRETOKENIZERS[name]
    except KeyError:
        raise TokenizerError(
            f"This model's text is cut into words by the scheme {name!r}, which is not supported; "
            f"supported are {', '.join(PRETOKENIZERS)}."
        ) from None
