"""What a reply cost, in words."""

from draftree.cli.summary import round_lines, summary_line
from draftree.core import Compression, RoundStats, Usage


def test_plain_reply_names_no_acceptance_length():
    usage = Usage(prompt_tokens=1, completion_tokens=1, prefill_ms=50, decode_ms=10)
    usage.rounds.num_rounds = 1
    assert summary_line(usage) == (
        "1 token in 0.01 s (100.0 tokens per second); prompt of 1 token in 0.05 s"
    )
    assert round_lines(usage) == ["speculation was off: no draft"]


def test_speculation_is_accounted_for():
    rounds = RoundStats(
        num_rounds=2,
        num_drafted=30,
        num_accepted=6,
        verified_by_depth=[2, 2, 0],
        accepted_by_depth=[2, 1, 0],
        draft_ms=4.0,
        verify_ms=11.0,
    )
    usage = Usage(8, 4, completion_tokens=8, decode_ms=20, rounds=rounds)
    line = summary_line(usage)
    assert "AL 4.00" in line
    assert "4 of them cached" in line
    assert round_lines(usage) == [
        "2 rounds, 6 of 30 nodes accepted",
        "draft 4 ms, tree 0 ms, verify 11 ms, accept 0 ms, commit 0 ms",
        "accepted by depth: 100% 50%",
    ]


def test_reason_for_not_speculating_is_said():
    usage = Usage(rounds=RoundStats(off_reason="the draft costs more than it saves"))
    assert summary_line(usage).endswith("; speculation was off: the draft costs more than it saves")


def test_reason_for_rounds_of_the_host_is_said():
    usage = Usage(rounds=RoundStats(host_reason="of this kind of draft"))
    assert summary_line(usage).endswith("; rounds ran on the host: of this kind of draft")


def test_what_was_left_out_is_said():
    usage = Usage(compression=Compression(1, 0, 5, 4321, 1234, 1500.0))
    assert summary_line(usage).endswith(
        "; 1,234 of 4,321 tokens kept of long messages, scored in 1.50 s"
    )
    usage.compression = Compression()
    assert "kept" not in summary_line(usage)
