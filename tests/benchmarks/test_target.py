"""Targets are judged on the figures of the right file."""

from dataclasses import replace

from benchmarks.target import (
    EXPORT_KIND,
    EXPORT_TARGETS,
    FUZZ_KIND,
    GROWTH_KIND,
    PAGE_KIND,
    SERVER_TARGETS,
    TARGETS,
    judge_targets,
)
from benchmarks.target_draft import CPU_SUITE_TARGETS
from benchmarks.verdict import CODER, NEOVERSE_N1, SERVER, SMOLLM2, SYNTH
from tests.benchmarks import example


def words(records, kind, sha256=SMOLLM2):
    return [
        verdict.words
        for verdict in judge_targets(records)
        if (verdict.target.kind, verdict.target.sha256) == (kind, sha256)
    ]


def test_without_results_nothing_is_measured():
    verdicts = judge_targets([])
    assert len(verdicts) == len(TARGETS)
    assert {verdict.words for verdict in verdicts} == {"not measured"}


def test_ratios_above_their_targets():
    assert words([example.record("peers", example.peers(1.0))], "peers") == [
        "aim reached",  # 1.6 of 1.6
        "missed",  # 1.6 of 2.5
    ]
    assert words([example.record("peers", example.peers(0.8))], "peers")[0] == "target reached"
    assert words([example.record("peers", example.peers(0.5))], "peers")[0] == "missed"


def test_figures_below_their_targets():
    for ratio, verdict in ((1.05, "aim reached"), (1.2, "target reached"), (3.4, "missed")):
        records = [example.record("memory", example.memory(ratio), sha256=CODER)]
        assert words(records, "memory", CODER) == [verdict]


def test_formats_of_keys_and_values_are_judged_one_by_one():
    for percent, verdicts in (
        (0.3, ["aim reached"] * 3),
        (0.7, ["target reached", "target reached", "target reached"]),
        (1.2, ["missed"] * 3),
    ):
        record = example.record("kv-quality", example.kv_quality(percent))
        assert words([record], "kv-quality") == verdicts


def test_perplexity_counts_in_both_directions():
    for excess, verdict in (
        (-0.0005, "aim reached"),
        (-0.004, "target reached"),
        (-0.006, "missed"),
    ):
        assert words([example.record("parity", example.parity(excess))], "parity")[0] == verdict


def test_one_unexplained_disagreement_misses():
    assert words([example.record("parity", example.parity(gap=0.1))], "parity")[1] == "aim reached"
    assert words([example.record("parity", example.parity(gap=2.0))], "parity")[1] == "missed"


def test_a_result_counts_for_its_own_file_only():
    records = [example.record("peers", sha256=CODER)]
    assert words(records, "peers") == ["not measured"] * 2
    assert words(records, "peers", CODER)[0] == "aim reached"


def test_retired_targets_are_figures_only():
    """Memory of the smallest model anywhere, eight rows over one on a Neoverse-N1."""
    records = [example.record("memory", example.memory(3.4)), example.record("decode")]
    assert words(records, "memory") == ["no target"]
    assert words(records, "decode") == ["aim reached"]
    records[1]["machine"]["cpu"] = f"aarch64 {NEOVERSE_N1}"
    assert words(records, "decode") == ["no target"]
    retired = [verdict for verdict in judge_targets(records) if verdict.is_retired]
    assert len(retired) == 2 and all(verdict.value is not None for verdict in retired)


def test_verdicts_of_older_kernels_say_so():
    record = example.record("start")
    assert words([record], "start") == ["aim reached"]
    found = [v.words for v in judge_targets([], [record]) if v.target.kind == "start"]
    assert found == ["aim reached, older kernels"]
    found = [v.words for v in judge_targets([record], [record]) if v.target.kind == "start"]
    assert found == ["aim reached"]


