"""The DFlash draft against z-lab's own module: hidden states, logits, whole greedy runs."""

import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from draftree.config import EngineConfig
from draftree.core import SamplingParams
from draftree.decode.decoder import Round
from draftree.decode.host_round import SpeculationOptions, SpeculativeDecoder
from draftree.decode.sampler import Sampler
from draftree.drafts.dflash import BlockDrafter
from draftree.drafts.dflash_model import Draft, check_fit, load_draft, read_draft_config
from draftree.drafts.drafter import Proposal
from draftree.engine.engine import TokenEngine
from draftree.errors import ModelError
from draftree.kernels.ops import Columns
from draftree.models.target import ForwardOutput, Target
from draftree.prefill.chunked import prefill
from draftree.weights.file import open_checkpoint
from tests.decode.table import TableTarget
from tests.golden import golden
from tests.made import HYBRID, make_draft
from tests.tiny import make_qwen2, new_ops, open_target, tiny_path

TOLERANCE = 1e-3
GGUF = "dflash/tiny-dflash-A-F16.gguf"


@pytest.fixture(scope="module")
def arrays() -> np.lib.npyio.NpzFile:
    return np.load(golden("dflash/dflash.npz"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights: as GGUF, as a z-lab folder, and as one whose config has sliding windows."""
    folder = tmp_path_factory.mktemp("sliding")
    shutil.copy(golden("dflash/zlab/config_sliding_window.json"), folder / "config.json")
    shutil.copy(golden("dflash/zlab/model.safetensors"), folder / "model.safetensors")
    return {"full": golden(GGUF), "zlab": golden("dflash/zlab"), "swa": folder}


@cache
def _target() -> Target:
    return open_target(tiny_path("qwen35"), feature_layers=(1, 2, 3, 4, 5), num_threads=1)


@cache
def open_draft(path: Path, *, exact: bool = True) -> tuple[Draft, BlockDrafter]:
    ops = new_ops(exact=exact, num_threads=1)
    draft = load_draft(open_checkpoint(path), ops)
    return draft, BlockDrafter(draft, _target().model, ops)


def _final_hidden(draft: Draft, drafter: BlockDrafter) -> np.ndarray:
    """The last block's hidden states after the final norm."""
    x = drafter.hidden[:16]
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + draft.eps) * draft.output_norm


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max())


@pytest.mark.parametrize("context_len", [1, 7, 40])
@pytest.mark.parametrize("tag", ["full", "swa"])
def test_a_block_after_a_context(
    tag: str, context_len: int, arrays: np.lib.npyio.NpzFile, paths: dict[str, Path]
) -> None:
    draft, drafter = open_draft(paths[tag])
    expected = f"{tag}.ctx{context_len}"
    anchor, *masks = arrays[f"{expected}.noise_ids"].tolist()
    assert set(masks) == {draft.config.mask_token} and len(masks) == 15
    drafter.reset()
    drafter.extend_context(arrays["target_features"][:context_len])
    logits = drafter.block_logits(anchor)
    assert _error(logits, arrays[f"{expected}.logits"][1:]) < TOLERANCE
    assert _error(_final_hidden(draft, drafter), arrays[f"{expected}.hidden"]) < TOLERANCE


@pytest.mark.parametrize("tag", ["full", "swa"])
def test_two_blocks_share_the_cached_context(
    tag: str, arrays: np.lib.npyio.NpzFile, paths: dict[str, Path]
) -> None:
    """The first block's own keys and values must not be seen by the second."""
    draft, drafter = open_draft(paths[tag])
    drafter.reset()
    for block, (start, end) in {"block1": (0, 40), "block2": (40, 45)}.items():
        drafter.extend_context(arrays["target_features"][start:end])
        expected = f"{tag}.two.{block}"
        logits = drafter.block_logits(int(arrays[f"{expected}.noise_ids"][0]))
        assert _error(logits, arrays[f"{expected}.logits"][1:]) < TOLERANCE
        assert _error(_final_hidden(draft, drafter), arrays[f"{expected}.hidden"]) < TOLERANCE


