"""Atomic words, a spinning barrier and calls through an address: what threads need inside
compiled code.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
import platform

from llvmlite import ir

from draftree.kernels.cpu.form import LINE_BYTES
from draftree.kernels.cpu.instruction import I8, I32, I64, call, instruction
from draftree.kernels.cpu.jit import Deferred, njit, types

_SPINS_BEFORE_YIELD = 200  # some ten microseconds: longer waits are another program's turn

_sched_yield = Deferred(lambda: types.ExternalFunction("sched_yield", types.int32()))


def _word(builder, address):
    return builder.inttoptr(address, I64.as_pointer())


@instruction("int64 int64 -> int64")
def atomic_add(builder, address, value):
    """Add, and return what was there before."""
    return builder.atomic_rmw("add", _word(builder, address), value, "seq_cst")


@instruction("int64 -> int64")
def atomic_load(builder, address):
    return builder.load_atomic(_word(builder, address), "seq_cst", 8)


@instruction("int64 int64")
def atomic_store(builder, address, value):
    builder.store_atomic(value, _word(builder, address), "seq_cst", 8)


@instruction("")
def pause(builder):
    """Tell the core that this is a spin loop, and let some 30 nanoseconds pass."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif machine in ("aarch64", "arm64"):
        # Its hint for spin loops does nothing; a barrier for instructions takes as long.
        call(builder, "llvm.aarch64.isb", ir.VoidType(), [ir.Constant(I32, 15)])


@instruction("int64 int64 int64 int64 int64")
def call_operation(builder, function, args, ticket, thread, num_threads):
    """Call `void f(int64* args, int64 ticket, int64 thread, int64 num_threads)` at an address."""
    pointer = I8.as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [pointer, I64, I64, I64])
    target = builder.inttoptr(function, function_type.as_pointer())
    builder.call(target, [builder.inttoptr(args, pointer), ticket, thread, num_threads])


@njit(nogil=True)
def take_item(ticket, thread, num_threads, turn, num_items):
    """The next of a thread's own items, later of the others': whose turn it is, and the item.

    Turn 0 is the thread itself, 1 the next one; num_threads says that nothing is left.
    """
    while turn < num_threads:
        item = atomic_add(ticket + LINE_BYTES * ((thread + turn) % num_threads), 1)
        if item < num_items:
            return turn, item
        turn += 1
    return turn, 0


@njit(nogil=True)
def barrier(count_address, generation_address, num_threads):
    """Wait until all threads are here; the last one to arrive lets the others go."""
    if num_threads == 1:
        return
    generation = atomic_load(generation_address)
    if atomic_add(count_address, 1) == num_threads - 1:
        atomic_store(count_address, 0)
        atomic_store(generation_address, generation + 1)
        return
    spins = 0
    while atomic_load(generation_address) == generation:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _sched_yield()
        else:
            pause()
