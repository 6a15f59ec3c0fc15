"""What a target is, and a verdict on one: a figure, what we ask of it, and an aim beyond it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from draftree.bench.record import Json

SMOLLM2: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CODER: Final = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
CODER_LARGE: Final = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
HYBRID: Final = "4962fe0225dfcf985a72e6c7c5ed65633f4dc26cfa875324ca8d13564583a4b2"
SYNTH: Final = "988b1e63e2e37bd5f0302d80fccf7e527833232ebe4a1022c52323fc55a2b30d"
SMALL_Q4: Final = "a49ce4ef77152443bbca8f017d67d0aaac28d11d0e0c6b306b8dc07e539fb160"
SMALL_BF16: Final = "31a2dd4c2f3839c4966d3a50e7c0cd413d297fa5747244f4505367fc51ebd2da"
SERVER: Final = ""  # no file: the same with every model
_NAMES: Final = {
    SERVER: "any model",
    SMOLLM2: "SmolLM2-135M Q4_1",
    CODER: "Qwen2.5-Coder-0.5B Q4_K_M",
    CODER_LARGE: "Qwen2.5-Coder-1.5B Q4_K_M",
    HYBRID: "small hybrid of 44M, Q8_0",
    SYNTH: "27B shapes, Q4_K_M",
    SMALL_Q4: "0.8B shapes, Q4_K_M",
    SMALL_BF16: "0.8B shapes, BF16",
}


NEOVERSE_N1: Final = "0x41 0xd0c"  # implementer and part


def _never(cpu: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Target:
    """read: the figure in the measures of a result of this kind, for the file with this hash.
    is_retired: whether nothing is asked of it, by the machine's CPU. is_optional: it is not missed
    where it was not measured.
    """

    what: str
    kind: str
    sha256: str
    read: Callable[[Json], float | None]
    is_at_least: bool
    limit: float
    aim: float
    unit: str = "×"
    is_retired: Callable[[str], bool] = _never
    is_optional: bool = False

    @property
    def model(self) -> str:
        return _NAMES[self.sha256]


@dataclass(frozen=True, slots=True)
class Verdict:
    """value None: there is no result for it."""

    target: Target
    value: float | None
    is_retired: bool = False
    is_older: bool = False  # taken with other kernels than the newest result

    @property
    def is_shown(self) -> bool:
        return self.value is not None or not self.target.is_optional

    @property
    def words(self) -> str:
        if self.value is None:
            return "not measured"
        if self.is_retired:
            return "no target"
        if self._reaches(self.target.aim):
            words = "aim reached"
        else:
            words = "target reached" if self._reaches(self.target.limit) else "missed"
        return f"{words}, older kernels" if self.is_older else words

    def _reaches(self, limit: float) -> bool:
        assert self.value is not None
        return self.value >= limit if self.target.is_at_least else self.value <= limit
