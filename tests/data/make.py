"""Makes the shipped cut of the reference set, from the full set in a folder: see README.md.

    python -m tests.data.make FOLDER

It needs transformers and xllamacpp, which run the models: nothing here computes with draftree.
"""

import json
import lzma
import shutil
import sys
from hashlib import sha256
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

HERE = Path(__file__).parent
MODEL = "qwen35/tiny-qwen35-A"
# The file that each layer is taken from; embedding and head come from the F16 file.
LAYER_TYPES = ("F16", "Q8_0", "Q4_0", "Q5_K_M", "Q4_K_M", "Q5_K_M", "Q4_0", "Q4_K_M")
SEQUENCES = ("len1", "len5", "len33", "len130", "text")
PROMPTS = ("g1", "g5", "g33", "g130", "gtext")
KEPT = (
    *("dense/llama-rs.npz", "dflash/dflash.npz", "qwen35/hf_config.json"),
    *("dflash/zlab/config.json", "dflash/zlab/config_sliding_window.json"),
)
PACKED = ("dense/tiny-llama-rs-F16.gguf", "dflash/zlab/model.safetensors")


def main(folder: Path) -> None:
    for name in KEPT:
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, HERE / name)
    for name in PACKED:
        pack(folder / name, HERE / f"{name}.xz")
    save_recipe(folder / "dflash/tiny-dflash-A-F16.gguf", folder / PACKED[1])
    internals = np.load(folder / "qwen35/internals.npz")
    first = {key: internals[key] for key in internals.files if "layer0" in key}
    np.savez_compressed(HERE / "qwen35/layer0.npz", **first)
    mixed = HERE / f"{MODEL}-mixed.gguf"
    mix_layers(folder, mixed)
    check_method(folder)
    np.savez_compressed(HERE / "qwen35/logits_A_mixed.npz", **make_references(mixed, folder))
    pack(mixed, mixed.with_name(mixed.name + ".xz"))
    mixed.unlink()


def pack(source: Path, packed: Path) -> None:
    packed.write_bytes(lzma.compress(source.read_bytes(), preset=9 | lzma.PRESET_EXTREME))


