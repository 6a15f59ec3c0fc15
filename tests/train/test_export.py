"""Files of a trained draft: what the engine reads from them is what was trained."""

import json
from collections import Counter
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from draftree.drafts.dflash import BlockDrafter
from draftree.drafts.dflash_model import load_draft, read_draft_config
from draftree.errors import ModelError
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.train.draft import DraftModule, DraftSpec, resolve_shape
from draftree.train.export import export_folder, export_gguf
from draftree.train.settings import DraftShape
from draftree.train.teacher import load_teacher
from draftree.weights.dflash import rename_tensor
from draftree.weights.file import open_checkpoint
from tests.tiny import new_ops, open_target, tiny_path

CPU = torch.device("cpu")
FEATURES = (0, 2)


@pytest.fixture(scope="module")
def pair():
    teacher = load_teacher(open_checkpoint(tiny_path("llama")), CPU)
    torch.manual_seed(4)
    shape = DraftShape(2, 256, block_size=6, feature_layers=FEATURES, sliding_window=20)
    draft = DraftModule(resolve_shape(shape, teacher, 511), teacher.output_norm)
    for parameter in draft.parameters():  # so that every tensor matters
        parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.data = parameter.data.bfloat16().float()
    return teacher, draft


def _engine_logits(path, ids, anchor):
    """What the engine's draft says after reading the text before the anchor."""
    target = open_target(tiny_path("llama"), feature_layers=FEATURES, num_threads=1)
    ops = new_ops(exact=True, num_threads=1)
    drafter = BlockDrafter(load_draft(open_checkpoint(path), ops), target.model, ops)
    from draftree.core import DraftTree

    target.state.begin(DraftTree.chain(tuple(ids[:anchor])), is_committed=True)
    features = target.forward(range(anchor)).features
    drafter.extend_context(features[:anchor])
    return drafter.block_logits(int(ids[anchor])).copy()


def _module_logits(teacher, draft, ids, anchor):
    tokens = torch.full((1, 1, draft.spec.block_size), draft.spec.mask_token)
    tokens[0, 0, 0] = int(ids[anchor])
    with torch.no_grad():
        features = teacher.read(torch.tensor([ids]), FEATURES).features
        hidden = draft(features, torch.tensor([[anchor]]), teacher.embedding[tokens])
        return teacher.logits(hidden[0, 0, 1:]).numpy()


@pytest.mark.parametrize("kind", ["folder", "f32", "bf16", "f16"])
def test_the_engine_drafts_what_was_trained(pair, tmp_path, kind):
    teacher, draft = pair
    path = tmp_path if kind == "folder" else tmp_path / "draft.gguf"
    if kind == "folder":
        export_folder(draft, path)
    else:
        export_gguf(draft, path, kind, "Tiny")
    ids = np.random.default_rng(0).integers(0, 500, 40).tolist()
    tolerance = 0.05 if kind == "f16" else 1e-3  # the other formats hold these weights exactly
    for anchor in (1, 33):
        logits = _engine_logits(path, ids, anchor)
        assert np.abs(logits - _module_logits(teacher, draft, ids, anchor)).max() < tolerance


def test_eight_bits_are_the_quantised_weights(pair, tmp_path):
    teacher, draft = pair
    path = tmp_path / "draft.gguf"
    export_gguf(draft, path, "q8", "Tiny")
    rounded = DraftModule(draft.spec)
    kind = gguf.GGMLQuantizationType.Q8_0
    state = {}
    for name, value in draft.state_dict().items():
        array = value.numpy()
        if array.ndim > 1:
            array = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        state[name] = torch.from_numpy(array)
    rounded.load_state_dict(state)
    ids = np.random.default_rng(0).integers(0, 500, 40).tolist()
    expected = _module_logits(teacher, rounded, ids, 33)
    assert np.abs(_engine_logits(path, ids, 33) - expected).max() < 1e-3
    assert not np.allclose(expected, _module_logits(teacher, draft, ids, 33), atol=1e-4)


@pytest.fixture
def four_bit(pair):
    """A draft that computes with rounded weights."""
    exact = pair[1]
    draft = DraftModule(exact.spec)
    draft.is_four_bit = True
    draft.load_state_dict(exact.state_dict())
    return draft


