"""Model files that are made on the spot, where a reference file would be too large to ship."""

import struct
import tempfile
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np

from draftree.kernels.quant.formats import dequantize
from draftree.weights.file import open_checkpoint
from tests.golden import golden

HYBRID = "qwen35/tiny-qwen35-C-mtp-F16.gguf"  # hidden 128, 4 layers, the last with attention
DRAFT_FEATURE_LAYERS = (0, 1, 3)


@cache
def make_draft(
    qtype: str = "F16",
    vocab_size: int = 0,
    tokens: tuple[str, ...] = (),
    feature_layers: tuple[int, ...] = DRAFT_FEATURE_LAYERS,
    window: int = 0,
    relative: str = "",
) -> Path:
    """A random DFlash draft for the tiny hybrid model, or another of its widths, with one sliding
    layer of two. qtype: of its matrices. vocab_size, tokens: what it says of its target. window:
    of both layers. relative: "dflash2", "dspark", "dspark bonus" (whose first row is not used),
    "jetspec", "selector" (which has no convolutions) or "listed selector" (for every other token).

    It knows nothing of the text. At a high temperature it agrees with its target often, because
    both draw the same noise.
    """
    import gguf

    rng, kind = np.random.default_rng(17), gguf.GGMLQuantizationType[qtype]
    hidden, ffn, heads, kv_heads, head_dim = 128, 96, 2, 1, 32
    path = Path(tempfile.mkdtemp()) / "made-dflash.gguf"
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_uint32("dflash.block_size", 8 if relative else 16)
    writer.add_array("dflash.target_layers", [layer + 1 for layer in feature_layers])
    writer.add_uint32("dflash.attention.sliding_window", window or 24)
    pattern = [relative != "jetspec", window > 0]
    writer.add_array("dflash.attention.sliding_window_pattern", pattern)
    writer.add_uint32("tokenizer.ggml.mask_token_id", 511)
    if vocab_size:
        writer.add_vocab_size(vocab_size)
    if tokens:
        writer.add_token_list(tokens)

    def matrix(name: str, rows: int, cols: int) -> None:
        values = rng.standard_normal((rows, cols)) * 1.5 / np.sqrt(cols)
        raw = gguf.quants.quantize(values.astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)

    def norm(name: str, length: int) -> None:
        values = 1.0 + 0.2 * rng.standard_normal(length)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    matrix("fc", hidden, len(feature_layers) * hidden)
    norm("enc.output_norm", hidden)
    norm("output_norm", hidden)
    for prefix in ("blk.0", "blk.1"):
        norm(f"{prefix}.attn_norm", hidden)
        norm(f"{prefix}.ffn_norm", hidden)
        norm(f"{prefix}.attn_q_norm", head_dim)
        norm(f"{prefix}.attn_k_norm", head_dim)
        matrix(f"{prefix}.attn_q", heads * head_dim, hidden)
        matrix(f"{prefix}.attn_k", kv_heads * head_dim, hidden)
        matrix(f"{prefix}.attn_v", kv_heads * head_dim, hidden)
        matrix(f"{prefix}.attn_output", hidden, heads * head_dim)
        matrix(f"{prefix}.ffn_gate", ffn, hidden)
        matrix(f"{prefix}.ffn_up", ffn, hidden)
        matrix(f"{prefix}.ffn_down", hidden, ffn)
    if relative == "jetspec":
        writer.add_bool("dflash.attention.causal", True)
    elif relative:
        has_selector = relative == "dflash2" or relative.endswith("selector")
        tensors = _selector_tensors(relative) if has_selector else _markov_tensors()
        for name, values in tensors.items():
            writer.add_tensor(name, values.astype(np.float16 if values.ndim == 2 else np.float32))
        sizes = {"conv_kernel_size": 2, "conv_group_size": 16} if relative == "dflash2" else {}
        sizes |= {"selector_rank": 16, "selector_top_k": 6} if has_selector else {}
        for key, value in sizes.items():
            writer.add_uint32(f"dflash.{key}", value)
        if relative == "listed selector":
            writer.add_array("dflash.head_tokens", list(range(0, 512, 2)))
            writer.add_bool("dflash.selector_by_head_token", True)
        if relative == "dspark bonus":
            writer.add_bool("dflash.sample_from_anchor", False)
    _finish(writer)
    return path


