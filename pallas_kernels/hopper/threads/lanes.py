"""Code for single CUDA threads in Mosaic GPU kernels: ballots, asynchronous copies, stores inside a cluster.

Pallas works on whole arrays. A few stages (scoring scattered index rows, selecting by counting, exchanging results
inside a cluster) need single threads. They run inside `plgpu.inline_mgpu`, on `Scalar`s. This is the only file that
uses JAX's private MLIR bindings. Tried with jax 0.11.2 to 0.12.0; `check_version` refuses older ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu, llvm, math, scf, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import core as mgpu_core
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import dispatch

OLDEST_JAX = (0, 11, 2)
DUMP_NAME = "mosaic_gpu.dump_basename"


def check_version() -> None:
    """Raise NotImplementedError for a JAX older than the bindings that this file was written for."""
    if jax.__version_info__ < OLDEST_JAX:
        raise NotImplementedError(f"Mosaic GPU kernels need jax >= {'.'.join(map(str, OLDEST_JAX))}, found {jax.__version__}; upgrade jax")


def _name_after_functions() -> None:
    """Let JAX call a kernel by its function's name in files that it may dump. By itself it numbers the kernels of a
    process in order, and the number is part of the key under which the compilation cache keeps a program: a process
    that needs its programs in another order would find none. A JAX that numbers nothing is left as it is."""
    numbered = getattr(mgpu_core.dialect, "get_or_set_dump_options", None)
    if numbered is None or hasattr(numbered, "__wrapped__"):
        return

    @functools.wraps(numbered)
    def named(module: ir.Module) -> Any:
        attributes = module.operation.attributes
        if DUMP_NAME not in attributes:
            with module.context:
                attributes[DUMP_NAME] = ir.StringAttr.get(attributes["sym_name"].value)
        return numbered(module)

    mgpu_core.dialect.get_or_set_dump_options = named


_name_after_functions()


def _i32():
    return ir.IntegerType.get_signless(32)


def _type(name: str):
    return {"i32": _i32, "f32": ir.F32Type.get, "i1": lambda: ir.IntegerType.get_signless(1)}[name]()


class Scalar:
    """A 32-bit signed integer, a float32 or a bool of one thread. Comparisons and arithmetic as in Python, but `//` and
    `%` truncate."""

    __hash__ = None

    def __init__(self, value: ir.Value):
        self.value = value

    @property
    def is_float(self) -> bool:
        """Whether it is a float32."""
        return isinstance(self.value.type, ir.F32Type)

    def _other(self, other) -> ir.Value:
        return other.value if isinstance(other, Scalar) else _constant(other, self.value.type)

    def _apply(self, of_int, of_float, other, swap=False) -> Scalar:
        a, b = self.value, self._other(other)
        a, b = (b, a) if swap else (a, b)
        return Scalar((of_float if self.is_float else of_int)(a, b))

    def _compare(self, of_int, of_float, other) -> Scalar:
        a, b = self.value, self._other(other)
        return Scalar(arith.cmpf(of_float, a, b) if self.is_float else arith.cmpi(of_int, a, b))

    def __add__(self, other):
        return self._apply(arith.addi, arith.addf, other)

    def __sub__(self, other):
        return self._apply(arith.subi, arith.subf, other)

    def __rsub__(self, other):
        return self._apply(arith.subi, arith.subf, other, swap=True)

    def __mul__(self, other):
        return self._apply(arith.muli, arith.mulf, other)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other):
        return self._apply(None, arith.divf, other)

    def __floordiv__(self, other):
        return self._apply(arith.divsi, None, other)

    def __mod__(self, other):
        return self._apply(arith.remsi, None, other)

    def __and__(self, other):
        return self._apply(arith.andi, None, other)

    def __or__(self, other):
        return self._apply(arith.ori, None, other)

    def __xor__(self, other):
        return self._apply(arith.xori, None, other)

    def __lshift__(self, other):
        return self._apply(arith.shli, None, other)

    def __rshift__(self, other):
        return self._apply(arith.shrsi, None, other)

    def __invert__(self):
        return self ^ (True if self.value.type == _type("i1") else -1)

    def __lt__(self, other):
        return self._compare(arith.CmpIPredicate.slt, arith.CmpFPredicate.OLT, other)

    def __le__(self, other):
        return self._compare(arith.CmpIPredicate.sle, arith.CmpFPredicate.OLE, other)

    def __gt__(self, other):
        return self._compare(arith.CmpIPredicate.sgt, arith.CmpFPredicate.OGT, other)

    def __ge__(self, other):
        return self._compare(arith.CmpIPredicate.sge, arith.CmpFPredicate.OGE, other)

    def __eq__(self, other):
        return self._compare(arith.CmpIPredicate.eq, arith.CmpFPredicate.OEQ, other)

    def __ne__(self, other):
        return self._compare(arith.CmpIPredicate.ne, arith.CmpFPredicate.UNE, other)


def _constant(x, ty) -> ir.Value:
    if isinstance(ty, ir.F32Type):
        return arith.constant(ty, ir.FloatAttr.get(ty, float(x)))
    return arith.constant(ty, ir.IntegerAttr.get(ty, int(x)))


def i32(x: int) -> Scalar:
    """A constant integer."""
    return Scalar(_constant(x, _i32()))


def f32(x: float) -> Scalar:
    """A constant float32."""
    return Scalar(_constant(x, ir.F32Type.get()))


@dataclasses.dataclass(frozen=True)
class Swizzled:
    """A reference to shared memory with transforms, as an argument of a `stage`. The stage sees its plain words."""

    ref: Any
    transforms: tuple


def stage(**scalars: jax.Array) -> Callable:
    """Decorator: makes a function of lanes a stage of a Pallas kernel.

    The function takes two pytrees of references (whole arrays; inside it, what the memory functions below take) and the
    scalars by name. The decorated function takes the two pytrees. All threads of the CTA run it.
    """
    names = tuple(scalars)

    def decorate(function):
        def run(arrays, scratch):
            leaves, structure = jax.tree.flatten((arrays, scratch), is_leaf=lambda x: isinstance(x, Swizzled))
            refs = [plgpu.RefType(x.transforms if isinstance(x, Swizzled) else ()) for x in leaves]
            types = (*refs, *(plgpu.Layout.WG_SPLAT(()),) * len(names))

            @plgpu.inline_mgpu(arg_types=types)
            def inline(_, *args):
                refs = jax.tree.unflatten(structure, args[: len(leaves)])
                function(*refs, **{name: of_splat(x) for name, x in zip(names, args[len(leaves) :], strict=True)})

            inline(*(x.ref if isinstance(x, Swizzled) else x for x in leaves), *scalars.values())

        return run

    return decorate


def held(array) -> list[Scalar]:
    """This thread's numbers of an array with one number per register: `Layout.WGMMA.reduce(1)`, `per_thread`."""
    return [elements(register, 1)[0] for register in array.registers.flat]


