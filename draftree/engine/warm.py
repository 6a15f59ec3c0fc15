"""What the first requests would wait for, done before they come: kernels compiled, graphs captured,
libraries' choices made. On a CPU there is nothing of the kind.

In: an engine that is otherwise ready. Leaves it as it was: neither sequence, prefix cache nor
controllers know of it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from draftree.core import FreeSpan, Request, SamplingParams, TokenEvent
from draftree.decode.device_decoder import DeviceDecoder
from draftree.engine.live import EngineUse
from draftree.prefill.chunked import prefill

if TYPE_CHECKING:
    import numpy as np

Report = Callable[[int, int], None]  # kernels compiled, and of how many


class _AnyText:
    """A grammar that asks something of every token, and forbids none; its own matcher."""

    is_complete = False

    def new_matcher(self) -> "_AnyText":
        return self

    def copy(self) -> "_AnyText":
        return self

    def find_free(self) -> FreeSpan | None:
        return None

    def fill_mask(self, bits: "np.ndarray") -> bool:
        bits[:] = 0xFFFFFFFF
        return True

    def count_valid(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def propose_forced(self) -> Sequence[int]:
        return ()

    def advance(self, token: int) -> None:
        pass


_SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)
_PENALISED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)
# Kinds whose rounds have graphs or kernels of their own: the usual ones, and the rest.
_USUAL = (
    Request((0,), 2),
    Request((0,), 2, _SAMPLED),
    Request((0,), 2, grammar=_AnyText()),
    Request((0,), 2, _SAMPLED, grammar=_AnyText()),
)
_RARE = (
    Request((0,), 2, SamplingParams(repetition_penalty=1.1), logprobs=1),
    Request((0,), 2, _PENALISED, logprobs=1),
    Request((0,), 2, SamplingParams(repetition_penalty=1.1), grammar=_AnyText()),
    Request((0,), 2, _PENALISED, logprobs=1, grammar=_AnyText()),
)


def warm_up(
    use: EngineUse, generate: Callable[[Request], Iterable[TokenEvent]], report: Report
) -> None:
    target, sizes = use.parts.target, use.parts.device.first_sizes()
    if not sizes:
        return
    num_forwards = target.num_forwards

    def rehearse() -> None:
        for size in sizes:
            _read(use, size)
        for request in (*_USUAL, *_RARE):
            use.slots.reset()
            decoder = use.decoders.new(request, None)
            if isinstance(decoder, DeviceDecoder):
                decoder.start(0)
                decoder.rehearse()
        use.slots.reset()

    use.parts.device.compile_kernels(rehearse, report)
    with use.parts.device.warm():
        for size in sizes:
            _read(use, size)
        for request in _USUAL:
            for _ in generate(request):
                pass
            use.slots.reset()
    use.decoders.reset()
    target.num_forwards = num_forwards


def _read(use: EngineUse, size: int) -> None:
    """A prompt in two passes of so many rows: one with nothing before it may be another graph."""
    parts, drafter = use.parts, use.parts.drafter
    tokens = (0,) * min(2 * size, parts.plan.max_ctx - 1)
    for start in range(0, len(tokens), size):
        extend = drafter.extend_context if drafter is not None else None
        prefill(parts.target, tokens[start : start + size], size, extend)
        if drafter is not None:
            drafter.flush_context()
    use.slots.reset()
