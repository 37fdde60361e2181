"""What inline PTX does, by its code: the table that `emulated_lanes` looks into. A new instruction is a new entry of
`CODES`.

Keys are regular expressions over the code, whose operands are numbered, the results first. A function takes the
machine, the operands that are not results, and the groups of the expression by name; it returns the results. `{... setp
p; @p X}` is X with the predicate left out, among the threads `where` it holds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

from emulator.values import F32, I32, Divergence, Fault, Pointer, UnknownCode, Value, unknown_in

CODES: dict[str, Callable] = {}
WITH_ALL_LANES: set[str] = set()
WITH_EFFECTS: set[str] = set()

_PREDICATED = re.compile(r"\{\.reg \.pred p; setp\.ne\.s32 p, \$(\d+), 0; @p (.*)\}")


def code(*patterns: str, convergent: bool = False, effects: bool = False) -> Callable:
    """Decorator: the function of codes. convergent, effects: the compiler has to be told that it concerns all lanes,
    that it may not be moved or dropped."""

    def decorate(function):
        for pattern in patterns:
            CODES[pattern] = function
            WITH_ALL_LANES.update([pattern] * convergent)
            WITH_EFFECTS.update([pattern] * effects)
        return function

    return decorate


@functools.cache
def _find(text: str) -> tuple[str, dict[str, str], int | None]:
    """The pattern that a code matches, its groups, and the operand that is its predicate."""
    predicated = _PREDICATED.fullmatch(text)
    flag, inner = (int(predicated[1]), predicated[2]) if predicated else (None, text)
    if predicated:
        inner = re.sub(r"\$(\d+)", lambda n: f"${int(n[1]) - (int(n[1]) > flag)}", inner)
    for pattern in CODES:
        match = re.fullmatch(pattern, inner)
        if match:
            return pattern, {name: x or "" for name, x in match.groupdict().items()}, flag
    raise UnknownCode(f"no function for {text!r}: add it to `CODES`")


def run(machine, text: str, values: tuple, results: int, effects: bool, convergent: bool) -> tuple:
    """The results of a piece of inline PTX with `values` as its operands that are not results."""
    pattern, groups, flag = _find(text)
    if pattern in WITH_ALL_LANES and not convergent:
        raise Divergence(f"{text!r} concerns all lanes of the warp, and the compiler is not told (convergent)")
    if pattern in WITH_EFFECTS and not effects:
        raise Fault(f"{text!r} must stay where it is, and the compiler is not told (has_side_effects)")
    extra = {}
    if flag is not None:
        extra["where"] = machine.known(values[flag - results], "decides") != 0
        values = values[: flag - results] + values[flag - results + 1 :]
    out = CODES[pattern](machine, *values, **groups, **extra)
    out = () if out is None else tuple(out) if isinstance(out, tuple | list) else (out,)
    if len(out) != results:
        raise TypeError(f"{text!r} has {len(out)} results, not {results}")
    return out


# Arithmetic.


def value(data, *sources: Value) -> Value:
    """A number per thread, made of others."""
    data = np.asarray(data)
    kind = F32 if data.dtype == np.float32 else I32
    return Value(data.view(np.int32) if data.dtype == np.uint32 else data, kind, unknown_in(*sources))


def pure(name: str, function: Callable) -> None:
    """The code `name $0, $1, ...;` of a function of numbers to one number."""
    operands = ", ".join(rf"\${n}" for n in range(function.__code__.co_argcount + 1))

    @code(rf"{re.escape(name)} {operands};")
    def apply(machine, *values):
        return value(function(*(np.asarray(x.data) for x in values)), *values)


def _unsigned(x):
    return np.asarray(x, x.dtype).view(np.uint32)


def _flushed(x):
    """Denormals as 0."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _integer(x):
    """A float without a fraction as an integer: too large ones as the largest, NaN as 0."""
    return np.where(np.isnan(x), 0, np.clip(x.astype(np.float64), -(2**31), 2**31 - 1)).astype(np.int32)


def _zero_when_far(shift: Callable, x, places):
    places = _unsigned(places)
    return np.where(places < 32, shift(_unsigned(x), places & 31), 0).astype(np.uint32)


