"""The page: every kind has its part, and the one in docs/ is not stale."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.report import make_page
from benchmarks.result import KINDS
from benchmarks.section import SECTIONS
from draftree.bench.record import write_record
from draftree.errors import BenchError
from tests.benchmarks import example

ROOT = Path(__file__).parents[2]


def write_all(folder):
    for kind in KINDS:
        write_record(folder, example.record(kind))


def test_page_is_not_stale():
    docs = ROOT / "docs"
    plots = [path.name for path in (docs / "plots").glob("*.png")]
    page = (docs / "benchmarks.md").read_text(encoding="utf-8")
    assert page == make_page(ROOT / "results", plots), "run `python -m benchmarks report`"


def test_without_results_the_page_says_so(tmp_path):
    assert "no results yet" in make_page(tmp_path)


def test_every_kind_has_its_part(tmp_path):
    write_all(tmp_path)
    page = make_page(tmp_path)
    assert [kind for kind, _, _ in SECTIONS] == list(KINDS)
    for _, title, _ in SECTIONS:
        assert f"### {title}\n\n**SmolLM2.gguf**" in page
    row = "| decode 128 tokens | 128 [116 to 142] | 40 [37.6 to 42.7] | 80 [75.3 to 85.3] |"
    assert f"{row} 1.60 [1.55 to 1.67] |" in page  # over the faster build
    assert "The wheel is xllamacpp 1, built for: AVX2. The native build is commit abc" in page
    assert "| 8 | 14 [13 to 15] | 2.00 | 1.75 |" in page
    assert "| matmul | 60.0 % | 60.0 % | 60.0 % |" in page
    assert "1 of 1 disagreements explained" in page
    row = "| q4 | 12.060 | +0.50 ± 0.10 % | 95.0 % | 1.0 % | 2.0 % | 3.0 % | 3 of 4 (4) |"
    assert row in page and "needles at 2048 |" in page
    assert "| second turn | 75 [50 to 100] |" in page
    assert "first: 0.050 [0.050 to 0.050]; third" in page
    assert "2 of 2 replies after a hit have the text and the rounds" in page
    assert "| gsm8k | 4 of 4 | 100.0 | 150.0 | 1.50 | 1.80 | 60 40 | 40 [30 to 50] |" in page
    assert (
        "| 512 | 3 of 3 | 90 [81 to 99] | 135 [126 to 144] | 1.50 [1.45 to 1.56] | 1.70 |" in page
    )
    assert "| **22** | 6 of 6 | 141 [140 to 143] | 1.40 [1.40 to 1.40] | 2.40 | 4.0 |" in page
    assert "The best here is 22" in page and "Refused: 64 (on a GPU" in page
    assert "| `draftree serve` | 98.5 [98 to 99] | 25 [20 to 30] |" in page
    assert "server has 0.985 [0.980 to 0.990] of the engine's rate" in page
    assert "| 2 | 15.0 | 200, 200 | 50, 50 | 100, 100 |" in page


def test_what_another_folder_has_is_not_missing_here(tmp_path):
    write_record(tmp_path, example.record("decode"))
    alone = make_page(tmp_path)
    assert "| two replicas over one, 8 clients |  |" in alone
    write_record(tmp_path / "cluster", example.record("cluster"))
    main, apart = make_page(tmp_path).split("## cluster")
    assert "replicas" not in main and "warm start to first token |  |" in main
    assert "two replicas over one" in apart and "warm start" not in apart
    assert "agent session" not in main  # a GPU's, unless this machine has one of its own
    write_record(tmp_path, example.record("agent"))
    assert "agent session" in make_page(tmp_path).split("## cluster")[0]


@pytest.mark.parametrize("kind", ["decode", "gpu"])
def test_the_mean_of_four_sets_has_a_target_for_each_device(tmp_path, kind):
    write_record(tmp_path, example.record(kind))
    record = example.record("suite")
    item = next(iter(record["measures"]["sets"].values()))
    record["measures"]["sets"] = {name: item | {"speed_up": 2.0} for name in "abcd"}
    write_record(tmp_path, record)
    words = "| speculative over plain, greedy, mean of four sets | 2 × |"
    verdict = {"decode": "≥ 1.5 × | ≥ 1.8 × | aim reached", "gpu": "≥ 3 × | ≥ 3.6 × | missed"}[kind]
    assert f"{words} {verdict} |" in make_page(tmp_path)


@pytest.mark.parametrize("kind", ["peers", "parity"])
def test_a_comparison_says_the_format_of_keys_and_values(tmp_path, kind):
    record = example.record(kind)
    write_record(tmp_path, record)
    assert "Keys and values: draftree q8, llama.cpp f16." in make_page(tmp_path)
    del record["measures"]["kv_type"]  # as older ones
    write_record(tmp_path, record)
    assert "Keys and values" not in make_page(tmp_path)


def test_a_changed_result_changes_the_page(tmp_path):
    write_record(tmp_path, example.record("peers"))
    before = make_page(tmp_path)
    write_record(tmp_path, example.record("peers", example.peers(1.5)))
    assert make_page(tmp_path) != before


def test_plots_are_linked_where_they_are(tmp_path):
    write_record(tmp_path, example.record("decode"))
    assert "![" not in make_page(tmp_path)
    page = make_page(tmp_path, ["decode-passes-smollm2.png", "decode-passes-other.png"])
    assert page.count("![") == 1
    assert "(plots/decode-passes-smollm2.png)" in page


def test_a_busy_machine_is_said(tmp_path):
    write_record(tmp_path, example.record("peers"))
    assert "busy machine" not in make_page(tmp_path)
    write_record(tmp_path, example.record("decode", disturbance=0.4))
    assert "busy machine**, so that times mean little: decode-smollm2.json" in make_page(tmp_path)


def test_somebodys_server_on_this_machine_is_no_disturbance(tmp_path):
    record = example.record("http", disturbance=0.9)
    write_record(tmp_path, record)
    assert "busy machine" in make_page(tmp_path)
    record["settings"]["is_own"] = False
    write_record(tmp_path, record)
    assert "busy machine" not in make_page(tmp_path)


def test_another_server_stands_beside_ours(tmp_path):
    record = example.record("http")
    write_record(tmp_path, record)
    assert "llama-server" not in make_page(tmp_path)
    peer = deepcopy(record["measures"])
    for level in peer["levels"].values():
        level["throughput"] *= 2
    record["measures"]["peer"], record["settings"]["llama_slots"] = peer, 8
    write_record(tmp_path, record)
    page = make_page(tmp_path)
    assert "`llama-server` with 8 slots" in page and "| 1 | 30.0 | 0.50 | 100" in page


def test_memory_does_not_mind_a_busy_machine(tmp_path):
    write_record(tmp_path, example.record("memory", disturbance=0.4))
    assert "busy machine" not in make_page(tmp_path)


def test_results_of_older_kernels_are_targets_only(tmp_path):
    older = example.record("start")
    older = older | {"machine": older["machine"] | {"kernels": "old"}}
    write_record(tmp_path, older | {"timestamp": "2020-01-01T00:00:00+00:00"})
    page = make_page(tmp_path)
    assert "older kernels" not in page and "### Start" in page
    write_record(tmp_path, example.record("decode"))
    page = make_page(tmp_path)
    assert "older kernels than the newest result, and shown as targets only: start-" in page
    assert "| aim reached, older kernels |" in page
    assert "### Start" not in page and "### Decoding" in page


def test_a_gpu_has_kernels_of_its_own(tmp_path):
    gpu = example.record("suite")
    gpu["measures"]["device"], gpu["machine"]["kernels"] = "A GPU", "old"
    write_record(tmp_path, gpu)
    write_record(tmp_path, example.record("decode"))
    assert "older kernels" not in make_page(tmp_path)
    other = example.record("gpu")
    other["machine"]["gpu_kernels"] = "new"
    write_record(tmp_path, other | {"timestamp": "2999-01-01T00:00:00+00:00"})
    assert "shown as targets only: suite-" in make_page(tmp_path)
    depth = example.record("gpu-depth")
    depth["machine"]["gpu_kernels"] = "newer"
    write_record(tmp_path, depth | {"timestamp": "2999-01-02T00:00:00+00:00"})
    name = f"gpu-{other['model']['name']}.json"
    assert f"shown as targets only: {name}, suite-" in make_page(tmp_path)


def other_machine(record):
    return record | {"machine": record["machine"] | {"cpu": "Another"}}


def test_results_of_two_machines_in_one_folder_are_refused(tmp_path):
    write_record(tmp_path, example.record("peers"))
    write_record(tmp_path, other_machine(example.record("decode")))
    with pytest.raises(BenchError, match="different machines"):
        make_page(tmp_path)


def test_a_result_of_another_version_is_a_sentence(tmp_path):
    record = example.record("peers")
    del record["measures"]["decode"]["ratio"]
    write_record(tmp_path, record)
    with pytest.raises(BenchError, match=r"has no 'ratio'.*measure again"):
        make_page(tmp_path)


def test_each_folder_is_a_machine_of_its_own(tmp_path):
    write_record(tmp_path, example.record("peers"))
    write_record(tmp_path / "laptop", other_machine(example.record("peers")))
    page = make_page(tmp_path)
    assert page.count("### Targets") == 2
    assert "## laptop" in page


def test_command_writes_the_page_and_one_line(tmp_path):
    write_all(tmp_path / "results")
    page = tmp_path / "docs" / "page.md"
    arguments = ["--results", str(tmp_path / "results"), "--page", str(page), "--no-plots"]
    result = CliRunner().invoke(app, ["report", *arguments])
    assert result.exit_code == 0, result.stderr
    html = tmp_path / "results" / "report.html"
    assert json.loads(result.stdout) == {"page": str(page), "html": str(html), "plots": []}
    assert page.read_text(encoding="utf-8") == make_page(tmp_path / "results")
    assert "<h1" in html.read_text(encoding="utf-8")


def test_command_refuses_in_one_sentence(tmp_path):
    write_record(tmp_path, example.record("peers"))
    write_record(tmp_path, other_machine(example.record("decode")))
    page = tmp_path / "page.md"
    arguments = ["--results", str(tmp_path), "--page", str(page), "--no-plots"]
    result = CliRunner().invoke(app, ["report", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "Internal error" not in result.stderr
    assert not page.exists()


def test_all_goes_on_without_what_cannot_be_had(tmp_path):
    arguments = ["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]
    result = CliRunner().invoke(app, ["all", "-m", "no-such-model", *arguments])
    assert result.exit_code == 1
    line = json.loads(result.stdout)
    assert line["results"] == []
    assert "no-such-model" in line["skipped"][0]
    assert "Nothing could be measured." in result.stderr


def test_a_session_is_shown_by_kind_of_turn():
    lines = {kind: write for kind, _, write in SECTIONS}["agent"](example.record("agent"))
    assert lines[2:4] == [
        "| read_file | 1 | 900 | 850 | 44 | 700 | 38.0 |",
        "| answer | 1 | 700 | 640 | 40 | 500 | 35.0 |",
    ]
    assert "0.071 of the time" in lines[-1] and "93.1% of the prompts" in lines[-1]