def per_thread(count: int, dtype: Any) -> plgpu.ShapeDtypeStruct:
    """Type of an array of which each thread of a warpgroup holds `count` numbers, for `inline_mgpu` to return. See
    `holding`."""
    return plgpu.ShapeDtypeStruct((128 * count,), dtype, plgpu.Layout.WG_STRIDED((128 * count,), 1))


def holding(values: Sequence[Scalar]) -> mgpu.FragmentedArray:
    """An array of which this thread holds these numbers."""
    registers = [vector.broadcast(ir.VectorType.get((1,), x.value.type), x.value) for x in values]
    layout = mgpu.WGStridedFragLayout((128 * len(values),), 1)
    signed = None if values[0].is_float else True
    return mgpu.FragmentedArray(_registers=np.array(registers, dtype=object), _layout=layout, _is_signed=signed)


def of_splat(array) -> Scalar:
    """The scalar for a scalar array, as `inline_mgpu` passes it to its function."""
    return Scalar(array.registers.item())


def elements(register, count: int) -> list[Scalar]:
    """The numbers in one register of an array's `registers`."""
    return [Scalar(vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))) for i in range(count)]


def where(condition: Scalar, a, b) -> Scalar:
    """a if condition else b. At least one of them is a Scalar; the other may be a number."""
    ty = (a if isinstance(a, Scalar) else b).value.type
    a, b = (x.value if isinstance(x, Scalar) else _constant(x, ty) for x in (a, b))
    return Scalar(arith.select(condition.value, a, b))


def minimum(a: Scalar, b) -> Scalar:
    """The smaller of two integers."""
    return Scalar(arith.minsi(a.value, a._other(b)))