def test_drafting_changes_no_text_and_costs_nothing():
    suite = example.suite()
    assert words([example.record("suite", suite)], "suite") == ["aim reached", "aim reached"]
    own = replace(suite.sets["own"], num_equal=3, speed_up=0.98)
    worse = replace(suite, sets=suite.sets | {"own": own})
    assert words([example.record("suite", worse)], "suite") == ["missed", "target reached"]
    slow = replace(suite, sets={"own": replace(own, speed_up=0.86)})
    assert words([example.record("suite", slow)], "suite")[1] == "missed"


def test_sampled_texts_have_targets_of_their_own():
    measures = example.suite()
    own = measures.sets["own"]
    rates = {"own": 0.98, "humaneval": 1.2, "gsm8k": 1.3, "math500": 1.4}
    sets = {name: replace(own, speed_up=rate) for name, rate in rates.items()}
    sampled = example.record("suite-sampled", replace(measures, sets=sets))
    found = [v.words for v in judge_targets([sampled], set(), CPU_SUITE_TARGETS) if v.value]
    assert found == ["target reached", "missed"]


def test_replicas():
    good = example.record("cluster", example.cluster(1.96))
    assert words([good], "cluster") == ["aim reached"] * 5
    bad = example.record("cluster", example.cluster(1.5, num_faults=1))
    assert words([bad], "cluster") == ["missed", "missed", "aim reached", "missed", "aim reached"]
    older = example.record("cluster", replace(example.cluster(1.96), turns_over_one=None))
    assert words([older], "cluster")[1] == "not measured", "shared passes came later"


def judge_server(kind, measures):
    record = {"kind": kind, "model": {"sha256": SERVER}, "machine": {"cpu": ""}}
    verdicts = judge_targets([record | {"measures": measures}], targets=SERVER_TARGETS)
    return [verdict.words for verdict in verdicts if verdict.target.kind == kind]


def test_memory_is_judged_with_and_without_what_the_cache_holds():
    def judge(end_mb, kept_mb):
        none = [{"rss_mb": mb, "kept_mb": 0.0} for mb in (120.0, 140.0, 142.0, 145.0)]
        kept = [{"rss_mb": end_mb, "kept_mb": kept_mb}]
        return judge_server(
            GROWTH_KIND, {"no cache": {"samples": none}, "default": {"samples": kept}}
        )

    assert judge(200.0, 53.0) == ["target reached", "aim reached"]
    assert judge(200.0, 20.0) == ["target reached", "missed"]


def test_the_page_is_judged():
    long = {"open_ms": 138.0, "frame_ms": {"p95": 17.0}}
    good = {"first_paint_ms": {"median": 301.0}, "long": long, "script_lines": 2501}
    assert judge_server(PAGE_KIND, good) == ["missed", "aim reached", "aim reached", "missed"]


def test_an_export_may_change_no_weight():
    def judge(**changed):
        record = {"kind": EXPORT_KIND, "model": {"sha256": SMOLLM2}, "machine": {"cpu": ""}}
        record["measures"] = {"num_changed": changed}
        return [verdict.words for verdict in judge_targets([record], targets=EXPORT_TARGETS)]

    assert judge(vllm=0, sglang=0) == ["aim reached"]
    assert judge(vllm=0, sglang=1) == ["missed"]


def test_made_up_requests_are_judged_on_any_model():
    def judge(**measures):
        good = {"num_cases": 10_000, "num_failed": 0, "num_hung": 0}
        good["rss_mb"] = {"warm": 130.0, "end": 135.0}
        return judge_server(FUZZ_KIND, {**good, **measures})

    assert judge() == ["aim reached"] * 3
    assert judge(num_cases=9_999)[0] == "missed"
    assert judge(num_failed=1)[1] == judge(num_hung=1)[1] == "missed"
    assert judge(rss_mb={"warm": 100.0, "end": 140.0})[2] == "target reached"
    assert judge(rss_mb={"warm": 100.0, "end": 170.0})[2] == "missed"


