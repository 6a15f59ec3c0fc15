"""Atomic words, a spinning barrier and calls through an address: what threads need inside
compiled code.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
import platform

from llvmlite import ir

from draftree.kernels.cpu.form import LINE_BYTES
from draftree.kernels.cpu.jit import Deferred, cgutils, intrinsic, njit, types

_I64 = ir.IntType(64)
_SPINS_BEFORE_YIELD = 200  # some ten microseconds: longer waits are another program's turn

_sched_yield = Deferred(lambda: types.ExternalFunction("sched_yield", types.int32()))


@intrinsic
def atomic_add(typingctx, address, value):
    """Add, and return what was there before."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, address):
    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx, address, value):
    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        builder.store_atomic(args[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this is a spin loop, and let some 30 nanoseconds pass."""

    def codegen(context, builder, signature, args):
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            name, operands = "llvm.x86.sse2.pause", []
        elif machine in ("aarch64", "arm64"):
            # Its hint for spin loops does nothing; a barrier for instructions takes as long.
            name, operands = "llvm.aarch64.isb", [ir.Constant(ir.IntType(32), 15)]
        else:
            return context.get_dummy_value()
        function_type = ir.FunctionType(ir.VoidType(), [o.type for o in operands])
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        builder.call(function, operands)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_operation(typingctx, function, args_address, ticket, thread, num_threads):
    """Call `void f(int64* args, int64 ticket, int64 thread, int64 num_threads)` at an address."""

    def codegen(context, builder, signature, args):
        i8_pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [i8_pointer, _I64, _I64, _I64])
        function = builder.inttoptr(args[0], function_type.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], i8_pointer), *args[2:]])
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word, word), codegen


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