def save_recipe(source: Path, stored: Path) -> None:
    """A GGUF file whose tensors are those of a safetensors file: its head, and which goes where."""
    raw, reader = source.read_bytes(), gguf.GGUFReader(source)
    with safe_open(stored, "pt") as file:
        tensors = {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118
    parts = []
    for tensor in reader.tensors:
        values = np.array(tensor.data, dtype=np.float32)
        same = [k for k, v in tensors.items() if v.shape == values.shape and (v == values).all()]
        kind = "<f2" if tensor.tensor_type.name == "F16" else "<f4"
        parts.append((tensor.data_offset, same[0], kind))
    head = lzma.compress(raw[: parts[0][0]])
    recipe = {"sha256": sha256(raw).hexdigest(), "num_bytes": len(raw), "parts": parts}
    (HERE / "dflash" / source.name).with_suffix(".gguf.head.xz").write_bytes(head)
    text = json.dumps(recipe, indent=0)
    (HERE / "dflash" / source.name).with_suffix(".gguf.json").write_text(text + "\n")


def mix_layers(folder: Path, path: Path) -> None:
    """The tiny hybrid with each layer in another format, so that one file holds them all."""
    readers = {
        name: gguf.GGUFReader(folder / f"{MODEL}-{name}.gguf") for name in sorted({*LAYER_TYPES})
    }
    tensors = {name: {t.name: t for t in reader.tensors} for name, reader in readers.items()}
    writer = gguf.GGUFWriter(path, "qwen35")
    for key, field in readers["F16"].fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for name in tensors["F16"]:
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        tensor = tensors[LAYER_TYPES[layer]][name]
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_method(folder: Path) -> None:
    """The same steps on the F16 file give the full set's own logits."""
    known = np.load(folder / "qwen35/logits.npz")
    model = load_transformers(folder / f"{MODEL}-F16.gguf", folder)
    worst = max(
        np.abs(run(model, known[f"{name}.ids"])[0] - known[f"{name}.logits"]).max()
        for name in SEQUENCES
    )
    print(f"F16 against the full set: {worst:.1e}")
    assert worst < 2e-4


def make_references(path: Path, folder: Path) -> dict[str, np.ndarray]:
    from draftree.bench.peer_wheel import Library  # libllama's C functions, nothing else

    known, model = np.load(folder / "qwen35/logits.npz"), load_transformers(path, folder)
    found: dict[str, np.ndarray] = {}
    for name in SEQUENCES:
        ids = found[f"{name}.ids"] = known[f"{name}.ids"]
        found[f"{name}.logits"], layers = run(model, ids)
        if name == "len33":
            found["len33.layer_out"] = layers
    for name in PROMPTS:
        prompt = found[f"{name}.prompt"] = known[f"{name}.prompt"]
        tokens, gaps = greedy(model, prompt.tolist(), 64)
        sure = next((i for i, gap in enumerate(gaps) if gap < 5e-3), len(gaps))
        print(name, "greedy tokens without a near tie:", sure)
        found[f"{name}.ids"] = np.array(tokens[:sure], dtype=np.int32)
    library = Library(str(path), 1)
    native = library.forward(found["text.ids"].tolist(), 0, all_rows=True).copy()
    best = np.argsort(-native, axis=1)[:, :20]
    found["text.llamacpp_top20_ids"] = best.astype(np.int32)
    found["text.llamacpp_top20_logits"] = np.take_along_axis(native, best, axis=1)
    print(f"llama.cpp against transformers: {np.abs(native - found['text.logits']).max():.2f}")
    return found


def load_transformers(path: Path, folder: Path) -> torch.nn.Module:
    """The file's weights as float32 in transformers' own model: the converter's steps, undone."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**json.loads((folder / "qwen35/hf_config.json").read_text()))
    config._attn_implementation, config.dtype = "eager", torch.float32
    model = Qwen3_5ForCausalLM(config).float().eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, config.num_hidden_layers)
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weights[tensor.name] = values.reshape(tuple(tensor.shape.tolist())[::-1])
    state = {}
    for name, parameter in model.state_dict().items():
        stored = _gguf_name(name, names)
        values = torch.from_numpy(_undo(name, weights.pop(stored).copy(), config))
        state[name] = values.reshape(parameter.shape)
    assert not weights, weights.keys()
    model.load_state_dict(state)
    return model


def _gguf_name(name: str, names: gguf.TensorNameMap) -> str:
    if name.endswith(".A_log"):
        return names.get_name(name) or ""
    if name.endswith(".dt_bias"):
        return f"blk.{name.split('.')[2]}.ssm_dt.bias"
    return (names.get_name(name.removesuffix(".weight")) or "") + ".weight"


def _undo(name: str, values: np.ndarray, config: object) -> np.ndarray:
    heads, groups, dim = 6, 2, config.linear_value_head_dim
    assert (config.linear_num_value_heads, config.linear_num_key_heads) == (heads, groups)
    order = np.argsort([k * (heads // groups) + t for t in range(heads // groups) for k in (0, 1)])

    def by_head(rows: np.ndarray, size: int) -> np.ndarray:
        return rows.reshape(heads, size, -1)[order].reshape(rows.shape)

    keys = 2 * groups * config.linear_key_head_dim
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return values - 1
    if name.endswith(".A_log"):
        return by_head(np.log(-values), 1)
    if name.endswith((".dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return by_head(values, 1)
    if name.endswith("in_proj_z.weight"):
        return by_head(values, dim)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([values[:keys], by_head(values[keys:], dim)])
    if name.endswith("linear_attn.out_proj.weight"):
        return np.ascontiguousarray(by_head(np.ascontiguousarray(values.T), dim).T)
    return values


def run(model: torch.nn.Module, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [count, vocab], and the residual stream after each layer [layers, count, hidden]."""
    layers: list[np.ndarray] = []
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out: layers.append((out[0] if isinstance(out, tuple) else out).numpy())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits[0].numpy(), np.stack([layer.reshape(len(ids), -1) for layer in layers])


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    gaps: list[float] = []
    for _ in range(count):
        row = run(model, np.array(prompt + tokens))[0][-1]
        best, second = np.argsort(-row)[:2]
        gaps.append(float(row[best] - row[second]))
        tokens.append(int(best))
    return tokens, gaps


if __name__ == "__main__":
    main(Path(sys.argv[1]))
