"""Bytes of a model by arithmetic: keys and values in pages, drafts in rings, scratch."""

from draftree.core import DraftSize
from draftree.memory import count_ring, kv_bytes, plan_gpu_memory, plan_memory
from tests.test_config import FACTS
from tests.test_config_kv import DRAFT, LARGE


def test_memory_is_arithmetic() -> None:
    """Keys and values: layers x width x bytes x positions; exact math holds weights in float32."""
    plan = plan_memory(FACTS, 1000, "f16", "f16", exact=False, chunk=256, max_nodes=24)
    assert plan.kv == 2 * 64 * 2 * 1024
    assert plan.weights == 600_000 and plan.recurrent == 5000
    assert plan.total == plan.weights + plan.kv + plan.recurrent + plan.scratch
    exact = plan_memory(FACTS, 1000, "f32", "f32", exact=True, chunk=256, max_nodes=24)
    assert exact.weights == 4_000_000 and exact.kv == 2 * plan.kv
    small = plan_memory(FACTS, 1000, "q8_0", "q8_0", exact=False, chunk=256, max_nodes=24)
    assert small.kv == 2 * 2 * (32 + 4) * 1024


def test_a_draft_keeps_a_bounded_context() -> None:
    """What it looks back at, the rows of a pass, a reply to be written again, in whole pages."""
    assert count_ring(4096, 512) == 4096 + 512 + 1024
    assert count_ring(90, 64) == 256 and count_ring(90, 100) == 512
    draft = DraftSize(1000, 32, 128, 16, (), 1024)
    lengths = (1000, 2000, 4000, 100_000)
    angles = 4 * FACTS.head_dim
    sizes = [plan_gpu_memory(FACTS, draft, n, 256, 24).draft - angles * n for n in lengths]
    assert sizes[1] - sizes[0] == 2 * 32 * 4 * 256  # pages
    assert sizes[2] == sizes[3] == sizes[0] + 2 * 32 * (1024 + 256 + 1024 - 6 * 256 + 256)


def test_a_token_takes_what_its_rows_take() -> None:
    sizes = [kv_bytes(LARGE, name, name) for name in ("f16", "q8_0", "q4", "tq3_0")]
    assert sizes == [65536, 34816, 18432, 14336]
    assert kv_bytes(LARGE, "q8_0", "q4") == (34816 + 18432) // 2


def test_a_gpu_allocates_whole_pages_and_a_spare_one() -> None:
    for max_ctx, pages in ((488, 3), (489, 4), (744, 4)):
        memory = plan_gpu_memory(LARGE, None, max_ctx, 512, 24, "q4", "q8_0")
        assert memory.kv == pages * 256 * kv_bytes(LARGE, "q4", "q8_0")


def test_long_prompts_need_room_for_expanded_keys_and_for_angles() -> None:
    def scratch(max_ctx: int) -> int:
        return plan_gpu_memory(LARGE, None, max_ctx, 512, 24).scratch

    angles = 4 * LARGE.rotary_dim
    spans = 160 * LARGE.hidden_size // 1024  # results that attention merges
    assert scratch(20_480) - scratch(10_240) == 10_240 * (angles + 4 * 4 * 256 + spans)
    assert scratch(204_800) - scratch(102_400) == 102_400 * (angles + spans)
    drafts = [plan_gpu_memory(LARGE, DRAFT, n * 256, 512, 24).draft for n in (100, 200)]
    assert drafts[1] - drafts[0] == 100 * 256 * 4 * 128  # its keys and values are a ring
