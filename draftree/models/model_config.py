"""Checkpoint -> ModelConfig: sizes that planning and `inspect` need, without loading a tensor."""

from math import prod

from draftree.core import ModelConfig
from draftree.errors import CheckpointError
from draftree.kernels.quant.formats import QuantType
from draftree.models.load import check_architecture
from draftree.models.metadata import Metadata
from draftree.weights.checkpoint import Checkpoint

_FLOAT_BYTES = 4
_HEAD_STEP = 16  # dimensions that attention on a CPU computes together

_EVEN_KEYS = ("llama",)  # qwen2's biases make some dimensions of a key much larger than others


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    check_architecture(checkpoint)
    metadata = Metadata(checkpoint)
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{checkpoint.path} has no token embedding.")
    vocab_size, hidden = embedding.shape
    num_layers = metadata.count("block_count") - int(metadata.optional("nextn_predict_layers") or 0)
    num_recurrent = sum(f"blk.{i}.ssm_a" in checkpoint.tensors for i in range(num_layers))
    heads = metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", max(hidden // heads, 1))
    if head_dim % _HEAD_STEP:
        sentence = f"has heads of {head_dim} dimensions; only multiples of {_HEAD_STEP} can be run"
        raise CheckpointError(f"{checkpoint.path} {sentence}.")
    kv_heads = metadata.count("attention.head_count_kv", heads)
    recurrent_floats = window_floats = stash_floats = 0
    if num_recurrent:
        value_heads, inner = metadata.count("ssm.time_step_rank"), metadata.count("ssm.inner_size")
        key_width = metadata.count("ssm.group_count") * metadata.count("ssm.state_size")
        channels = 2 * key_width + inner
        window_floats = (metadata.count("ssm.conv_kernel") - 1) * channels
        recurrent_floats = inner * metadata.count("ssm.state_size") + window_floats
        stash_floats = channels + key_width + inner + 2 * value_heads
    return ModelConfig(
        name=str(checkpoint.metadata.get("general.name") or checkpoint.path.stem),
        architecture=checkpoint.architecture,
        num_parameters=sum(prod(t.shape) for t in checkpoint.tensors.values()),
        weight_bytes=sum(t.nbytes for t in checkpoint.tensors.values()),
        context_length=metadata.count("context_length"),
        vocab_size=vocab_size,
        hidden_size=hidden,
        ffn_size=metadata.count("feed_forward_length"),
        num_layers=num_layers,
        num_kv_layers=num_layers - num_recurrent,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        recurrent_bytes=num_recurrent * recurrent_floats * _FLOAT_BYTES,
        stash_width=num_recurrent * stash_floats,
        window_bytes=num_recurrent * window_floats * _FLOAT_BYTES,
        is_quantized=any(
            t.qtype not in (QuantType.F32, QuantType.F16, QuantType.BF16)
            for t in checkpoint.tensors.values()
        ),
        embedding_bytes=embedding.nbytes if "output.weight" in checkpoint.tensors else 0,
        has_even_keys=checkpoint.architecture in _EVEN_KEYS,
        has_key_bias="blk.0.attn_k.bias" in checkpoint.tensors,
        rotary_dim=metadata.count("rope.dimension_count", head_dim),
    )
