"""Whatever several clients do in whatever order, a reply is the one a fresh engine gives."""

from dataclasses import replace

import pytest

from tests.engine.conversations import Setting, Walk
from tests.examples import mark_long, share
from tests.made import make_draft
from tests.tiny import tiny_path

LARGE = 1 << 30
SMALL = 200_000  # a few turns
KINDS = {
    "dense": ("llama", None, "auto"),
    "dense, drafted": ("llama", (0, 1, 2), "auto"),
    "dense in eight bits": ("llama", (0, 1, 2), "q8"),
    "hybrid": ("qwen35-mtp", None, "auto"),
    "hybrid, drafted": ("qwen35-mtp", (0, 1, 3), "auto"),
}
LONG_STEPS = 4_000
WINDOW, SCALE = 90, 3  # a ring of 256 positions, and texts of up to 864


def _setting(kind: str, **options: object) -> Setting:
    model, layers, kv_type = KINDS[kind]
    draft = make_draft(feature_layers=layers) if layers else None
    return Setting(tiny_path(model), draft, kv_type=kv_type, **options)  # type: ignore[arg-type]


def _walk(setting: Setting, seed: int, num_steps: int) -> int:
    """How many replies began with less context than a fresh engine's."""
    walk = Walk(setting, seed)
    walk.run(num_steps)
    assert walk.num_cached > 4 * num_steps, "hardly anything was found in the cache"
    assert len(walk.counts) == 10, walk.counts
    walk.close()
    return walk.num_lost


SIZES = (SMALL, 7, share(150)), (SMALL, 512, share(150)), (LARGE, 512, share(300))


@pytest.mark.parametrize(
    "prefix_bytes, span_len, num_steps",
    [SIZES[0], pytest.param(*SIZES[1], marks=pytest.mark.long), SIZES[2]],
)
@pytest.mark.parametrize("kind", KINDS)
def test_conversations(kind: str, prefix_bytes: int, span_len: int, num_steps: int) -> None:
    setting = _setting(kind, prefix_bytes=prefix_bytes, span_len=span_len)
    assert _walk(setting, span_len, num_steps) == 0


@pytest.mark.parametrize("prefix_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("kind", mark_long(KINDS, but=("dense, drafted", "hybrid, drafted")))
def test_conversations_that_share_passes(
    kind: str, prefix_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.engine.batch._FRAME_S", 0.0)
    monkeypatch.setattr("draftree.engine.batch._SLICE_S", 0.0)
    setting = _setting(kind, prefix_bytes=prefix_bytes, span_len=40, batching="always")
    assert _walk(setting, 1, share(300)) == 0


@pytest.mark.parametrize("prefix_bytes, span_len", [(SMALL, 40), (LARGE, 512)])
@pytest.mark.parametrize(
    "kind",
    mark_long([kind for kind, (_, layers, _) in KINDS.items() if layers], but=("hybrid, drafted",)),
)
def test_conversations_longer_than_the_context_of_a_draft(
    kind: str, prefix_bytes: int, span_len: int
) -> None:
    """With room for all, context is lost only where a text was read further than the ring holds
    before it was kept, and later ones branch off in between: one such place may serve several.
    """
    num_steps = share(240)
    setting = _ring_setting(kind, prefix_bytes=prefix_bytes, span_len=span_len)
    num_lost = _walk(setting, 3, num_steps)
    assert num_lost <= num_steps // 8 or prefix_bytes < LARGE


def _ring_setting(kind: str, **options: object) -> Setting:
    draft = make_draft(feature_layers=KINDS[kind][1] or (), window=WINDOW)
    return replace(_setting(kind, **options), draft=draft, window=WINDOW, scale=SCALE)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_conversations(kind: str) -> None:
    for seed in range(4):
        prefix_bytes, span_len = (SMALL, LARGE)[seed % 2], (7, 40, 512, 512)[seed]
        setting = _setting(kind, prefix_bytes=prefix_bytes, span_len=span_len)
        assert _walk(setting, 100 + seed, LONG_STEPS // 4) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("prefix_bytes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["dense", "dense, drafted", "hybrid", "hybrid, drafted"])
def test_conversations_on_a_gpu(kind: str, prefix_bytes: int) -> None:
    setting = _setting(kind, prefix_bytes=prefix_bytes, span_len=40, device="cuda")
    _walk(setting, 7, 1000)
