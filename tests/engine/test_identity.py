"""A prefix cache on disk: another process goes on with the bits of the one before."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftree.config import EngineConfig
from draftree.core import Request, SamplingParams
from draftree.engine.engine import TokenEngine
from draftree.engine.identity import identify
from draftree.kernels.cpu.isa import PORTABLE
from draftree.weights.file import open_checkpoint
from tests.made import make_draft
from tests.tiny import same_state, tiny_path

HOT = SamplingParams(temperature=3.0, seed=4)
KINDS = {
    "dense": ("llama", None),
    "dense, drafted": ("llama", (0, 1, 2)),
    "hybrid": ("qwen35-mtp", None),
    "hybrid, drafted": ("qwen35-mtp", (0, 1, 3)),
}
CONFIG = EngineConfig(
    budget=7, max_ctx=400, threads=1, math="exact", chunk=24, ngram="off", prefix_bytes=1 << 28
)


def _open(kind: str, folder: Path | None, **options: object) -> TokenEngine:
    model, layers = KINDS[kind]
    config = replace(CONFIG, prefix_dir=str(folder or ""), **options)  # type: ignore[arg-type]
    draft = make_draft(feature_layers=layers) if layers else None
    return TokenEngine.open(tiny_path(model), config, draft)


def _text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


def _reply(engine: TokenEngine, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], list, int]:
    rounds: list[object] = []
    stream = engine.generate(Request(prompt, 12, HOT))
    stream.watch = rounds.append
    ids = tuple(event.token for event in stream)
    return ids, rounds, stream.usage.cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_goes_on_where_the_last_process_was(kind: str, tmp_path: Path) -> None:
    prompt, follow_up = _text(1, 130), _text(2, 20)
    first = _open(kind, tmp_path)
    said = _reply(first, prompt)[0]
    first.close()
    again, fresh = _open(kind, tmp_path), _open(kind, None)
    ids, rounds, cached = _reply(again, prompt + said + follow_up)
    assert cached >= len(prompt) + len(said) - 1
    fresh_ids, fresh_rounds, fresh_cached = _reply(fresh, prompt + said + follow_up)
    assert fresh_cached == 0
    assert (ids, rounds) == (fresh_ids, fresh_rounds)
    assert same_state(again.target.state.snapshot(), fresh.target.state.snapshot())
    for engine in (again, fresh):
        engine.close()


def test_files_are_written_when_idle_and_given_up_by_a_reset(tmp_path: Path) -> None:
    engine = _open("hybrid", tmp_path)
    _reply(engine, _text(1, 60))
    engine.offload(lambda: True)
    assert not list(tmp_path.rglob("*.npz"))
    engine.offload()
    assert list(tmp_path.rglob("*.npz"))
    engine.reset()
    assert not list(tmp_path.rglob("*.npz"))
    engine.close()


def test_a_folder_is_not_used_without_a_cache(tmp_path: Path) -> None:
    engine = _open("dense", tmp_path, prefix_bytes=0)
    _reply(engine, _text(1, 60))
    engine.close()
    assert not list(tmp_path.rglob("*"))


def test_another_format_of_keys_is_another_engine(tmp_path: Path) -> None:
    prompt = _text(1, 130)
    for kv, expected in (("f32", 0), ("f16", 0), ("f16", 129)):
        engine = _open("dense", tmp_path, kv_k=kv, kv_v=kv)
        assert _reply(engine, prompt)[2] == expected
        engine.close()


def test_the_key_follows_all_that_decides_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _open("dense, drafted", None)
    plan, draft = engine.plan, open_checkpoint(make_draft(feature_layers=(0, 1, 2)))
    engine.close()
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_path("llama").read_bytes())
    checkpoint = open_checkpoint(path)
    keys = [identify(CONFIG, plan, checkpoint, draft)]
    assert keys[0] == identify(CONFIG, plan, open_checkpoint(path), draft)
    keys.append(identify(CONFIG, plan, checkpoint, None))
    changes = {"kv_v": "q8_0"}, {"chunk": 25}, {"is_exact": False}
    for change in changes:
        keys.append(identify(CONFIG, replace(plan, **change), checkpoint, draft))
    content, other = bytearray(path.read_bytes()), tmp_path / "other.gguf"
    content[-100] ^= 1
    other.write_bytes(bytes(content))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    keys.append(identify(CONFIG, plan, open_checkpoint(other), draft))
    monkeypatch.setattr("draftree.kernels.cpu.isa.current_isa", lambda: PORTABLE)
    keys.append(identify(CONFIG, plan, checkpoint, draft))
    assert len(set(keys)) == len(keys)
