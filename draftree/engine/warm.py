"""What the first requests would wait for, done before they come: kernels compiled, graphs captured,
libraries' choices made. On a CPU there is nothing of the kind.

In: an engine that is otherwise ready. Leaves it as it was: neither sequence, prefix cache nor
controllers know of it.
"""

from collections.abc import Callable, Iterable

from draftree.core import Request, SamplingParams, TokenEvent
from draftree.decode.device_decoder import DeviceDecoder
from draftree.engine.live import EngineUse
from draftree.prefill.chunked import prefill

Report = Callable[[int, int], None]  # kernels compiled, and of how many
_KINDS = SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)  # other kernels choose


def warm_up(
    use: EngineUse, generate: Callable[[Request], Iterable[TokenEvent]], report: Report
) -> None:
    target, sizes = use.parts.target, use.parts.device.first_sizes()
    if not sizes:
        return
    num_forwards = target.num_forwards
    requests = [Request((0,), 2, sampling) for sampling in _KINDS]

    def rehearse() -> None:
        for size in sizes:
            _read(use, size)
        for request in requests:
            use.slots.reset()
            decoder = use.decoders.new(request, None)
            if isinstance(decoder, DeviceDecoder):
                decoder.start(0)
                decoder.rehearse()
        use.slots.reset()

    use.parts.device.compile_kernels(rehearse, report)
    for size in sizes:
        _read(use, size)
    for request in requests:
        for _ in generate(request):
            pass
        use.slots.reset()
    use.decoders.reset()
    target.num_forwards = num_forwards


def _read(use: EngineUse, size: int) -> None:
    """Prompts in passes of so many rows: one that others follow, and one alone, for the second use
    of a size may bring more than the first.
    """
    parts, drafter = use.parts, use.parts.drafter
    for length in (2 * size, size):
        tokens = (0,) * min(length, parts.plan.max_ctx - 1)
        for start in range(0, len(tokens), size):
            extend = drafter.extend_context if drafter is not None else None
            prefill(parts.target, tokens[start : start + size], size, extend)
            if drafter is not None:
                drafter.flush_context()
        use.slots.reset()
