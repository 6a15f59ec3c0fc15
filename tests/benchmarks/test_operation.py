"""Kernels by group."""

from benchmarks.operation import group_kernels


def test_kernels_are_grouped_by_their_names():
    kernels = {
        "linear": 5.0,
        "quantize": 1.0,
        "attention_kernel": 1.0,
        "attention_merge_kernel": 0.5,
        "kv_write_kernel": 0.5,
        "gated_norm_kernel": 1.0,
        "strange": 1.0,
    }
    groups = group_kernels(kernels)
    assert groups == {
        "matmul": 0.5,
        "attention": 0.2,
        "activation rounding": 0.1,
        "norms": 0.1,
        "other": 0.1,
    }
    assert next(iter(groups)) == "matmul"


def test_nothing_has_no_shares():
    assert group_kernels({}) == {}
