"""The functions of `pallas_kernels.hopper.threads.lanes` that this op's kernel uses, in numpy: all threads of a CTA in
step.

What the single-thread code computes and where it writes can so be checked without a GPU. Beside wrong values it finds
reads and writes outside an array, threads that meet at a barrier only in part, and data that passes between threads
without a barrier.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

THREADS = 128


class Numbers:
    """One number per thread: int32, float32 or bool; `//` and `%` truncate, as in `lanes.Scalar`."""

    __hash__ = None

    def __init__(self, values):
        self.values = np.broadcast_to(values, (THREADS,))

    def _with(self, function, other):
        other = other.values if isinstance(other, Numbers) else np.asarray(other, self.values.dtype)
        with np.errstate(all="ignore"):
            return Numbers(function(self.values, other))

    def __add__(self, other):
        return self._with(np.add, other)

    def __sub__(self, other):
        return self._with(np.subtract, other)

    def __mul__(self, other):
        return self._with(np.multiply, other)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other):
        return self._with(np.divide, other)

    def __floordiv__(self, other):
        return self._with(lambda a, b: np.trunc(a / b).astype(np.int32), other)

    def __mod__(self, other):
        return self._with(lambda a, b: np.fmod(a, b), other)

    def __and__(self, other):
        return self._with(np.bitwise_and, other)

    def __lt__(self, other):
        return self._with(np.less, other)

    def __ge__(self, other):
        return self._with(np.greater_equal, other)

    def __eq__(self, other):
        return self._with(np.equal, other)


class Memory:
    """The words of an array, and who touched which since the last barrier. fixed: nobody may write."""

    def __init__(self, array, *, fixed: bool = False):
        array = np.array(array)
        self.words, self.shape, self.dtype = array.reshape(-1).view(np.int32), array.shape, array.dtype
        self.fixed = fixed
        self.settle()

    def settle(self):
        """All threads have met."""
        self.written, self.read = {}, {}

    @property
    def array(self):
        return self.words.view(self.dtype).reshape(self.shape)

    def access(self, thread: int, first: int, values=None, count: int = 1):
        assert 0 <= first <= len(self.words) - count, f"words {first} to {first + count} of {len(self.words)}"
        for word in range(first, first + count):
            assert self.written.get(word, thread) == thread, f"word {word} of another thread's, without a barrier"
            if values is not None:
                assert not self.fixed
                assert self.read.get(word, {thread}) == {thread}, f"word {word} overwritten while others read, without a barrier"
                self.written[word] = thread
            elif not self.fixed:
                self.read.setdefault(word, set()).add(thread)
        if values is not None:
            self.words[first : first + count] = values
        return self.words[first : first + count]


class Cta:
    """What `pallas_kernels.hopper.threads.lanes` offers, for one CTA. without: number of a barrier that is left out."""

    def __init__(self, memories, without: int | None = None):
        self.memories, self.active, self.barriers, self.without = memories, np.ones(THREADS, bool), 0, without

    def thread(self):
        return Numbers(np.arange(THREADS, dtype=np.int32))

    def f32(self, x):
        return Numbers(np.float32(x))

    def i32(self, x):
        return Numbers(np.int32(x))

    def bits(self, x):
        return Numbers(np.ascontiguousarray(x.values).view(np.float32 if x.values.dtype == np.int32 else np.int32))

    def where(self, condition, a, b):
        dtype = (a if isinstance(a, Numbers) else b).values.dtype
        return Numbers(np.where(condition.values, *(x.values if isinstance(x, Numbers) else dtype.type(x) for x in (a, b))))

    def maximum_or_nan(self, a, b):
        return Numbers(np.maximum(a.values, b.values))

    def minimum_or_nan(self, a, b):
        return Numbers(np.minimum(a.values, b.values))

    def maximum(self, a, b):
        return a._with(np.maximum, b)

    def minimum(self, a, b):
        return a._with(np.minimum, b)

    def multiply(self, a, b):
        return a * b

    def quotient_of_xla(self, a, b):
        return a / b

    def nearest(self, x):
        whole = np.nan_to_num(np.rint(x.values.astype(np.float64)), posinf=np.inf, neginf=-np.inf)
        return Numbers(np.clip(whole, -(2.0**31), 2.0**31 - 1).astype(np.int32))

    def unpack(self, word, dtype):
        pairs = np.ascontiguousarray(word.values).view(jnp.dtype(dtype)).reshape(THREADS, 2).astype(np.float32)
        return [Numbers(pairs[:, 0]), Numbers(pairs[:, 1])]

    def pack(self, low, high, dtype):
        return Numbers(np.stack([low.values, high.values], 1).astype(jnp.dtype(dtype)).view(np.int32)[:, 0])

    @contextlib.contextmanager
    def when(self, condition):
        outer = self.active
        self.active = outer & condition.values
        yield
        self.active = outer

    def loop(self, stop, carry, body, start=0, step=1):
        for i in range(start, stop, step) if self.active.any() else ():
            carry = body(Numbers(np.int32(i)), *carry)
        return list(carry)

    def cta_barrier(self, threads):
        assert threads == THREADS
        assert self.active.all() or not self.active.any(), "only some threads meet"
        if self.active.all():
            for memory in self.memories if self.barriers != self.without else ():
                memory.settle()
            self.barriers += 1

    def _each(self, ref, first, values=None, count=1):
        found = np.zeros((count, THREADS), np.int32)
        for thread in np.flatnonzero(self.active):
            own = None if values is None else [x[thread] for x in values]
            found[:, thread] = ref.access(int(thread), int(first[thread]), own, count)
        return found

    def _load(self, ref, first, count, name="i32"):
        found = self._each(ref, first, count=count)
        return [Numbers(x.view(np.float32) if name == "f32" else x) for x in found]

    def _store(self, ref, first, values):
        self._each(ref, first, [np.ascontiguousarray(x.values).view(np.int32) for x in values], len(values))

    def _piece(self, offset_bytes, block, block_bytes):
        place = offset_bytes.values.astype(np.int64) + (block.values.astype(np.int64) * block_bytes if block is not None else 0)
        assert (place[self.active] % 16 == 0).all()
        return place // 4

    def load_global(self, ref, offset):
        assert ref.fixed, "this load may come from a cache that does not see what the launch writes"
        return self._load(ref, offset.values, 1)[0]

    def load_global_16_bytes(self, ref, offset_bytes):
        assert ref.fixed
        return self._load(ref, self._piece(offset_bytes, None, 0), 4)

    def load_written_16_bytes(self, ref, offset_bytes, *, block, block_bytes):
        return self._load(ref, self._piece(offset_bytes, block, block_bytes), 4)

    def store_global_16_bytes(self, ref, offset_bytes, *words, block, block_bytes):
        self._store(ref, self._piece(offset_bytes, block, block_bytes), words)

    def part(self, ref, bytes_offset, block, block_bytes):
        return ref, self._piece(bytes_offset, block, block_bytes)

    def load_global_now(self, part, offset):
        ref, first = part
        return self._load(ref, first + offset.values, 1)[0]

    def store_global(self, part, offset, *words):
        ref, first = part
        self._store(ref, first + offset.values, words)

    def load_shared(self, ref, offset, name="i32", count=1):
        return self._load(ref, offset.values, count, name)

    def store_shared(self, ref, offset, *values):
        self._store(ref, offset.values, values)


@pytest.fixture
def threads():
    """`Memory`, `Cta`, `Numbers`."""
    return SimpleNamespace(Memory=Memory, Cta=Cta, Numbers=Numbers)
