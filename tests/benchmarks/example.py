"""Invented measurements of every kind, as dataclasses and as records."""

from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.budget import BudgetMeasures, BudgetRow
from benchmarks.chaos import ChaosMeasures
from benchmarks.cluster import ClusterMeasures, ClusterOptions, RoutingMeasures
from benchmarks.compress_session import WAYS, ReplayOptions, ReplayTurn, summarize_ways
from benchmarks.context import ContextMeasures, DepthMeasures
from benchmarks.gpu_depth import DepthRun, GpuDepthMeasures
from benchmarks.gpu_phases import PassPhases, Phase, PhaseMeasures
from benchmarks.gpu_shape import ShapeOptions
from benchmarks.kv_quality import FormatQuality, KvQualityMeasures, LengthQuality
from benchmarks.kv_reading import FormatError
from benchmarks.memory import MemoryMeasures
from benchmarks.multiturn import MultiturnMeasures
from benchmarks.operation import OperationMeasures, Shares, group_kernels
from benchmarks.overhead import OverheadMeasures
from benchmarks.parity import Agreement, Disagreement, Noise, Noises, ParityMeasures
from benchmarks.parts import PartMeasures
from benchmarks.session import ServerMeasures
from benchmarks.start import StartMeasures
from benchmarks.verdict import CODER, SMOLLM2, SYNTH
from draftree.bench.agent import AgentOptions, AgentReport, AgentTurn
from draftree.bench.decode import DecodeMeasures
from draftree.bench.gpu import Equality, GpuMeasures
from draftree.bench.http import (
    BehindMeasures,
    FirstMeasures,
    HttpMeasures,
    StreamedReply,
    summarize_level,
)
from draftree.bench.median import Ratio, divide, summarize
from draftree.bench.peers import PeerMeasures, PeerOptions, judge
from draftree.bench.prefill import PrefillMeasures
from draftree.bench.record import ModelId, make_record
from draftree.bench.suite import SetMeasures, SuiteMeasures

KERNELS = {"linear": 6.0, "quantize": 1.0, "attention_kernel": 2.0, "norm_kernel": 1.0}
PEER = {"version": "1", "system": "AVX2 = 1 |", "kv": "f16"}


def shares(width):
    return Shares(width, 10.0, KERNELS, 2.0, group_kernels(KERNELS))


def peers(scale=1.0):
    times = {
        "ours": [1000.0 / scale, 1100.0 / scale, 900.0 / scale],
        "wheel": [3200.0, 3400.0, 3000.0],
        "native": [1600.0, 1700.0, 1500.0],
    }
    duel = judge(128, times, {"server": 4000.0, "library": 3000.0})
    builds = {
        "wheel": {"version": "1", "system": "AVX2 = 1 |", "kv": "f16"},
        "native": {"build_commit": "abc", "build_number": "7", "backends": "CPU", "cpu_info": "x"},
    }
    return PeerMeasures(duel, {"512": duel, "64": duel}, builds, "q8")


def decode():
    widths = (1, 2, 4, 8, 16, 24, 32, 64)
    forward = {str(w): summarize([5.0 + w, 6.0 + w, 7.0 + w], "ms") for w in widths}
    rates = {"32": summarize([100.0, 110.0, 90.0], "tok/s")}
    ratio = divide(forward["8"], forward["1"])
    return DecodeMeasures(rates, forward, ratio)


def prefill():
    return PrefillMeasures({"512": summarize([900.0, 1000.0], "tok/s")})


def operations():
    by_width = {str(width): shares(width) for width in (1, 8, 256)}
    return OperationMeasures(by_width, summarize([10.0], "ms"))


def memory(ratio=1.2):
    mib = summarize([100.0], "MiB")
    samples = summarize([ratio], "×")
    return MemoryMeasures(
        *(2048, samples, samples, mib, mib, mib, mib, mib, 120.0, samples, mib),
    )


def start():
    seconds = summarize([0.9, 1.1, 1.0], "s")
    return StartMeasures(seconds, seconds, seconds, seconds, {"draftree": 200.0, "numpy": 90.0})


