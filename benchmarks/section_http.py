"""What many clients of a server get, beside turns alone and llama.cpp's server, as Markdown. In: a
record. Out: lines.
"""

from itertools import chain

from benchmarks.markdown import short, spread, table
from draftree.bench.record import Json


def http(record: Json) -> list[str]:
    measures, settings = record["measures"], record["settings"]
    rows = [
        [
            clients,
            f"{level['throughput']:.1f}",
            *(
                f"{short(level[name]['median'])}, {short(level[name]['p95'])}"
                for name in ("ttft", "gap_ms", "token_ms")
            ),
        ]
        for clients, level in measures["levels"].items()
    ]
    head = ["clients", "tok/s of all", "first token, ms", "between pieces, ms", "a token, ms"]
    server = "`draftree serve`" if settings["is_own"] else "a server given by its URL"
    counted = "counted by the server" if measures["is_counted"] else "taken to be one a piece"
    note = (
        f"Of {server}: median and 95th percentile over {settings['requests']} requests of each "
        f"client, at most {settings['num_tokens']} tokens, greedy; a piece may hold several "
        f"tokens, which are {counted}."
    )
    if measures.get("one_by_one") and not measures.get("unbatched"):
        note += " Measured before requests shared passes."
    parts = _behind(measures), _unbatched(measures), _beside(measures, settings)
    return [*table(head, rows), "", note, *chain.from_iterable(parts)]


def _unbatched(measures: Json) -> list[str]:
    """The same clients where no pass is shared, where that was measured."""
    unbatched = measures.get("unbatched")
    if unbatched is None:
        return []
    rows = []
    for clients, level in unbatched["levels"].items():
        ours, first = measures["levels"][clients], level["ttft"]
        over = f"{ours['throughput'] / level['throughput']:.2f}"
        times = f"{short(first['median'])}, {short(first['p95'])}"
        rows.append([clients, f"{level['throughput']:.1f}", over, times])
    head = ["clients", "tok/s of all", "shared over it", "first token, ms"]
    note = "The same clients where no pass is shared (`--batching off`):"
    return ["", note, "", *table(head, rows)]


def _beside(measures: Json, settings: Json) -> list[str]:
    """llama.cpp's server with the same clients, where that was measured."""
    peer = measures.get("peer")
    if peer is None:
        return []
    rows = []
    for clients, level in peer["levels"].items():
        ours, names = measures["levels"][clients], ("ttft", "token_ms")
        times = [f"{short(level[name]['median'])}, {short(level[name]['p95'])}" for name in names]
        ratio = ours["token_ms"]["median"] / level["token_ms"]["median"]
        rate = level["throughput"]
        over = f"{ours['throughput'] / rate:.2f}"
        rows.append([clients, f"{rate:.1f}", over, *times, f"{ratio:.2f}"])
    head = ["clients", "tok/s of all", "ours over it", "first token, ms", "a token, ms"]
    note = (
        f"The same clients of llama.cpp's `llama-server` with {settings['llama_slots']} slots, "
        "without a draft:"
    )
    return ["", note, "", *table([*head, "ours over it"], rows)]


def _behind(measures: Json) -> list[str]:
    """A short request behind a long one, where that was measured."""
    behind, one = measures.get("behind"), measures.get("one_by_one")
    if behind is None:
        return []
    text = (
        f"A short request that is sent 1 s after one of {behind['num_ahead']} tokens has its first "
        f"token after {spread(behind['ttft_ms'])} ms, and after {spread(behind['alone_ms'])} ms "
        "with nobody ahead."
    )
    if one is not None:
        rates = ", ".join(f"{level['throughput']:.1f}" for level in one["levels"].values())
        text += (
            f" Where requests take no turns (`--parallel 1`), it is "
            f"{spread(one['behind']['ttft_ms'])} ms, and the rates above are {rates} tok/s."
        )
    return ["", text]