def maximum(a: Scalar, b) -> Scalar:
    """The larger of two integers, or of two floats. Of a NaN and a number it is the number."""
    return Scalar((arith.maxnumf if a.is_float else arith.maxsi)(a.value, a._other(b)))


def maximum_or_nan(a: Scalar, b: Scalar) -> Scalar:
    """The larger of two floats, NaN if one of them is."""
    return Scalar(arith.maximumf(a.value, b.value))


def minimum_or_nan(a: Scalar, b: Scalar) -> Scalar:
    """The smaller of two floats, NaN if one of them is."""
    return Scalar(arith.minimumf(a.value, b.value))


def log2(x: Scalar) -> Scalar:
    """Binary logarithm."""
    return Scalar(math.log2(x.value))


def fma(a: Scalar, b: Scalar, c: Scalar | float) -> Scalar:
    """a * b + c, rounded once."""
    return Scalar(math.fma(a.value, b.value, a._other(c)))


def number(x: Scalar) -> Scalar:
    """An integer as a float32."""
    return Scalar(arith.sitofp(ir.F32Type.get(), x.value))


def shift_right(x: Scalar, places: Scalar) -> Scalar:
    """An integer read as unsigned, shifted to the right. The result is 0 from 32 places on."""
    return ptx("shr.u32 $0, $1, $2;", x, places, result="i32")


def masked_or(x: Scalar, mask: int, others: int) -> Scalar:
    """(x & mask) | others, by one instruction, which compilers do not always find."""
    return ptx("lop3.b32 $0, $1, $2, $3, 0xea;", x, mask, others, result="i32")


def leading_zeros(x: Scalar) -> Scalar:
    """How many of the 32 bits come before the first set bit."""
    return ptx("clz.b32 $0, $1;", x, result="i32")


def bits(x: Scalar) -> Scalar:
    """The bits of a float32 as an integer, or of an integer as a float32."""
    return Scalar(arith.bitcast(_i32() if x.is_float else ir.F32Type.get(), x.value))


def ptx(code: str, *args: Scalar, result: str | Sequence[str] | None = None, convergent: bool = False) -> Any:
    """Inline PTX. result: a type name or several; None for instructions that return nothing. convergent: whole warps
    must execute it."""
    names = [result] if isinstance(result, str) else list(result or ())
    types = [_type(name) for name in names]
    values = [x.value if isinstance(x, Scalar) else i32(x).value if isinstance(x, int) else x for x in args]
    effects = convergent or not types
    out = mgpu_utils.inline_ptx(code, *values, result_types=types or None, has_side_effects=effects, convergent=convergent)
    if not types:
        return None
    return Scalar(out[0]) if isinstance(result, str) else [Scalar(x) for x in out]


# Thread numbers.


def thread() -> Scalar:
    """Number of this thread in its CTA."""
    return Scalar(arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x)))


def lane() -> Scalar:
    """Number of this thread in its warp."""
    return thread() & 31


def warp() -> Scalar:
    """Number of this warp in its CTA."""
    return thread() >> 5


# Control flow.


def when(condition: Scalar) -> contextlib.AbstractContextManager:
    """Run the block in the threads for which `condition` holds."""
    return mgpu_utils.when(condition.value)


def loop(stop: Scalar | int, carry: Sequence[Scalar], body: Callable[..., Sequence[Scalar]], start: Scalar | int = 0, step: int = 1):
    """`for i in range(start, stop, step): carry = body(i, *carry)`; returns the carry."""
    bounds = [x.value if isinstance(x, Scalar) else _constant(x, _i32()) for x in (start, stop, step)]
    op = scf.ForOp(*bounds, [x.value for x in carry])
    with ir.InsertionPoint(op.body):
        scf.yield_([x.value for x in body(Scalar(op.induction_variable), *map(Scalar, op.inner_iter_args))])
    return [Scalar(x) for x in op.results]


def while_loop(condition: Callable[..., Scalar], body: Callable[..., Sequence[Scalar]], carry: Sequence[Scalar]) -> list[Scalar]:
    """`while condition(*carry): carry = body(*carry)`; returns the carry."""
    values = [x.value for x in carry]
    types = [x.type for x in values]
    op = scf.WhileOp(types, values)
    before = op.before.blocks.append(*types)
    with ir.InsertionPoint(before):
        scf.condition(condition(*map(Scalar, before.arguments)).value, list(before.arguments))
    after = op.after.blocks.append(*types)
    with ir.InsertionPoint(after):
        scf.yield_([x.value for x in body(*map(Scalar, after.arguments))])
    return [Scalar(x) for x in op.results]


