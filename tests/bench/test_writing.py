"""What usages say together."""

from draftree.bench import writing
from draftree.bench.writing import open_writer, without_drafts, write_text
from draftree.config import EngineConfig
from draftree.core import RoundStats, Usage


def usage(tokens, decode_ms, lengths):
    """lengths: for each round the depth of its tree and how far its path got."""
    rounds = RoundStats(draft_ms=2.0, verify_ms=5.0, commit_ms=1.0)
    for depth, accepted in lengths:
        rounds.count(depth + 1, depth, accepted)
    return Usage(completion_tokens=tokens, decode_ms=decode_ms, rounds=rounds)


USAGES = [
    usage(7, 10.0, [(3, 3), (2, 0), (2, 1)]),
    usage(3, 15.0, [(0, 0), (1, 1)]),
]


def test_rounds_are_counted_by_their_tokens():
    assert writing.rounds_by_length(USAGES) == [2, 2, 0, 1]
    assert sum(writing.rounds_by_length(USAGES)) == 5
    tokens = sum(i * count for i, count in enumerate(writing.rounds_by_length(USAGES), 1))
    assert tokens == sum(u.completion_tokens for u in USAGES)
    assert writing.acceptance_length(USAGES) == 2.0


def test_shares_are_of_the_trees_that_were_so_deep():
    assert writing.accepted_shares(USAGES) == [0.75, 0.3333, 1.0]
    never = [usage(1, 1.0, [(2, 0)])]
    assert writing.accepted_shares(never) == [0.0, 0.0]
    assert writing.rounds_by_length(never) == [1]


def test_stages_and_rest_are_all_of_decoding():
    stages = writing.stage_ms(USAGES)
    assert stages == {"draft": 4.0, "tree": 0.0, "verify": 10.0, "accept": 0.0} | {
        "commit": 2.0,
        "rest": 9.0,
    }
    assert writing.total_rate(USAGES) == 400.0


def test_a_writer_repeats_itself(tiny_path):
    config = EngineConfig("cpu", budget=4, threads=2, max_ctx=128)
    with open_writer(tiny_path, config) as engine:
        assert writing.describe_drafts(engine) == "lookup in the text so far"
        assert writing.device_name(engine) == "CPU"
        ids = engine.tokenizer.encode("one two one two one two")
        first = write_text(engine.tokens, ids, 8)
        again = write_text(engine.tokens, ids, 8, use_cache=True)
        fresh = write_text(engine.tokens, ids, 8)
    assert first.tokens == again.tokens == fresh.tokens
    assert (first.usage.cached_tokens, fresh.usage.cached_tokens) == (0, 0)
    assert again.usage.cached_tokens > 0
    with open_writer(tiny_path, without_drafts(config)) as engine:
        assert writing.describe_drafts(engine) == "none"
        assert write_text(engine.tokens, ids, 8).tokens == first.tokens
