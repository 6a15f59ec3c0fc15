"""Every kernel once, as a large model on a given chip would load it: what tests compile everywhere.

A new kernel is added here, with the macros that ask the most of a chip.
"""

from dataclasses import replace

from draftree.kernels.cuda.accept import accept_source
from draftree.kernels.cuda.attention import plan_attention
from draftree.kernels.cuda.attention_prefill import expand_source as kv_expand_source
from draftree.kernels.cuda.attention_prefill import merge_source
from draftree.kernels.cuda.compile import Gpu, KernelSource
from draftree.kernels.cuda.conv import conv_source
from draftree.kernels.cuda.edges import edges_source
from draftree.kernels.cuda.embed import embed_source
from draftree.kernels.cuda.gated_delta import MOST_ROWS, block_cols, commit_source, delta_source
from draftree.kernels.cuda.gated_delta_prefill import chunk_source, plan_pass
from draftree.kernels.cuda.heads import heads_source
from draftree.kernels.cuda.kv_cache import COMMIT_SOURCE, KvShape
from draftree.kernels.cuda.layout import UnitFormat, band_tiles, unit_format
from draftree.kernels.cuda.linear import plan_linear
from draftree.kernels.cuda.lookup import lookup_source
from draftree.kernels.cuda.pack import repack_source
from draftree.kernels.cuda.persistent import PersistentSource
from draftree.kernels.cuda.prefill import expand_source
from draftree.kernels.cuda.prepare import (
    RowOp,
    RowPlan,
    plan_long,
    plan_row,
    prepare_source,
    row_macros,
    takes_warpgroups,
)
from draftree.kernels.cuda.process import process_source
from draftree.kernels.cuda.rotary import rotary_source
from draftree.kernels.cuda.rows import CONV_SOURCE, COPY_SOURCE, NORM_SOURCE
from draftree.kernels.cuda.sampling import sampling_source
from draftree.kernels.cuda.scores import score_source
from draftree.kernels.cuda.tree import plan_source, tree_source
from draftree.kernels.quant.formats import QuantType
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS


def all_sources(gpu: Gpu) -> list[KernelSource]:
    """Another chip may have other macros: room for more stages, more blocks for a row."""
    states = (*_attention_sources(gpu), *_delta_sources(gpu))
    return [
        *(*_matrix_sources(gpu), *_row_sources(gpu), *states, *_round_sources()),
        persistent_source(gpu),
    ]


def persistent_source(gpu: Gpu) -> KernelSource:
    """The operations that ask the most of registers and shared memory, with fewest for others."""
    num_threads, gpu = 256 * band_tiles(gpu), gpu.without_warpgroups()
    with gpu.rehearsal.collect(is_persistent=True):
        shape = KvShape(4, 256, KEY_FORMATS["q4"], VALUE_FORMATS["q4"])
        attention = plan_attention(shape, gpu)[-1].shrunk(gpu)
        kinds = [
            (plan_linear(unit_format(QuantType.Q4_K), 24, gpu).source, num_threads),
            (plan_linear(unit_format(QuantType.Q6_K), 24, gpu).source, num_threads),
            (prepare_source(RowOp.SILU_MUL, plan_row(5120, gpu)), 32),
            (attention.source, 256),
            (attention.merge_source, 256),
            (delta_source(128, 64, 4), 256),
            (sampling_source("choose_kernel"), 256),
            (tree_source(has_edges=True), 64),
            (edges_source(QuantType.Q4_1), 256),
        ]
    macros = (("BLOCK_THREADS", num_threads),)
    return PersistentSource("persistent_kernel", (), macros, tuple(kinds))


def _matrix_sources(gpu: Gpu) -> list[KernelSource]:
    qtype = QuantType.Q4_K
    form = unit_format(qtype)
    return [
        KernelSource("read_kernel", ("bits", "read")),
        *(repack_source(name, qtype, form) for name in ("row_scale_kernel", "repack_kernel")),
        *(expand_source(name, form) for name in ("expand_kernel", "rescale_kernel")),
        *(plan_linear(form, num_tokens, gpu).source for num_tokens in (16, 24)),
        _own_row_source(form, gpu),
        embed_source(qtype),
    ]


def _own_row_source(form: UnitFormat, gpu: Gpu) -> KernelSource:
    row = RowPlan(1, 8 * band_tiles(gpu), 2)
    macros = (("OWN_ROW", 1), *row_macros(RowOp.GATED_NORM, 128, row))
    plan = plan_linear(form, 1, gpu)
    return replace(plan, own_cols=6144, row_macros=macros).source


def _row_sources(gpu: Gpu) -> list[KernelSource]:
    plan = plan_row(17408, gpu)
    tiles = "WARPGROUPS" if takes_warpgroups(24, gpu) else ""
    prepares = [
        prepare_source(op, plan, form=tiles, head_dim=128) for op in RowOp if op != RowOp.SILU_MUL
    ]
    prepares.append(prepare_source(RowOp.SILU_MUL, plan_long(17408), form="IN_ROWS"))
    convs = [conv_source(name, 4) for name in ("conv_kernel", "conv_commit_kernel")]
    return [*prepares, *convs, COPY_SOURCE, NORM_SOURCE, CONV_SOURCE]


def _attention_sources(gpu: Gpu) -> list[KernelSource]:
    names = "f16", "q8_0", "q4", "tq3_0"
    shapes = [KvShape(4, 256, KEY_FORMATS[name], VALUE_FORMATS[name]) for name in names]
    shapes += [
        KvShape(2, dim, KEY_FORMATS["q4"], VALUE_FORMATS["q4"], is_centred=True)
        for dim in (64, 128)
    ]
    plans = [plan for shape in shapes for plan in plan_attention(shape, gpu)]
    sources = [source for plan in plans for source in (plan.source, plan.merge_source)]
    sources += [COMMIT_SOURCE, heads_source(256)]
    merges = [merge_source(dim) for dim in (64, 256)]
    return [*sources, *merges, *map(kv_expand_source, shapes), *map(rotary_source, shapes)]


def _delta_sources(gpu: Gpu) -> list[KernelSource]:
    walk = delta_source(128, block_cols(MOST_ROWS, 128, 4, gpu), 4)
    return [walk, commit_source(128), chunk_source(128), plan_pass(128, gpu).source]


def _round_sources() -> list[KernelSource]:
    """Choosing, the tree, the accept walk: what lies between the passes of a round."""
    choices = ("choose", "rank", "peak", "bin", "threshold")
    plans = ("plan_plain", "plan_block", "plan_context", "advance")
    return [
        *(sampling_source(f"{name}_kernel") for name in choices),
        *(plan_source(f"{name}_kernel") for name in plans),
        tree_source(),
        tree_source(has_edges=True),
        tree_source("plan_tree_kernel"),
        edges_source(QuantType.Q4_1),
        accept_source(),
        lookup_source(),
        process_source(),
        score_source(),
    ]