# Memory. References are whole arrays (`plgpu.RefType()`); offsets count 32-bit words unless they are called bytes.


@dataclasses.dataclass(frozen=True)
class _OneOf:
    """An array of which only the pointer is known."""

    pointer: ir.Value


def either(condition: Scalar, a, b) -> _OneOf:
    """Array a if condition else array b, as an array argument of the functions below."""
    return _OneOf(arith.select(condition.value, _pointer(a), _pointer(b)))


def _pointer(ref) -> ir.Value:
    return ref.pointer if isinstance(ref, _OneOf) else mgpu_utils.memref_ptr(ref)


def address(ref, bytes_offset: Scalar | int, block: Scalar | int = 0, block_bytes: int = 0) -> ir.Value:
    """Pointer to `block * block_bytes + bytes_offset` after the start of an array. Only the first product is formed in
    64 bits."""
    pointer = _pointer(ref)
    byte, i64 = map(ir.IntegerType.get_signless, (8, 64))
    gep = functools.partial(llvm.getelementptr, pointer.type, elem_type=byte, no_wrap_flags=llvm.GEPNoWrapFlags.none)
    dynamic = -2147483648
    if block_bytes:
        wide = arith.muli(arith.extsi(i64, block.value), arith.constant(i64, block_bytes))
        pointer = gep(pointer, [wide], [dynamic])
    if isinstance(bytes_offset, int):
        return gep(pointer, [], [bytes_offset])
    return gep(pointer, [bytes_offset.value], [dynamic])


def part(ref, bytes_offset: Scalar | int, block: Scalar | int = 0, block_bytes: int = 0) -> _OneOf:
    """An array from `address` of these on, as an array argument of the functions below. Offsets in it that are no
    Scalars cost nothing."""
    return _OneOf(address(ref, bytes_offset, block, block_bytes))


def _load(pointer, names: Sequence[str], space: str, hint: str = "") -> list[Scalar]:
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(names)]
    kind = "f32" if names[0] == "f32" else "u32"
    targets = ", ".join(f"${i}" for i in range(len(names)))
    targets = f"{{{targets}}}" if vector else targets
    code = f"ld.{space}{hint}{vector}.{kind} {targets}, [${len(names)}];"
    types = [_type(name) for name in names]
    out = mgpu_utils.inline_ptx(code, pointer, result_types=types, has_side_effects=not (space == "global" and hint))
    return [Scalar(x) for x in out]


def load_global(ref, offset: Scalar | int, name: str = "i32") -> Scalar:
    """One 32-bit word of an array in global memory that nothing writes meanwhile."""
    return _load(address(ref, offset * 4), [name], "global", ".nc")[0]


def load_global_now(ref, offset: Scalar | int, size: int = 4) -> Scalar:
    """One integer of 4 bytes, or of 1 or 2 bytes without a sign, loaded at this place of the program. Compilers move
    other loads to where their value is needed. offset: counts such integers."""
    pointer = address(ref, offset * size)
    if size == 4:
        return _load(pointer, ["i32"], "global")[0]
    return Scalar(mgpu_utils.inline_ptx(f"ld.global.u{8 * size} $0, [$1];", pointer, result_types=[_i32()], has_side_effects=True)[0])


def load_global_16_bytes(ref, offset_bytes: Scalar | int, *, block: Scalar | None = None, block_bytes: int = 0) -> list[Scalar]:
    """Four words of an array in global memory that nothing writes meanwhile; both offsets multiples of 16 bytes.
    Bypasses the L1 cache."""
    pointer = address(ref, offset_bytes, block, block_bytes) if block is not None else address(ref, offset_bytes)
    return _load(pointer, ["i32"] * 4, "global", ".nc.L1::no_allocate")


def load_ahead(ref, offset_bytes: Scalar | int, size: int) -> list[Scalar]:
    """16 bytes, as four words, or 2 bytes, as one integer, of an array in global memory that nothing writes meanwhile,
    loaded at this place of the program. What needs them waits."""
    pointer = address(ref, offset_bytes)
    if size == 16:
        code, names = "ld.global.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];", ["i32"] * 4
    else:
        code, names = "ld.global.u16 $0, [$1];", ["i32"]
    out = mgpu_utils.inline_ptx(code, pointer, result_types=[_type(name) for name in names], has_side_effects=True)
    return [Scalar(x) for x in out]


