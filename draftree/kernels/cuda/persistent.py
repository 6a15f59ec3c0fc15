"""One kernel for a whole pass: launches become a list of operations, which blocks that stay on the
GPU work through.

In: launches as they were recorded (compile.Rehearsal). Out: a pass that is one launch. Operations
are compiled from the kernels' own sources, so a pass has the same bits either way. What is saved is
what lies between kernels: starts, ends, and weights that were asked for too late.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from draftree.kernels.cuda.compile import (
    PERSISTENT_RESERVED,
    Argument,
    Gpu,
    KernelSource,
    RecordedLaunch,
    load_kernel,
    read_file,
)
from draftree.kernels.cuda.layout import X_TILE_BYTES

_log = logging.getLogger("draftree")
_DEFINED = re.compile(r"^#define (\w+)", re.MULTILINE)
_THREADS = "static __device__ constexpr uint3 op_threads = {OP_THREADS, 1, 1};\n"
_COMMON = ("bits", "ring")  # files that all operations share
_MOST_WORDS = 27
_STREAM = np.dtype(
    [("weights", np.uint64)]
    + [(name, np.int32) for name in ("step_bytes", "num_steps", "num_shares")]
    + [(name, np.int32) for name in ("stage_bytes", "num_stages", "x_bytes")]
)
# As struct Operation of source/machine.cu.
_OPERATION = np.dtype(
    [(name, np.int32) for name in ("kind", "num_threads", "grid_x", "grid_y", "num_workers")]
    + [(name, np.int32) for name in ("num_before", "shared_offset", "is_prefetched")]
    + [("has_next", np.int32), ("unused", np.int32), ("next", _STREAM)]
    + [("words", np.uint64, _MOST_WORDS)]
)


_Kinds: TypeAlias = "dict[tuple[KernelSource, int], int]"


class NotPersistentError(Exception):
    """These launches cannot be one kernel, for the reason that it names."""


@dataclass(frozen=True)
class PersistentSource(KernelSource):
    """The kernels of `kinds`, each with its number of threads, as functions of one kernel."""

    kinds: tuple[tuple[KernelSource, int], ...] = ()

    def text(self) -> str:
        parts = ["#define PERSISTENT 1\n", self.defines, *map(read_file, (*_COMMON, "machine"))]
        cases = []
        for number, (kind, num_threads) in enumerate(self.kinds):
            name = f"kind_{number}"
            head = f"#define OP_THREADS {num_threads}\n{kind.defines}"
            body = "".join(read_file(file) for file in kind.files if file not in _COMMON)
            macros = dict.fromkeys(_DEFINED.findall(head + body))
            parts += [f"namespace {name} {{\n", head, _THREADS, body, "}\n"]
            parts += [f"#undef {macro}\n" for macro in macros]
            cases += [f"    case {number}: return Call<{name}::{kind.name}>::run(words);\n"]
        parts += ["DEV void run_kind(int kind, const u64* words) {\n  switch (kind) {\n", *cases]
        return "".join([*parts, "  }\n}\n", read_file("persistent")])


class PersistentPass:
    """Launches, as one. Keeps alive what they work on."""

    def __init__(self, launches: Sequence[RecordedLaunch], gpu: Gpu) -> None:
        _check(launches)
        self._gpu, self._launches = gpu, launches
        kinds = tuple(dict.fromkeys((each.source, each.block) for each in launches))
        self._num_threads = max(launch.block for launch in launches)
        macros = (("BLOCK_THREADS", self._num_threads),)
        self.source = PersistentSource("persistent_kernel", (), macros, kinds)
        numbers = {kind: number for number, kind in enumerate(kinds)}
        self._table, self._shared_bytes = self._make_table(numbers)
        if self._shared_bytes > gpu.shared_per_block - PERSISTENT_RESERVED:
            raise NotPersistentError(f"{self._shared_bytes} bytes of shared memory are too many")
        self._operations = torch.from_numpy(self._table.view(np.uint8)).to(gpu.place)
        # One more than operations: the last counts the blocks that have ended.
        self._done = torch.zeros(len(self._table) + 1, dtype=torch.int32, device=gpu.place)

    @property
    def names(self) -> list[str]:
        """Of the kernels whose launches they were, in order."""
        return [launch.source.name.removesuffix("_kernel") for launch in self._launches]

    @property
    def num_blocks(self) -> int:
        return self._gpu.num_sms

    def launch(self, times: torch.Tensor | None = None) -> None:
        """times: [operation][block] cycles at its begin, after its wait and at its end; the first
        operation is none of the launches. Zero before.
        """
        load_kernel(self.source, self._gpu).launch(
            (self.num_blocks,),
            self._num_threads,
            *(self._operations, self._done, times, len(self._done) - 1),
            shared_bytes=self._shared_bytes,
            is_cooperative=True,
        )

    def _make_table(self, kinds: _Kinds) -> tuple[np.ndarray, int]:
        """The operations, behind one that only asks for the first weights; shared memory."""
        room = self._gpu.shared_per_block - PERSISTENT_RESERVED
        ring = max((each.shared_bytes for each in self._launches if _is_product(each)), default=0)
        ring = -(-ring // 128) * 128
        table = np.zeros(len(self._launches) + 1, _OPERATION)
        table["kind"][0] = -1
        prefetcher: int | None = 0  # the last product, if the ring has been free since then
        shared_bytes = ring
        for number, noted in enumerate(self._launches, 1):
            row, size = table[number], noted.shared_bytes
            grid = (*noted.grid, 1)[:2]
            row["kind"], row["num_threads"] = kinds[noted.source, noted.block], noted.block
            row["grid_x"], row["grid_y"] = grid
            row["num_workers"] = min(grid[0] * grid[1], self._gpu.num_sms)
            row["num_before"] = table["num_workers"][number - 1]
            row["words"][: len(noted.args)] = [_word(value) for value in noted.args]
            if _is_product(noted):
                if prefetcher is not None:
                    table["next"][prefetcher], table["has_next"][prefetcher] = _stream(noted), 1
                    row["is_prefetched"] = 1
                prefetcher = number
            elif size:
                row["shared_offset"] = ring if ring + size <= room else 0
                prefetcher = prefetcher if row["shared_offset"] else None
            shared_bytes = max(shared_bytes, int(row["shared_offset"]) + size)
        return table, shared_bytes


def collect(launch: Callable[[], None], gpu: Gpu) -> PersistentPass | None:
    """What `launch` launches, as one; None, and a warning, where that cannot be."""
    with gpu.rehearsal.collect(is_persistent=True) as launches:
        launch()
    try:
        return PersistentPass(launches, gpu)
    except NotPersistentError as reason:
        _log.warning("separate kernels instead of a persistent one: %s", reason)
        return None


def _check(launches: Sequence[RecordedLaunch]) -> None:
    for noted in launches:
        macros = dict(noted.source.macros)
        if len(noted.grid) > 2 or len(noted.args) > _MOST_WORDS:
            raise NotPersistentError(f"{noted.source.name} has too many dimensions or arguments")
        if macros.get("CLUSTER", 1) > 1 or "BULK" in macros:
            raise NotPersistentError(f"{noted.source.name} is made for clusters or old copies")


def _is_product(noted: RecordedLaunch) -> bool:
    return noted.source.name == "linear_kernel"


def _stream(noted: RecordedLaunch) -> tuple[int, ...]:
    """The first weights of a product, from its launch (linear.py)."""
    macros, (weights, *_) = dict(noted.source.macros), noted.args
    first_token, _, num_bands, num_chunks = map(_word, noted.args[7:11])
    step_bytes = macros["BAND"] * macros["HOST_UNIT_BYTES"]
    x_blocks, tiles = macros["COLS"] // 128, macros["TOKEN_TILES"]
    if macros.get("OWN_ROW"):
        tiles, x_tiles = 0, 0
    else:
        x_tiles = _word(noted.args[15]) - first_token // 8
    return (
        _word(weights),
        step_bytes,
        num_bands * num_chunks,
        noted.grid[0],
        step_bytes + tiles * x_blocks * X_TILE_BYTES,
        macros["STAGES"],
        x_blocks * min(tiles, x_tiles) * X_TILE_BYTES,
    )


def _word(value: Argument) -> int:
    """An argument in 64 bits."""
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    number = np.float32(value) if isinstance(value, float) else np.int32(value)
    return int(number.view(np.uint32))
