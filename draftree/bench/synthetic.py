"""Synthetic weights of real shapes: a hybrid target and its block-diffusion draft as GGUF files.

Weights are random and scaled so that activations keep their size; tensor types are those that a
Q4_K_M file has, or one for all. Nothing they write means anything: they are for measuring time and
memory, and for comparing texts bit for bit.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from draftree.bench.record import ModelId
from draftree.kernels.quant.formats import QuantType, dequantize, row_bytes

_SEED: Final = 0
_PIECE_BYTES: Final = 64 * 2**20
_CONV_LEN: Final = 4
_ATTENTION_EVERY: Final = 4
_MIN_RATIO: Final = {QuantType.Q4_K: 7.5, QuantType.Q5_K: 15.5}  # of minimum to scale
_SCALE_AT: Final = {QuantType.Q4_K: 0, QuantType.Q5_K: 0, QuantType.Q6_K: 208}


@dataclass(frozen=True, slots=True)
class TargetShape:
    num_layers: int
    hidden: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    key_heads: int  # of the delta net
    value_heads: int
    state_dim: int
    context: int = 262144
    matrix_type: QuantType | None = None  # of all matrices; None: as in a Q4_K_M file


@dataclass(frozen=True, slots=True)
class DraftShape:
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int = 16
    num_features: int = 5


SHAPES: Final = {
    "27b": (
        TargetShape(64, 5120, 17408, 248320, 24, 4, 256, 64, 16, 48, 128),
        DraftShape(5, 32, 8, 128),
    ),
    "27b-8": (
        TargetShape(8, 5120, 17408, 32768, 24, 4, 256, 64, 16, 48, 128),
        DraftShape(5, 32, 8, 128),
    ),
    "0.8b": (
        TargetShape(24, 1024, 3584, 248320, 8, 2, 256, 64, 16, 16, 128),
        DraftShape(3, 8, 2, 128),
    ),
    "0.8b-bf16": (
        TargetShape(
            *(24, 1024, 3584, 248320, 8, 2, 256, 64, 16, 16, 128), matrix_type=QuantType.BF16
        ),
        DraftShape(3, 8, 2, 128),
    ),
    "tiny": (
        TargetShape(8, 256, 512, 1024, 4, 2, 64, 32, 2, 4, 64, context=8192),
        DraftShape(2, 4, 2, 64, num_features=3),
    ),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    rows: int  # 1: a vector
    cols: int
    qtype: QuantType
    low: float = 1.0  # of a float32 tensor, whose values are spread evenly
    high: float = 1.0


def identify_pair(shape: str, target: Path) -> ModelId:
    """The bytes follow from shape and seed, so these are hashed instead."""
    digest = hashlib.sha256(f"synthetic {shape} {_SEED}".encode()).hexdigest()
    return ModelId(f"synth-{shape}", target.name, target.stat().st_size, digest)


def write_pair(
    shape: str, folder: Path, draft_type: QuantType = QuantType.BF16
) -> tuple[Path, Path]:
    """Target and draft; files that are there already are kept."""
    target, draft = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "" if draft_type is QuantType.BF16 else f"-{draft_type.name.lower()}"
    paths = folder / f"synth-{shape}-target.gguf", folder / f"synth-{shape}-draft{suffix}.gguf"
    if not paths[0].exists():
        metadata, tensors = _target_metadata(target), _target_types(target)
        write_file(paths[0], "qwen35", metadata, tensors, _SEED)
    if not paths[1].exists():
        metadata = _draft_metadata(target, draft)
        tensors = list(_draft_tensors(target, draft, draft_type))
        write_file(paths[1], "dflash", metadata, tensors, _SEED + 1)
    return paths


def _target_metadata(t: TargetShape) -> dict[str, Any]:
    return {
        "block_count": t.num_layers,
        "context_length": t.context,
        "embedding_length": t.hidden,
        "feed_forward_length": t.ffn,
        "attention.head_count": t.heads,
        "attention.head_count_kv": t.kv_heads,
        "attention.key_length": t.head_dim,
        "attention.value_length": t.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": t.rotary_dim,
        "ssm.conv_kernel": _CONV_LEN,
        "ssm.state_size": t.state_dim,
        "ssm.group_count": t.key_heads,
        "ssm.time_step_rank": t.value_heads,
        "ssm.inner_size": t.value_heads * t.state_dim,
        "full_attention_interval": _ATTENTION_EVERY,
    }


def _target_types(t: TargetShape) -> list[Tensor]:
    """Vectors and what is not multiplied stay as they are."""
    tensors, matrix_type = list(_target_tensors(t)), t.matrix_type
    if matrix_type is None:
        return tensors
    return [
        tensor if tensor.qtype is QuantType.F32 else replace(tensor, qtype=matrix_type)
        for tensor in tensors
    ]


def _target_tensors(t: TargetShape) -> Iterator[Tensor]:
    common, wide = QuantType.Q4_K, QuantType.Q6_K
    yield Tensor("token_embd.weight", t.vocab, t.hidden, common)
    yield Tensor("output.weight", t.vocab, t.hidden, wide)
    yield Tensor("output_norm.weight", 1, t.hidden, QuantType.F32)
    attention = [i for i in range(t.num_layers) if (i + 1) % _ATTENTION_EVERY == 0]
    for i in range(t.num_layers):
        blk = f"blk.{i}."
        down = wide if _is_wide(i, t.num_layers) else common
        yield Tensor(f"{blk}attn_norm.weight", 1, t.hidden, QuantType.F32)
        yield Tensor(f"{blk}post_attention_norm.weight", 1, t.hidden, QuantType.F32)
        yield Tensor(f"{blk}ffn_gate.weight", t.ffn, t.hidden, common)
        yield Tensor(f"{blk}ffn_up.weight", t.ffn, t.hidden, common)
        yield Tensor(f"{blk}ffn_down.weight", t.hidden, t.ffn, down)
        if i in attention:
            value = wide if _is_wide(attention.index(i), len(attention)) else common
            yield from _attention_tensors(t, blk, value)
        else:
            yield from _delta_tensors(t, blk)


def _attention_tensors(t: TargetShape, blk: str, value_type: QuantType) -> Iterator[Tensor]:
    width, kv_width = t.heads * t.head_dim, t.kv_heads * t.head_dim
    yield Tensor(f"{blk}attn_q.weight", 2 * width, t.hidden, QuantType.Q4_K)
    yield Tensor(f"{blk}attn_k.weight", kv_width, t.hidden, QuantType.Q4_K)
    yield Tensor(f"{blk}attn_v.weight", kv_width, t.hidden, value_type)
    yield Tensor(f"{blk}attn_output.weight", t.hidden, width, QuantType.Q4_K)
    for name in ("attn_q_norm", "attn_k_norm"):
        yield Tensor(f"{blk}{name}.weight", 1, t.head_dim, QuantType.F32)


def _delta_tensors(t: TargetShape, blk: str) -> Iterator[Tensor]:
    inner = t.value_heads * t.state_dim
    channels = 2 * t.key_heads * t.state_dim + inner
    yield Tensor(f"{blk}attn_qkv.weight", channels, t.hidden, QuantType.Q5_K)
    yield Tensor(f"{blk}attn_gate.weight", inner, t.hidden, QuantType.Q4_K)
    yield Tensor(f"{blk}ssm_alpha.weight", t.value_heads, t.hidden, QuantType.Q4_K)
    yield Tensor(f"{blk}ssm_beta.weight", t.value_heads, t.hidden, QuantType.Q4_K)
    yield Tensor(f"{blk}ssm_out.weight", t.hidden, inner, QuantType.Q4_K)
    yield Tensor(f"{blk}ssm_a", 1, t.value_heads, QuantType.F32, -1.0, -0.05)
    yield Tensor(f"{blk}ssm_dt.bias", 1, t.value_heads, QuantType.F32, -4.0, 0.0)
    yield Tensor(f"{blk}ssm_conv1d.weight", channels, _CONV_LEN, QuantType.F32, -0.8, 0.8)
    yield Tensor(f"{blk}ssm_norm.weight", 1, t.state_dim, QuantType.F32)


def _is_wide(i: int, count: int) -> bool:
    """Which layers get more bits in such files."""
    eighth = count // 8
    return i < eighth or i >= 7 * count // 8 or (i - eighth) % 3 == 2


def _draft_metadata(t: TargetShape, d: DraftShape) -> dict[str, Any]:
    last, steps = t.num_layers - 3, max(d.num_features - 1, 1)
    layers = [round(1 + i * (last - 1) / steps) + 1 for i in range(d.num_features)]
    return {
        "block_count": d.num_layers,
        "context_length": t.context,
        "embedding_length": t.hidden,
        "feed_forward_length": t.ffn,
        "attention.head_count": d.heads,
        "attention.head_count_kv": d.kv_heads,
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "block_size": d.block,
        "target_layers": layers,
        "tokenizer.ggml.mask_token_id": t.vocab - 1,
    }


def _draft_tensors(t: TargetShape, d: DraftShape, kind: QuantType) -> Iterator[Tensor]:
    width, kv_width = d.heads * d.head_dim, d.kv_heads * d.head_dim
    yield Tensor("fc.weight", t.hidden, d.num_features * t.hidden, kind)
    yield Tensor("enc.output_norm.weight", 1, t.hidden, QuantType.F32)
    yield Tensor("output_norm.weight", 1, t.hidden, QuantType.F32)
    for i in range(d.num_layers):
        blk = f"blk.{i}."
        yield Tensor(f"{blk}attn_norm.weight", 1, t.hidden, QuantType.F32)
        yield Tensor(f"{blk}ffn_norm.weight", 1, t.hidden, QuantType.F32)
        yield Tensor(f"{blk}attn_q_norm.weight", 1, d.head_dim, QuantType.F32)
        yield Tensor(f"{blk}attn_k_norm.weight", 1, d.head_dim, QuantType.F32)
        yield Tensor(f"{blk}attn_q.weight", width, t.hidden, kind)
        yield Tensor(f"{blk}attn_k.weight", kv_width, t.hidden, kind)
        yield Tensor(f"{blk}attn_v.weight", kv_width, t.hidden, kind)
        yield Tensor(f"{blk}attn_output.weight", t.hidden, width, kind)
        yield Tensor(f"{blk}ffn_gate.weight", t.ffn, t.hidden, kind)
        yield Tensor(f"{blk}ffn_up.weight", t.ffn, t.hidden, kind)
        yield Tensor(f"{blk}ffn_down.weight", t.hidden, t.ffn, kind)


def write_file(
    path: Path, architecture: str, metadata: dict[str, Any], tensors: list[Tensor], seed: int
) -> None:
    """metadata: the architecture's fields, and a tokenizer's by their whole names."""
    import gguf

    scratch = path.with_suffix(".part")
    writer = gguf.GGUFWriter(scratch, architecture)
    writer.add_name(path.stem)
    adders = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool}
    adders |= {float: writer.add_float32, int: writer.add_uint32}
    for key, value in metadata.items():
        name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        adders[type(value)](name, value)
    for tensor in tensors:
        num_bytes = tensor.rows * row_bytes(tensor.qtype, tensor.cols)
        shape = (tensor.cols,) if tensor.rows == 1 else (tensor.rows, tensor.cols)
        kind = gguf.GGMLQuantizationType(tensor.qtype.value)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with scratch.open("ab") as file, ThreadPoolExecutor() as pool:
        alignment = 32
        file.write(bytes(-file.tell() % alignment))
        for number, tensor in enumerate(tensors):
            for piece in pool.map(lambda job: _fill(*job), _jobs(tensor, seed, number)):
                file.write(piece)
            file.write(bytes(-file.tell() % alignment))
    scratch.rename(path)


def _jobs(tensor: Tensor, seed: int, number: int) -> list[tuple[Tensor, int, tuple[int, ...]]]:
    rows = max(1, _PIECE_BYTES // row_bytes(tensor.qtype, tensor.cols))
    starts = range(0, tensor.rows, rows)
    return [(tensor, min(rows, tensor.rows - s), (seed, number, s)) for s in starts]


def _fill(tensor: Tensor, rows: int, seed: tuple[int, ...]) -> memoryview:
    rng = np.random.default_rng(seed)
    if tensor.qtype is QuantType.F32:
        return rng.uniform(tensor.low, tensor.high, (rows, tensor.cols)).astype(np.float32).data
    size = tensor.cols**-0.5
    if tensor.qtype is QuantType.BF16:
        values = rng.standard_normal((rows, tensor.cols), dtype=np.float32) * np.float32(size)
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).data
    return (_random_blocks(tensor.qtype, rows, tensor.cols, rng, size)).data


def _random_blocks(
    qtype: QuantType, rows: int, cols: int, rng: np.random.Generator, size: float
) -> np.ndarray:
    """uint8 [rows, row_bytes] whose weights have mean 0 and deviation `size`."""
    num_bytes = row_bytes(qtype, cols)
    raw = rng.integers(0, 2**64, (rows * num_bytes + 7) // 8, dtype=np.uint64).view(np.uint8)
    raw = raw[: rows * num_bytes].reshape(rows, num_bytes)
    sample = (
        raw[:1, : 4 * qtype.block_bytes].copy() if cols >= 4 * qtype.block_len else raw[:1].copy()
    )
    _set_scales(sample, qtype, 1.0)
    unit = float(dequantize(sample, qtype).std())
    _set_scales(raw, qtype, size / unit)
    return raw


def _set_scales(raw: np.ndarray, qtype: QuantType, scale: float) -> None:
    blocks, at = raw.reshape(len(raw), -1, qtype.block_bytes), _SCALE_AT[qtype]
    blocks[:, :, at : at + 2] = np.array([scale], dtype=np.float16).view(np.uint8)
    if qtype in _MIN_RATIO:
        low = np.array([scale * _MIN_RATIO[qtype]], dtype=np.float16).view(np.uint8)
        blocks[:, :, at + 2 : at + 4] = low
