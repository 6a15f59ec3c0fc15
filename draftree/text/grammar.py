"""Formats that a reply must have -> grammars over one model's tokens, through `llguidance`.

In: a tokenizer, and JSON schemas, patterns or Lark grammars. Out: `Cursor`s that know which tokens
may follow, and `Recognizer`s of text. It does not know about reasoning or tools: see constraint.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import takewhile
from threading import Lock
from typing import Any

import numpy as np

from draftree.errors import GrammarError
from draftree.text.tokenizer import Tokenizer

# Bounded, or a small model may write spaces for ever.
_LOOSE = {"whitespace_pattern": r"[ ]?|\n[ ]{0,40}"}
# As templates write JSON: long runs of text are then known beforehand.
STRICT_SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
_MAX_KEPT = 64
_MAX_REFERENCES = 500  # the library follows a chain of them on the stack, and may crash
_MAX_RULES = 256  # of a GBNF grammar: reading them takes time that grows with their square
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile )?")
_LISTING = re.compile(r"\n +\d+ \| ")


class FormatKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    GBNF = "gbnf"  # as llama.cpp's grammars are


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the reply's text must be. definition: a JSON schema, a pattern or a Lark grammar."""

    kind: FormatKind
    definition: Mapping[str, Any] | str | None = None

    def write_rules(self, name: str) -> str:
        """Lark text that defines the rule `name`."""
        match self.kind, self.definition:
            case FormatKind.JSON_OBJECT, _:
                return json_rule(name, {"type": "object"}, _LOOSE)
            case FormatKind.JSON_SCHEMA, Mapping():
                return json_rule(name, self.definition, _LOOSE)
            case FormatKind.REGEX, str():
                from llguidance import regex_to_lark

                return f"{name}: /{regex_to_lark(self.definition)}/\n"
            case FormatKind.LARK, str():
                return f"{name}: %lark {{\n{self.definition}\n}}\n"
            case FormatKind.GBNF, str():
                return f"{name}: %lark {{\n{_read_gbnf(self.definition)}\n}}\n"
        wanted = "an object" if self.kind is FormatKind.JSON_SCHEMA else "text"
        raise GrammarError(f"The definition of a {self.kind} format must be {wanted}.")


