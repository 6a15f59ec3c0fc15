"""What a result says of the machine."""

from draftree.bench.machine import describe_machine


def test_this_machine_is_described():
    machine = describe_machine()
    assert machine.cpu
    assert machine.num_cores >= 1
    assert machine.memory_gib >= 1
    assert {"draftree", "numba", "numpy"} <= machine.packages.keys()
    assert machine.kernels and len(machine.gpu_kernels) == 16
