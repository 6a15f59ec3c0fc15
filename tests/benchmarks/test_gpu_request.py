"""How rounds are compared, which prompts are taken, and a small run on a CPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_request, gpu_suite
from benchmarks.gpu_writing import CHAT, Asker, Bench, OpenEngines, Written, read_sets, write
from benchmarks.parts import Deadline
from draftree.bench.dataset import Prompt
from draftree.config import EngineConfig, GpuInfo, Plan, resolve
from draftree.core import RoundStats, Usage
from draftree.errors import BenchError
from draftree.models.model_config import read_model_config
from draftree.weights.file import open_checkpoint


def written(round_ms, num_nodes):
    usage = Usage(completion_tokens=10, decode_ms=1.0, rounds=RoundStats(num_rounds=5))
    return Written([1, 2], usage, round_ms, num_nodes)


def test_only_drafted_rounds_count_and_not_the_first():
    text = written([9.0, 9.0, 9.0, 1.0, 5.0, 2.0], [24, 24, 24, 24, 24, 1, 24])
    assert gpu_request.drafted_ms(text) == [1.0, 2.0]


def test_rounds_are_compared_at_their_own_temperature():
    def text(ms):
        return [written([0.0] * 3 + [ms] * 3, [24] * 7)]

    names = {"free": 2.0, "free, T = 0.8": 4.0, "schema": 2.2, "schema, T = 0.8": 4.4}
    found = gpu_request.compare_rounds({name: text(ms) for name, ms in names.items()})
    assert [row["over_free"] for row in found.values()] == [1.0, 1.0, 1.1, 1.1]
    assert found["free"]["acceptance_length"] == 2.0
    with pytest.raises(BenchError, match="No round of the kind 'free' was drafted"):
        gpu_request.compare_rounds({"free": [written([1.0] * 6, [1] * 7)]})


def test_prompts_of_a_file_by_set(tmp_path):
    lines = [{"set": name, "prompt": str(i), "chat": True} for name in "ab" for i in range(3)]
    path = tmp_path / "sets.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_sets(path, Path(), 2) == {
        name: [Prompt("0", is_chat=True), Prompt("1", is_chat=True)] for name in "ab"
    }


def test_files_are_cut_to_a_number_of_tokens(smollm2_path):
    from draftree.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_metadata(open_checkpoint(smollm2_path).metadata)
    text = gpu_request.cut_source(tokenizer, "textwrap", 1000)
    assert 900 < len(tokenizer.encode(text)) <= 1000


@pytest.mark.long
def test_all_parts_run_on_the_default_model(smollm2_path):
    sets = {CHAT: [Prompt("Name two colours.", is_chat=True)], "text": [Prompt("1 2 3", False)]}
    configs = gpu_request.CONFIGS | gpu_suite.CONFIGS
    with OpenEngines(smollm2_path, "cpu", configs, lambda text: None) as engines:
        bench = Bench(engines, sets, 24, Deadline(600), lambda text: None)
        kinds = gpu_request.measure_kinds(bench)["kinds"]
        assert all(row["ratio"]["value"] > 0 for row in kinds.values()) and len(kinds) == 3
        first = gpu_request.measure_first(bench)
        assert len(first["first_ms"]["samples"]) == 3
        auto = gpu_suite.measure_auto(bench, 0.8)
        assert all(row["num_equal"] == row["num_texts"] == 10 for row in auto.values())
        assert set(gpu_suite.measure_lookup(bench)) == {CHAT, "text"}
        rows = gpu_suite.measure_equal(bench)["kinds"]
        assert all(row["num_equal"] == row["num_texts"] == 10 for row in rows.values())
        assert len(rows) == 11
        limits = gpu_suite.measure_limits(bench)
        assert limits["num_equal"] == limits["num_texts"] and limits["chunks"][1] < 128


class PlannedEngines:
    """Engines that are planned for a GPU, and not opened."""

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        self._model = read_model_config(checkpoint)
        self.planned: list[Plan] = []

    def open(self, **config: Any) -> SimpleNamespace:
        asked = EngineConfig(max_ctx=2048, **config)
        self.planned.append(resolve(asked, self._model, gpu=GpuInfo(0, "a GPU", 2**37)))
        return SimpleNamespace(plan=self.planned[-1], tokens=None, close=lambda: None)

    def close(self) -> None:
        pass


def test_a_limit_leaves_the_format_and_shortens_chunks(smollm2_path, monkeypatch):
    engines = PlannedEngines(smollm2_path)
    plan = engines.open().plan
    text = Written([1], Usage(prompt_tokens=1), [], [])
    monkeypatch.setattr(gpu_suite, "_write_unlimited", lambda bench: ([None], [text], plan))
    monkeypatch.setattr(gpu_suite, "write", lambda *args: text)
    found = gpu_suite.measure_limits(Bench(engines, {}, 24, Deadline(600), lambda text: None))
    limited = engines.planned[-1]
    assert limited.kv == plan.kv and limited.memory.total < plan.memory.total
    assert found["chunks"] == [plan.chunk, limited.chunk] and limited.chunk < plan.chunk


def test_a_text_says_how_long_its_rounds_took(smollm2_path):
    configs = {"fixed": {"budget": 4, "threads": 1}}
    with OpenEngines(smollm2_path, "cpu", configs, lambda text: None) as engines:
        engine = engines["fixed"]
        asker = Asker(engine, 8)
        prompt = Prompt("Say hello.", is_chat=True)
        text = write(engine.tokens, asker.ask(prompt))
        assert len(text.num_nodes) == text.usage.rounds.num_rounds
        assert len(text.round_ms) >= len(text.num_nodes) - 2 and min(text.round_ms) > 0
        free, asked = asker.ask_with_tools(prompt)
        assert free.prompt_ids == asked.prompt_ids and free.grammar is None is not asked.grammar
