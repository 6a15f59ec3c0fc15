"""Weights of one draft into another: all of them, and only where the shapes agree."""

from dataclasses import replace

import pytest
import torch

from draftree.errors import ModelError
from draftree.train.draft import DraftModule, resolve_shape
from draftree.train.export import export_folder, export_gguf
from draftree.train.initial import compare_shapes, copy_weights
from draftree.train.settings import DraftShape
from draftree.train.teacher import load_teacher
from draftree.weights.file import open_checkpoint
from tests.tiny import tiny_path


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A draft and its folder."""
    teacher = load_teacher(open_checkpoint(tiny_path("llama")), torch.device("cpu"))
    spec = resolve_shape(DraftShape(2, 64, block_size=6, feature_layers=(0, 2)), teacher, 511)
    torch.manual_seed(1)
    draft = DraftModule(spec)
    folder = tmp_path_factory.mktemp("draft")
    export_folder(draft, folder)
    export_gguf(draft, folder / "draft.gguf", "f32", "Tiny")
    return draft, folder


def test_every_weight_arrives(stored):
    draft, folder = stored
    for path, dtype in ((folder, torch.bfloat16), (folder / "draft.gguf", torch.float32)):
        other = DraftModule(replace(draft.spec, block_size=4, sliding_window=40))
        copy_weights(open_checkpoint(path), other)
        for name, value in draft.state_dict().items():
            assert torch.equal(other.state_dict()[name], value.to(dtype).float()), name
        assert all(parameter.requires_grad for parameter in other.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "layers 2, not 3"),
        ({"mask_token": 5}, "mask token 511, not 5"),
        ({"feature_layers": (1, 2)}, r"feature layers \[0, 2\], not \[1, 2\]"),
        ({"num_kv_heads": 1}, "key heads 2, not 1"),
        ({"ffn_size": 96}, r"gate_proj.weight \[64, 128\], not \[96, 128\]"),
    ],
)
def test_other_shapes_are_refused(stored, change, message):
    draft, folder = stored
    with pytest.raises(ModelError, match=message):
        compare_shapes(open_checkpoint(folder), replace(draft.spec, **change))


def test_a_target_is_no_draft(stored):
    with pytest.raises(ModelError, match="no DFlash draft"):
        compare_shapes(open_checkpoint(tiny_path("llama")), stored[0].spec)
