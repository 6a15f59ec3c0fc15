"""A small hybrid language model, for want of one to download: `python -m benchmarks.hybrid_model`.

In: a target whose tokenizer it takes and that writes the text it learns from. Out: a `qwen35` GGUF
of about 40 million parameters, and record.json. The model is the torch target of `draftree train`
with weights that learn, so nothing is computed in two ways.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftree.text.tokenizer import Tokenizer
from draftree.train.attention import TeacherAttention
from draftree.train.corpus import Corpus, write_corpus
from draftree.train.delta_net import TeacherDeltaNet
from draftree.train.muon import Muon
from draftree.train.prompt import encode_prompts, template_prompts
from draftree.train.settings import TextPlan
from draftree.train.teacher import Teacher, TeacherLayer, load_teacher
from draftree.train.writer import Writer
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint

_NAME = "Small hybrid"
_EPS, _ROPE_BASE, _INTERVAL, _KERNEL_LEN = 1e-6, 1e4, 4, 4
_HEAD_ROWS = 8192  # rows whose logits are held at once


@dataclass(frozen=True, slots=True)
class Shape:
    """Every fourth layer is attention; the head is the embedding."""

    num_layers: int = 12
    hidden_size: int = 384
    ffn_size: int = 1152
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 32
    key_heads: int = 4
    value_heads: int = 8
    delta_dim: int = 64
    context_length: int = 4096


class _Initial:
    """Draws weights that can learn."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        self._shape, self._device = shape, device
        self._generator = torch.Generator().manual_seed(seed)
        self._out_scale = (2 * shape.num_layers) ** -0.5

    def matrix(self, rows: int, cols: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(rows, cols, generator=self._generator) * (0.02 * scale)
        return values.to(self._device).requires_grad_()

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self._device, requires_grad=True)

    def layer(self, *, is_attention: bool) -> TeacherLayer:
        hidden, ffn_size = self._shape.hidden_size, self._shape.ffn_size
        return TeacherLayer(
            mixer_norm=self.ones(hidden),
            mixer=self._attention() if is_attention else self._delta_net(),
            ffn_norm=self.ones(hidden),
            gate_up=self.matrix(2 * ffn_size, hidden),
            down=self.matrix(hidden, ffn_size, self._out_scale),
        )

    def _attention(self) -> TeacherAttention:
        shape = self._shape
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        inputs = self.matrix((2 * heads + 2 * kv_heads) * dim, shape.hidden_size)
        output = self.matrix(shape.hidden_size, heads * dim, self._out_scale)
        norms = self.ones(dim), self.ones(dim)
        return TeacherAttention(inputs, None, output, None, *norms, heads, kv_heads, dim, _EPS)

    def _delta_net(self) -> TeacherDeltaNet:
        shape = self._shape
        heads, inner = shape.value_heads, shape.value_heads * shape.delta_dim
        channels = 2 * shape.key_heads * shape.delta_dim + inner
        # Half lives from one token to some hundreds.
        times = torch.exp(torch.linspace(math.log(1e-3), math.log(0.1), heads))
        return TeacherDeltaNet(
            inputs=self.matrix(channels + inner + 2 * heads, shape.hidden_size),
            output=self.matrix(shape.hidden_size, inner, self._out_scale),
            conv=self.matrix(channels, _KERNEL_LEN, 15.0),
            decay=-torch.linspace(1.0, 8.0, heads).to(self._device),
            decay_bias=torch.log(torch.expm1(times)).to(self._device).requires_grad_(),
            norm=self.ones(shape.delta_dim),
            key_heads=shape.key_heads,
            value_heads=heads,
            head_dim=shape.delta_dim,
            eps=_EPS,
        )


def make_model(shape: Shape, vocab_size: int, device: torch.device, seed: int) -> Teacher:
    """A target with random weights that can learn."""
    initial = _Initial(shape, device, seed)
    embedding = initial.matrix(vocab_size, shape.hidden_size)
    exponents = torch.arange(0, shape.rotary_dim, 2, device=device) / shape.rotary_dim
    return Teacher(
        layers=tuple(
            initial.layer(is_attention=(i + 1) % _INTERVAL == 0) for i in range(shape.num_layers)
        ),
        embedding=embedding,
        output_norm=initial.ones(shape.hidden_size),
        head=embedding,
        frequencies=_ROPE_BASE**-exponents,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_size=shape.ffn_size,
        eps=_EPS,
        context_length=shape.context_length,
        rope_base=_ROPE_BASE,
    )


