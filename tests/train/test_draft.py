"""The torch draft against z-lab's module, and what each block may see."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftree.errors import ModelError
from draftree.kernels.quant.formats import dequantize
from draftree.train.draft import DraftModule, DraftSpec, resolve_shape, usual_features
from draftree.train.settings import DraftShape
from draftree.train.teacher import load_teacher
from draftree.weights.file import open_checkpoint
from tests.golden import golden
from tests.tiny import tiny_path

TOLERANCE = 1e-3
SMALL = DraftSpec(32, 2, 48, 4, 2, 16, (0, 1), 3, 6, 9, 64, 512, 1e-6, 1e4)


def test_hidden_states_are_those_of_the_reference():
    arrays = np.load(golden("dflash/dflash.npz"))
    config = json.loads(golden("dflash/zlab/config.json").read_text())
    spec = DraftSpec(256, 5, 320, 4, 2, 64, (1, 2, 3, 4, 5), 8, 16, 1023, 1024, 4096, 1e-6, 1e7)
    assert config["rope_theta"] == spec.rope_base and config["rms_norm_eps"] == spec.eps
    draft = DraftModule(spec)
    weights = load_file(golden("dflash/zlab/model.safetensors"))
    draft.load_state_dict({name: value.float() for name, value in weights.items()})
    target = open_checkpoint(tiny_path("qwen35"))
    info = target.tensors["token_embd.weight"]
    embedding = torch.from_numpy(dequantize(target.raw(info.name), info.qtype))
    lengths = (1, 7, 40)  # three blocks of one sequence in one pass
    ids = np.stack([arrays[f"full.ctx{n}.noise_ids"] for n in lengths]).astype(np.int64)
    features = torch.from_numpy(arrays["target_features"])[None]
    with torch.no_grad():
        hidden = draft(features, torch.tensor([lengths]), embedding[torch.from_numpy(ids)][None])
    for index, length in enumerate(lengths):
        expected = arrays[f"full.ctx{length}.hidden"]
        assert np.abs(hidden[0, index].numpy() - expected).max() < TOLERANCE


def _run(draft, features, anchors, blocks):
    with torch.no_grad():
        return draft(features, torch.tensor([anchors]), blocks[None])[0]


def test_a_block_sees_the_context_before_its_anchor_and_itself():
    torch.manual_seed(0)
    draft = DraftModule(SMALL)
    features, blocks = torch.randn(1, 20, 64), torch.randn(2, 6, 32)
    before = _run(draft, features, [8, 12], blocks)
    changed = features.clone()
    changed[:, 8:] += 1.0
    after = _run(draft, changed, [8, 12], blocks)
    assert torch.equal(before[0], after[0]) and not torch.allclose(before[1], after[1])
    other = blocks.clone()
    other[1, 3] += 1.0
    after = _run(draft, features, [8, 12], other)
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1, 0], after[1, 0])  # earlier rows see later ones
    alone = _run(draft, features[:, :12], [12], blocks[1:])
    assert torch.allclose(alone[0], before[1], atol=1e-5)


def test_a_window_hides_what_is_too_far_back():
    torch.manual_seed(0)
    from dataclasses import replace

    draft = DraftModule(replace(SMALL, sliding_window=8))
    features, blocks = torch.randn(1, 20, 64), torch.randn(1, 6, 32)
    before = _run(draft, features, [16], blocks)
    far, near = features.clone(), features.clone()
    far[:, :8] += 1.0  # 16 - 8 is out of sight of row 0 and of all behind it
    near[:, 9] += 1.0
    assert torch.equal(_run(draft, far, [16], blocks), before)
    assert not torch.allclose(_run(draft, near, [16], blocks)[0, 0], before[0, 0])


def test_shapes_follow_the_target():
    teacher = load_teacher(open_checkpoint(tiny_path("llama")), torch.device("cpu"))
    spec = resolve_shape(DraftShape(num_layers=2, feature_layers=(0, 2)), teacher, 500)
    assert (spec.hidden_size, spec.ffn_size, spec.vocab_size) == (128, 320, 512)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32)
    assert spec.mask_token == 500
    windows = [
        resolve_shape(DraftShape(sliding_window=window), teacher, 500, max_len=96).sliding_window
        for window in (0, -1, 64)
    ]
    assert windows == [96, 0, 64]
    with pytest.raises(ModelError, match="feature layers"):
        resolve_shape(DraftShape(feature_layers=(3,)), teacher, 500)
    with pytest.raises(ModelError, match="share"):
        resolve_shape(DraftShape(num_heads=3, num_kv_heads=2), teacher, 500)


def test_usual_features_are_within_the_target():
    assert usual_features(30) == (1, 8, 14, 20, 27)
    for count in range(1, 12):
        layers = usual_features(count)
        assert layers and all(0 <= layer < count for layer in layers)
        assert list(layers) == sorted(set(layers))
