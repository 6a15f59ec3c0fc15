"""A recorded session in four ways: one conversation, what is judged, and what the page says."""

import json
from dataclasses import replace

import pytest

from benchmarks.compress_session import (
    BOTH,
    CACHED,
    COMPRESSED,
    PLAIN,
    Replay,
    ReplayOptions,
    ReplayTurn,
    judge_calls,
    make_section,
    record_session,
    right_over_plain,
    summarize_ways,
    write_session,
)
from benchmarks.parts import Deadline
from benchmarks.report import make_page
from draftree.chat import Engine
from tests.made import make_shallow

TURN = ReplayTurn(10.0, 100.0, 1000, 0, 20, 0.0, "read_file()", True, True)


def call(name: str, **arguments: str) -> dict:
    return {"function": {"name": name, "arguments": json.dumps(arguments)}}


def test_the_recorded_calls_are_right_and_answer_each_other() -> None:
    beginning, turns = record_session(1)
    assert [message["role"] for message in beginning] == ["system", "user"] and len(turns) == 24
    for turn in turns:
        calls = turn.reply.get("tool_calls", [])
        assert judge_calls(turn, calls) is (turn.kind != "answer")
        ids = [each["id"] for each in calls] or [None]
        assert ids == [turn.follow_up.get("tool_call_id")]


def test_calls_are_judged_by_tool_file_and_function() -> None:
    _, (read, edit, run, *_) = record_session(1)
    assert not judge_calls(read, [call("read_file", path="other.py")])
    assert not judge_calls(read, [call("run_tests", module="stats")])
    assert not judge_calls(read, [])
    assert judge_calls(edit, [call("edit_file", path="stats.py", old="def median(", new="")])
    assert not judge_calls(edit, [call("edit_file", path="stats.py", old="def rank(", new="")])
    assert not judge_calls(edit, [{"function": {"name": "edit_file", "arguments": '{"pa'}}])
    assert judge_calls(run, [call("run_tests", module="test_stats.py")])


def make_part(both_ms: float = 90.0, is_right: bool = True) -> dict:
    wrong = replace(TURN, total_ms=both_ms, cached_tokens=900, calls="x", is_right=is_right)
    answer = replace(TURN, is_call=False, is_right=False)
    ways = {PLAIN: TURN, COMPRESSED: TURN, CACHED: replace(TURN, total_ms=95.0), BOTH: wrong}
    found = {way: [[turn, answer]] * 2 for way, turn in ways.items()}
    return summarize_ways(found) | {"settings": {**REPLAY, "num_turns": 2}}


REPLAY = {"mode": "auto", "num_turns": 24, "is_judged": True}


def test_both_are_compared_with_the_faster_one() -> None:
    part = make_part()
    assert part["faster"] == CACHED
    assert part["both_over_faster"] == pytest.approx(190 / 195, abs=1e-4)
    assert part["ways"][BOTH]["num_calls"] == 1 and part["ways"][BOTH]["num_equal"] == 0
    assert right_over_plain(part) == 1.0 and right_over_plain(make_part(is_right=False)) == 0.0
    text = "\n".join(make_section(part))
    assert "| both | 0.19 [0.19 to 0.19] | 10 | 1,100 | 0.00 | 1 of 1 | 0 of 1 |" in text
    assert "0.974 of the time of prefix cache alone" in text
    part["settings"]["is_judged"] = False
    assert right_over_plain(part) is None and "right calls" not in "\n".join(make_section(part))


def test_ways_far_from_the_fastest_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {PLAIN: 300.0, COMPRESSED: 200.0, CACHED: 100.0, BOTH: 90.0}
    replay, asked = object.__new__(Replay), []
    replay.options, replay.report = ReplayOptions(num_turns=1), lambda words: None

    def run(self: Replay, way: str, num_turns: int) -> list[ReplayTurn]:
        asked.append(way)
        return [replace(TURN, total_ms=times[way])]

    monkeypatch.setattr(Replay, "_run", run)
    replay.measure(Deadline(1000.0))
    assert asked == [*times, *times, CACHED, BOTH, CACHED, BOTH]  # warming up, then three rounds


def test_the_page_has_a_session_where_there_is_one(tmp_path) -> None:
    assert "session" not in make_page(tmp_path)
    folder = tmp_path / "compress" / "qwen2.5-coder-0.5b"
    folder.mkdir(parents=True)
    result = make_part() | {"target": "coder.gguf", "machine": {"cpu": "any"}}
    (folder / "session.json").write_text(json.dumps(result))
    page = make_page(tmp_path)
    assert "**coder.gguf, a session**" in page and "not measured" not in page
    assert "the faster of the two alone | 0.9744 × | ≤ 1 × | ≤ 0.95 × | target reached |" in page
    assert "both over the whole conversation | 1 × | ≥ 1 × | ≥ 1 × | aim reached |" in page


def test_a_session_is_read_in_four_ways(smollm2_path, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("benchmarks.compress_session._WARM_TURNS", 0)
    monkeypatch.setattr("draftree.compress.AUTO_TOKENS", 300)
    path = str(make_shallow(smollm2_path))
    engine = Engine.open(path, draft="none", max_ctx=2048, device="cpu")
    options = ReplayOptions(num_tokens=4, num_turns=5, file_scale=4, num_rounds=1)
    given = path, "self", options, Deadline(600), lambda text: None
    line = write_session(tmp_path / "session.json", engine, *given)
    engine.close()
    part = json.loads((tmp_path / "session.json").read_text())
    ways = part["ways"]
    assert set(line["total_s"]) == set(ways) and part["device"] == "CPU"
    assert ways[PLAIN]["cached_tokens"] == ways[COMPRESSED]["cached_tokens"] == 0
    assert ways[COMPRESSED]["prompt_tokens"] < ways[PLAIN]["prompt_tokens"]
    assert ways[CACHED]["prompt_tokens"] == ways[PLAIN]["prompt_tokens"]
    assert ways[CACHED]["cached_tokens"] > 0.4 * ways[CACHED]["prompt_tokens"]
    assert ways[BOTH]["cached_tokens"] == ways[CACHED]["cached_tokens"], "read once, whole"
    assert ways[BOTH]["num_equal"] == ways[CACHED]["num_equal"] == 4
    assert ways[COMPRESSED]["score_s"] > 0
