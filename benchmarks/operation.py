"""How the time of one pass is shared out among its operations. In: a target. Out: milliseconds by
group.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import numpy as np

from draftree.bench.median import Report, Samples, summarize
from draftree.bench.subject import PLAIN, Subject
from draftree.config import EngineConfig
from draftree.core import DraftTree
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.thread_pool import RECORD_BYTES

# The first group whose word is in a kernel's name.
_GROUPS: Final = (
    ("quantize", "activation rounding"),
    ("linear", "matmul"),
    ("attention", "attention"),
    ("kv_", "attention"),
    ("delta", "delta rule"),
    ("conv", "convolution"),
    ("norm", "norms"),
    ("rope", "rotary"),
    ("embed", "embedding"),
    ("elementwise", "elementwise"),
)


@dataclass(frozen=True, slots=True)
class Shares:
    """Operations run one at a time, so that total_ms is above the time of a pass run as a whole."""

    num_tokens: int
    total_ms: float
    kernels_ms: dict[str, float]
    head_ms: float  # of total_ms: output norm and matrix
    groups: dict[str, float]  # share of total_ms, largest first


@dataclass(frozen=True, slots=True)
class OperationMeasures:
    shares: dict[str, Shares]  # by number of tokens in a pass
    total_ms: Samples  # of those passes

    def headline(self) -> dict[str, Any]:
        return {width: item.groups for width, item in self.shares.items()}


def measure_operations(path: Path, threads: int, rounds: int, report: Report) -> OperationMeasures:
    """Passes of 1 and 8 tokens with logits for all, and a chunk of a prompt."""
    subject = Subject(path, EngineConfig(**PLAIN | {"budget": 7}, ngram="off", threads=threads))
    try:
        chunk, shares = subject.engine.plan.chunk, {}
        for width, head_rows in ((1, 1), (8, 8), (chunk, 1)):
            report(f"operations of a pass of {width}")
            shares[str(width)] = measure_shares(subject, width, rounds, head_rows=head_rows)
    finally:
        subject.close()
    return OperationMeasures(shares, summarize([s.total_ms for s in shares.values()], "ms"))


def measure_shares(subject: Subject, num_tokens: int, rounds: int, *, head_rows: int) -> Shares:
    """Medians over rounds of a committed pass; the sequence is empty afterwards."""
    target = subject.target
    body, head = cast(Program, target._body), cast(Program, target._head)
    chain = DraftTree.chain(tuple(i % 256 for i in range(num_tokens)))
    bodies, heads = [], []
    for _ in range(rounds + 1):
        target.state.reset()
        target.state.begin(chain, is_committed=True)
        bodies.append(_profile(body))
        target._ops.step.set_rows(np.arange(num_tokens - head_rows, num_tokens))
        heads.append(_profile(head))
        target.state.commit(range(num_tokens))
    target.state.reset()
    body_ms, head_ms = _medians(bodies[1:]), _medians(heads[1:])
    kernels = {name: body_ms.get(name, 0.0) + head_ms.get(name, 0.0) for name in body_ms | head_ms}
    total = sum(kernels.values())
    return Shares(
        num_tokens=num_tokens,
        total_ms=round(total, 3),
        kernels_ms={name: round(ms, 4) for name, ms in kernels.items()},
        head_ms=round(sum(head_ms.values()), 3),
        groups=group_kernels(kernels),
    )


def group_kernels(kernels_ms: Mapping[str, float]) -> dict[str, float]:
    """Shares of the whole by group of kernels, largest first."""
    total = sum(kernels_ms.values())
    groups: dict[str, float] = {}
    for name, ms in kernels_ms.items():
        group = next((group for word, group in _GROUPS if word in name), "other")
        groups[group] = groups.get(group, 0.0) + ms
    ordered = sorted(groups.items(), key=lambda item: -item[1])
    return {name: round(ms / total, 4) if total else 0.0 for name, ms in ordered}


def _profile(program: Program) -> dict[str, float]:
    """Run once, one operation at a time: milliseconds by kernel name."""
    records, _, *tickets = program._frozen or program._freeze()
    times = dict.fromkeys(program._names, 0.0)
    for i, name in enumerate(program._names):
        start = time.perf_counter()
        program._pool.run(records + i * RECORD_BYTES, 1, *tickets)
        times[name] += (time.perf_counter() - start) * 1000
    return times


def _medians(profiles: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(profile[name] for profile in profiles) for name in profiles[0]}
