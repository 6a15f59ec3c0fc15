"""Keys without what they have in common: attention gives what it gave, and rounding costs less."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.attention import attention, new_attention_workspace  # noqa: E402
from draftree.kernels.cuda.attention_prefill import prefill_attention  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.kv_cache import KvArena, key_angles  # noqa: E402
from draftree.kernels.cuda.kv_centre import measure_centre  # noqa: E402
from draftree.kernels.cuda.pass_args import CudaPassArgs  # noqa: E402
from draftree.kernels.cuda.rotary import RopeArgs, rope_and_store_kv, rope_table  # noqa: E402
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS  # noqa: E402
from tests.examples import mark_long  # noqa: E402
from tests.kernels.passes import Tree, make_tree  # noqa: E402
from tests.kernels.reference.attention import (  # noqa: E402
    attention_reference,
    chain_mask,
    tree_mask,
)
from tests.kernels.reference.rope import rope_reference  # noqa: E402

HEADS, KV_HEADS, CAPACITY, MAX_ROWS = 4, 2, 400, 128


class Layer:
    """Rows before they are turned go in. centre: as many times the size of what else keys are."""

    def __init__(
        self,
        gpu: Gpu,
        dim: int,
        pairs: int,
        interleaved: bool,
        *,
        name: str = "q8_0",
        is_centred: bool = True,
        size: float = 30.0,
    ) -> None:
        self.gpu, self.dim, self.interleaved = gpu, dim, interleaved
        self.inv_freq = 1e4 ** (-np.arange(pairs) / pairs)
        self.table = rope_table(self.inv_freq, CAPACITY, gpu)
        self.step = CudaPassArgs(MAX_ROWS, 16, gpu)
        self.centre = size * torch.randn(KV_HEADS * dim, generator=torch.Generator().manual_seed(9))
        arena = KvArena(CAPACITY, gpu, KEY_FORMATS[name], VALUE_FORMATS["q8_0"])
        own = self.centre.to(gpu.place) if is_centred else None
        self.cache = arena.new(KV_HEADS, dim, own)
        if self.cache.shape.is_centred:
            self.cache.angles = key_angles(self.table, interleaved, dim, MAX_ROWS, HEADS)
        self.workspace = new_attention_workspace(64, HEADS, self.cache.shape, CAPACITY, gpu)

    def rows(self, seed: int, count: int) -> list[torch.Tensor]:
        """Queries, keys, values [rows, heads * head_dim]."""
        generator = torch.Generator().manual_seed(seed)
        sizes = [n * self.dim for n in (HEADS, KV_HEADS, KV_HEADS)]
        q, k, v = (torch.randn((count, n), generator=generator) for n in sizes)
        return [q, k + self.centre, v]

    def run(self, rows: list[torch.Tensor], is_long: bool = False) -> torch.Tensor:
        """The step is set."""
        q, k, v = (part.clone().to(self.gpu.place) for part in rows)
        rest = None, 0.0, self.dim, self.table, self.interleaved
        args = self.cache, self.step, self.gpu
        rope_and_store_kv(RopeArgs(q, *rest), RopeArgs(k, *rest), v, *args)
        out = torch.zeros_like(q)
        if is_long:
            prefill_attention(q, self.cache, self.step, out, self.gpu)
        else:
            attention(q, self.cache, self.step, out, self.workspace, self.gpu)
        return out.cpu().unflatten(1, (HEADS, self.dim))

    def chain(
        self, rows: list[torch.Tensor], committed: int, is_long: bool = False
    ) -> torch.Tensor:
        self.step.set_chain(np.zeros(len(rows[0]), np.int32), committed)
        return self.run(rows, is_long)

    def tree(self, rows: list[torch.Tensor], tree: Tree, committed: int) -> torch.Tensor:
        nodes = np.zeros(len(tree), np.int32)
        self.step.set_tree(nodes, np.array(tree.parents), tree.depths, committed)
        return self.run(rows)

    def expect(
        self,
        before: list[torch.Tensor],
        rows: list[torch.Tensor],
        positions: np.ndarray,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        places = torch.from_numpy(np.concatenate((np.arange(len(before[0])), positions)))
        inv_freq = torch.from_numpy(self.inv_freq)
        q, k, v = (
            torch.cat(both).double().unflatten(1, (-1, self.dim))
            for both in zip(before, rows, strict=True)
        )
        q, k = (rope_reference(x, places, inv_freq, self.interleaved) for x in (q, k))
        q = q[len(before[0]) :]
        return attention_reference(q, k, v, mask, self.dim**-0.5).float()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


SHAPES = [(64, 32, True), (64, 32, False), (128, 64, False), (128, 16, True)]
SOME_SHAPES = mark_long(SHAPES, but=(SHAPES[0], SHAPES[2]))


@pytest.mark.parametrize(("dim", "pairs", "interleaved"), SOME_SHAPES)
def test_attention_is_what_it_was(dim: int, pairs: int, interleaved: bool, any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, dim, pairs, interleaved)
    before, rows, tree = layer.rows(1, 70), layer.rows(2, 6), make_tree([0, 0, 1, 1, 2], 4)
    got = layer.chain([x[:64] for x in before], 0)
    nothing = [x[:0] for x in before]
    first = [x[:64] for x in before]
    assert error(got, layer.expect(nothing, first, np.arange(64), chain_mask(64, 0))) < 0.02
    layer.chain([x[64:] for x in before], 64)
    got = layer.tree(rows, tree, 70)
    mask = tree_mask(list(tree.parents), 70)
    assert error(got, layer.expect(before, rows, 70 + tree.depths, mask)) < 0.02


@pytest.mark.parametrize(("dim", "pairs", "interleaved"), SOME_SHAPES)
def test_long_prompts_see_the_same_keys(
    dim: int, pairs: int, interleaved: bool, any_gpu: Gpu
) -> None:
    layer = Layer(any_gpu, dim, pairs, interleaved)
    before, rows = layer.rows(1, 70), layer.rows(2, 66)
    layer.chain(before, 0, is_long=True)
    got = layer.chain(rows, 70, is_long=True)
    expected = layer.expect(before, rows, np.arange(70, 136), chain_mask(66, 70))
    assert error(got, expected) < 0.02


@pytest.mark.parametrize("name", mark_long(("q4", "tq3_0"), but=("q4",)))
def test_what_keys_share_is_not_rounded(name: str, any_gpu: Gpu) -> None:
    errors = []
    for is_centred in (True, False):
        layer = Layer(any_gpu, 128, 64, False, name=name, is_centred=is_centred, size=5.0)
        before, rows = layer.rows(1, 64), layer.rows(2, 5)
        layer.chain(before, 0)
        expected = layer.expect(before, rows, np.arange(64, 69), chain_mask(5, 64))
        errors.append(error(layer.chain(rows, 64), expected))
    assert errors[0] < 0.4 * errors[1], errors


def test_rows_have_the_same_bits_alone_and_in_a_tree(any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 64, 32, True, name="q4")
    before, rows, tree = layer.rows(1, 64), layer.rows(2, 6), make_tree([0, 0, 1, 1, 2], 4)
    layer.chain(before, 0)
    together = layer.tree(rows, tree, 64)
    for node in range(6):
        branch = tree.branch(node)
        for depth, member in enumerate(branch):
            alone = layer.chain([x[member : member + 1] for x in rows], 64 + depth)
        assert torch.equal(alone[0], together[node])


@pytest.mark.parametrize(("dim", "pairs", "interleaved"), SOME_SHAPES)
def test_a_centre_is_measured(dim: int, pairs: int, interleaved: bool, any_gpu: Gpu) -> None:
    """From what lies in the cache, whatever the centre was before."""
    layer = Layer(any_gpu, dim, pairs, interleaved, size=2.0)
    layer.chain(layer.rows(1, 64), 0)
    layer.cache.centre.zero_()
    rows = layer.rows(1, 64)
    layer.chain(rows, 0)
    measure_centre(layer.cache, 4, 64, any_gpu)
    wanted = rows[1][4:].mean(dim=0)
    torch.testing.assert_close(layer.cache.centre.cpu(), wanted, atol=0.02, rtol=0.02)