@pytest.mark.parametrize("tag", ["full", "swa"])
def test_fused_features_and_every_layer(
    tag: str, arrays: np.lib.npyio.NpzFile, paths: dict[str, Path]
) -> None:
    draft, _ = open_draft(paths[tag])
    ops, target = new_ops(exact=True, num_threads=1), _target().model
    hidden, num_layers = draft.config.hidden_size, len(draft.blocks)
    states, features = draft.new_state(ops), ops.new_rows(5 * hidden)
    fused_out, layer_out = ops.new_rows(hidden), ops.new_rows(num_layers * hidden)
    with ops.scope(), ops.capture() as context:
        draft.record_context(ops, features, states)
        fused = draft.fuse(ops, ops.matmul_input(features))
        normed = ops.rms_norm(fused, draft.context_norm, draft.eps)
        ops.copy_columns(normed.rows, Columns(fused_out, 0))
    with ops.scope(), ops.capture() as block:
        x = target.embedding(ops)
        for i, (layer, state) in enumerate(zip(draft.blocks, states, strict=True)):
            layer(ops, x, state)
            ops.copy_columns(x, Columns(layer_out, i * hidden))
    features[:7] = arrays["target_features"][:7]
    ops.step.set_chain(np.zeros(7, dtype=np.int64), 0)
    context.run()
    if tag == "full":
        assert _error(fused_out[:7], arrays["full.ctx7.fused"]) < TOLERANCE
    ops.step.set_chain(arrays[f"{tag}.ctx7.noise_ids"].astype(np.int64), 7)
    block.run()
    found = layer_out[:16].reshape(16, num_layers, hidden).transpose(1, 0, 2)
    assert _error(found, arrays[f"{tag}.ctx7.layer_out"]) < TOLERANCE


def test_the_features_are_those_that_the_reference_reads(arrays: np.lib.npyio.NpzFile) -> None:
    draft_config = read_draft_config(open_checkpoint(golden(GGUF)))
    assert list(draft_config.feature_layers) == arrays["target_layer_ids"].tolist()


@pytest.mark.parametrize("exact", [True, False])
def test_files_of_the_same_draft_agree_to_the_bit(
    exact: bool, arrays: np.lib.npyio.NpzFile, paths: dict[str, Path]
) -> None:
    logits = []
    for kind in ("full", "zlab"):
        drafter = open_draft(paths[kind], exact=exact)[1]
        drafter.reset()
        drafter.extend_context(arrays["target_features"][:40])
        logits.append(drafter.block_logits(int(arrays["target_ids"][40])).copy())
    assert np.array_equal(*logits)


@pytest.mark.parametrize("chunk_lens", [(40,), (1,) * 40, (3, 17, 20)])
def test_how_features_arrive_does_not_matter(chunk_lens: tuple[int, ...]) -> None:
    """In one piece or many, blocks drafted in between or not: the same bits."""
    drafter, features = _made_drafter(), np.random.default_rng(1).standard_normal((40, 384))
    features = features.astype(np.float32)
    drafter.reset()
    drafter.extend_context(features)
    expected = drafter.block_logits(9).copy()
    drafter.reset()
    start = 0
    for count in chunk_lens:
        drafter.extend_context(features[start : start + count])
        start += count
        if count % 2:
            drafter.block_logits(5)
    assert np.array_equal(drafter.block_logits(9), expected)


@cache
def _made_target() -> Target:
    return open_target(tiny_path("qwen35-mtp"), num_threads=1)


@cache
def _made_drafter() -> BlockDrafter:
    ops = new_ops(exact=True, num_threads=1)
    draft = load_draft(open_checkpoint(make_draft()), ops)
    return BlockDrafter(draft, _made_target().model, ops)


class _FirstChoice:
    """Only the draft's first choice at every position: a tree without branches."""

    def __init__(self, inner: BlockDrafter) -> None:
        self._inner = inner
        self.reset, self.extend_context = inner.reset, inner.extend_context
        self.extend_text = inner.extend_text

    def propose(
        self, anchor: int, sampler: Sampler, num_candidates: int, num_positions: int
    ) -> Proposal:
        return self._inner.propose(anchor, sampler, 1, num_positions)


class _RecordedTarget(TableTarget):
    """Reads no text: its greedy choice and its features at a position are the reference's."""

    def __init__(self, ids: np.ndarray, features: np.ndarray, vocab_size: int) -> None:
        super().__init__(np.eye(vocab_size))
        self._next, self._features = np.append(ids[1:], ids[-1:]), features

    def forward(self, rows: Sequence[int]) -> ForwardOutput:
        count = super().forward(rows) and self.pass_sizes[-1]
        places = np.minimum(self._ops.step.positions[:count], len(self._next) - 1)
        return ForwardOutput(self.table[self._next[places[list(rows)]]], self._features[places])


