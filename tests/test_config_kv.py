"""Formats of cached keys and values: what a plan chooses, what it takes, what it refuses."""

from dataclasses import replace

import pytest

from draftree.config import EngineConfig, GpuInfo, resolve
from draftree.core import DraftSize, ModelConfig
from draftree.errors import CapacityError
from draftree.memory import plan_gpu_memory
from tests.test_config import FACTS

LARGE = ModelConfig(
    *("27B", "any", 26_900_000_000, 16_500_000_000, 262144, 248320, 5120, 17408, 64, 16),
    *(4, 256, 157_000_000, 48 * 22624, True),
    window_bytes=48 * 3 * 10240 * 4,
    embedding_bytes=715_000_000,
    rotary_dim=64,
)
DRAFT = DraftSize(1_800_000_000, 5 * 2 * 8 * 128, 5 * 5120, 16, (), 4096, head_dim=128)
GPU = GpuInfo(0, "a GPU", 24 * 2**30)
WIDE = replace(FACTS, head_dim=64)


@pytest.mark.parametrize(
    ("max_ctx", "kv", "chunk"), [(0, "f16", 2048), (100_000, "q8_0", 2048), (150_000, "q4", 2048)]
)
def test_auto_takes_the_best_format_that_fits(max_ctx: int, kv: str, chunk: int) -> None:
    plan = resolve(EngineConfig(max_ctx=max_ctx), LARGE, gpu=GPU, draft=DRAFT)
    assert (plan.kv_k, plan.kv_v, plan.chunk) == (kv, kv, chunk)
    assert plan.memory.total <= GPU.memory_bytes
    if kv == "f16":
        assert plan.kv_note == "" and plan.max_ctx == 8192
    else:
        assert plan.kv_note.startswith(f"keys and values in {kv}: f16 would need ")
        assert plan.kv_note.endswith(" GiB of 24.0")


def test_a_shorter_chunk_comes_before_a_smaller_format_and_the_shortest_last() -> None:
    def limited(limit: int, **options: object) -> tuple[str, int]:
        config = EngineConfig(max_ctx=32768, **options)  # type: ignore[arg-type]
        plan = resolve(config, LARGE, memory_limit=limit, gpu=GPU)
        return plan.kv, plan.chunk

    def total(chunk: int, kv: str) -> int:
        return plan_gpu_memory(LARGE, None, 32768, chunk, 24, kv, kv).total

    assert limited(total(512, "f16")) == ("f16", 512)
    assert limited(total(512, "f16") - 1)[0] == "q8_0"
    assert limited(total(256, "q4")) == ("q4", 256)
    assert limited(total(256, "f16"), kv_k="f16", kv_v="f16") == ("f16", 256)


