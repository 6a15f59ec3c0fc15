"""Figures of prompt compression, as the page shows them, and how replies are judged."""

from dataclasses import asdict

import pytest

from benchmarks.compress import (
    AUTO,
    FULL,
    CompressOptions,
    Tally,
    join_results,
    name_model,
)
from benchmarks.compress_case import make_case
from benchmarks.section_compress import make_section, worst_of_auto


def make_result() -> dict:
    kept, replies, worse = Tally(), Tally(), Tally()
    kept.add(1.0, 0.2)
    kept.add(0.0, 0.4)
    replies.add(1.0, 0.2, 1500.0)
    worse.add(0.5, 0.1, 1500.0)
    keys = [f"single/drafter/{rules}/0.1" for rules in ("rules", "scores")]
    options = CompressOptions("big", ("small",), shares=(0.1,))
    whole = {f"{kind}/{FULL}": asdict(replies) for kind in ("single", "agent")}
    return {
        "settings": asdict(options) | {"auto_share": 0.2},
        "kept": {key: asdict(kept) for key in keys},
        "replies": whole
        | {f"single/drafter/{key}": asdict(replies) for key in (AUTO, 0.1)}
        | {f"agent/drafter/{AUTO}": asdict(worse)},
        "score_ms": {"drafter": [1000.0, 3000.0]},
    }


def test_page_counts_cases_and_what_was_kept() -> None:
    text = "\n".join(make_section(make_result()))
    assert "| drafter | scores and rules |  | 1 of 2, 30 % |" in text
    assert "| drafter | single | 1 of 1, 20 % | 1 of 1, 20 % | 1 of 1, 20 % |" in text
    assert "| drafter | agent | 1 of 1, 20 % |  | 0.5 of 1, 10 % |" in text
    assert "drafter 2.00 s" in text and "Target big, scored by small" in text


def test_page_compares_positions_and_lists_what_auto_changed() -> None:
    result = make_result()
    assert "original" not in "\n".join(make_section(result))
    result["replies"]["single/drafter/0.1/original"] = {"score": 0.0, "num_cases": 1}
    case = {"kind": "agent", "seed": 0, "scorer": "drafter", "is_kept": False}
    scores = ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0))
    result["auto"] = [case | {"score": score, "whole": whole} for score, whole in scores]
    text = "\n".join(make_section(result))
    assert "| drafter | 0.1 | 1.0 | 0.0 | 1 | single 1 / 0 |" in text
    assert "| drafter | agent | 3 | 1 | 1 | 1 |" in text


def test_a_kind_measured_apart_leaves_the_others() -> None:
    before, now = make_result() | {"auto": [{"kind": "single"}, {"kind": "agent"}]}, make_result()
    better = {f"agent/drafter/{AUTO}": {"score": 1.0, "num_cases": 1, "kept_shares": [0.3]}}
    now |= {"replies": better, "kept": {}, "timestamp": "2026-11-20T00:01:11+00:00"}
    now |= {"auto": [{"kind": "agent", "seed": 7}]}
    joined = join_results(before, now, ["agent"])
    assert joined["replies"] == before["replies"] | better and joined["kept"] == before["kept"]
    assert joined["auto"] == [{"kind": "single"}, {"kind": "agent", "seed": 7}]
    assert worst_of_auto(joined) == 1.0
    joined["auto"] = []
    words = (
        "agent: measured apart, 2026-11-20T00:01, on a shared machine, texts of 10,000 characters."
    )
    assert words in "\n".join(make_section(joined))


def test_names_are_without_the_form_of_weights() -> None:
    assert name_model("/x/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf") == "qwen2.5-coder-0.5b"
    assert name_model("smollm2-135m") == "smollm2-135m"


def test_the_worst_kind_is_what_counts() -> None:
    assert worst_of_auto(make_result()) == 0.5


def test_without_replies_there_is_one_table() -> None:
    result = make_result() | {"replies": {}}
    assert "answered" not in "\n".join(make_section(result))


def test_replies_are_judged_by_what_they_hold() -> None:
    case = make_case("multi-value", 9000, 0)
    assert case.judge("The codes are " + " and ".join(case.answers)) == 1.0
    assert case.judge(f"One is {case.answers[1]}.") == pytest.approx(1 / 3)
    call = make_case("agent", 9000, 0)
    assert call.judge(f'{{"path": "{call.answers[0]}"}}') == 1.0 and call.judge("{}") == 0.0


def test_an_agents_text_is_an_earlier_message() -> None:
    case = make_case("agent", 9000, 0)
    messages = case.messages("shorter")
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages[2]["content"] == "shorter" and messages[-1]["content"] == case.question
    assert case.options()["tool_choice"]["function"]["name"] == "read_file"
    plain = make_case("single", 9000, 0)
    assert plain.messages("t") == [{"role": "user", "content": f"t\n\n{plain.question}"}]
