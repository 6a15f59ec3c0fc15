"""Whose results may stand beside whose."""

from dataclasses import asdict

import pytest

from draftree.bench.fault import BenchError
from draftree.bench.machine import check_same_machine, describe_machine, fingerprint


def test_this_machine_is_described():
    machine = describe_machine()
    assert machine.cpu
    assert machine.num_cores >= 1
    assert machine.memory_gib >= 1
    assert {"draftree", "numba", "numpy"} <= machine.packages.keys()
    assert machine.kernels


def test_software_does_not_make_another_machine():
    here = asdict(describe_machine())
    newer = here | {"python": "9.9", "packages": {"numpy": "9"}, "isa": "newer"}
    check_same_machine({"a.json": here, "b.json": newer})
    assert fingerprint(here) == fingerprint(newer)


@pytest.mark.parametrize(
    "change",
    [{"cpu": "Another"}, {"num_cores": 64}, {"architecture": "vax"}, {"memory_gib": 4096}],
)
def test_different_machines_are_refused(change):
    here = asdict(describe_machine())
    with pytest.raises(BenchError, match=r"b\.json are from different machines"):
        check_same_machine({"a.json": here, "b.json": here | change})
