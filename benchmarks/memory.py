"""Resident memory that a model costs, measured in fresh processes: with its draft, and without.

Method: resident bytes after imports are subtracted from those after the engine has been opened with
the given context and that context has been filled. File pages that stay mapped count as well; the
peak is reported beside. A process before the others sees to it that nothing has to be compiled.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from draftree.bench.median import Report, Samples, summarize
from draftree.bench.record import Json
from draftree.bench.subject import PLAIN
from draftree.bench.worker import Child
from draftree.engine.locate import locate

CONTEXT: Final = 2048
METHOD: Final = (
    "Resident bytes of a fresh process, after the engine was opened and its context filled, minus "
    "those after imports; mapped pages of files count. Over the size of all files that were "
    "loaded: with default settings those of the target and of the draft that the catalogue pairs "
    "with it, without a draft the target's."
)
_DECODED: Final = 8


@dataclass(frozen=True, slots=True)
class MemoryMeasures:
    """ratio, peak_ratio, plain_ratio: resident bytes above imports over the size of the files."""

    context: int
    ratio: Samples
    peak_ratio: Samples
    imports_mib: Samples
    loaded_mib: Samples  # above imports, before the context is used
    filled_mib: Samples  # above imports, with the context full
    anonymous_mib: Samples
    file_mib: Samples  # mapped pages of files
    files_mib: float  # what was loaded: target, and draft if it has one
    plain_ratio: Samples  # without a draft, over the target's file
    plain_filled_mib: Samples

    def headline(self) -> dict[str, Any]:
        return {"ratio": self.ratio.median, "plain_ratio": self.plain_ratio.median}


def measure_memory(
    path: Path, threads: int, rounds: int, report: Report, context: int = CONTEXT
) -> MemoryMeasures:
    report("memory: warm-up")
    _measure_once(path, threads, context, {})
    rows, plain = [], []
    for number in range(rounds):
        report(f"memory: process {number + 1} of {rounds}")
        rows.append(_measure_once(path, threads, context, {}))
        plain.append(_measure_once(path, threads, context, PLAIN))
    total, size = loaded_bytes(path), path.stat().st_size
    plain_bytes = [r["filled"]["now"] - r["imports"]["now"] for r in plain]
    return MemoryMeasures(
        context=context,
        ratio=summarize([(r["filled"]["now"] - r["imports"]["now"]) / total for r in rows], "×"),
        peak_ratio=summarize(
            [(r["filled"]["peak"] - r["imports"]["now"]) / total for r in rows], "×"
        ),
        imports_mib=_mebibytes([r["imports"]["now"] for r in rows]),
        loaded_mib=_mebibytes([r["loaded"]["now"] - r["imports"]["now"] for r in rows]),
        filled_mib=_mebibytes([r["filled"]["now"] - r["imports"]["now"] for r in rows]),
        anonymous_mib=_mebibytes(
            [r["filled"]["anonymous"] - r["imports"]["anonymous"] for r in rows]
        ),
        file_mib=_mebibytes([r["filled"]["file"] - r["imports"]["file"] for r in rows]),
        files_mib=round(total / 2**20, 1),
        plain_ratio=summarize([value / size for value in plain_bytes], "×"),
        plain_filled_mib=_mebibytes(plain_bytes),
    )


def loaded_bytes(path: Path) -> int:
    """Bytes of the files that default settings load for a target."""
    located = locate(str(path), "auto")
    draft = located.draft_checkpoint
    paths = [located.checkpoint.path, *([draft.path] if draft is not None else [])]
    files = [file for each in paths for file in (each.iterdir() if each.is_dir() else (each,))]
    return sum(file.stat().st_size for file in files)


def _measure_once(path: Path, threads: int, context: int, options: Json) -> dict[str, Json]:
    with Child("benchmarks.scorer", "draftree") as child:
        imports = child.ask("resident")
        child.ask("load", path=str(path.resolve()), threads=threads, max_ctx=context, **options)
        loaded = child.ask("resident")
        # Ordinary ids, since the text's words do not matter and encoding it would cost memory too.
        ids = [(7919 * i) % 251 + 3 for i in range(context - _DECODED)]
        child.ask("greedy", ids=ids, num_tokens=_DECODED)
        return {"imports": imports, "loaded": loaded, "filled": child.ask("resident")}


def _mebibytes(values: list[int]) -> Samples:
    return summarize([value / 2**20 for value in values], "MiB")