def kv_quality(percent=0.5):
    needles = {"2048": [4, 3, 4]}
    base = FormatQuality(12.0, summarize([12.0], "perplexity"), 0.0, 0.0, 1.0, needles, None)
    formats = {"f16": base}
    for name, share in (("q8_0", 0.1), ("q4", 1.0), ("tq3_0", 5.0)):
        error = FormatError(0.01, 0.02, 0.03)
        over = share * percent / 100
        texts = summarize([12 * (1 + over)], "perplexity")
        formats[name] = FormatQuality(texts.median, texts, over, 0.001, 0.95, needles, error)
    return KvQualityMeasures({"2048": LengthQuality(2000, formats)})


def parity(excess=0.001, gap=0.1):
    perplexities = summarize([12.0, 14.0], "perplexity")
    noise = Noise(0.08, 0.3, 0.5)
    found = Disagreement("prompt 0", 7, 11, 12, gap, gap <= 0.6)
    agreement = Agreement(64, 63, int(found.is_explained), [found])
    names = ("ours", "llama", "ours_part", "llama_part", "exact_part")
    return ParityMeasures(
        *(perplexities, perplexities, perplexities, dict.fromkeys(names, 13.0)),
        *(excess, 0.002, 0.004, Noises(noise, noise), 0.98, agreement, agreement, "ab" * 32),
        *(PEER, "q8", 2),
    )


def suite():
    rate = summarize([100.0], "tok/s")
    ttft = summarize([30.0, 50.0], "ms")
    stages = {"draft": 300.0, "tree": 20.0, "verify": 1200.0, "accept": 60.0, "commit": 40.0}
    item = SetMeasures(
        *(4, 4, 256, rate, rate, 100.0, 150.0, 1.5, 1.8, [0.6, 0.4], 90, 40),
        *(ttft, ttft, [80, 30, 20, 12], stages | {"rest": 80.0}),
    )
    return SuiteMeasures("CPU", "lookup in the text so far", {"own": item, "gsm8k": item})


def context():
    depths = {}
    for depth, scale in (("128", 1.0), ("512", 0.9), ("4096", 0.5)):
        plain = summarize([100 * scale, 110 * scale, 90 * scale], "tok/s")
        drafted = summarize([150 * scale, 160 * scale, 140 * scale], "tok/s")
        ttft = summarize([float(depth)], "ms")
        ratio = divide(drafted, plain)
        depths[depth] = DepthMeasures(plain, drafted, ratio, ttft, ttft, 1.7, 3, 3)
    return ContextMeasures("CPU", "lookup in the text so far", depths)


def budget():
    plain = summarize([100.0, 102.0], "tok/s")
    rows = {}
    for name, scale in (("0", 1.0), ("4", 1.2), ("22", 1.4), ("auto", 1.3)):
        rate = summarize([100 * scale, 102 * scale], "tok/s")
        rows[name] = BudgetRow(rate, divide(rate, plain), 1.0 + scale, 4.0, 6, 6)
    refused = {"64": "on a GPU the budget is at most 63"}
    return BudgetMeasures("CPU", "a trained draft", 3, rows, "22", "22", refused)


def overhead():
    served, direct = summarize([98.0, 99.0], "tok/s"), summarize([100.0, 100.0], "tok/s")
    ttft = summarize([20.0, 30.0], "ms")
    ratio = divide(served, direct)
    return OverheadMeasures(served, direct, ratio, ratio, ttft, ttft, 6, 6)


def http():
    levels = {}
    for clients in (1, 2, 4):
        replies = [
            StreamedReply("ab", 3, True, [0.1 * clients, 0.1 * clients + 0.05], 0.2 * clients)
            for _ in range(2 * clients)
        ]
        levels[str(clients)] = summarize_level(replies, 0.4 * clients)
    behind, late = (
        BehindMeasures(summarize([ms, 2 * ms], "ms"), summarize([30.0, 40.0], "ms"), 1200)
        for ms in (50.0, 8000.0)
    )
    first = FirstMeasures((33.0, *[30.0] * 9))
    one_by_one = HttpMeasures("smollm2", True, levels, late, first)
    return ServerMeasures("smollm2", True, levels, behind, first, one_by_one, unbatched=one_by_one)


def multiturn():
    times = [summarize([ms, 2 * ms], "ms") for ms in (1000.0, 50.0, 60.0, 1200.0, 8.0)]
    first, second, returned, fresh, save = times
    return MultiturnMeasures(
        *(2048, first, second, returned, fresh),
        *(divide(second, first), divide(returned, fresh)),
        *(summarize([20.0, 21.0], "tokens"), save, summarize([47.0], "MiB")),
        *(2, 2, {"hit": 2.5, "fresh": 2.5}),
    )