pure("mov.u32", lambda x: x)
pure("ex2.approx.ftz.f32", lambda x: _flushed(np.exp2(_flushed(x))))
pure("lg2.approx.ftz.f32", lambda x: np.log2(_flushed(x)))
pure("rcp.approx.ftz.f32", lambda x: _flushed(np.float32(1) / _flushed(x)))
pure("sqrt.approx.f32", lambda x: np.sqrt(x) + np.float32(0))
pure("rsqrt.approx.f32", lambda x: np.float32(1) / np.sqrt(x))
pure("add.rn.f32", lambda a, b: a + b)
pure("sub.rn.f32", lambda a, b: a - b)
pure("mul.rn.f32", lambda a, b: a * b)
pure("div.rn.f32", lambda a, b: a / b)
pure("div.full.f32", lambda a, b: a / b)  # rounded more exactly than by a GPU
pure("rcp.approx.f32", lambda x: np.float32(1) / x)
pure("fma.rn.f32", lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32))
pure("max.f32", lambda a, b: np.fmax(a, b))
pure("min.f32", lambda a, b: np.fmin(a, b))
pure("max.s32", lambda a, b: np.maximum(a, b))
pure("min.s32", lambda a, b: np.minimum(a, b))
pure("max.u32", lambda a, b: np.maximum(_unsigned(a), _unsigned(b)))
pure("min.u32", lambda a, b: np.minimum(_unsigned(a), _unsigned(b)))
pure("shr.u32", lambda x, places: _zero_when_far(np.right_shift, x, places))
pure("shl.b32", lambda x, places: _zero_when_far(np.left_shift, x, places))
pure("clz.b32", lambda x: 32 - np.frexp(_unsigned(x).astype(np.float64))[1].astype(np.int32))
pure("popc.b32", lambda x: np.bitwise_count(_unsigned(x)).astype(np.int32))
pure("cvt.rn.f32.s32", lambda x: x.astype(np.float32))
pure("cvt.rzi.s32.f32", lambda x: _integer(np.trunc(x)))
pure("cvt.rni.s32.f32", lambda x: _integer(np.rint(x)))
pure("cvt.rmi.s32.f32", lambda x: _integer(np.floor(x)))
pure("cvt.rpi.s32.f32", lambda x: _integer(np.ceil(x)))


@code(r"lop3\.b32 \$0, \$1, \$2, \$3, (?P<table>0x[0-9a-f]{2});")
def _logic(machine, a, b, c, table):
    """Bit n of the table is the result for the bits (a, b, c) of n."""
    bits, found = [_unsigned(np.asarray(x.data)) for x in (a, b, c)], np.uint32(0)
    for n in range(8):
        if int(table, 16) >> n & 1:
            own = [x if n >> place & 1 else ~x for x, place in zip(bits, (2, 1, 0), strict=True)]
            found = found | own[0] & own[1] & own[2]
    return value(found, a, b, c)


@code(r"prmt\.b32 \$0, \$1, \$2, (?P<order>0x[0-7]{4}|\$3);")
def _permute(machine, a, b, *lanes_order, order):
    """Digit n, the lowest first, says which byte of (a, b) is byte n. Lanes may have an order each."""
    words = [_unsigned(np.asarray(x.data)) for x in (a, b)]
    digits = _unsigned(np.asarray(lanes_order[0].data)) if lanes_order else np.uint32(int(order, 16))
    if (digits & 0x8888).any():
        raise TypeError("an order with the sign of a byte")
    found = np.uint32(0)
    for n in range(4):
        digit = digits >> np.uint32(4 * n) & np.uint32(7)
        chosen = np.where(digit < 4, *words) >> (digit % np.uint32(4) * np.uint32(8)) & np.uint32(255)
        found = found | chosen << np.uint32(8 * n)
    return value(found, a, b, *lanes_order)


_HALF = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}


def _join(low, high, kind: str):
    """Two numbers, rounded, in a word."""
    low, high = (np.asarray(x).astype(_HALF[kind]).view(np.uint16).astype(np.uint32) for x in (low, high))
    return low | high << np.uint32(16)


def _split(word, kind: str):
    """The two numbers of a word as float32."""
    word = _unsigned(np.asarray(word))
    return [(x & np.uint32(0xFFFF)).astype(np.uint16).view(_HALF[kind]).astype(np.float32) for x in (word, word >> np.uint32(16))]


