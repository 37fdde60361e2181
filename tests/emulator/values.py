"""Values of emulated GPU threads, and what `pallas_kernels.hopper.threads.lanes` takes for MLIR's types and arithmetic
while they run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


class Fault(AssertionError):
    """What the emulated program did wrong."""


class OutOfBounds(Fault):
    """An access outside of the array that its pointer came from."""


class Misaligned(Fault):
    """A vector access at an address that is no multiple of its size."""


class Race(Fault):
    """Two threads access a word, one of them writes, and no barrier orders them."""


class Unwritten(Fault):
    """Something depends on a word that nobody wrote."""


class Divergence(Fault):
    """Only some of the threads that an instruction concerns have reached it."""


class NotArrived(Fault):
    """A word is accessed while an asynchronous copy to it is on its way."""


class Undefined(Fault):
    """Division by 0 and the like."""


class UnknownCode(Fault):
    """PTX that the emulator has no function for."""


# Values.


class Type:
    """Of values."""

    def __init__(self, name: str, dtype):
        self.name, self.dtype = name, dtype

    def __repr__(self):
        return self.name


class Float(Type):
    """What `isinstance(x, ir.F32Type)` is true of."""

    get = staticmethod(lambda: F32)


I1, I8, I32, I64 = (Type(*x) for x in (("i1", np.bool_), ("i8", np.int8), ("i32", np.int32), ("i64", np.int64)))
F32, INDEX = Float("f32", np.float32), Type("index", np.int64)


class Value:
    """A number per thread, or one for all. unknown: the threads whose number comes from a word that nobody wrote (None:
    no such)."""

    __slots__ = ("data", "type", "unknown")

    def __init__(self, data, type_: Type, unknown=None):
        self.data, self.type, self.unknown = data, type_, unknown


def unknown_in(*values: Value):
    """The threads for which one of the values is unknown."""
    masks = None
    for x in values:
        if x.unknown is not None:
            masks = x.unknown if masks is None else masks | x.unknown
    return masks


def spread(data, size: int) -> np.ndarray:
    """A number per thread of a number per thread or one for all; to be read only. Much quicker than
    `numpy.broadcast_to`."""
    data = np.asarray(data)
    return data if data.shape == (size,) else np.full(size, data)


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Address per thread: array, CTA (None: the thread's own) and bytes. choices: (threads, pointer) where it came from
    a select."""

    memory: Any
    offset: np.ndarray
    cta: np.ndarray | None = None
    choices: tuple = ()
    type = "pointer"

    def moved(self, by) -> Pointer:
        if self.choices:
            return Pointer(None, self.offset, None, tuple((where, pointer.moved(by)) for where, pointer in self.choices))
        return Pointer(self.memory, self.offset + by, self.cta)

    def parts(self):
        """(threads or None for all, pointer to one array)."""
        if not self.choices:
            return [(None, self)]
        parts = [(where, part) for where, pointer in self.choices for part in pointer.parts()]
        return [(where if inner is None else where & inner, pointer) for where, (inner, pointer) in parts]


# Arithmetic.


def same(*values: Value) -> Type:
    kind = values[0].type
    for x in values:
        if x.type is not kind:
            raise TypeError(f"operands of different types: {', '.join(map(repr, (x.type for x in values)))}")
    return kind


def operation(function: Callable, kinds: tuple = (I32, I64), result: Type | None = None) -> Callable[..., Value]:
    def apply(*values):
        kind = same(*values)
        if kind not in kinds:
            raise TypeError(f"{function} is not for {kind}")
        return Value(function(*[x.data for x in values]), result or kind, unknown_in(*values))

    return apply


def constant(kind: Type, x) -> Value:
    return Value(np.float32(x), kind) if kind is F32 else _whole(kind, int(x))


@functools.cache
def _whole(kind: Type, x: int) -> Value:
    if kind in (I32, I64):
        bits = 32 if kind is I32 else 64
        x = (x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    return Value(kind.dtype(x), kind)


_COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}


def _compare(kinds: tuple):
    operations = {name: operation(function, kinds, I1) for name, function in _COMPARISONS.items()}
    return lambda predicate, a, b: operations[predicate](a, b)


def select(condition: Value, a, b):
    if condition.type is not I1:
        raise TypeError(f"a condition of type {condition.type}")
    where = condition.data
    if isinstance(a, Pointer):
        return Pointer(None, np.int64(0), None, ((where, a), (~where, b)))
    kind = same(a, b)
    unknown = unknown_in(condition)
    if a.unknown is not None or b.unknown is not None:
        masks = [False if x.unknown is None else x.unknown for x in (a, b)]
        unknown = np.where(where, *masks) if unknown is None else unknown | np.where(where, *masks)
    return Value(np.where(where, a.data, b.data), kind, unknown)


IR = SimpleNamespace(
    IntegerType=SimpleNamespace(get_signless=lambda bits: {1: I1, 8: I8, 32: I32, 64: I64}[bits]),
    F32Type=Float,
    FloatAttr=SimpleNamespace(get=lambda kind, x: x),
    IntegerAttr=SimpleNamespace(get=lambda kind, x: x),
)
_INTEGERS, _FLOATS = (I32, I64), (F32,)
ARITH = {
    "constant": constant,
    "select": select,
    "CmpIPredicate": SimpleNamespace(slt="lt", sle="le", sgt="gt", sge="ge", eq="eq", ne="ne"),
    "CmpFPredicate": SimpleNamespace(OLT="lt", OLE="le", OGT="gt", OGE="ge", OEQ="eq", UNE="ne"),
    "cmpi": _compare((I1, *_INTEGERS)),
    "cmpf": _compare(_FLOATS),
    "addi": operation(np.add),
    "subi": operation(np.subtract),
    "muli": operation(np.multiply),
    "andi": operation(np.bitwise_and, (I1, *_INTEGERS)),
    "ori": operation(np.bitwise_or, (I1, *_INTEGERS)),
    "xori": operation(np.bitwise_xor, (I1, *_INTEGERS)),
    "minsi": operation(np.minimum),
    "maxsi": operation(np.maximum),
    "addf": operation(np.add, _FLOATS),
    "subf": operation(np.subtract, _FLOATS),
    "mulf": operation(np.multiply, _FLOATS),
    "divf": operation(np.divide, _FLOATS),
    "maxnumf": operation(np.fmax, _FLOATS),
    "maximumf": operation(np.maximum, _FLOATS),
    "minimumf": operation(np.minimum, _FLOATS),
    "sitofp": lambda kind, x: Value(x.data.astype(kind.dtype), kind, x.unknown),
    "extsi": lambda kind, x: Value(x.data.astype(kind.dtype), kind, x.unknown),
    "index_cast": lambda kind, x: Value(x.data.astype(kind.dtype), kind, x.unknown),
    "bitcast": lambda kind, x: Value(np.asarray(x.data).view(kind.dtype), kind, x.unknown),
}
MATH = SimpleNamespace(
    log2=operation(np.log2, _FLOATS),
    fma=operation(lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32), _FLOATS),
    ctpop=operation(lambda x: np.bitwise_count(np.asarray(x).view(np.uint32)).astype(np.int32), (I32,)),
)


def quotient(a, b):
    b = np.where(b == 0, 1, b).astype(b.dtype)
    return (a - np.fmod(a, b)) // b


def remainder(a, b):
    return np.fmod(a, np.where(b == 0, 1, b).astype(b.dtype))