def test_four_bits_are_what_the_draft_computed_with(pair, four_bit, tmp_path):
    path, ids = tmp_path / "draft.gguf", np.random.default_rng(0).integers(0, 500, 40).tolist()
    export_gguf(four_bit, path, "q4", "Tiny")
    checkpoint, used = open_checkpoint(path), four_bit.used_weights()
    kinds = Counter(info.qtype for info in checkpoint.tensors.values())
    assert kinds[QuantType.Q4_1] == 1 + 7 * 2 and set(kinds) == {QuantType.Q4_1, QuantType.F32}
    for name, value in used.items():
        found = rename_tensor(name)
        read = dequantize(checkpoint.raw(found), checkpoint.tensors[found].qtype)
        assert np.array_equal(read.reshape(value.shape), value.detach().numpy())
        assert torch.equal(value, pair[1].state_dict()[name]) == (value.ndim == 1)
    expected = _module_logits(pair[0], four_bit, ids, 33)
    assert np.abs(_engine_logits(path, ids, 33) - expected).max() < 1e-3
    assert not np.allclose(expected, _module_logits(*pair, ids, 33), atol=1e-2)


def test_other_files_of_such_a_draft_hold_the_rounded_weights(four_bit, tmp_path):
    export_gguf(four_bit, tmp_path / "draft.gguf", "f32", "Tiny")
    file = open_checkpoint(tmp_path / "draft.gguf")
    for name, value in four_bit.used_weights().items():
        read = file.raw(rename_tensor(name)).view(np.float32).reshape(value.shape)
        assert np.array_equal(read, value.detach().numpy())


def test_rows_that_are_not_whole_blocks_are_not_rounded(tmp_path):
    draft = DraftModule(DraftSpec(48, 1, 64, 2, 1, 16, (0,), 3, 6, 9, 64, 512, 1e-6, 1e4))
    draft.is_four_bit = True
    export_gguf(draft, tmp_path / "draft.gguf", "q4", "Tiny")
    kinds = {n: t.qtype for n, t in open_checkpoint(tmp_path / "draft.gguf").tensors.items()}
    assert kinds["blk.0.ffn_down.weight"] == QuantType.Q4_1
    assert kinds["blk.0.ffn_up.weight"] == QuantType.F16
    exact = draft.state_dict()["layers.0.mlp.up_proj.weight"]
    assert torch.equal(draft.used_weights()["layers.0.mlp.up_proj.weight"], exact)


def test_a_draft_may_list_the_tokens_that_it_proposes(pair, tmp_path):
    """The head has a column for each, behind those that the text's tokens share."""
    _, draft = pair
    tokens = [3, 4, 77, 500]
    export_gguf(draft, tmp_path / "some.gguf", "f32", "Tiny", tokens)
    export_gguf(draft, tmp_path / "all.gguf", "f32", "Tiny")
    ids = np.random.default_rng(2).integers(0, 500, 40).tolist()
    some, every = (_engine_logits(tmp_path / f"{name}.gguf", ids, 20) for name in ("some", "all"))
    assert np.array_equal(some[:, -4:], every[:, tokens])


def test_both_files_state_the_same_facts(pair, tmp_path):
    _, draft = pair
    export_folder(draft, tmp_path)
    export_gguf(draft, tmp_path / "draft.gguf", "q8", "Tiny")
    folder, file = (open_checkpoint(p) for p in (tmp_path, tmp_path / "draft.gguf"))
    assert read_draft_config(folder) == read_draft_config(file)
    config = read_draft_config(file)
    assert (config.block_size, config.feature_layers, config.mask_token) == (6, FEATURES, 511)
    assert file.metadata["dflash.target_layers"] == [1, 3]
    keys = [key for key in folder.metadata if key.startswith("dflash.")]
    assert len(keys) > 12
    assert {key: file.metadata[key] for key in keys} == {k: folder.metadata[k] for k in keys}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 6
    # Without these vLLM and SGLang would take its layers, which have a window, for causal ones.
    assert config["is_causal"] is False and config["dflash_config"]["causal"] is False


def test_without_a_window_none_is_stated(pair, tmp_path):
    draft = pair[1]
    plain = DraftModule(replace(draft.spec, sliding_window=0))
    export_gguf(plain, tmp_path / "draft.gguf", "bf16", "Tiny")
    metadata = open_checkpoint(tmp_path / "draft.gguf").metadata
    assert not any("sliding" in key for key in metadata)


def test_unknown_formats_are_refused(pair, tmp_path):
    with pytest.raises(ModelError, match="not as q3"):
        export_gguf(pair[1], tmp_path / "draft.gguf", "q3", "Tiny")