@code(r"cvt\.rn\.(?P<kind>bf16x2|f16x2)\.f32 \$0, \$1, \$2;")
def _pack(machine, high, low, kind):
    return value(_join(low.data, high.data, kind), high, low)


@code(r"(?P<name>mul\.rn|sub\.rn|max|min)\.(?P<kind>bf16x2|f16x2) \$0, \$1, \$2;")
def _pairs(machine, a, b, name, kind):
    function = {"mul.rn": np.multiply, "sub.rn": np.subtract, "max": np.fmax, "min": np.fmin}[name]
    return value(_join(*map(function, _split(a.data, kind), _split(b.data, kind)), kind), a, b)


@code(r"max\.u16x2 \$0, \$1, \$2;")
def _larger_pairs(machine, a, b):
    a_words, b_words = (_unsigned(np.asarray(x.data)) for x in (a, b))
    low, high = (np.maximum(a_words & mask, b_words & mask) for mask in (np.uint32(0xFFFF), np.uint32(0xFFFF0000)))
    return value(low | high, a, b)


@code(r"fma\.rn\.(?P<kind>bf16x2|f16x2) \$0, \$1, \$2, \$3;")
def _multiply_add_pairs(machine, a, b, c, kind):
    low, high = (x.astype(np.float64) * y + z for x, y, z in zip(*(_split(x.data, kind) for x in (a, b, c)), strict=True))
    return value(_join(low, high, kind), a, b, c)


@code(re.escape("{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}"))
def _unpack(machine, word):
    return [value(x, word) for x in _split(word.data, "f16x2")]


@code(re.escape("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h};}"))
def _to_e4m3(machine, *numbers):
    """Four numbers in the bytes of a word; NaN without its sign."""
    data = np.stack(np.broadcast_arrays(*(np.atleast_1d(x.data) for x in numbers)), -1)
    data = np.where(np.isnan(data), np.float32(np.nan), np.clip(data, -448, 448))
    return value(data.astype(ml_dtypes.float8_e4m3fn).view(np.int32)[..., 0], *numbers)


@code(
    re.escape(
        "{.reg .b16 l, h; .reg .b32 w; prmt.b32 w, $2, 0, 0x3120; mov.b32 {l, h}, w; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}"
    )
)
def _of_e4m3(machine, word):
    """Bytes 0 and 2, and 1 and 3."""
    data = np.ascontiguousarray(np.atleast_1d(word.data))
    found = data.view(ml_dtypes.float8_e4m3fn).reshape(-1, 4).astype(np.float32)
    return [value(_join(found[:, n], found[:, n + 2], "f16x2"), word) for n in range(2)]


# Memory.

_VECTOR = {"": 1, ".v2": 2, ".v4": 4}
_PLACES = r"(?:\$\d+|\{\$\d+(?:, \$\d+)*\})"
_HINTS = r"(?:\.L1::no_allocate|\.L1::evict_last|\.L1::evict_first|\.L2::128B|\.L2::256B)*"
_KIND = r"(?P<kind>[fbus])32"


@code(rf"ld\.(?P<space>global)(?P<constant>\.nc){_HINTS}(?P<vector>\.v[24])?\.{_KIND} {_PLACES}, \[\$\d+\];")
@code(
    rf"ld\.(?P<space>global|shared(?:::cta|::cluster)?)(?P<constant>){_HINTS}(?P<vector>\.v[24])?\.{_KIND} {_PLACES}, \[\$\d+\];",
    effects=True,
)
def _load(machine, pointer, space, constant, vector, kind, where=None):
    found = machine.load(pointer, _VECTOR[vector], space=space, constant=bool(constant), where=where)
    return [Value(x.view(np.float32), F32, unknown) if kind == "f" else Value(x, I32, unknown) for x, unknown in found]


@code(r"ld\.volatile\.global\.v4\.u32 \{\$0, \$1, \$2, \$3\}, \[\$4\];", effects=True)
def _load_line(machine, pointer):
    return _load(machine, pointer, "global", "", ".v4", "u")


@code(r"st\.volatile\.global\.v4\.b32 \[\$0\], \{\$1, \$2, \$3, \$4\};", effects=True)
def _store_line(machine, pointer, *words):
    machine.store(pointer, words, space="global")


