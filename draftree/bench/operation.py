"""How the time of one pass is shared out among its operations. In: a target. Out: milliseconds by
group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final, cast

import numpy as np

from draftree.bench.subject import Subject
from draftree.core import DraftTree
from draftree.kernels.cpu.program import Program

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


def measure_shares(subject: Subject, num_tokens: int, rounds: int, *, head_rows: int) -> Shares:
    """Medians over rounds of a certain pass; the sequence is empty afterwards."""
    target = subject.target
    body, head = cast(Program, target._body), cast(Program, target._head)
    chain = DraftTree.chain(tuple(i % 256 for i in range(num_tokens)))
    bodies, heads = [], []
    for _ in range(rounds + 1):
        target.state.reset()
        target.state.begin(chain, certain=True)
        bodies.append(body.profile())
        target._ops.step.set_rows(np.arange(num_tokens - head_rows, num_tokens))
        heads.append(head.profile())
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


def _medians(profiles: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(profile[name] for profile in profiles) for name in profiles[0]}
