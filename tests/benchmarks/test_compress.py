"""Figures of prompt compression, as the page shows them."""

from dataclasses import asdict

from benchmarks.compress import FULL, CompressOptions, Tally, make_section


def make_result() -> dict:
    kept, replies = Tally(), Tally()
    kept.add(True, 0.2)
    kept.add(False, 0.4)
    replies.add(True, 0.2, 1500.0)
    keys = [f"single/drafter/{rules}/0.1" for rules in ("rules", "scores")]
    options = CompressOptions("big", "small", shares=(0.1,))
    return {
        "settings": asdict(options) | {"auto_share": 0.2},
        "kept": {key: asdict(kept) for key in keys},
        "replies": {f"single/{key}": asdict(replies) for key in (FULL, 0.1)},
        "score_ms": {"drafter": [1000.0, 3000.0]},
    }


def test_page_counts_cases_and_what_was_kept() -> None:
    text = "\n".join(make_section(make_result()))
    assert "| drafter | scores and rules |  | 1 of 2, 30 % |" in text
    assert "| single | 1 of 1, 20 % | 1 of 1, 20 % |" in text
    assert "drafter 2.0 s" in text and "Target big, drafter small" in text


def test_without_replies_there_is_one_table() -> None:
    result = make_result() | {"replies": {}}
    assert "answered" not in "\n".join(make_section(result))