def _read_gbnf(text: str) -> str:
    """As Lark."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if text.count("::=") > _MAX_RULES:
        raise GrammarError(f"The grammar has more than {_MAX_RULES} rules.")
    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise GrammarError("The grammar is nested too deeply.") from None
    except Exception as error:  # the library raises plain ones, too
        problem = " ".join(str(error).split()).rstrip(".")[:200]
        raise GrammarError(f"The grammar cannot be read: {problem}.") from None


def json_rule(
    name: str, schema: Mapping[str, Any], options: Mapping[str, Any] = STRICT_SPACING
) -> str:
    """Lark text for JSON that follows a schema. options: of the library, beside the schema's own
    under "x-guidance".
    """
    own = schema.get("x-guidance")
    options = {**(own if isinstance(own, Mapping) else {}), **options}
    try:
        text = json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"The JSON schema cannot be written as JSON: {error}.") from None
    if text.count('"$ref"') > _MAX_REFERENCES:
        raise GrammarError(f"The JSON schema has more than {_MAX_REFERENCES} references.")
    return f"{name}: %json {text}\n"


def quote(text: str) -> str:
    """A text as Lark rules spell it."""
    return json.dumps(text, ensure_ascii=False)


class Cursor:
    """A place in a grammar."""

    __slots__ = ("_forced", "_matcher", "_stop_ids", "_vocab_size")

    def __init__(self, matcher: Any, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher  # llguidance's
        self._vocab_size, self._stop_ids = vocab_size, stop_ids
        self._forced: list[int] | None = None  # None: not asked for yet

    def copy(self) -> "Cursor":
        return Cursor(self._matcher.deep_copy(), self._vocab_size, self._stop_ids)

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def fill_mask(self, bits: np.ndarray) -> None:
        """Set exactly the bits of tokens that may follow; stop tokens where the text may end."""
        num_words = (self._vocab_size + 31) // 32
        mask = bits[:num_words]
        assert mask.dtype == np.uint32 and mask.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        bits[num_words:] = 0  # the model may have more rows than there are tokens

    def count_valid(self, tokens: Sequence[int]) -> int:
        if tokens[0] in self._stop_ids:
            return int(self._matcher.is_accepting())
        forced = self.propose_forced()
        if forced and tokens[0] != forced[0]:
            return 0  # the text must be spelled as the tokenizer would
        if max(tokens) >= self._vocab_size:  # the model may have more rows than there are tokens
            tokens = list(takewhile(lambda token: token < self._vocab_size, tokens))
        return int(self._matcher.validate_tokens(tokens))

    def propose_forced(self) -> list[int]:
        """Tokens of the text that must follow; empty where there is a choice."""
        if self._forced is None:
            self._forced = self._matcher.compute_ff_tokens()
        return self._forced

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._forced = None
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = _read_problem(self._matcher.get_error())
            raise GrammarError(f"The reply cannot go on under its grammar: {problem}.")


class GrammarCompiler:
    """One model's vocabulary as the library wants it: built on first use, then kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._table: Any = None
        self._kept: dict[str, Cursor] = {}  # the newest last

    def compile(self, rules: str) -> Cursor:
        """Lark rules, beginning with `start`. Copy the cursor before advancing it."""
        with self._lock:
            cursor = self._kept.pop(rules, None)
            if cursor is None:
                cursor = self._compile(rules)
            self._kept[rules] = cursor
            if len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            return cursor

    def _compile(self, rules: str) -> Cursor:
        from llguidance import LLMatcher, LLParserLimits

        if self._table is None:
            self._table = _build_table(self._tokenizer)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._table, LLMatcher.grammar_from_lark(rules), limits=limits)
        first = matcher.deep_copy()
        first.compute_logit_bias()  # that nothing fits a grammar shows only here
        if first.is_error():
            problem = _read_problem(first.get_error())
            raise GrammarError(f"The reply's format cannot be used: {problem}.")
        return Cursor(matcher, self._tokenizer.vocab_size, frozenset(self._tokenizer.stop_ids))


class Recognizer:
    """Follows a text that may become what Lark rules describe."""

    def __init__(self, rules: str) -> None:
        self._matcher = _compile_bytes(rules).deep_copy()

    def push(self, text: str) -> str | None:
        """What follows the end, if anything. None: the text is something else."""
        data = text.encode()
        count = self._matcher.try_consume_tokens(list(data))
        if count == len(data) or self.is_complete:
            return data[count:].decode()
        return None

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())


@lru_cache(maxsize=16)
def _compile_bytes(rules: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    limits = LLParserLimits(verbose_errors=False)
    return LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(rules), limits=limits)


class _TableSource:
    """What the library reads of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        count = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.stop_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(count)]
        self.special_token_ids = [i for i in range(count) if tokenizer.is_special(i)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(
            text, add_special=False, parse_special=False, starts_text=False
        )


def _build_table(tokenizer: Tokenizer) -> Any:
    from llguidance import LLTokenizer

    if not tokenizer.stop_ids:
        raise GrammarError("The model file names no token that ends a text; formats need one.")
    return LLTokenizer(
        _TableSource(tokenizer),  # type: ignore[arg-type]
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.stop_ids),
    )


def _read_problem(message: str) -> str:
    """What the library objects to, without its listing of rules that the user never saw."""
    if message.startswith("panic"):
        return "there is too much of it for one grammar; use fewer or smaller schemas"
    if message.startswith("NoExtensionBias"):
        return "no text fits it"
    problem = _LISTING.split(_PLACE.sub("", message))[0].removesuffix("<non-verbose/>")
    return " ".join(problem.split()).rstrip(".")[:500]
