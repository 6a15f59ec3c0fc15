"""Delta-rule layers with their convolutions on a GPU, as the tests of their kernels run them."""

import numpy as np
import torch

from draftree.kernels.cuda.conv import ConvArena, Convolution, conv, conv_commit
from draftree.kernels.cuda.gated_delta import DeltaArena, delta_commit, gated_delta
from draftree.kernels.cuda.gated_delta_prefill import gated_delta_prefill
from draftree.kernels.cuda.pass_args import NUM_TOKENS, CudaPassArgs
from tests.kernels.passes import randn
from tests.kernels.reference.conv import conv_reference
from tests.kernels.reference.gated_delta import gated_delta_reference

MAX_NODES = 24


class Layers:
    """Some delta-rule layers of one size with their convolutions, and a step to run them with."""

    def __init__(
        self, gpu, key_heads, value_heads, dim, *, num_layers=1, max_nodes=MAX_NODES, taps=4
    ):
        rng = np.random.default_rng(key_heads + value_heads + dim)
        self.gpu, self.step, self.committed = gpu, CudaPassArgs(512, max_nodes, gpu), 0
        self.arena, self.conv_arena = DeltaArena(max_nodes, gpu), ConvArena(max_nodes, gpu)
        self.widths = ((2 * key_heads + value_heads) * dim, value_heads, value_heads)
        self.states = [self.arena.new(key_heads, value_heads, dim) for _ in range(num_layers)]
        self.convs = [self.conv_arena.new(self.widths[0], taps) for _ in range(num_layers)]
        self.decay, self.bias = -np.exp(randn(rng, value_heads)), randn(rng, value_heads)
        self.weights = [torch.from_numpy(randn(rng, self.widths[0], taps)) for _ in self.convs]

    def random_inputs(self, rng, count):
        return [randn(rng, count, width) for width in self.widths]

    def chain(self, inputs, *, num_rows=None, layer=0):
        self.step.set_chain(np.zeros(len(inputs[0])), self.committed)
        self.committed += len(inputs[0])
        return self.run(gated_delta, inputs, num_rows or len(inputs[0]), layer)

    def long_chain(self, inputs):
        self.step.set_chain(np.zeros(len(inputs[0])), self.committed)
        self.committed += len(inputs[0])
        return self.run(conv_and_prefill, inputs, len(inputs[0]))

    def one_by_one(self, inputs, *, layer=0):
        rows = [[a[i : i + 1] for a in inputs] for i in range(len(inputs[0]))]
        return np.concatenate([self.chain(row, layer=layer) for row in rows])

    def tree(self, tree, inputs, *, num_rows=None, layer=0):
        tree.load(self.step, self.committed)
        return self.run(gated_delta, inputs, num_rows or len(tree), layer)

    def commit(self, tree):
        delta_commit(self.arena, self.step, self.gpu)
        conv_commit(self.conv_arena, self.step, self.gpu)
        self.committed += len(tree.path)

    def run(self, operation, inputs, num_rows, layer=0):
        """Rows that are not live are NaN; all arrays are columns of wider ones."""
        count, state = len(inputs[0]), self.states[layer]
        wide = [self._wide(num_rows, a.shape[1], 8) for a in inputs]
        for to, values in zip(wide, inputs, strict=True):
            to[:count] = torch.from_numpy(values)
        out = self._wide(num_rows, state.value_heads * state.head_dim, 4)
        gates = [torch.from_numpy(a).to(self.gpu.place) for a in (self.decay, self.bias)]
        qkv = wide[0]
        if operation is gated_delta_prefill:
            self.step.control[NUM_TOKENS] = count
        else:
            qkv = Convolution(qkv, self.weights[layer].to(self.gpu.place), self.convs[layer])
        operation(qkv, *wide[1:], *gates, state, self.step, out, self.gpu)
        assert out[count:].isnan().all()
        return out[:count].cpu().numpy()

    def _wide(self, num_rows, width, more):
        padded = -(-width // 4) * 4 + more
        return torch.full((num_rows, padded), torch.nan, device=self.gpu.place)[:, 4 : 4 + width]

    def restore(self, state, window):
        self.states[0].restore((torch.as_tensor(state),))
        self.convs[0].restore((torch.as_tensor(window),))

    def snapshot(self, layer=0):
        return self.states[layer].snapshot(0)[0].cpu().numpy().copy()

    def window(self, layer=0):
        return self.convs[layer].snapshot(self.committed)[0].cpu().numpy()

    def random_start(self, rng):
        heads, dim = self.states[0].value_heads, self.states[0].head_dim
        return randn(rng, heads, dim, dim), randn(rng, *self.convs[0].windows.shape[1:])

    def convolved(self, inputs, window):
        """What the reference makes of the inputs, and the window after them."""
        qkv, after = conv_reference(
            torch.from_numpy(inputs[0]), self.weights[0], torch.from_numpy(window)
        )
        return [qkv.numpy(), *inputs[1:]], after.numpy()

    def reference(self, inputs, before):
        """Inputs after convolution."""
        tensors = [torch.from_numpy(a).double() for a in (*inputs, self.decay, self.bias)]
        out, after = gated_delta_reference(
            *tensors, torch.from_numpy(before).double(), self.states[0].key_heads
        )
        return out.flatten(1).numpy(), after.numpy()


def conv_and_prefill(qkv, alpha, beta, decay, bias, state, step, out, gpu):
    rows = conv(qkv, step, torch.full_like(qkv.x, torch.nan), gpu)
    gated_delta_prefill(rows, alpha, beta, decay, bias, state, step, out, gpu)


def assert_same(layers, others, layer=0, other_layer=0):
    """State and window, in bits."""
    np.testing.assert_array_equal(layers.snapshot(layer), others.snapshot(other_layer))
    np.testing.assert_array_equal(layers.window(layer), others.window(other_layer))


def relative_error(value, expected):
    return np.linalg.norm(value - expected) / np.linalg.norm(expected)