@code(r"ld\.global\.u(?P<bits>8|16) \$0, \[\$1\];", effects=True)
def _load_part(machine, pointer, bits):
    return Value(machine.load_part(pointer, int(bits) // 8), I32)


@code(rf"st\.(?P<space>global|shared(?:::cta|::cluster)?)(?P<vector>\.v[24])?\.{_KIND} \[\$0\], {_PLACES};", effects=True)
def _store(machine, pointer, *values, space, vector, kind, where=None):
    if len(values) != _VECTOR[vector]:
        raise TypeError(f"{len(values)} operands of a store of {_VECTOR[vector]} words")
    machine.store(pointer, values, space=space, where=where)


@code(r"red\.(?P<space>global|shared(?:::cta|::cluster)?)\.add\.[us]32 \[\$0\], (?P<amount>\d+|\$1);", effects=True)
def _add(machine, pointer, *amounts, space, amount, where=None):
    machine.add(pointer, amounts[0] if amounts else Value(np.int32(amount), I32), space=space, where=where)


@code(r"red\.shared\.or\.b32 \[\$0\], \$1;", effects=True)
def _set_bits(machine, pointer, bits, where=None):
    machine.set_bits(pointer, bits, where=where)


@code(r"atom\.(?P<space>global|shared(?:::cta|::cluster)?)\.add\.[us]32 \$0, \[\$1\], (?P<amount>\d+|\$2);", effects=True)
def _fetch_and_add(machine, pointer, *amounts, space, amount, where=None):
    return Value(machine.add(pointer, amounts[0] if amounts else Value(np.int32(amount), I32), space=space, where=where), I32)


@code(r"mapa\.shared::cluster\.u32 \$0, \$1, \$2;")
def _in_another_cta(machine, pointer: Pointer, cta: Value):
    number = machine.known(cta, "goes to a CTA")
    machine.refuse((number < 0) | (number >= machine.count_ctas), Fault, f"goes to a CTA beyond the {machine.count_ctas} of the cluster")
    memory = pointer.memory
    if memory is None or memory.is_global:
        raise TypeError("`mapa` of what is no shared memory")
    return Pointer(memory, pointer.offset, number)


@code(r"cp\.async\.c[ag]\.shared\.global(?:\.L2::(?:128|256)B)? \[\$0\], \[\$1\], 16(?:, \$2)?;", effects=True)
def _copy(machine, target, source, size=None, where=None):
    machine.start_copies(target, source, size or Value(np.int32(16), I32), where)


@code(r"cp\.async\.commit_group;", effects=True)
def _commit(machine):
    machine.commit()


@code(r"cp\.async\.wait_group (?P<groups>\d+);", effects=True)
def _wait(machine, groups):
    machine.wait(int(groups))


@code(r"cp\.async\.wait_all;", effects=True)
def _wait_all(machine):
    machine.commit()
    machine.wait(0)


@code(r"mbarrier\.init\.shared::cta\.b64 \[\$0\], 1;", effects=True)
def _make_arrival(machine, pointer):
    machine.make_arrivals(pointer)


@code(r"mbarrier\.inval\.shared::cta\.b64 \[\$0\];", effects=True)
def _forget_arrival(machine, pointer):
    machine.forget_arrivals(pointer)


@code(r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[\$0\], \$1;", effects=True)
def _expect(machine, pointer, size):
    machine.expect(pointer, size)


@code(r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes \[\$0\], \[\$1\], \$2, \[\$3\];", effects=True)
def _copy_bulk(machine, target, source, size, arrival):
    machine.start_bulk_copies(target, source, size, arrival)


@code(
    r"\{\.reg \.pred p; WAIT: mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[\$0\], \$1; @p bra DONE; bra WAIT; DONE:\}", convergent=True
)
def _await(machine, pointer, parity):
    machine.wait_for_arrivals(pointer, parity)


@code(r"fence\.mbarrier_init\.release\.cluster;", effects=True)
@code(r"prefetch\.global\.L[12](?:::evict_last)? \[\$0\];", r"fence\.proxy\.async\.shared::cta;", effects=True)
def _nothing_to_see(machine, *pointer):
    pass


# Warps, CTAs, the cluster.


@code(r"mov\.u32 \$0, %lanemask_(?P<which>lt|le|gt|ge|eq);")
def _lane_mask(machine, which):
    bit = np.int64(1) << (machine.thread & 31).astype(np.int64)
    mask = {"lt": bit - 1, "le": 2 * bit - 1, "eq": bit, "gt": 2**32 - 2 * bit, "ge": 2**32 - bit}[which]
    return value(mask.astype(np.uint32))


@code(r"mov\.u32 \$0, \$1;")
def _opaque(machine, x):
    return x


@code(r"mov\.u32 \$0, %clock;", effects=True)
def _clock(machine):
    return Value(np.full(machine.size, machine.clock.tick, np.int32), I32)


@code(r"bar\.warp\.sync 0xffffffff;", convergent=True)
def _warp_barrier(machine):
    machine.warp_barrier()


@code(r"barrier\.cta\.sync\.aligned \d+, (?P<threads>\d+);", convergent=True)
def _cta_barrier(machine, threads):
    machine.cta_barrier(int(threads))


@code(r"barrier\.cluster\.arrive\.release\.aligned;", convergent=True)
def _arrive(machine):
    machine.arrive()


@code(r"barrier\.cluster\.wait\.acquire\.aligned;", convergent=True)
def _wait_for_cluster(machine):
    machine.wait_for_cluster()


@code(r"shfl\.sync\.(?P<kind>idx|bfly|up|down)\.b32 \$0, \$1, (?P<by>\$2|\d+), (?:0x1f|0|31), 0xffffffff;", convergent=True)
def _shuffle(machine, x, *lane, kind, by):
    lane = machine.known(lane[0], "shuffles") if lane else int(by)
    own = machine.thread & 31
    from_ = {"idx": lane & 31, "bfly": own ^ lane, "up": own - lane, "down": own + lane}[kind]
    found = machine.across(x, np.where((from_ < 0) | (from_ > 31), own, from_))
    return Value(found.data.view(np.int32), I32, found.unknown)


@code(re.escape("{.reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"), convergent=True)
def _ballot(machine, flag):
    def ballot(flags):
        return np.packbits(flags != 0, axis=1, bitorder="little").view(np.int32)[:, 0]

    return machine.per_warp(flag, ballot, "a ballot")


_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@code(r"redux\.sync\.(?P<name>add|min|max|and|or|xor)\.(?P<kind>[sub])32 \$0, \$1, 0xffffffff;", convergent=True)
def _reduce(machine, x, name, kind):
    def reduce(values):
        values = values.view(np.uint32) if kind == "u" else values
        return _REDUCTIONS[name].reduce(values, axis=1, dtype=values.dtype).view(np.int32)

    return machine.per_warp(x, reduce, "a reduction")


_REGISTERS = r"\{\$0, \$1, \$2, \$3\}"


@code(rf"ldmatrix\.sync\.aligned\.m8n8\.x4(?P<turned>\.trans)?\.shared\.b16 {_REGISTERS}, \[\$4\];", convergent=True)
def _load_matrices(machine, pointer, turned):
    """Lane 8m + r points to row r of matrix m; lane (g, t) gets word t of row g of each, or of each turned round."""
    words = [Value(x, I32, unknown) for x, unknown in machine.load(pointer, 4, space="shared", constant=False)]
    row, word = (machine.thread & 31) >> 2, machine.thread & 3
    found = []
    for matrix in range(4):
        of_row = [machine.across(x, row + 8 * matrix) for x in words]
        data = np.select([word == n for n in range(4)], [x.data for x in of_row])
        word_of_lane = Value(data, I32, unknown_in(*of_row))
        found.append(_turn_matrix(machine, word_of_lane) if turned else word_of_lane)
    return found


@code(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16 \$0, \$1;", convergent=True)
def _turn_matrix(machine, word):
    """Lane (g, t) gives columns 2t, 2t + 1 of row g, and gets rows 2t, 2t + 1 of column g."""
    machine.whole_warps("a matrix that is turned round")
    halves = np.broadcast_to(word.data, machine.size).astype(np.int32).view(np.uint16).reshape(-1, 8, 8)
    turned = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1).view(np.int32)
    unknown = None
    if word.unknown is not None:  # of one lane: of all, since each word is spread over several
        unknown = np.repeat(np.broadcast_to(word.unknown, machine.size).reshape(-1, 32).any(1), 32)
    return Value(turned, I32, unknown)


def _product_words(machine, acc, words) -> list[Value]:
    """The words of a product `acc` `[warps, 16, 8]` of the operands `words`. A number is unknown where a word of its
    row of A is, of its column of B, or its own before."""
    found = [acc[:, 8 * (n // 2) : 8 * (n // 2) + 8, n % 2 :: 2].reshape(-1) for n in range(4)]
    if all(x.unknown is None for x in words):
        return [Value(x, words[6].type) for x in found]
    masks = [np.broadcast_to(False if x.unknown is None else x.unknown, machine.size).reshape(-1, 8, 4) for x in words]
    rows = [np.any(masks[half] | masks[half + 2], 2, keepdims=True) for half in range(2)]  # [warps, g, 1]
    columns = np.any(masks[4] | masks[5], 2)[:, None]  # [warps, 1, g]
    unknown = [rows[n // 2] | columns[:, :, n % 2 :: 2] | masks[6 + n] for n in range(4)]
    return [Value(x, words[6].type, mask.reshape(-1)) for x, mask in zip(found, unknown, strict=True)]


@code(
    rf"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(?P<kind>bf16|f16)\.(?P=kind)\.f32 {_REGISTERS}, "
    r"\{\$4, \$5, \$6, \$7\}, \{\$8, \$9\}, \{\$10, \$11, \$12, \$13\};",
    convergent=True,
)
def _multiply_matrices(machine, *words, kind):
    """acc + A [16, 16] @ B [16, 8], per warp. The words of lane (g, t): of A rows g, g + 8 of columns 2t and on, the
    same of columns 2t + 8 and on; of B rows 2t and on, 2t + 8 and on, of column g; of acc columns 2t, 2t + 1 of rows g,
    g + 8."""
    machine.whole_warps("a matrix product")
    spread = [np.broadcast_to(x.data, machine.size).reshape(-1, 8, 4) for x in words]  # [warps, g, t]
    a, b = np.zeros((2, len(spread[0]), 16, 16), np.float64)
    acc = np.zeros((len(a), 16, 8), np.float64)
    for n, word in enumerate(spread[:4]):
        for i, x in enumerate(_split(word, kind + "x2")):
            a[:, 8 * (n % 2) : 8 * (n % 2) + 8, 8 * (n // 2) + i : 8 * (n // 2) + 8 : 2] = x
    for n, word in enumerate(spread[4:6]):
        for i, x in enumerate(_split(word, kind + "x2")):
            b[:, 8 * n + i : 8 * n + 8 : 2, :8] = x.swapaxes(1, 2)
    for n, x in enumerate(spread[6:]):
        acc[:, 8 * (n // 2) : 8 * (n // 2) + 8, n % 2 :: 2] = x
    acc = (acc + a @ b[:, :, :8]).astype(np.float32)
    return _product_words(machine, acc, words)


@code(
    rf"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.(?P<kind>[su])8\.s32 {_REGISTERS}, "
    r"\{\$4, \$5, \$6, \$7\}, \{\$8, \$9\}, \{\$10, \$11, \$12, \$13\};",
    convergent=True,
)
def _multiply_integers(machine, *words, kind):
    """acc + A [16, 32] of int8 @ B [32, 8] of int8 or uint8, per warp. The words of lane (g, t): of A rows g, g + 8 of
    columns 4t and on, the same of columns 4t + 16 and on; of B rows 4t and on, 4t + 16 and on, of column g; of acc as
    above."""
    machine.whole_warps("a matrix product")
    spread = [np.broadcast_to(x.data, machine.size).astype(np.int32).reshape(-1, 8, 4) for x in words]  # [warps, g, t]
    kinds = [np.int8] * 4 + [np.int8 if kind == "s" else np.uint8] * 2
    of_bytes = [np.ascontiguousarray(x).view(of).reshape(-1, 8, 16).astype(np.int64) for x, of in zip(spread[:6], kinds, strict=True)]
    a = np.concatenate([np.concatenate(of_bytes[0:2], 1), np.concatenate(of_bytes[2:4], 1)], 2)
    b = np.concatenate(of_bytes[4:6], 2).swapaxes(1, 2)
    acc = np.zeros((len(a), 16, 8), np.int64)
    for n, x in enumerate(spread[6:]):
        acc[:, 8 * (n // 2) : 8 * (n // 2) + 8, n % 2 :: 2] = x
    acc = (acc + a @ b).astype(np.int32)
    return _product_words(machine, acc, words)