def agent():
    turns = [
        AgentTurn("read_file", 400, 0, 20, 300.0, 800.0, 310.0),
        AgentTurn("answer", 700, 640, 30, 40.0, 900.0, 500.0),
        AgentTurn("read_file", 900, 850, 20, 44.0, 600.0, 700.0),
    ]
    return AgentReport(
        turns,
        summarize([0.05, 0.071, 0.09], "ratio"),
        0.931,
        {"read_file": 38.0, "answer": 35.0},
        4.2,
    )


def gpu():
    def by(keys, unit):
        return {str(key): summarize([float(key)], unit) for key in keys}

    return GpuMeasures(
        *("A GPU", summarize([9.0], "s"), 21.0, summarize([21.5], "GiB"), 22.35),
        *(by((512, 65536), "tok/s"), by((512, 65536), "ms"), by((1, 8, 16, 24, 32), "ms")),
        *(by((2048, 13312), "tok/s"), {"greedy": Equality(200, 3, 3, 1.5)}),
        joules={"plain": 2.5, "round": 4.0},
    )


def gpu_depth():
    def by(value, unit):
        return {depth: summarize([value], unit) for depth in ("512", "65536", "131072", "261632")}

    seconds = {"512": 0.1, "65536": 8.0, "131072": 18.0, "261632": 46.0}
    run = DepthRun(*(24.0, 262144, 23.1, 22.0, seconds, by(140.0, "tok/s"), by(9.0, "ms")), 1, 1)
    names = "f16", "q8_0", "q4", "tq3_0", "f16 unlimited"
    return GpuDepthMeasures("A GPU", "Q4_K", dict.fromkeys(names, run))


def gpu_phases():
    phase = Phase(2.0, 3.0, 12.5, 1.0)
    graph, one = (summarize([us], "µs") for us in (88.0, 125.0))
    each = PassPhases(graph, one, 11.5, {"linear": phase, "attention": phase})
    return PhaseMeasures("A GPU", 8, 53.0, {"1": each, "24": each})


def cluster(scale=1.9, num_faults=0):
    one = summarize([100.0, 102.0], "tok/s")
    two = summarize([100 * scale, 102 * scale], "tok/s")
    routing = RoutingMeasures(50, 5, 200, 0.99, 0.6)
    chaos = ChaosMeasures(200, 4, 180.0, 900, 400, 8, 100, 0, num_faults, ["lost"] * num_faults)
    start = summarize([14.0, 16.0], "s")
    windows = {"1": summarize([20.0, 21.0], "s"), "2": summarize([11.0, 12.0], "s")}
    ratio = divide(two, one)
    alone = Ratio(1.95, 1.95, 1.95)
    turns = {"1": one, "2": two}
    return ClusterMeasures(
        *(start, one, two, ratio, routing, chaos, ratio, windows, alone, turns, ratio)
    )


def _ratio(value):
    return {"value": value, "low": value, "high": value}


def _samples(value, unit):
    return asdict(summarize([value], unit))


def gpu_requests(rate=0.96, rounds=1.04, num_unequal=0):
    side = {"free": _samples(100.0, "tok/s"), "asked": _samples(96.0, "tok/s")}
    names = ("log-probabilities", "bias of zero", "tools, none called")
    kinds = {name: {**side, "ratio": _ratio(rate)} for name in names}
    row = {"round_ms": _samples(1.5, "ms"), "over_free": rounds, "acceptance_length": 3.0}
    rate_of = {"plain": _samples(3600.0, "tok/s"), "auto": _samples(7200.0, "tok/s")}
    text = {"num_equal": 10 - num_unequal, "num_texts": 10}
    auto = {"chat": {"rates": rate_of, "best": "plain", "ratio": _ratio(rate), **text}}
    first = {"first_ms": _samples(5.0, "ms"), "tenth_ms": _samples(5.0, "ms"), "ratio": _ratio(1.0)}
    sides = {"off": _samples(1.0, "tok/s"), "on": _samples(1.0, "tok/s"), "ratio": _ratio(1.0)}
    copy = {"plain": _samples(1.0, "tok/s"), "lookup": _samples(4.0, "tok/s"), "ratio": _ratio(4.0)}
    copy |= {"acceptance_length": 8.0, **text}
    parts = {
        "kinds": {"kinds": kinds},
        "rounds": {
            "budget": 23,
            "kinds": dict.fromkeys(("free", "penalty", "schema", "regex"), row),
        },
        "first": first,
        "equal": {"kinds": {"free": text | {"unequal": ["auto, hit"] * num_unequal}}},
        "limits": text | {"chunks": [2048, 1024]},
        "auto": auto,
        "auto, T = 0.8": auto,
        "lookup": {"chat": sides},
        "copy": {"copy": copy, "edit": copy},
    }
    return PartMeasures("A GPU", parts, {})