def store_global(ref, offset: Scalar | int, *values: Scalar) -> None:
    """Store 1, 2 or 4 consecutive words to an array in global memory."""
    _store(address(ref, offset * 4), values, "global")


def store_global_if(condition: Scalar, ref, offset_bytes: Scalar | int, word: Scalar, *, block: Scalar, block_bytes: int) -> None:
    """Store a word to an array in global memory if the condition holds, without a branch; otherwise the place may be
    invalid."""
    code = "{.reg .pred p; setp.ne.s32 p, $1, 0; @p st.global.b32 [$0], $2;}"
    word = bits(word) if word.is_float else word
    ptx(code, address(ref, offset_bytes, block, block_bytes), where(condition, i32(1), 0), word)


def load_written(ref, offset_bytes: Scalar | int, name: str, *, block: Scalar, block_bytes: int, only: Scalar | None = None) -> Scalar:
    """One word of an array in global memory, as this warp left it before its last barrier; loaded at this place of the
    program.

    only: by which threads. The others get an undefined value, and their places may be invalid.
    """
    if only is None:
        return _load(address(ref, offset_bytes, block, block_bytes), [name], "global")[0]
    code = f"{{.reg .pred p; setp.ne.s32 p, $2, 0; @p ld.global.{'f32' if name == 'f32' else 'u32'} $0, [$1];}}"
    operands = address(ref, offset_bytes, block, block_bytes), where(only, i32(1), 0).value
    return Scalar(mgpu_utils.inline_ptx(code, *operands, result_types=[_type(name)], has_side_effects=True)[0])


def warp_barrier() -> None:
    """Wait for the other lanes of the warp. Their earlier writes are visible afterwards."""
    ptx("bar.warp.sync 0xffffffff;", convergent=True)


def load_written_16_bytes(ref, offset_bytes: Scalar | int, *, block: Scalar, block_bytes: int) -> list[Scalar]:
    """Four words of an array in global memory, as this CTA left them before its last barrier; both offsets multiples of
    16 bytes."""
    return _load(address(ref, offset_bytes, block, block_bytes), ["i32"] * 4, "global")


def store_global_16_bytes(ref, offset_bytes: Scalar | int, *words: Scalar, block: Scalar, block_bytes: int) -> None:
    """Store four words to an array in global memory; both offsets multiples of 16 bytes."""
    _store(address(ref, offset_bytes, block, block_bytes), words, "global")


def address_words(ref) -> tuple[Scalar, Scalar]:
    """The address of an array in global memory: its low and its high 32 bits. See `at_address`."""
    low, high = ptx("mov.b64 {$0, $1}, $2;", _pointer(ref), result=("i32", "i32"))
    return low, high


def at_address(table, offset: Scalar | int) -> _OneOf:
    """The array in global memory, maybe another device's, whose address is in two words of an array
    (`address_words`)."""
    i64 = ir.IntegerType.get_signless(64)
    low, high = (arith.extui(i64, load_global(table, offset + half).value) for half in range(2))
    whole = arith.ori(low, arith.shli(high, arith.constant(i64, 32)))
    return _OneOf(llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), whole))


def store_line(ref, offset: Scalar, *words: Scalar) -> None:
    """Store four words to an array in global memory, maybe another device's, that other threads read meanwhile
    (`load_line`). The first two arrive together, and the last two; nothing else is ordered. offset: a multiple of 4."""
    ptx("st.volatile.global.v4.b32 [$0], {$1, $2, $3, $4};", address(ref, offset * 4), *words)


def load_line(ref, offset: Scalar) -> list[Scalar]:
    """Four words that other threads may write meanwhile, as they are now: the first two together, and the last two."""
    code = "ld.volatile.global.v4.u32 {$0, $1, $2, $3}, [$4];"
    out = mgpu_utils.inline_ptx(code, address(ref, offset * 4), result_types=[_i32()] * 4, has_side_effects=True)
    return [Scalar(x) for x in out]


def load_shared(ref, offset: Scalar | int, name: str = "i32", count: int = 1) -> list[Scalar]:
    """Load 1, 2 or 4 consecutive words of shared memory."""
    return _load(address(ref, offset * 4), [name] * count, "shared")