def test_auto_never_takes_three_bits_by_itself_but_names_them() -> None:
    three, four = (
        plan_gpu_memory(LARGE, None, 262144, 256, 24, k, k).total for k in ("tq3_0", "q4")
    )
    with pytest.raises(CapacityError, match=r"in q4 .* try --kv tq3_0, a smaller --max-ctx"):
        resolve(EngineConfig(max_ctx=262144), LARGE, memory_limit=(three + four) // 2, gpu=GPU)
    config = EngineConfig(max_ctx=262144, kv_k="tq3_0", kv_v="tq3_0")
    assert resolve(config, LARGE, memory_limit=three, gpu=GPU).kv == "tq3_0"
    with pytest.raises(CapacityError, match="try a smaller --max-ctx"):
        resolve(config, LARGE, memory_limit=three - 1, gpu=GPU)


def test_a_format_that_was_asked_for_is_kept_or_refused() -> None:
    config = EngineConfig(max_ctx=150_000, kv_k="f16", kv_v="f16")
    with pytest.raises(CapacityError, match=r"in f16 \d\.\d.* try --kv q4 or tq3_0, a smaller"):
        resolve(config, LARGE, gpu=GPU, draft=DRAFT)
    plan = resolve(EngineConfig(kv_k="q8", kv_v="q4"), LARGE, gpu=GPU)
    assert (plan.kv_k, plan.kv_v, plan.kv, plan.kv_note) == ("q8_0", "q4", "q8_0/q4", "")
    half = resolve(EngineConfig(max_ctx=150_000, kv_k="q4"), LARGE, gpu=GPU, draft=DRAFT)
    assert half.kv == "q4/q8_0" and half.kv_note.startswith("keys and values in q4/q8_0: q4/f16 ")


def test_large_heads_with_a_bias_are_not_rounded_to_few_bits_by_auto() -> None:
    """Four bits of such keys ruin a model, and their bias is not taken out."""
    biased = replace(LARGE, has_key_bias=True)
    plan = resolve(EngineConfig(max_ctx=100_000), biased, gpu=GPU, draft=DRAFT)
    assert plan.kv == "q8_0"
    with pytest.raises(CapacityError, match=r"in q8_0 .* try a smaller --max-ctx"):
        resolve(EngineConfig(max_ctx=200_000), biased, gpu=GPU, draft=DRAFT)
    asked = EngineConfig(max_ctx=200_000, kv_k="q4", kv_v="q4")
    assert resolve(asked, biased, gpu=GPU, draft=DRAFT).kv == "q4"


def test_other_keys_with_a_bias_may_have_few_bits() -> None:
    """Their bias is taken out before they are rounded, which costs a table of angles."""
    plain = replace(LARGE, head_dim=128, num_kv_heads=2 * LARGE.num_kv_heads)
    biased = replace(plain, has_key_bias=True)
    plan = resolve(EngineConfig(max_ctx=180_000), biased, gpu=GPU, draft=DRAFT)
    assert plan.kv == "q4"
    for name, is_more in (("f16", False), ("q8_0", True), ("q4", True)):
        sizes = [plan_gpu_memory(m, None, 65536, 256, 24, name, name) for m in (plain, biased)]
        assert (sizes[1].scratch > sizes[0].scratch) is is_more


def test_heads_that_a_format_cannot_hold() -> None:
    odd = replace(LARGE, head_dim=96)
    with pytest.raises(ValueError, match=r"q4 cannot hold keys of 96 dimensions.*choose f16"):
        resolve(EngineConfig(kv_k="q4"), odd, gpu=GPU)
    with pytest.raises(ValueError, match=r"tq3_0 cannot hold values of 96 .*f16 or q8_0 or q4"):
        resolve(EngineConfig(kv_v="tq3_0"), odd)
    with pytest.raises(CapacityError, match="in f16"):
        resolve(EngineConfig(max_ctx=262144), odd, gpu=GPU, draft=DRAFT)


def test_a_cpu_has_bytes_for_any_head() -> None:
    assert resolve(EngineConfig(kv_k="q8", kv_v="q8_0"), FACTS).kv == "q8_0"
    with pytest.raises(ValueError, match="q8_0 cannot hold keys of 32 dimensions"):
        resolve(EngineConfig(kv_k="q8_0", kv_v="q4"), FACTS)
    with pytest.raises(ValueError, match="q8_0 cannot hold keys of 32 dimensions"):
        resolve(EngineConfig(kv_k="q8_0"), FACTS, gpu=GPU)


def test_f32_is_for_both_sides_of_a_cpu() -> None:
    assert resolve(EngineConfig(kv_k="f32"), WIDE).kv == "f32"
    with pytest.raises(ValueError, match="f32 is for keys and values alike"):
        resolve(EngineConfig(kv_k="f32", kv_v="q4"), WIDE)
    with pytest.raises(ValueError, match="f32 keys and values need the CPU"):
        resolve(EngineConfig(kv_v="f32"), LARGE, gpu=GPU)


@pytest.mark.parametrize(
    ("kv_k", "kv_v", "kv"),
    [
        ("q4", "q4", "q4"),
        ("q8", "q8_0", "q8_0"),
        ("q4", "auto", "q4/f16"),
        ("auto", "q8", "f16/q8_0"),
        ("tq3_0", "q4", "tq3_0/q4"),
    ],
)
def test_a_cpu_rounds_in_sixteen_bits(kv_k: str, kv_v: str, kv: str) -> None:
    plan = resolve(EngineConfig(kv_k=kv_k, kv_v=kv_v), WIDE)
    assert plan.kv == kv
    usual = resolve(EngineConfig(), WIDE)
    assert (plan.memory.kv == usual.memory.kv) == (kv != "q8_0")


def test_contexts_that_fit_a_gpu_of_24_gib_with_a_four_bit_draft() -> None:
    draft = replace(DRAFT, weight_bytes=1_000_000_000)
    for kv, max_ctx in (("f16", 65_536), ("q8_0", 131_072), ("q4", 262_144), ("tq3_0", 262_144)):
        plan = resolve(EngineConfig(max_ctx=max_ctx, kv_k=kv, kv_v=kv), LARGE, gpu=GPU, draft=draft)
        assert plan.kv == kv and plan.memory.total <= 24 * 2**30


def test_the_longest_chunk_is_for_gpus_of_which_half_stays_free() -> None:
    need = resolve(EngineConfig(chunk=4096), LARGE, gpu=GPU).memory.total
    chunks = [
        resolve(EngineConfig(), LARGE, memory_limit=limit, gpu=GPU).chunk
        for limit in (2 * need, 2 * need - 2, need)
    ]
    assert chunks == [4096, 2048, 2048]
    asked = resolve(EngineConfig(chunk=4096), LARGE, memory_limit=need, gpu=GPU)
    assert asked.chunk == 4096
