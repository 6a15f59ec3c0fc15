"""The block for multi-token prediction that some targets bring along, as a draft's checkpoint.

In: a target's checkpoint. Out: one of architecture `mtp` with the block's tensors alone, under the
names of a first layer, and the target's numbers. Knows none of the arithmetic.
"""

from dataclasses import replace
from typing import Any

from draftree.weights.checkpoint import Checkpoint


def split_mtp(checkpoint: Checkpoint) -> Checkpoint | None:
    """None where the file has no such block. Of several, the first."""
    prefix, metadata = f"{checkpoint.architecture}.", checkpoint.metadata
    num_blocks, num_extra = (
        metadata.get(prefix + key) for key in ("block_count", "nextn_predict_layers")
    )
    if not isinstance(num_blocks, int) or not isinstance(num_extra, int) or num_extra < 1:
        return None
    first = f"blk.{num_blocks - num_extra}."
    names = {name: f"blk.0.{name.removeprefix(first)}" for name in checkpoint.tensors}
    names = {old: new for old, new in names.items() if old.startswith(first)}
    if f"{first}nextn.eh_proj.weight" not in names:
        return None
    numbers: dict[str, Any] = {
        f"mtp.{key.removeprefix(prefix)}": value
        for key, value in metadata.items()
        if key.startswith(prefix)
    }
    numbers["mtp.block_count"] = num_blocks - num_extra
    numbers["general.architecture"] = "mtp"
    return Checkpoint(
        checkpoint.path,
        numbers,
        {new: replace(checkpoint.tensors[old], name=new) for old, new in names.items()},
        {new: checkpoint.raw(old) for old, new in names.items()},
    )
