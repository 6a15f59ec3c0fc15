"""Arrays of numpy, seen by compiled code that Python calls with the array itself.

An array's object says where its values are, how many and of which type; taking them from there
costs nothing, while asking for an address from Python takes as long as choosing a token. Another
array than the code was made for ends the process.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
import numpy as np

from draftree.kernels.cpu.jit import carray, intrinsic, njit, types
from draftree.kernels.cpu.simd import load_i64
from draftree.kernels.cpu.word import load_u8, load_u32

# Places in numpy's array object and in its descriptor of a type, which extensions rely on too.
_HEADER = object.__basicsize__
_DATA, _NDIM, _SHAPE = _HEADER, _HEADER + 8, _HEADER + 16
_DESCRIPTOR, _FLAGS = _HEADER + 40, _HEADER + 48
_TYPE = _HEADER + 9
_IS_DENSE = 1  # a flag: all values lie side by side, row after row
_F32, _I64, _U32 = (ord(np.dtype(kind).char) for kind in (np.float32, np.int64, np.uint32))


def _pointer(kind):
    """A function that takes an address for that of values of a kind."""

    @intrinsic
    def pointer(typingctx, address):
        numba_type = types.CPointer(getattr(types, kind))

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(numba_type))

        return numba_type(types.int64), codegen

    return pointer


f32_pointer, f64_pointer = _pointer("float32"), _pointer("float64")
i64_pointer, u32_pointer, u64_pointer = _pointer("int64"), _pointer("uint32"), _pointer("uint64")


@njit
def _values(array, kind):
    """The address of the first value and the number of values, in all rows together."""
    length, shape = 1, load_i64(array + _SHAPE)
    for i in range(load_u32(array + _NDIM)):
        length *= load_i64(shape + 8 * i)
    is_right = load_u8(load_i64(array + _DESCRIPTOR) + _TYPE) == kind
    if load_u32(array + _FLAGS) & _IS_DENSE == 0 or not is_right:
        raise TypeError
    return load_i64(array + _DATA), length


@njit
def f32_view(array):
    address, length = _values(array, _F32)
    return carray(f32_pointer(address), length)


@njit
def i64_view(array):
    address, length = _values(array, _I64)
    return carray(i64_pointer(address), length)


@njit
def u32_view(array):
    address, length = _values(array, _U32)
    return carray(u32_pointer(address), length)
