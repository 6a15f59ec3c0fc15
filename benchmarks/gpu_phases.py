"""Where a pass of a GPU spends its time: as separate kernels in a graph, and as one kernel whose
blocks note when they begin an operation, have waited for it, and end it.

Synthetic weights of a few layers. Times are of one layer, in microseconds.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from draftree.bench.gpu import Subject
from draftree.bench.median import Report, Samples, summarize
from draftree.bench.synthetic import SHAPES, write_pair
from draftree.engine.gpu import find_gpu
from draftree.kernels.ops import narrow
from draftree.kernels.quant.formats import QuantType
from draftree.weights.file import open_checkpoint

if TYPE_CHECKING:
    from draftree.kernels.cuda.persistent import PersistentPass

ROWS: Final = (1, 24)
_CONTEXT, _DEPTH, _REPEATS, _SAMPLES = 4096, 256, 10, 3
_READ_BYTES: Final = 2**32


@dataclass(frozen=True, slots=True)
class Phase:
    """Operations of one kernel in a layer, on average over all blocks. wait: for the operations
    before it; idle: it has no work for the block.
    """

    count: float
    wait_us: float
    work_us: float
    idle_us: float


@dataclass(frozen=True, slots=True)
class PassPhases:
    graph_us: Samples
    persistent_us: Samples
    num_launches: float
    phases: dict[str, Phase]  # by kernel, of the persistent pass


@dataclass(frozen=True, slots=True)
class PhaseMeasures:
    gpu: str
    num_layers: int
    read_us: float  # all weights of a layer, as fast as torch adds up an array
    passes: dict[str, PassPhases]  # by rows

    def headline(self) -> dict[str, Any]:
        return {"read_us": self.read_us} | {
            rows: {"graph_us": each.graph_us.median, "persistent_us": each.persistent_us.median}
            for rows, each in self.passes.items()
        }


def measure_phases(shape: str, folder: Path, report: Report) -> PhaseMeasures:
    from draftree.kernels.cuda.program import Program

    report("writing the files")
    pair = write_pair(shape, folder, draft_type=QuantType.Q4_K)
    gpu, num_layers = find_gpu("cuda"), SHAPES[shape][0].num_layers
    assert gpu is not None
    times: dict[bool, dict[int, Samples]] = {}
    phases: dict[int, dict[str, Phase]] = {}
    launches: dict[int, float] = {}
    for is_persistent in (False, True):
        report("one kernel" if is_persistent else "separate kernels")
        subject = Subject(pair, _CONTEXT, persistent=is_persistent)
        target = subject.engine.target
        body = target.programs().body
        times[is_persistent] = {}
        for rows in ROWS:
            subject.prefill(subject.prompt(_DEPTH))
            nodes = np.arange(rows)
            target.step.set_tree(nodes, nodes - 1, nodes, _DEPTH)
            target.step.set_rows(nodes)
            times[is_persistent][rows] = _time(body.run, num_layers)
            if (one := narrow(body, Program).find_persistent(rows)) is not None:
                total_us = num_layers * times[True][rows].median
                phases[rows] = read_phases(*_note(one), total_us, num_layers)
                launches[rows] = len(one.names) / num_layers
        subject.engine.close()
        del subject, target, body, one
        gc.collect()
    return PhaseMeasures(
        gpu=gpu.name,
        num_layers=num_layers,
        read_us=round(_layer_bytes(pair[0]) / num_layers / _read_rate(), 2),
        passes={
            str(rows): PassPhases(
                times[False][rows], times[True][rows], launches[rows], phases[rows]
            )
            for rows in phases
        },
    )


def read_phases(
    names: list[str], cycles: np.ndarray, total_us: float, num_layers: int
) -> dict[str, Phase]:
    """names: of the operations. cycles: [operation, block, 3], at the begin, after the wait (0:
    the block has no work) and at the end; all operations together took total_us.
    """
    begin, waited, end = (cycles[..., i].astype(np.float64) for i in range(3))
    has_work = waited > 0
    scale = total_us / (end[-1] - begin[0]).mean() / num_layers
    kinds: dict[str, list[np.ndarray]] = {}
    for i, name in enumerate(names):
        wait = np.where(has_work[i], waited[i] - begin[i], 0.0).mean()
        work = np.where(has_work[i], end[i] - waited[i], 0.0).mean()
        idle = np.where(has_work[i], 0.0, end[i] - begin[i]).mean()
        kinds.setdefault(name, []).append(np.array([wait, work, idle]) * scale)
    return {
        name: Phase(len(each) / num_layers, *(round(float(us), 3) for us in np.sum(each, axis=0)))
        for name, each in kinds.items()
    }


def _note(one: "PersistentPass") -> tuple[list[str], np.ndarray]:
    import torch

    names = ["first weights", *one.names]
    shape = len(names), one.num_blocks, 3
    for _ in range(2):  # the first one warms up
        times = torch.zeros(shape, dtype=torch.int64, device="cuda")
        one.launch(times)
    return names, times.cpu().numpy()


def _time(run: Callable[[], None], num_layers: int = 1) -> Samples:
    """Of a layer."""
    import torch

    found = []
    for _ in range(_SAMPLES + 1):  # the first one warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_REPEATS):
            run()
        end.record()
        end.synchronize()
        found.append(1000.0 * start.elapsed_time(end) / _REPEATS / num_layers)
    return summarize(found[1:], "µs")


def _read_rate() -> float:
    """Bytes in a microsecond."""
    import torch

    array = torch.ones(_READ_BYTES // 4, device="cuda")
    return _READ_BYTES / _time(array.sum).median


def _layer_bytes(path: Path) -> int:
    tensors = open_checkpoint(path).tensors.values()
    return sum(info.nbytes for info in tensors if info.name.startswith("blk."))
