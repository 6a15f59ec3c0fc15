"""Resident memory that a model costs, measured in a fresh process.

Method: resident bytes after imports are subtracted from those after the engine has been opened with
the given context and that context has been filled. File pages that stay mapped count as well; the
peak is reported beside.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftree.bench.record import Json
from draftree.bench.sample import Report, Samples, summarize
from draftree.bench.worker import Child

CONTEXT: Final = 2048
METHOD: Final = (
    "Resident bytes of a fresh process with default settings, after the engine was opened and its "
    "context filled, minus those after imports; mapped pages of files count."
)
_DECODED: Final = 8


@dataclass(frozen=True, slots=True)
class MemoryMeasures:
    """ratio and peak_ratio: resident bytes above imports over the file's size."""

    context: int
    ratio: Samples
    peak_ratio: Samples
    imports_mib: Samples
    loaded_mib: Samples  # above imports, before the context is used
    filled_mib: Samples  # above imports, with the context full
    anonymous_mib: Samples
    file_mib: Samples  # mapped pages of files


def measure_memory(
    path: Path, threads: int, rounds: int, report: Report, context: int = CONTEXT
) -> MemoryMeasures:
    rows = []
    for number in range(rounds):
        report(f"memory: process {number + 1} of {rounds}")
        rows.append(_measure_once(path, threads, context))
    size = path.stat().st_size
    return MemoryMeasures(
        context=context,
        ratio=summarize([(r["filled"]["now"] - r["imports"]["now"]) / size for r in rows], "×"),
        peak_ratio=summarize(
            [(r["filled"]["peak"] - r["imports"]["now"]) / size for r in rows], "×"
        ),
        imports_mib=_mebibytes([r["imports"]["now"] for r in rows]),
        loaded_mib=_mebibytes([r["loaded"]["now"] - r["imports"]["now"] for r in rows]),
        filled_mib=_mebibytes([r["filled"]["now"] - r["imports"]["now"] for r in rows]),
        anonymous_mib=_mebibytes(
            [r["filled"]["anonymous"] - r["imports"]["anonymous"] for r in rows]
        ),
        file_mib=_mebibytes([r["filled"]["file"] - r["imports"]["file"] for r in rows]),
    )


def _measure_once(path: Path, threads: int, context: int) -> dict[str, Json]:
    with Child("draftree.bench.subject", "draftree") as child:
        imports = child.ask("resident")
        child.ask(
            "load", path=str(path.resolve()), threads=threads, max_ctx=context, kind="default"
        )
        loaded = child.ask("resident")
        # Ordinary ids, since the text's words do not matter and encoding it would cost memory too.
        ids = [(7919 * i) % 251 + 3 for i in range(context - _DECODED)]
        child.ask("greedy", ids=ids, num_tokens=_DECODED)
        return {"imports": imports, "loaded": loaded, "filled": child.ask("resident")}


def _mebibytes(values: list[int]) -> Samples:
    return summarize([value / 2**20 for value in values], "MiB")