def _selector_tensors(relative: str) -> dict[str, np.ndarray]:
    """DFlash2's convolutions have two taps and groups of 16 columns."""
    rng, hidden, rank = np.random.default_rng(18), 128, 16
    found = {
        "selector_predecessor.weight": rng.standard_normal((512, rank)),
        "selector_successor.weight": rng.standard_normal((512, rank)),
        "selector_hidden.weight": rng.standard_normal((rank, hidden)) / np.sqrt(hidden),
    }
    if relative == "listed selector":
        for name in ("selector_predecessor.weight", "selector_successor.weight"):
            found[name] = np.concatenate([found[name][::2], found[name][-1:]])
    if relative != "dflash2":
        return found
    for prefix in ("blk.0.attn", "blk.0.ffn", "blk.1.attn", "blk.1.ffn"):
        base = 0.3 * rng.standard_normal((2, 2, hidden))
        base[:, 0] += 1.0
        found[f"{prefix}_conv_base"] = base
        own = rng.standard_normal((2 * 2 * hidden // 16, hidden)) * 0.5 / np.sqrt(hidden)
        found[f"{prefix}_conv_proj.weight"] = own
    return found


def _markov_tensors() -> dict[str, np.ndarray]:
    """Of DSpark, with a head for confidence."""
    rng, rank = np.random.default_rng(19), 16
    return {
        "markov_w1.weight": rng.standard_normal((512, rank)),
        "markov_w2.weight": rng.standard_normal((512, rank)),
        "conf_proj.weight": rng.standard_normal((1, 128 + rank)),
        "conf_proj.bias": rng.standard_normal(1),
    }


@cache
def make_quantised() -> Path:
    """The tiny hybrid model with its matrices in several block formats."""
    import gguf

    kinds = cycle(getattr(gguf.GGMLQuantizationType, name) for name in ("Q4_0", "Q8_0", "Q5_1"))
    source = open_checkpoint(golden(HYBRID))
    path = Path(tempfile.mkdtemp()) / "made-quantised.gguf"
    writer = gguf.GGUFWriter(path, source.architecture)
    for key, value in source.metadata.items():
        if not key.startswith(source.architecture):
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, info in source.tensors.items():
        values = dequantize(source.raw(name), info.qtype).reshape(info.shape)
        if info.qtype.name == "F32":
            writer.add_tensor(name, values)
        else:
            kind = next(kinds)
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    _finish(writer)
    return path


def _finish(writer: object) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def make_shallow(path: Path, num_layers: int = 3) -> Path:
    """A file's first layers with its tokenizer, for tests that ask nothing sensible of the model:
    the metadata as they are, then the infos and the data of the tensors that are left.
    """
    data, key, source = path.read_bytes(), b".block_count", open_checkpoint(path)
    first, *_ = names = list(source.tensors)
    start = data.index(struct.pack("<Q", len(first)) + first.encode())
    depth_at = data.index(key) + len(key) + 4  # behind the type
    kept = [n for n in names if not n.startswith("blk.") or int(n.split(".")[1]) < num_layers]
    infos, tensors = bytearray(), bytearray()
    for name in kept:
        info, encoded = source.tensors[name], name.encode()
        infos += struct.pack("<Q", len(encoded)) + encoded
        infos += struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *reversed(info.shape))
        infos += struct.pack("<IQ", info.qtype, len(tensors))
        tensors += source.raw(name).tobytes()
        tensors += bytes(-len(tensors) % 32)
    head = bytearray(data[:start])
    struct.pack_into("<Q", head, 8, len(kept))
    struct.pack_into("<I", head, depth_at, num_layers)
    head += infos
    shallow = Path(tempfile.mkdtemp()) / path.name
    shallow.write_bytes(head + bytes(-len(head) % 32) + tensors)
    return shallow
