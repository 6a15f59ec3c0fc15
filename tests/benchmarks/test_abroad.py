"""Counting what other systems accept, with stand-ins for their programs."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import abroad
from benchmarks.abroad import (
    BEGIN,
    END,
    Abroad,
    Work,
    draft_with_llama,
    draft_with_vllm,
    fill_page,
    read_counts,
)
from draftree.bench.dataset import Prompt
from draftree.errors import BenchError
from tests.golden import golden
from tests.tiny import tiny_path

ROOT = Path(__file__).parents[2]
LLAMA = """#!{python}
import json, sys
if "--version" in sys.argv:
    sys.exit(print("version: 1 (abc)", file=sys.stderr))
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
print("n_draft   = 15\\nn_predict = 32\\nn_drafted = 150\\nn_accept  = 22", file=sys.stderr)
"""
VLLM = """#!{python}
import json, sys
given = json.load(sys.stdin)
assert sys.argv[1] == "-P" and sys.argv[2].endswith("abroad_vllm.py")
assert json.load(open(given["draft"] + "/config.json"))["block_size"] == 16
print("INFO loading")
print(json.dumps({{"version": "1", "num_rounds": given["num_drafted"], "num_accepted": 30}}))
print("INFO worker ends")
"""


@pytest.fixture
def work() -> Work:
    draft = golden("dflash/tiny-dflash-A-F16.gguf")
    return Work(tiny_path("qwen35"), draft, [[1, 2], [3]], ["a\\n", "b"], 32, 16)


def put(path: Path, text: str) -> Path:
    path.write_text(text.format(python=sys.executable, log=str(path.with_suffix(".log"))))
    path.chmod(0o755)
    return path


def test_llama_gets_every_text_and_its_counts_are_added(work: Work, tmp_path: Path) -> None:
    program = put(tmp_path / "llama", LLAMA)
    found = draft_with_llama(program, work, tmp_path / "draft.gguf")
    assert found == Abroad("llama.cpp", "version: 1 (abc)", 2, 20, 44)
    assert found.acceptance_length == 3.2
    lines = [json.loads(line) for line in (tmp_path / "llama.log").read_text().splitlines()]
    assert [line[line.index("-p") + 1] for line in lines] == work.texts
    assert all(line[line.index("--spec-draft-n-max") + 1] == "15" for line in lines)
    assert all("--no-escape" in line for line in lines)


def test_vllm_is_given_the_exported_folder(work: Work, tmp_path: Path) -> None:
    program = put(tmp_path / "python", VLLM)
    found = draft_with_vllm(program, tmp_path, work, tmp_path / "draft")
    assert found == Abroad("vLLM", "1", 2, 15, 30)


def test_the_file_keeps_systems_that_are_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abroad, "draft_for", lambda model: golden("dflash/tiny-dflash-A-F16.gguf"))
    prompts, out = [Prompt("one two", is_chat=False)], tmp_path / "out.json"
    model, program = str(tiny_path("qwen35")), put(tmp_path / "llama", LLAMA)
    abroad.write_abroad(model, prompts, 4, out, lambda _: None, llama=program)
    ours, exact = abroad.write_abroad(model, prompts, 4, out, lambda _: None)
    runs = json.loads(out.read_text())["runs"]
    assert [run["system"] for run in runs] == ["draftree", "draftree, float32", "llama.cpp"]
    assert runs[0]["acceptance_length"] == ours.acceptance_length
    assert ours.num_rounds + ours.num_accepted == exact.num_rounds + exact.num_accepted == 4


def test_failures_are_sentences(work: Work, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="did not say what was accepted"):
        read_counts("n_predict = 3")
    with pytest.raises(BenchError, match="could not be started"):
        draft_with_llama(tmp_path / "none", work, tmp_path / "draft.gguf")
    program = put(tmp_path / "python", "#!{python}\nraise SystemExit('no vLLM')\n")
    with pytest.raises(BenchError, match="status 1: no vLLM"):
        draft_with_vllm(program, tmp_path, work, tmp_path / "draft")


def test_the_page_shows_the_figures_of_the_file() -> None:
    result = json.loads((ROOT / "results/draft/abroad/smollm2-135m.json").read_text())
    page = (ROOT / "docs/scale.md").read_text()
    assert BEGIN in page and END in page
    assert fill_page(page, result) == page