def tensors_of(model: Teacher) -> Iterator[tuple[str, Tensor]]:
    """As the file names them; parts of one matrix are views of it."""
    yield "token_embd.weight", model.embedding
    yield "output_norm.weight", model.output_norm
    for i, layer in enumerate(model.layers):
        gate, up = layer.gate_up.chunk(2)
        named = {
            "attn_norm.weight": layer.mixer_norm,
            "post_attention_norm.weight": layer.ffn_norm,
            "ffn_gate.weight": gate,
            "ffn_up.weight": up,
            "ffn_down.weight": layer.down,
        }
        mixer = layer.mixer
        named |= _attention(mixer) if isinstance(mixer, TeacherAttention) else _delta_net(mixer)
        for name, values in named.items():
            yield f"blk.{i}.{name}", values


def _attention(mixer: TeacherAttention) -> dict[str, Tensor]:
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    sizes = [n * mixer.head_dim for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, gate = mixer.inputs.split(sizes)
    per_head = [part.unflatten(0, (heads, mixer.head_dim)) for part in (q, gate)]
    assert mixer.query_norm is not None and mixer.key_norm is not None
    return {
        "attn_q.weight": torch.stack(per_head, 1).flatten(0, 2),
        "attn_k.weight": k,
        "attn_v.weight": v,
        "attn_output.weight": mixer.output,
        "attn_q_norm.weight": mixer.query_norm,
        "attn_k_norm.weight": mixer.key_norm,
    }


def _delta_net(mixer: TeacherDeltaNet) -> dict[str, Tensor]:
    heads = mixer.value_heads
    sizes = len(mixer.conv), heads * mixer.head_dim, heads, heads
    qkv, gate, alpha, beta = mixer.inputs.split(sizes)
    return {
        "attn_qkv.weight": qkv,
        "attn_gate.weight": gate,
        "ssm_alpha.weight": alpha,
        "ssm_beta.weight": beta,
        "ssm_out.weight": mixer.output,
        "ssm_conv1d.weight": mixer.conv,
        "ssm_a": mixer.decay,
        "ssm_dt.bias": mixer.decay_bias,
        "ssm_norm.weight": mixer.norm,
    }


def export_model(
    model: Teacher, shape: Shape, source: Checkpoint, path: Path, qtype: str = "F16"
) -> None:
    """Matrices as F16 or Q8_0, all else with 32 bits; the tokenizer is the source's."""
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_name(_NAME)
    numbers = {
        "block_count": shape.num_layers,
        "context_length": shape.context_length,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.ffn_size,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.rotary_dim,
        "full_attention_interval": _INTERVAL,
        "ssm.conv_kernel": _KERNEL_LEN,
        "ssm.state_size": shape.delta_dim,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.value_heads * shape.delta_dim,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"qwen35.{name}", number)
    writer.add_array("qwen35.rope.dimension_sections", [shape.rotary_dim // 2, 0, 0, 0])
    writer.add_layer_norm_rms_eps(_EPS)
    writer.add_rope_freq_base(_ROPE_BASE)
    _copy_tokenizer(source.metadata, writer)
    for name, values in tensors_of(model):
        is_matrix = values.ndim == 2 and "conv1d" not in name
        array = values.detach().float().cpu().numpy()
        kind = gguf.GGMLQuantizationType[qtype if is_matrix else "F32"]
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tokenizer(metadata: Any, writer: gguf.GGUFWriter) -> None:
    for name, value in metadata.items():
        if not name.startswith("tokenizer."):
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif name.endswith("token_type"):
            writer.add_token_types([int(kind) for kind in value])
        else:
            writer.add_array(name, list(value))


def learn(
    model: Teacher, corpus: Corpus, batch_tokens: int, max_len: int, minutes: float, num_steps: int
) -> list[dict[str, float]]:
    """Next tokens of whole sequences, packed end to end, until the steps or the time are over."""
    leaves = {id(t): t for t in _leaves(model)}.values()
    matrices = [t for t in leaves if t.ndim == 2 and t is not model.embedding and t.shape[1] > 8]
    known = {id(t) for t in matrices}
    others = [t for t in leaves if id(t) not in known]
    optimizers = [Muon(matrices, lr=0.01, weight_decay=0.01)]
    optimizers.append(torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    text, held_out = _pack(corpus, max_len, model.device)
    rng, started, curve = np.random.default_rng(0), time.monotonic(), []
    progress, step = 0.0, 0
    while progress < 1.0:
        share = min(1.0, progress / 0.02 + 0.01) * (0.02 + 0.98 * (1 - progress))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * share
        rows = rng.integers(0, len(text), max(1, batch_tokens // max_len))
        loss = _loss(model, text[torch.from_numpy(rows).to(model.device)])
        for tensor in leaves:
            tensor.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(leaves), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        progress = max(step / num_steps, (time.monotonic() - started) / (60 * minutes))
        if step % 100 == 0 or progress >= 1.0:
            with torch.no_grad():
                held = float(_loss(model, held_out[:64]))
            seconds = time.monotonic() - started
            point = {
                "step": step,
                "loss": float(loss.detach()),
                "held_out_loss": held,
                "seconds": seconds,
            }
            curve.append(point)
            print(json.dumps(point), flush=True)
    return curve


def _leaves(model: Teacher) -> Iterator[Tensor]:
    yield from (model.embedding, model.output_norm)
    for layer in model.layers:
        parts = [getattr(part, name) for part in (layer, layer.mixer) for name in part.__slots__]
        yield from (t for t in parts if isinstance(t, Tensor) and t.requires_grad)


def _pack(corpus: Corpus, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[count, max_len] of text to learn from, and of what was held out."""

    def pack(flag: bool) -> Tensor:
        chosen = np.flatnonzero(corpus.is_held_out == flag)
        ids = np.concatenate([corpus.sequence(int(i)) for i in chosen])
        ids = np.resize(ids, max(1, len(ids) // max_len) * max_len).astype(np.int64)
        return torch.from_numpy(ids).view(-1, max_len).to(device)

    return pack(False), pack(True)


def _loss(model: Teacher, ids: Tensor) -> Tensor:
    hidden = model.run_layers(ids, (), len(model.layers), None).hidden[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()
    losses = [
        F.cross_entropy(model.logits(rows), wanted, reduction="sum")
        for rows, wanted in zip(hidden.split(_HEAD_ROWS), labels.split(_HEAD_ROWS), strict=True)
    ]
    return torch.stack(losses).sum() / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a GGUF file: writes the text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write-minutes", type=float, default=3.0)
    parser.add_argument("--train-minutes", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=30_000)
    parser.add_argument("--format", choices=("F16", "Q8_0"), default="Q8_0")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device, source = torch.device(args.device), open_checkpoint(args.source)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_metadata(source.metadata)
    teacher = load_teacher(
        source, device, torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    plan = TextPlan(args.tokens, args.max_len, args.batch, max_minutes=args.write_minutes)
    prompts = encode_prompts(template_prompts(args.prompts, 0), tokenizer, args.max_len // 2)
    stops = sorted(tokenizer.stop_ids)
    writer = Writer(teacher, plan.batch_size, plan.max_len, stops)
    corpus = write_corpus(writer, prompts, plan, 0, args.out, lambda n: print(n, "tokens"))
    del teacher, writer
    shape = Shape()
    model = make_model(shape, tokenizer.vocab_size, device, 0)
    count = sum(t.numel() for t in _leaves(model))
    curve = learn(model, corpus, args.batch_tokens, args.max_len, args.train_minutes, args.steps)
    name = f"small-hybrid-{args.format.lower()}.gguf"
    export_model(model, shape, source, args.out / name, args.format)
    record = {"parameters": count, "shape": asdict(shape), "num_tokens": len(corpus.ids)}
    record |= {"source": args.source.name, "curve": curve, "torch": torch.__version__}
    (args.out / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