@pytest.mark.parametrize("tag", ["full", "swa"])
def test_whole_greedy_runs(tag: str, arrays: np.lib.npyio.NpzFile, paths: dict[str, Path]) -> None:
    _, drafter = open_draft(paths[tag])
    features, vocab_size = arrays["target_features"], _target().model.vocab_size
    target = _RecordedTarget(arrays["target_ids"], features, vocab_size)
    check_greedy_run(arrays, f"{tag}.run_g33", target, drafter)


def check_greedy_run(
    arrays: np.lib.npyio.NpzFile, name: str, target: Target, drafter: BlockDrafter
) -> None:
    """Where each block starts, what it proposes and how much of it is kept, as the reference."""
    keys = ("prompt", "ids", "starts", "accepted", "drafts")
    run = {key: arrays[f"{name}.{key}"].tolist() for key in keys}
    target.state.reset()
    drafter.reset()
    prefill(target, run["prompt"][:-1], 64, drafter.extend_context)
    rounds: list[Round] = []
    decoder = SpeculativeDecoder(
        target,
        Sampler(SamplingParams(), target.model.vocab_size, run["prompt"]),
        _FirstChoice(drafter),
        SpeculationOptions(15, is_auto=False, use_lookup=False),
        watch=rounds.append,
    )
    decoder.start(run["prompt"][-1])
    tokens = [
        e.token for e in decoder.step(max_tokens=1)
    ]  # the reference takes it from the prefill
    rounds.clear()
    starts = []
    while len(tokens) < len(run["ids"]):
        starts.append(target.state.committed)
        tokens += [e.token for e in decoder.step(max_tokens=64)]
    assert tokens[: len(run["ids"])] == run["ids"]
    assert starts == run["starts"]
    assert [len(one.path) - 1 for one in rounds] == run["accepted"]
    assert [list(one.tree.tokens[1:]) for one in rounds] == run["drafts"]


def test_a_draft_for_another_target_is_refused() -> None:
    draft = read_draft_config(open_checkpoint(make_draft()))
    target = _made_target().model
    check_fit(replace(draft, vocab_size=512), "fits.gguf", target, "Tiny")
    misfits = {
        "hidden size 512, the target has 128": replace(draft, hidden_size=512),
        "layers [1, 4], the target has 4": replace(draft, feature_layers=(1, 4)),
        "mask token 512 is outside": replace(draft, mask_token=512),
        "vocabulary of 2000, the target has 512": replace(draft, vocab_size=2000),
        "vocabulary of 300, the target has 512": replace(draft, vocab_size=300),
        "tokens outside the target's vocabulary of 512": replace(draft, draft_vocab=(1, 512)),
    }
    for reason, model_config in misfits.items():
        with pytest.raises(ModelError) as refusal:
            check_fit(model_config, "other.gguf", target, "Tiny")
        sentence = str(refusal.value)
        assert reason in sentence and "other.gguf" in sentence and "Tiny" in sentence


def test_the_engine_refuses_a_draft_that_does_not_fit() -> None:
    path, config = make_qwen2(), EngineConfig(max_ctx=64, threads=1)
    with pytest.raises(ModelError, match=r"made-dflash.*does not fit the target.*hidden size 128"):
        TokenEngine.open(path, config, make_draft())
    with pytest.raises(ModelError, match="not a draft"):
        TokenEngine.open(path, config, path)


def test_the_engine_refuses_a_draft_of_another_vocabulary() -> None:
    """All shapes fit, since a draft has neither embedding nor head."""
    path, config = golden(HYBRID), EngineConfig(max_ctx=64, threads=1, device="cpu")
    known = tuple(open_checkpoint(path).metadata["tokenizer.ggml.tokens"])
    renamed = ("other", *known[1:])
    with closing(TokenEngine.open(path, config, make_draft(tokens=renamed))):
        pass
    with pytest.raises(ModelError, match="trained on a vocabulary of 300, the target has 512"):
        TokenEngine.open(path, config, make_draft(vocab_size=300))
    with pytest.raises(ModelError, match="trained on a vocabulary of 300, the target has 512"):
        TokenEngine.open(path, config, make_draft(tokens=known[:300]))
    with pytest.raises(ModelError, match="only 0 of 512 tokens are the same"):
        TokenEngine.open(path, config, make_draft(tokens=known[::-1]))
