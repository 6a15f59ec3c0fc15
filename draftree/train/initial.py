"""A draft that begins where another one ended: weights of a DFlash file into a DraftModule.

In: a checkpoint in z-lab's layout or a `dflash` GGUF. It must have the shape that is to be trained;
its block and window may be others.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from draftree.errors import ModelError
from draftree.kernels.quant.formats import dequantize
from draftree.train.draft import DraftModule, DraftSpec
from draftree.train.settings import DraftShape
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.dflash import rename_tensor


@torch.no_grad()
def copy_weights(checkpoint: Checkpoint, draft: DraftModule) -> None:
    """Every parameter of the draft gets the checkpoint's values."""
    compare_shapes(checkpoint, draft.spec)
    for zlab_name, parameter in draft.state_dict().items():
        name = rename_tensor(zlab_name) or zlab_name
        info = checkpoint.tensors[name]
        values = dequantize(checkpoint.raw(name), info.qtype).reshape(info.shape)
        parameter.copy_(torch.from_numpy(values))


def take_shape(checkpoint: Checkpoint, shape: DraftShape) -> DraftShape:
    """What is left open is the checkpoint's: layers that features come from, and a mask token."""
    features = checkpoint.metadata.get("dflash.target_layers")
    mask_token = checkpoint.metadata.get("tokenizer.ggml.mask_token_id")
    if not shape.feature_layers and features:
        shape = replace(shape, feature_layers=tuple(n - 1 for n in features))
    if shape.mask_token < 0 and mask_token is not None:
        shape = replace(shape, mask_token=int(mask_token))
    return shape


def compare_shapes(checkpoint: Checkpoint, spec: DraftSpec) -> None:
    """Refuse a checkpoint that cannot start a draft of this shape."""
    metadata = checkpoint.metadata
    if checkpoint.architecture != "dflash":
        raise ModelError(f"{checkpoint.path} is no DFlash draft to start from.")
    features = metadata.get("dflash.target_layers")
    pairs = (
        ("layers", metadata.get("dflash.block_count"), spec.num_layers),
        ("query heads", metadata.get("dflash.attention.head_count"), spec.num_heads),
        ("key heads", metadata.get("dflash.attention.head_count_kv"), spec.num_kv_heads),
        ("mask token", metadata.get("tokenizer.ggml.mask_token_id"), spec.mask_token),
        # The file counts the inputs of layers, the spec their outputs.
        ("feature layers", features and [n - 1 for n in features], list(spec.feature_layers)),
    )
    for what, found, wanted in (*pairs, *_tensor_shapes(checkpoint, spec)):
        if found is not None and found != wanted:
            raise ModelError(
                f"{checkpoint.path} has another shape than the draft to be trained: "
                f"{what} {found}, not {wanted}."
            )


def _tensor_shapes(checkpoint: Checkpoint, spec: DraftSpec) -> Iterator[tuple[str, str, str]]:
    """Of every parameter: its name, its shape in the checkpoint, and the one it must have."""
    with torch.device("meta"):
        parameters = DraftModule(spec).state_dict()
    for zlab_name, parameter in parameters.items():
        info = checkpoint.tensors.get(rename_tensor(zlab_name) or zlab_name)
        found = "is missing" if info is None else str(list(info.shape))
        yield zlab_name, found, str(list(parameter.shape))
