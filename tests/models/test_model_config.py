"""What is read from metadata alone agrees with the model's other description of itself."""

import json

import pytest

from draftree.errors import CheckpointError
from draftree.layers.attention import Attention
from draftree.layers.delta_net import DeltaNet
from draftree.models.model_config import read_model_config
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint
from tests.golden import golden
from tests.tiny import tiny_path, tiny_target


def test_fields_are_those_of_the_config_it_was_converted_from() -> None:
    config = json.loads(golden("qwen35/hf_config.json").read_text())
    model_config = read_model_config(open_checkpoint(tiny_path("qwen35")))
    assert model_config.vocab_size == config["vocab_size"]
    assert model_config.hidden_size == config["hidden_size"]
    assert model_config.ffn_size == config["intermediate_size"]
    assert model_config.num_layers == config["num_hidden_layers"]
    assert model_config.context_length == config["max_position_embeddings"]
    assert model_config.num_kv_layers == config["layer_types"].count("full_attention")
    shape = model_config.num_kv_heads, model_config.head_dim
    assert shape == (config["num_key_value_heads"], config["head_dim"])
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    channels = 2 * keys + config["linear_num_value_heads"] * config["linear_value_head_dim"]
    num_recurrent = model_config.num_layers - model_config.num_kv_layers
    window = (config["linear_conv_kernel_dim"] - 1) * channels
    assert model_config.window_bytes == 4 * num_recurrent * window


def test_layers_are_of_the_kinds_that_the_config_lists() -> None:
    config = json.loads(golden("qwen35/hf_config.json").read_text())
    kinds = {"linear_attention": DeltaNet, "full_attention": Attention}
    found = [type(block.mixer) for block in tiny_target("qwen35").model.blocks]
    assert found == [kinds[name] for name in config["layer_types"]]


def test_rotary_dimensions_and_biases_are_read() -> None:
    hybrid, biased = (read_model_config(open_checkpoint(tiny_path(n))) for n in ("qwen35", "qwen2"))
    assert (hybrid.head_dim, hybrid.rotary_dim, hybrid.has_key_bias) == (64, 16, False)
    assert biased.has_key_bias


def test_heads_that_no_kernel_can_run_are_a_sentence() -> None:
    checkpoint = open_checkpoint(tiny_path("llama"))
    metadata = {**checkpoint.metadata, "llama.attention.key_length": 8}
    changed = Checkpoint(checkpoint.path, metadata, checkpoint.tensors, {})
    with pytest.raises(CheckpointError, match="heads of 8 dimensions; only multiples of 16"):
        read_model_config(changed)