def test_requests_on_a_gpu():
    def judge(**figures):
        record = example.record("gpu-requests", example.gpu_requests(**figures))
        return {
            verdict.target.what: verdict.words
            for verdict in judge_targets([record])
            if (verdict.target.kind, verdict.target.sha256) == ("gpu-requests", SMOLLM2)
        }

    good = judge(rate=1.0)
    assert len(good) == 11 and set(good.values()) == {"aim reached"}
    slow = judge(rate=0.84, rounds=1.2)
    assert list(slow.values()).count("missed") == 3 + 3 + 1
    changed = judge(num_unequal=1)
    assert changed["texts changed, all kinds, budgets, hits, limits"] == "missed"


def test_a_part_that_was_not_measured_has_no_verdict():
    record = example.record("gpu-requests")
    del record["measures"]["parts"]["rounds"], record["measures"]["parts"]["auto, T = 0.8"]
    found = words([record], "gpu-requests")
    assert found.count("not measured") == 3 + 1


def test_clients_of_a_server():
    def level(rate, *first_ms):
        return {"throughput": rate, "ttft_ms": {"samples": list(first_ms)}}

    record, none = example.record("http"), ["not measured"] * 2
    levels = record["measures"]["levels"]
    shared = "target reached"  # as fast as without
    assert words([record], "http") == ["not measured", "aim reached", *none, shared]  # four at most
    levels["8"] = level(150.0, 500.0, 700.0)
    assert words([record], "http") == ["target reached", "aim reached", *none, shared]
    record["measures"]["peer"] = {"levels": {"8": level(100.0, 550.0, 600.0)}}
    assert words([record], "http")[2:4] == ["missed", "target reached"]
    record["measures"]["peer"] = {"levels": {"8": level(70.0, 1200.0)}}
    assert words([record], "http")[2:4] == ["aim reached", "aim reached"]
    record["measures"]["unbatched"]["levels"]["4"]["throughput"] /= 2
    assert words([record], "http")[4] == "aim reached"
    for newer in ("behind", "peer", "unbatched"):
        del record["measures"][newer]
    levels["8"] = level(150.0, 500.0, 1700.0)
    assert words([record], "http") == ["missed", "not measured", *none, "not measured"]


def test_shapes_on_a_gpu():
    def judge(first_s):
        record = example.record("gpu-shapes", example.gpu_shapes(first_s), sha256=SYNTH)
        return words([record], "gpu-shapes", SYNTH)

    expected = ["aim reached", "target reached", *["aim reached"] * 2, "missed"]
    assert judge(0.9) == [*expected, *["aim reached"] * 8, "target reached"]
    assert judge(1.8)[5:11] == 2 * ["missed", "target reached", "aim reached"]


def test_sessions_on_a_gpu():
    record = example.record("agent")
    record["measures"]["first_over_cold"]["median"] = 0.03
    assert words([record], "agent") == ["target reached", "not measured"]
    record["measures"]["waited_over_peer"] = 0.4
    assert words([record], "agent") == ["target reached", "target reached"]


def test_small_keys_are_compared_with_the_whole_gpu():
    measures = example.gpu_depth()
    (whole,) = {id(run): run for run in measures.runs.values()}.values()
    slow = replace(whole, prefill_s={"65536": 9.0})
    short = replace(whole, plain={"512": whole.plain["512"]})
    runs = measures.runs | {"f16": short, "q4": slow, "q4 unlimited": slow}
    record = example.record("gpu-depth", replace(measures, runs=runs), sha256=SYNTH)
    found = {verdict.target.what: verdict for verdict in judge_targets([record])}
    assert found["prefill of 65536, q4 over f16"].value == 1.125
    assert found["prefill of 65536, q4 over f16"].words == "missed"
    assert found["plain decoding at 65536, f16"].value == 140.0, "the other run of f16 has it"
