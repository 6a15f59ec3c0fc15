"""Targets of requests, clients, long prompts and sessions on a large GPU: see gpu_request.py,
gpu_suite.py, gpu_shape.py and gpu_agent.py. A part that was not measured has no figure.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from benchmarks.verdict import CODER, SMOLLM2, SYNTH, Target
from draftree.bench.record import Json

REQUESTS, SHAPES, AGENT = "gpu-requests", "gpu-shapes", "agent"
_AGENT_WORDS: Final = "agent session: first token of later turns over a cold read"
KINDS: Final = (REQUESTS, SHAPES, AGENT)


def _at(*path: str) -> Callable[[Json], float | None]:
    """The figure at a place inside the parts, where it was measured."""

    def read(measures: Json) -> float | None:
        found: Any = measures["parts"]
        for key in path:
            if not isinstance(found, dict) or key not in found:
                return None
            found = found[key]
        return round(float(found), 4)

    return read


def _worst_ratio(*parts: str) -> Callable[[Json], float | None]:
    """The lowest of all data sets; None until all parts are there."""

    def read(measures: Json) -> float | None:
        if any(part not in measures["parts"] for part in parts):
            return None
        rows = [row for part in parts for row in measures["parts"][part].values()]
        return min(float(row["ratio"]["value"]) for row in rows)

    return read


def _slowest_plain(measures: Json) -> float | None:
    rows = measures["parts"].get("auto", {}).values()
    return min((float(row["rates"]["plain"]["median"]) for row in rows), default=None)


def _changed_texts(measures: Json) -> float | None:
    """Of all kinds, budgets, hits and limits; None until these parts are there."""
    parts = measures["parts"]
    if any(name not in parts for name in ("equal", "limits")):
        return None
    rows = [*parts["equal"]["kinds"].values(), parts["limits"]]
    rows += [row for name in ("auto", "auto, T = 0.8") for row in parts.get(name, {}).values()]
    return float(sum(row["num_texts"] - row["num_equal"] for row in rows))


def _request_targets() -> tuple[Target, ...]:
    def target(
        what: str, read: Callable[[Json], float | None], more: bool, limit: float, aim: float
    ) -> Target:
        return Target(what, REQUESTS, SMOLLM2, read, more, limit, aim)

    same = ("log-probabilities", "bias of zero", "tools, none called")
    slower = {"penalty": "repetition penalty", "schema": "JSON schema", "regex": "regex"}
    return (
        *(
            target(
                f"{name}: rate over free",
                *(_at("kinds", "kinds", name, "ratio", "value"), True, 0.85, 0.95),
            )
            for name in same
        ),
        *(
            target(
                f"{words}: round over a free one",
                *(_at("rounds", "kinds", name, "over_free"), False, 1.15, 1.05),
            )
            for name, words in slower.items()
        ),
        target("lookup on over off, slowest set", _worst_ratio("lookup"), True, 0.98, 1.0),
        target(
            "auto over the best fixed budget, T = 0 and 0.8, slowest set",
            *(_worst_ratio("auto", "auto, T = 0.8"), True, 0.97, 1.0),
        ),
        Target(
            "plain decoding, slowest set",
            *(REQUESTS, SMOLLM2, _slowest_plain, True, 2000, 3500, "tok/s"),
        ),
        target("first request over the tenth", _at("first", "ratio", "value"), False, 1.2, 1.05),
        Target(
            "texts changed, all kinds, budgets, hits, limits",
            *(REQUESTS, SMOLLM2, _changed_texts, False, 0, 0, ""),
        ),
        *(
            Target(
                f"{name} of a file with lookup alone: speed over plain",
                *(REQUESTS, CODER, _at("copy", name, "ratio", "value"), True, 3.0, 5.0),
            )
            for name in ("copy", "edit")
        ),
    )


def _shape_targets() -> tuple[Target, ...]:
    def target(
        what: str, path: tuple[str, ...], more: bool, limit: float, aim: float, unit: str = "×"
    ) -> Target:
        return Target(what, SHAPES, SYNTH, _at(*path), more, limit, aim, unit)

    seconds = {"32768": (1.5, 1.0), "65536": (2.0, 1.3), "131072": (3.5, 2.2)}
    scorers = {"compress": "0.6B scorer", "compress self": "own scores"}
    return (
        target(
            "JSON schema: round over a free one",
            *(("schema", "kinds", "schema", "over_free"), False, 1.10, 1.03),
        ),
        target("four clients over one", ("clients", "ratio", "value"), True, 0.95, 1.8),
        target(
            "first token beside three writers",
            *(("beside", "first_s", "median"), False, 0.3, 0.3, "s"),
        ),
        target(
            "first token behind a prompt of 65536",
            *(("behind", "first_s", "high"), False, 2.0, 2.0, "s"),
        ),
        target(
            _AGENT_WORDS,
            *(("agent", "first_over_cold", "median"), False, 0.05, 0.02),
        ),
        *(
            target(
                f"first token of {length}, compressed, {words}",
                *((part, "lengths", length, "first_s", "median"), False, limit, aim, "s"),
            )
            for part, words in scorers.items()
            for length, (limit, aim) in seconds.items()
        ),
        *(
            target(f"peak memory, {words}", (part, "peak_gib"), False, 22.35, 22.35, "GiB")
            for part, words in scorers.items()
        ),
        replace(
            target(
                "session: cache and compression over the faster of the two alone",
                *(("session", "both_over_faster"), False, 1.0, 0.95),
            ),
            is_optional=True,
        ),
    )


def _agent_targets() -> tuple[Target, ...]:
    def over_cold(measures: Json) -> float:
        return round(float(measures["first_over_cold"]["median"]), 4)

    def over_peer(measures: Json) -> float | None:
        return measures.get("waited_over_peer")

    words = "agent session: time of all turns over llama.cpp's server"
    models = SMOLLM2, CODER
    return (
        *(Target(_AGENT_WORDS, AGENT, model, over_cold, False, 0.05, 0.02) for model in models),
        *(
            Target(words, AGENT, model, over_peer, False, 0.5, 0.3, is_optional=True)
            for model in models
        ),
    )


GPU_TARGETS: Final = (*_request_targets(), *_shape_targets(), *_agent_targets())