def store_shared(ref, offset: Scalar | int, *values: Scalar) -> None:
    """Store 1, 2 or 4 consecutive words to shared memory."""
    _store(address(ref, offset * 4), values, "shared")


def _store(pointer, values: Sequence[Scalar], space: str) -> None:
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(values)]
    sources = ", ".join(f"${i + 1}" for i in range(len(values)))
    sources = f"{{{sources}}}" if vector else sources
    kind = "f32" if values[0].is_float else "b32"
    mgpu_utils.inline_ptx(f"st.{space}{vector}.{kind} [$0], {sources};", pointer, *(x.value for x in values))


def count_shared(ref, offset: Scalar, condition: Scalar) -> None:
    """Add 1 to an integer in shared memory, atomically, if the condition holds; otherwise the offset may be invalid."""
    code = "{.reg .pred p; setp.ne.s32 p, $1, 0; @p red.shared.add.u32 [$0], 1;}"
    mgpu_utils.inline_ptx(code, address(ref, offset * 4), where(condition, i32(1), 0).value, has_side_effects=True)


def store_cluster(cta: Scalar | int, ref, offset: Scalar | int, *values: Scalar) -> None:
    """Store 1, 2 or 4 consecutive words to the shared memory of CTA number `cta` of this cluster (x varies fastest)."""
    there = ptx("mapa.shared::cluster.u32 $0, $1, $2;", address(ref, offset * 4), cta, result="i32")
    _store(there.value, values, "shared::cluster")


# Warps, the CTA, the cluster.


def shuffle_xor(x: Scalar, distance: int) -> Scalar:
    """The value of the lane whose number differs by `distance` (a power of two)."""
    return Scalar(mgpu_utils.shfl_bfly(x.value, distance))


def shuffle(x: Scalar, lane: Scalar | int) -> Scalar:
    """The value of lane number `lane`."""
    return ptx("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", x, lane, result="i32", convergent=True)


def ballot(condition: Scalar) -> Scalar:
    """One bit per lane of the warp: where the condition holds."""
    flag = where(condition, i32(1), i32(0))
    code = "{.reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"
    return ptx(code, flag, result="i32", convergent=True)


def popcount(x: Scalar) -> Scalar:
    """How many bits are set."""
    return Scalar(math.ctpop(x.value))


def lanes_below() -> Scalar:
    """The bits of the lanes before this one."""
    return ptx("mov.u32 $0, %lanemask_lt;", result="i32")


def warp_reduce(x: Scalar, kind: str) -> Scalar:
    """ "add", "min" or "max" of an integer over the warp."""
    return ptx(f"redux.sync.{kind}.s32 $0, $1, 0xffffffff;", x, result="i32", convergent=True)


SHARED_BYTES = {9: 222 << 10, 10: 222 << 10, 12: 94 << 10}
"""Bytes of shared memory for a CTA's stages, by the first number of the compute capability: less than there are, as
Mosaic needs some."""


def shared_words() -> int:
    """32-bit words of shared memory for a CTA's stages on this process's GPU; where there is none, on a Hopper GPU."""
    capability = dispatch.compute_capability()
    return SHARED_BYTES.get(capability[0] if capability else 9, SHARED_BYTES[9]) // 4


CTA_BARRIER = 15
"""The hardware barrier that these functions use; Mosaic counts its own up from 0."""


def cta_barrier(threads: int) -> None:
    """Wait for all threads of the CTA. Their earlier writes to shared memory are visible afterwards."""
    ptx(f"barrier.cta.sync.aligned {CTA_BARRIER}, {threads};", convergent=True)


def publish_to_tensor_cores() -> None:
    """Make this thread's earlier writes to shared memory visible to `wgmma` and TMA after the next barrier."""
    ptx("fence.proxy.async.shared::cta;")


def cluster_barrier() -> None:
    """Wait for all threads of the cluster. Their earlier writes to each other's shared memory are visible
    afterwards."""
    cluster_arrive()
    cluster_wait()


def cluster_arrive() -> None:
    """The first half of `cluster_barrier`: this thread has come."""
    ptx("barrier.cluster.arrive.release.aligned;", convergent=True)


def cluster_wait() -> None:
    """The second half: wait until all have come, and see what they wrote before."""
    ptx("barrier.cluster.wait.acquire.aligned;", convergent=True)
