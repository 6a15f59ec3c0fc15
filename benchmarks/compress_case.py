"""Long texts with a question whose answer stands in a known place: needles in prose, code, the log
of an agent's tests; and a text to sum up.

In: a kind, a length in characters and a seed. Out: cases. Prose and code are those of Python's own
library, which is at hand everywhere.
"""

import ast
import inspect
import pydoc_data.topics
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import numpy as np

_PLACES: Final = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Quebec", "Nairobi", "Vienna")
_CODE: Final = ("argparse", "shutil", "textwrap", "statistics", "zipfile", "tarfile", "calendar")
# Modules that say in several sentences what they are for.
_DESCRIBED: Final = (
    *("argparse", "base64", "calendar", "cmd", "codecs", "configparser", "csv", "ctypes"),
    *("datetime", "difflib", "fractions", "ftplib", "gettext", "heapq", "imaplib", "inspect"),
    *("locale", "mimetypes", "pickle", "pickletools", "pstats", "random", "sched", "shlex"),
    *("statistics", "string", "subprocess", "threading", "timeit", "trace", "zipfile"),
)
_LEAST_WORDS: Final = 4
_READ_FILE: Final = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Shows a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 60}},
            "required": ["path"],
        },
    },
}
_RUN: Final = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "run_tests", "arguments": "{}"},
}
_MAX_TOKENS: Final = MappingProxyType({"summary": 96, "multi-value": 48, "variables": 64})
# What is told and what is asked share no name and no four words.
_PARAPHRASES: Final = (
    ("The old baker always puts {} into his bread.", "Which spice goes into the dough?", "cumin"),
    ("My sister keeps her bicycle in the {}.", "Where does she leave her bike?", "barn"),
    ("The meeting was moved to {} afternoon.", "On what day will we meet?", "Thursday"),
    ("We painted the front door {} last summer.", "What colour is the entrance?", "purple"),
    ("Her new puppy is called {}.", "What name did the dog get?", "Biscuit"),
    ("The train to the coast leaves from platform {}.", "Which track is it?", "nineteen"),
    ("Grandfather hid the key under the {}.", "What was it concealed beneath?", "flowerpot"),
    ("The soup tasted far too much of {}.", "What had the cook used in excess?", "garlic"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """needed: pieces of the text without which the question cannot be answered; answers: what a
    reply should hold, of a summary words. has_tools: the text is the result of a tool, an earlier
    message, and the reply a call.
    """

    kind: str
    text: str
    question: str
    needed: tuple[str, ...]
    answers: tuple[str, ...]
    has_tools: bool = False

    def messages(self, text: str) -> list[dict[str, Any]]:
        """With this text in the place of its own."""
        if not self.has_tools:
            return [{"role": "user", "content": f"{text}\n\n{self.question}"}]
        return [
            {"role": "user", "content": "Please run the tests."},
            {"role": "assistant", "content": "", "tool_calls": [_RUN]},
            {"role": "tool", "tool_call_id": _RUN["id"], "content": text},
            {"role": "assistant", "content": "One of the tests failed."},
            {"role": "user", "content": self.question},
        ]

    def options(self) -> dict[str, Any]:
        """Of the request: how long the reply is, and which tool it calls."""
        if not self.has_tools:
            return {
                "max_tokens": {"summary": 96, "multi-value": 48, "variables": 64}.get(self.kind, 24)
            }
        choice = {"type": "function", "function": {"name": "read_file"}}
        return {"max_tokens": 48, "tools": [_READ_FILE], "tool_choice": choice}

    def judge(self, reply: str) -> float:
        """The share of the answers that are there; 1.0: all is right."""
        found = [answer.lower() in reply.lower() for answer in self.answers]
        return sum(found) / len(found)


def _prose(rng: np.random.Generator, num_chars: int) -> list[str]:
    topics = pydoc_data.topics.topics
    names = rng.permutation(sorted(topics)).tolist()
    paragraphs: list[str] = []
    while num_chars > 0:
        parts = textwrap.dedent(topics[names.pop()]).split("\n\n")
        for part in parts:
            if len(part) > 60 and num_chars > 0:
                paragraphs.append(" ".join(part.split()))
                num_chars -= len(paragraphs[-1])
    return paragraphs


def _hide(rng: np.random.Generator, num_chars: int, needles: list[str]) -> str:
    """Sentences of their own, apart from each other and from both ends."""
    paragraphs = _prose(rng, num_chars - sum(map(len, needles)))
    spots = np.sort(rng.choice(np.arange(3, len(paragraphs) - 4), len(needles), replace=False))
    for spot, needle in reversed(list(zip(spots.tolist(), needles, strict=True))):
        paragraphs.insert(spot, needle)
    return "\n\n".join(paragraphs)


def _told(place: str, code: int) -> str:
    return f"The code of the {place} office is {code}."


def _single(rng: np.random.Generator, num_chars: int) -> Case:
    place, code = str(rng.choice(_PLACES)), int(rng.integers(1000, 9999))
    told = _told(place, code)
    question = f"What is the code of the {place} office?"
    return Case("single", _hide(rng, num_chars, [told]), question, (told,), (str(code),))


def _paraphrase(rng: np.random.Generator, num_chars: int) -> Case:
    told, question, answer = _PARAPHRASES[rng.integers(len(_PARAPHRASES))]
    told = told.format(answer)
    return Case("paraphrase", _hide(rng, num_chars, [told]), question, (told,), (answer,))


def _multi_key(rng: np.random.Generator, num_chars: int) -> Case:
    places = rng.permutation(_PLACES)[:4].tolist()
    codes = rng.integers(1000, 9999, 4).tolist()
    told = [_told(place, code) for place, code in zip(places, codes, strict=True)]
    question = f"What is the code of the {places[1]} office?"
    text = _hide(rng, num_chars, told)
    return Case("multi-key", text, question, (told[1],), (str(codes[1]),))


def _multi_value(rng: np.random.Generator, num_chars: int) -> Case:
    place, codes = str(rng.choice(_PLACES)), rng.integers(1000, 9999, 3).tolist()
    told = [f"One code of the {place} office is {code}." for code in codes]
    question = f"What are the three codes of the {place} office?"
    answers = tuple(map(str, codes))
    return Case("multi-value", _hide(rng, num_chars, told), question, tuple(told), answers)


def _variables(rng: np.random.Generator, num_chars: int) -> Case:
    """One number, handed on from name to name; asked is for all of them."""
    names = [f"VAR_{letter}" for letter in rng.permutation(list("ABCDEFGHKLMNPRST"))[:4]]
    value = int(rng.integers(10000, 99999))
    told = [f"{names[0]} = {value}"]
    told += [f"{later} = {name}" for name, later in pairwise(names)]
    question = f"Which four variables are assigned the value {value}, directly or by another one?"
    return Case("variables", _hide(rng, num_chars, told), question, tuple(told), tuple(names))


def _source(name: str) -> str:
    return inspect.getsource(__import__(name))


def _function(rng: np.random.Generator, num_chars: int) -> Case:
    """Among the sources of other modules, where one is too short."""
    names = rng.permutation(_CODE).tolist()
    source = _source(names[0])
    tree, lines = ast.parse(source), source.splitlines()
    found = [
        (node, ast.get_docstring(node) or "")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and len((ast.get_docstring(node) or "").split()) > 5
    ]
    found = [(node, words) for node, words in found if node.name not in words]
    node, words = found[rng.integers(len(found))]
    room = num_chars // 2
    before = "\n".join((*map(_source, names[1:4]), *lines[: node.lineno - 1]))
    after = "\n".join((*lines[node.lineno - 1 :], *map(_source, names[4:])))
    text = before[-room:].partition("\n")[2] + "\n" + after[:room].rpartition("\n")[0]
    sentence = " ".join(words.split("\n\n")[0].split()).rstrip(".")
    question = f'What is the name of the function whose documentation says "{sentence[:60]}"?'
    told = lines[node.lineno - 1].strip()
    return Case("function", text, question, (told,), (node.name,))


def _summary(rng: np.random.Generator, num_chars: int) -> Case:
    """A module without what it says of itself: a summary should have those words."""
    name = str(rng.choice(_DESCRIBED))
    source = _source(name)
    body = ast.parse(source).body
    said = ast.get_docstring(ast.Module(body, [])) or ""
    rest = source.splitlines()[body[0].end_lineno or 0 :]
    words = dict.fromkeys(re.findall(r"[a-z]{5,}", " ".join(said.split()[:60]).lower()))
    text = "\n".join((f"# {name}.py", *rest))[:num_chars].rpartition("\n")[0]
    question = "What is this module for? Summarise it in three sentences."
    if len(words) < _LEAST_WORDS:  # this Python's module says little of itself
        return _summary(rng, num_chars)
    return Case("summary", text, question, (), tuple(words))


def _agent(rng: np.random.Generator, num_chars: int) -> Case:
    """The log of a test run, in which one failed."""
    words = sorted(set(_PLACES) | set(_CODE))

    def name() -> str:
        return "_".join(rng.choice(words, 2)).lower() + str(rng.integers(10, 99))

    lines: list[str] = []
    while sum(map(len, lines)) + len(lines) < num_chars:
        lines.append(f"tests/test_{name()}.py::test_{name()} PASSED in {rng.integers(2, 900)} ms")
    path = f"src/{name()}.py"
    told = f"{path}:{rng.integers(20, 400)}: AssertionError"
    failure = [
        f"_____ test_{name()} _____",
        *("", "    def test_round_trip():", ">       assert decode(encode(3)) == 3"),
        *("E       assert 4 == 3", "", told, ""),
    ]
    spot = int(rng.integers(len(lines) // 8, 7 * len(lines) // 8))
    text = "\n".join((*lines[:spot], *failure, *lines[spot:]))
    question = "A check in a file below src was not met. Open that file."
    return Case("agent", text, question, (told,), (path,), has_tools=True)


KINDS: Final = MappingProxyType[str, Callable[[np.random.Generator, int], Case]](
    {
        "single": _single,
        "paraphrase": _paraphrase,
        "multi-key": _multi_key,
        "multi-value": _multi_value,
        "variables": _variables,
        "function": _function,
        "summary": _summary,
        "agent": _agent,
    }
)


def make_case(kind: str, num_chars: int, seed: int) -> Case:
    rng = np.random.default_rng([seed, *kind.encode()])
    return KINDS[kind](rng, num_chars)
