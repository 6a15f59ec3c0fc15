"""What was asked for becomes a plan: every "auto" is decided, every misfit refused."""

from dataclasses import replace

import pytest

from draftree.config import GPU_NODES, EngineConfig, GpuInfo, resolve
from draftree.core import ModelConfig
from draftree.errors import CapacityError
from draftree.memory import usable_cores

FACTS = ModelConfig(
    name="Tiny",
    architecture="any",
    num_parameters=1_000_000,
    weight_bytes=600_000,
    context_length=4096,
    vocab_size=1000,
    hidden_size=64,
    ffn_size=128,
    num_layers=4,
    num_kv_layers=2,
    num_kv_heads=1,
    head_dim=32,
    recurrent_bytes=5000,
    stash_width=100,
    is_quantized=True,
)


def test_defaults() -> None:
    plan = resolve(EngineConfig(), FACTS)
    assert plan.threads == usable_cores() >= 1
    assert plan.max_ctx == 4096 and plan.max_nodes == 65
    assert plan.kv == plan.kv_k == plan.kv_v == "f16" and not plan.is_exact
    assert resolve(EngineConfig(), replace(FACTS, has_even_keys=True)).kv == "q8_0"
    assert resolve(EngineConfig(), replace(FACTS, context_length=100_000)).max_ctx < 100_000


def test_half_precision_keys_only_where_weights_are_quantised_too() -> None:
    assert resolve(EngineConfig(), replace(FACTS, is_quantized=False)).kv == "f32"
    assert resolve(EngineConfig(math="exact"), FACTS).kv == "f32"
    assert resolve(EngineConfig(math="exact", kv_k="f16"), FACTS).kv == "f16"


@pytest.mark.parametrize("budget", [0, 1, 15, 1000])
def test_a_pass_holds_the_root_and_the_budget(budget: int) -> None:
    plan = resolve(EngineConfig(budget=budget, chunk=8), FACTS)
    assert plan.max_nodes == budget + 1 <= plan.chunk
    assert plan.chunk == max(8, budget + 1)


def test_a_context_beyond_the_model_is_refused() -> None:
    assert resolve(EngineConfig(max_ctx=4096), FACTS).max_ctx == 4096
    with pytest.raises(CapacityError, match=r"4097.*Tiny was trained for 4096"):
        resolve(EngineConfig(max_ctx=4097), FACTS)


def test_what_does_not_fit_is_refused_before_anything_is_loaded() -> None:
    needed = resolve(EngineConfig(), FACTS).memory.total
    assert resolve(EngineConfig(), FACTS, memory_limit=needed).memory.total == needed
    with pytest.raises(CapacityError, match=r"Tiny needs .* GiB.*--max-ctx"):
        resolve(EngineConfig(), FACTS, memory_limit=needed - 1)
    assert resolve(EngineConfig(max_ctx=64), FACTS, memory_limit=needed - 1).max_ctx == 64


def test_earlier_conversations_get_a_share_of_what_is_left() -> None:
    needed = resolve(EngineConfig(), FACTS).memory.total
    for left, expected in ((0, 0), (8000, 1000), (1 << 40, 4 << 30)):
        plan = resolve(EngineConfig(), FACTS, memory_limit=needed + left)
        assert plan.prefix_bytes == expected
    for asked in (0, 12345):
        assert resolve(EngineConfig(prefix_bytes=asked), FACTS).prefix_bytes == asked


def test_requests_that_take_turns_get_a_share_of_what_is_left() -> None:
    """As many as fit by default; a number that does not fit is refused."""
    needed = resolve(EngineConfig(), FACTS).memory.total
    one = resolve(EngineConfig(parallel=2), FACTS).swapped_bytes // 2
    assert one > 4 * FACTS.num_kv_layers * FACTS.head_dim * 1000 + 5 * FACTS.recurrent_bytes
    for left, expected in ((0, 1), (4 * one, 1), (8 * one, 2), (1 << 40, 8)):
        plan = resolve(EngineConfig(), FACTS, memory_limit=needed + left)
        assert plan.parallel == expected
        assert plan.swapped_bytes == (0 if expected == 1 else expected * one)
    asked = EngineConfig(parallel=6)
    assert resolve(asked, FACTS, memory_limit=needed + 6 * one).parallel == 6
    with pytest.raises(CapacityError, match=r"6 requests .* that take turns .*--parallel"):
        resolve(asked, FACTS, memory_limit=needed + 6 * one - 1)
    alone = resolve(EngineConfig(parallel=1), FACTS, memory_limit=needed)
    assert (alone.parallel, alone.swapped_bytes) == (1, 0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("math", "fast"),
        ("kv_k", "q5"),
        ("kv_v", "tq3"),
        ("ngram", "maybe"),
        ("budget", -1),
        ("budget", True),
        ("max_ctx", 1),
        ("max_ctx", 2.5),
        ("threads", True),
        ("gpu_memory", float("nan")),
        ("budget", 1025),
        ("budget", "many"),
        ("block", 65),
        ("block", -1),
        ("max_ctx", -1),
        ("threads", 513),
        ("chunk", 4097),
        ("prefix_bytes", -1),
        ("prefix_bytes", "much"),
        ("parallel", -1),
        ("parallel", 257),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(option: str, value: int | str) -> None:
    with pytest.raises(ValueError, match=option.replace("_len", "").replace("_", " ")):
        EngineConfig(**{option: value})


def test_a_gpu_shares_no_more_rows_than_a_tree_has():
    gpu = GpuInfo(0, "a large one", 2**40)
    plan = resolve(EngineConfig(parallel=128, device="cuda", max_ctx=256), FACTS, gpu=gpu)
    assert plan.parallel == 128 and plan.batch == GPU_NODES
    assert (
        0
        < plan.batch_bytes
        < plan.left_bytes
        == plan.memory_limit - plan.memory.total - (plan.batch_bytes)
    )
