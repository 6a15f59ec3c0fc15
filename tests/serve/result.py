"""Result files of the load and the generated requests, and the table of docs/clients.md from them.

`python -m tests.serve.result` writes the table anew; a test fails when it is stale.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from draftree.bench.disturbance import foreign_share, look
from draftree.bench.machine import describe_machine

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/clients.md"
START, END = "<!-- figures -->\n", "<!-- end of figures -->\n"


def write_result(folder, name, settings, measures, before):
    """before: what `look` said when it began."""
    machine = describe_machine()
    result = {
        "schema": 1,
        "kind": f"serve-{name}",
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine),
        "settings": settings,
        "disturbance": foreign_share(before, look(), machine.num_cores),
        "measures": measures,
    }
    path = path_of(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, ensure_ascii=False, indent=1)
    path.write_text(f"{text}\n", encoding="utf-8")


def path_of(folder, name):
    """Below a folder of its own: the ones above are for measurements that can be compared."""
    return folder / "serve" / "checks" / f"{name}.json"


def read_result(folder, name):
    return json.loads(path_of(folder, name).read_text(encoding="utf-8"))


def render(load, fuzz):
    """Both results as a table. What must be nothing is shown like all the rest."""
    measures, asked = load["measures"], load["settings"]
    outcomes, refusals = measures["outcomes"], measures["refusals"]
    rss, wait, served = measures["rss_mb"], measures["wait_s"], measures["served"]
    machine, num_clients = load["machine"], len(served["by_client"])
    num_whole = outcomes["whole"] + outcomes["slow, whole"]
    num_left = outcomes["left while waiting"] + outcomes["left while reading"]
    retry = " to ".join(map(str, measures["retry_after_s"]))
    statuses = ", ".join(f"{count} × {status}" for status, count in fuzz["statuses"].items())
    num_failed = fuzz["num_failed"] + fuzz["num_hung"]
    rows = [
        ("load", f"{asked['streams']} streams at a time, {asked['seconds']:.0f} s"),
        ("replies read to their end", f"{num_whole}, of them {outcomes['slow, whole']} slowly"),
        ("clients that left", f"{num_left}, half way or before the first word"),
        ("replies lost or mixed up", f"{measures['num_faults']}"),
        ("asked for more than its share", f"{refusals.get('429', 0)} × 429"),
        ("came when the queue was full", f"{refusals.get('503', 0)} × 503"),
        ("Retry-After of these", f"{retry} s"),
        ("server's memory, after a quarter of the time", f"{rss['warm']:.0f} MB"),
        ("server's memory, at the end", f"{rss['end']:.0f} MB"),
        (
            f"replies to each of {num_clients} equal clients",
            f"{min(served['by_client'])} to {max(served['by_client'])}",
        ),
        ("their wait for the first word", f"{wait['median']:.0f} s"),
        ("longest of these waits", f"{wait['longest']:.0f} s"),
        ("replies to the client that asks for more than its share", f"{served['greedy']}"),
        ("generated requests", f"{fuzz['num_cases']:,}: {statuses}"),
        ("generated requests that failed or hung", f"{num_failed}"),
        ("slowest of them", f"{fuzz['slowest_s']:.1f} s"),
        ("server's memory, after a quarter of them", f"{fuzz['rss_mb']['warm']:.0f} MB"),
        ("server's memory, at the end", f"{fuzz['rss_mb']['end']:.0f} MB"),
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    place = f"{machine['cpu']}, {machine['num_cores']} cores, clients and server together"
    return "\n".join([f"| {asked['model']} on {place} | |", "|---|---|", *lines]) + "\n"


def main():
    folder = ROOT / "results"
    table = render(read_result(folder, "load"), read_result(folder, "fuzz")["measures"])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + START + table + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
