"""The table of results in the README, from result files: nothing in it is typed by hand."""

from pathlib import Path
from typing import Final

from benchmarks.markdown import table
from benchmarks.result import read_records
from draftree.bench.record import Json

BEGIN: Final = "<!-- results, by `python -m benchmarks report` -->"
END: Final = "<!-- end of results -->"
_SUITE: Final = "suite-smollm2-135m-instruct.q4-1.json"
_FLAGSHIP: Final = "gpu-synth-27b.json"
_SETS: Final = {
    "own": "own prompts",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
}


def make_tables(results: Path) -> str:
    """The default pair on a CPU and on a GPU, and a GPU with the flagship's shapes."""
    cpu, gpu = (read_records(results / place) for place in ("", "gpu"))
    on_cpu, on_gpu = cpu[_SUITE]["measures"], gpu[_SUITE]["measures"]
    head = [
        "SmolLM2-135M, tokens per second",
        "two CPU cores",
        "",
        on_gpu["device"],
        "",
        f"AL, {on_gpu['device']}",
    ]
    rows = [["", "plain", "drafted", "plain", "drafted", "tokens a round"]]
    for name, title in _SETS.items():
        left, right = on_cpu["sets"][name], on_gpu["sets"][name]
        al = f"{right['acceptance_length']:.1f}"
        rows.append([title, *_rates(left), *_rates(right), al])
    shapes = gpu[_FLAGSHIP]["measures"]
    plain, round_ms = shapes["plain"]["512"]["median"], shapes["round_ms"]["512"]["median"]
    equal = sum(item["num_equal"] for item in (*on_cpu["sets"].values(), *on_gpu["sets"].values()))
    total = sum(
        item["num_prompts"] for item in (*on_cpu["sets"].values(), *on_gpu["sets"].values())
    )
    words = (
        f"{equal} of {total} texts are those of plain decoding. With synthetic weights of the 27B "
        f"model's shapes, Q4_K_M, in {shapes['memory_gib']:.1f} GiB of an {shapes['gpu']}: "
        f"{plain:.0f} plain tokens per second, and {round_ms:.1f} ms for a round with a tree of 23 "
        "nodes."
    )
    return "\n".join([*table(head, rows), "", words])


def fill_readme(text: str, results: Path) -> str:
    """The README with its tables made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{make_tables(results)}\n{END}{after}"


def _rates(item: Json) -> tuple[str, str]:
    drafted = f"{item['speculative_rate']:.0f} ({item['speed_up']:.2f} ×)"
    return f"{item['plain_rate']:.0f}", drafted
