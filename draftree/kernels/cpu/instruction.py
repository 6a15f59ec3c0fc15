"""Instructions for kernels: sixteen float32 lanes as a numba value, a decorator that makes a call
in a kernel the LLVM code that a function emits, and the pieces of such code that many share.

No fast-math anywhere: the compiler may neither reorder nor contract, so a lane's result depends on
its inputs alone. LLVM splits vectors into whatever registers the machine has.
"""

# ruff: noqa: ANN001, ANN002, ANN201, ANN202, ANN204  (types are numba's and llvmlite's)
import operator
from functools import wraps

from llvmlite import ir

from draftree.kernels.cpu.jit import Deferred, cgutils, intrinsic, types

LANES = 16
F32 = ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS, INTEGERS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


def _lanes_type():
    """Sixteen lanes as a type of numba's, whose operators mean one instruction each."""
    from numba.core.datamodel import models
    from numba.core.datamodel.registry import register_default
    from numba.core.imputils import lower_builtin
    from numba.core.typing.templates import ConcreteTemplate, infer_global

    class Lanes(types.Type):
        def __init__(self):
            super().__init__(name="f32x16")

    @register_default(Lanes)
    class LanesModel(models.PrimitiveModel):
        def __init__(self, dmm, fe_type):
            super().__init__(dmm, fe_type, FLOATS)

    lanes = Lanes()

    def register(operation, name):
        @infer_global(operation)
        class LanesOperator(ConcreteTemplate):
            cases = (lanes(lanes, lanes),)

        @lower_builtin(operation, lanes, lanes)
        def lower(context, builder, signature, args):
            return getattr(builder, name)(args[0], args[1])

    register(operator.add, "fadd")
    register(operator.sub, "fsub")
    register(operator.mul, "fmul")
    register(operator.truediv, "fdiv")
    return lanes


f32x16 = Deferred(_lanes_type)


def instruction(signature):
    """Decorator: kernels call `function(builder, *values)`, without the builder, by values of the
    types that the signature names, as "int64 f32x16 -> f32x16"; without an arrow nothing returns.
    """
    arguments, _, result = signature.partition("->")

    def find_type(name):
        return f32x16 if name == "f32x16" else getattr(types, name)

    def decorate(function):
        @wraps(function)
        def define(typingctx, *_):
            def codegen(context, builder, signature, args):
                value = function(builder, *args)
                return value if result else context.get_dummy_value()

            returned = find_type(result.strip() or "void")
            return returned(*map(find_type, arguments.split())), codegen

        return intrinsic(define)

    return decorate


def call(builder, name, result, args):
    """Call one of LLVM's own functions."""
    function_type = ir.FunctionType(result, [a.type for a in args])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, args)


def fused(builder, a, b, c):
    """a * b + c with one rounding."""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


def shuffle(builder, pair, lanes):
    """Pick some of the lanes of two values, or of one given twice."""
    return builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def spread(builder, scalar, num_lanes):
    """The scalar in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, num_lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return shuffle(builder, (first, undefined), [0] * num_lanes)


def load_from(builder, address, kind, align):
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store_to(builder, value, address, align):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def step_by(builder, base, stride, index):
    """base + stride * index, the index being a constant."""
    return builder.add(base, builder.mul(stride, ir.Constant(I64, index)))