def session(both_ms=1000.0):
    turn = ReplayTurn(50.0, 1000.0, 4000, 3000, 16, 5.0, "text", False, False)
    found = {way: [[turn, turn]] for way in WAYS}
    found["both"] = [[turn, replace(turn, total_ms=both_ms)]]
    settings = asdict(ReplayOptions(num_turns=2, is_judged=False))
    return summarize_ways(found) | {"settings": settings}


def gpu_shapes(first_s=1.2):
    row = {"round_ms": _samples(9.0, "ms"), "over_free": 1.02, "acceptance_length": 1.0}
    read = {"first_s": _samples(first_s, "s"), "score_s": 0.8, "prompt_tokens": 1700}
    lengths = dict.fromkeys(("32768", "65536", "131072"), read)
    rates = {"one": _samples(160.0, "tok/s"), "all": _samples(155.0, "tok/s")}
    parts = {
        "schema": {"budget": 23, "kinds": {"free": row, "schema": row}},
        "clients": {**rates, "ratio": _ratio(0.97), "num_clients": 4},
        "beside": {
            "first_s": _samples(0.25, "s"),
            "alone_s": _samples(0.02, "s"),
            "num_writers": 3,
        },
        "behind": {"first_s": _samples(1.1, "s")},
        "agent": asdict(agent()) | {"settings": AgentOptions(48, 1.0, 3).settings()},
        "compress": {"lengths": lengths, "peak_gib": 22.1},
        "compress self": {"lengths": lengths, "peak_gib": 21.1},
        "session": session(),
    }
    return PartMeasures("A GPU", parts, {})


def suite_sampled():
    return suite()


SETTINGS = {
    "gpu-requests": {"num_tokens": 96, "limit": 4, "sets": ["chat"]},
    "gpu-shapes": ShapeOptions("27b", Path()).settings(),
    "cluster": ClusterOptions().settings(),
    "gpu-depth": {"memory": 24.0, "shape": "27b"},
    "gpu-phases": {"shape": "27b-8"},
    "gpu": {"rounds": 3, "memory": 22.35, "shape": "27b"},
    "peers": PeerOptions(2, 3).settings(),
    "decode": {"threads": 2, "rounds": 3},
    "prefill": {"threads": 2, "rounds": 3},
    "operations": {"threads": 2, "rounds": 1},
    "memory": {"threads": 2, "rounds": 1},
    "start": {"threads": 2, "rounds": 3},
    "parity": {"threads": 2, "num_tokens": 20480, "window": 512, "exact_windows": 4},
    "kv-quality": {"threads": 2, "num_tokens": 2048, "text": "some text"},
    "suite": {"threads": 2, "num_tokens": 96, "limit": 4},
    "suite-sampled": {"threads": 2, "num_tokens": 96, "limit": 4, "temperature": 0.8},
    "multiturn": {"threads": 2, "rounds": 2},
    "agent": AgentOptions(48, 1.0, 3).settings(),
    "context": {"threads": 2, "rounds": 1, "num_tokens": 32},
    "budget": {"threads": 2, "passes": 2, "num_tokens": 40, "limit": 3, "sets": ["own"]},
    "overhead": {"threads": 2, "rounds": 2, "num_tokens": 64, "limit": 3},
    "http": {"clients": [1, 2, 4], "requests": 2, "num_tokens": 48, "is_own": True},
}
MODELS = {
    SMOLLM2: ModelId("smollm2", "SmolLM2.gguf", 98_362_432, SMOLLM2),
    CODER: ModelId("coder", "Coder.gguf", 491_400_064, CODER),
    SYNTH: ModelId("synth-27b", "synth-27b-target.gguf", 16_500_000_000, SYNTH),
}


def record(kind, measures=None, sha256=SMOLLM2, disturbance=0.01):
    measures = globals()[kind.replace("-", "_")]() if measures is None else measures
    return make_record(kind, MODELS[sha256], SETTINGS[kind], measures, disturbance)
