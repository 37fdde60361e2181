"""select_blocks in Pallas Mosaic GPU (Hopper): one launch, a cluster of CTAs per sequence and KV head.

1. Score: each warp takes 16 blocks at a time and copies their index rows ahead into its own ring, those of long tables
   by bulk copies. They are one operand of `mma.m16n8k16`. The query, split into its positive and negative part, is the
   other; its heads are the 8 columns.
2. Choose the k best, exactly (`choose`). Up to `AT_ONCE` candidates are dealt out in turn, every score goes to all CTAs
   (distributed shared memory), and all make the same choice. With more candidates, each CTA takes a span, chooses its
   best, and sends these to all others, which choose again. Where the table names at most k blocks, all are listed, and
   nothing is scored.

Memory traffic: each candidate's index rows once (R * D elements), 4 bytes of page table per page, the list. Sources:
bounds scoring, Quest (ICML 2024). Selection by counting needs no sort and is exact and deterministic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode import clusters
from pallas_kernels.hopper.threads import lane_copies, lane_pairs, lane_sums, lanes
from pallas_kernels.selection.page_index import INDEX_ROWS
from pallas_kernels.selection.select_blocks import choose
from pallas_kernels.selection.select_blocks.api import Call, selection_width

AT_ONCE = 2048
"""Up to this many candidates, all CTAs choose once, among all. This saves the choice within their shares. (Faster at 64
and 1024.)"""

MAX_DEPTH = 3
"""Most turns of index rows that a warp has in flight."""

MIN_DEPTH_BULK = 2
"""Bulk copies need more shared memory, since nothing swizzles their rows. With fewer turns in flight they are slower
than others."""

PADDING_WORDS = 4
"""After a row that a bulk copy brings: pieces with the same number in 8 consecutive rows lie in different banks."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on. ctas: of the cluster that serves a (sequence, KV head). depth:
    turns of 16 index rows that a warp has in flight. threads: of a CTA. bulk: whether index rows come by bulk
    copies."""

    batch: int
    num_queries: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    table_width: int
    page_size: int
    block_size: int
    kind: str
    k: int
    sink: int
    local: int
    dtype: str
    ctas: int
    depth: int
    threads: int = 256
    bulk: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def per_page(self) -> int:
        """Blocks per page."""
        return self.page_size // self.block_size

    @property
    def width(self) -> int:
        """W, entries of a list."""
        return selection_width(page_size=self.page_size, block_size=self.block_size, k=self.k, sink=self.sink, local=self.local)

    @property
    def row_words(self) -> int:
        """32-bit words of a block's index rows."""
        return INDEX_ROWS[self.kind] * self.head_dim // 2

    @property
    def chunks(self) -> int:
        """Pieces of 64 bytes of a block's index rows: two steps of the matrix product."""
        return self.row_words // 16

    @property
    def column_tiles(self) -> int:
        """Matrix products of 8 columns. Bounds have a column per query head, means four columns (a float32 in three
        parts)."""
        return -(-self.group // 8) if self.kind == "bounds" else 1

    @property
    def blocks(self) -> int:
        """Blocks that a page table can name."""
        return self.table_width * self.per_page

    @property
    def lists_all(self) -> bool:
        """Whether every candidate is among the k best, so that nothing is scored."""
        return self.k >= self.blocks

    @property
    def at_once(self) -> bool:
        """Whether all CTAs choose once, among all candidates."""
        return self.blocks <= AT_ONCE

    @property
    def span(self) -> int:
        """Most keys among which a CTA chooses first."""
        return self.blocks if self.at_once else -(-self.blocks // self.ctas)

    @property
    def kept(self) -> int:
        """Most survivors that a CTA sends."""
        return 0 if self.at_once else min(self.k, self.span)

    @property
    def stride_words(self) -> int:
        """Words from an index row in shared memory to the next."""
        return self.row_words + PADDING_WORDS * self.bulk

    @property
    def slot_words(self) -> int:
        """Words of a warp's 16 index rows in flight."""
        return 16 * self.stride_words

    def with_ring(self, words: int) -> Shape:
        """The same with as many turns as a ring of so many words holds, up to `MAX_DEPTH`; 0 if it cannot hold one.

        Many rows come by bulk copies, of which a thread starts one for each row. Of few rows, the first would come
        later so.
        """
        plain, bulk = (dataclasses.replace(self, bulk=each) for each in (False, True))

        def depth(form: Shape) -> int:
            return min(MAX_DEPTH, max(0, words) // (form.threads // 32 * form.slot_words))

        form = bulk if not self.at_once and depth(bulk) >= MIN_DEPTH_BULK else plain
        return dataclasses.replace(form, depth=depth(form))

    def scratch_words(self) -> dict[str, int]:
        """Words of shared memory beside the ring: the query operand, keys, survivors of all CTAs (key, block), distant
        blocks, the list and its length, counters, and arrivals of bulk copies behind them, because an array of their
        own takes 1 KB."""
        return {
            "queries_s": self.column_tiles * self.chunks * 128,
            "keys_s": max(self.span, 1),
            "survivors_s": 2 * self.ctas * max(self.kept, 1),
            "distant_s": max(self.k, 1),
            "ids_s": self.width + 1,
            "counts_s": choose.SCRATCH_WORDS + (0 if self.at_once else self.threads // 32 * MAX_DEPTH * lane_copies.ARRIVAL_WORDS),
        }


def unsupported(call: Call, q, index, table, lengths) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    num_heads, head_dim = q.shape[2:]
    if q.dtype != index.dtype or q.dtype.name not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 or float16, q and index alike; got q {q.dtype}, index {index.dtype}"
    if head_dim not in (64, 128, 256):
        return f"the head dim must be 64, 128 or 256, got {head_dim}"
    if num_heads // index.shape[1] > 64:
        return f"there may be at most 64 query heads per KV head, got {num_heads // index.shape[1]}"
    shape = shape_of(call, q, index, table)
    if reason := too_many_blocks(shape):
        return reason
    if shape.depth == 0:
        return f"{sum(shape.scratch_words().values())} words of keys and lists leave no shared memory for index rows of head dim {head_dim}"
    return None


def too_many_blocks(s: Shape) -> str | None:
    """Why a CTA cannot choose among its blocks, whose keys its threads hold in registers, or None if it can."""
    most = choose.MAX_PER_THREAD * s.threads
    if max(s.span, s.ctas * s.kept) <= most:
        return None
    return (
        f"a CTA chooses among at most {most} blocks; {s.table_width * s.page_size} tokens in blocks of {s.block_size} over "
        f"{s.ctas} CTAs give {s.span}, and the survivors of all are {s.ctas * s.kept}"
    )


def shape_of(call: Call, q, index, table) -> Shape:
    """The sizes of a call. `depth` is as many turns as shared memory holds, up to `MAX_DEPTH`, and 0 if it cannot hold
    one."""
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = index.shape[1]
    ctas = clusters.ctas_per_unit(batch * num_queries * num_kv_heads)
    dims = (batch, num_queries, num_heads, num_kv_heads, head_dim, table.shape[1])
    s = Shape(*dims, **dataclasses.asdict(call), dtype=q.dtype.name, ctas=ctas, depth=1)
    return s.with_ring(lanes.shared_words() - sum(s.scratch_words().values()))


def select_blocks(call: Call, q, index, table, lengths):
    """See `pallas_kernels.select_blocks`."""
    reason = unsupported(call, q, index, table, lengths)
    if reason:
        raise NotImplementedError(f"select_blocks 'mosaic_gpu': {reason}")
    return _select(shape_of(call, q, index, table), q, index, table, lengths)


@functools.partial(jax.jit, static_argnames="s")
def _select(s: Shape, q, index, table, lengths):
    lanes.check_version()

    def select_kernel(q_ref, index_ref, table_ref, lengths_ref, ids_ref, *scratch):
        @lanes.stage(unit=lax.axis_index("unit"), cta=lax.axis_index("cta"))
        def run(arrays, scratch, unit, cta):
            inputs, ids_ref = arrays
            select(s, unit, cta, inputs, scratch)
            store_list(s, unit, cta, ids_ref, scratch["ids_s"])

        run(((q_ref, index_ref, table_ref, lengths_ref), ids_ref), dict(zip(sizes, scratch, strict=True)))

    sizes = s.scratch_words() | {"ring_s": s.threads // 32 * s.depth * s.slot_words}
    return plgpu.kernel(
        select_kernel,
        out_type=outputs(s),
        grid=(s.batch * s.num_queries * s.num_kv_heads,),
        grid_names=("unit",),
        cluster=(s.ctas,),
        cluster_names=("cta",),
        num_threads=s.threads // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in sizes.values()],
    )(q, index, table, lengths)[0]


def outputs(s: Shape) -> list[jax.ShapeDtypeStruct]:
    """The lists."""
    return [jax.ShapeDtypeStruct((s.batch, s.num_queries, s.num_kv_heads, s.width), jnp.int32)]


def select(s: Shape, unit, cta, inputs, scratch, meanwhile: Callable = lambda: None) -> tuple:
    """All stages, by all threads of all CTAs of a cluster. The list is written to `scratch["ids_s"]` of each of them,
    its length after it. Returns how many sink, distant and local blocks it has.

    unit: row * num_kv_heads + KV head, where a row is a query, sequence * num_queries + its number. cta: number in the
    cluster. inputs: q, index, page table, lengths. meanwhile: called by all threads while the first index rows come;
    ends with a barrier.
    """
    q_ref, index_ref, table_ref, lengths_ref = inputs
    row, head = unit // s.num_kv_heads, unit % s.num_kv_heads
    length = tokens_seen(s.num_queries, lengths_ref, row)
    current = (length - 1) // s.block_size
    open_page = lanes.maximum(length - 1, 0) // s.page_size * s.per_page
    first_local = lanes.maximum(lanes.minimum(current - (s.local - 1), open_page), 0)
    local_start = lanes.maximum(first_local, s.sink)
    found = lanes.i32(0)
    if s.lists_all:
        meanwhile()
        found = _list_all(s, row // s.num_queries * s.table_width, table_ref, first_local - s.sink, scratch)
    elif s.k:
        queries_s, ring_s = scratch["queries_s"], scratch["ring_s"]
        arrivals = lanes.part(scratch["counts_s"], 4 * choose.SCRATCH_WORDS)

        def operand():
            _operand(s, q_ref, row, head, queries_s)
            if s.bulk:
                lane_copies.make_arrivals(arrivals, s.threads // 32 * s.depth, s.threads)
            else:
                lanes.cta_barrier(s.threads)

        of_row = index_ref, table_ref, row, head
        score = functools.partial(_score, s, of_row, (queries_s, ring_s, arrivals), operand, meanwhile)
        choose_best = _choose_at_once if s.at_once else _choose_twice
        found = choose_best(s, cta, lanes.maximum(first_local - s.sink, 0), score, scratch)
        lanes.cta_barrier(s.threads)
    else:
        meanwhile()
    parts = _assemble(s, length, current, local_start, found, scratch["distant_s"], scratch["ids_s"])
    lanes.cta_barrier(s.threads)
    return parts


def tokens_seen(num_queries: int, lengths_ref, row):
    """Tokens up to and including that of query `row` = sequence * num_queries + its number; 0 where it stands before
    the sequence."""
    length = lanes.load_global_now(lengths_ref, row // num_queries)
    return lanes.maximum(length - (num_queries - 1) + row % num_queries, 0)


def store_list(s: Shape, unit, cta, ids_ref, ids_s) -> None:
    """The first CTA of a cluster writes its list to global memory."""
    for start in range(0, s.width, s.threads):
        i = lanes.thread() + start
        with lanes.when((i < s.width) & (cta == 0)):
            lanes.store_global(ids_ref, unit * s.width + i, lanes.load_shared(ids_s, i)[0])


# 1. Score.


def _operand(s: Shape, q_ref, row, head, queries_s) -> None:
    """The queries as B operands: word w of lane (column g, t) of chunk j holds elements 32j + 8w + 2t, + 1 of column
    g."""
    for start in range(0, s.column_tiles * s.chunks * 32, s.threads):
        i = lanes.thread() + start
        with lanes.when(i < s.column_tiles * s.chunks * 32):
            column, t = (i // (s.chunks * 32)) * 8 + (i % 32) // 4, i % 4
            d = (i // 32) % s.chunks * 32 + t * 2
            words = _bounds_column(s, q_ref, row, head, column, d) if s.kind == "bounds" else _mean_column(s, q_ref, row, head, column, d)
            lanes.store_shared(queries_s, i * 4, *words)


def _query_words(s: Shape, q_ref, row, head, member, d):
    """Elements d, d + 1 and the pairs 8, 16 and 24 further, of head `member` of the group."""
    element = (row * s.num_heads + head * s.group + member) * s.head_dim + d
    return [lanes.load_global(q_ref, element // 2 + 4 * n) for n in range(4)]


def _bounds_column(s: Shape, q_ref, row, head, column, d):
    """max(q, 0) for the maxima, min(q, 0) for the minima: their products add up to the bound. Columns past the group
    repeat its last."""
    minima = d >= s.head_dim
    words = _query_words(s, q_ref, row, head, lanes.minimum(column, s.group - 1), lanes.where(minima, d - s.head_dim, d))
    kind = "bf16x2" if s.dtype == "bfloat16" else "f16x2"
    zero = lanes.i32(0)
    parts = [[lanes.ptx(f"{op}.{kind} $0, $1, $2;", word, zero, result="i32") for op in ("max", "min")] for word in words]
    return [lanes.where(minima, low, high) for high, low in parts]


def _mean_column(s: Shape, q_ref, row, head, column, d):
    """The group's mean query in float32, as the sum of three numbers of the storage type. Each has its own column, the
    fourth column is 0, and the four are repeated once."""
    part = column % 4

    def add(member, *total):
        words = _query_words(s, q_ref, row, head, member, d)
        return [a + b for a, b in zip(total, [x for word in words for x in lane_pairs.unpack(word, s.dtype)], strict=True)]

    total = lanes.loop(s.group, [lanes.f32(0.0)] * 8, add)
    words = []
    for pair in range(4):
        rest = [x * (1.0 / s.group) for x in total[2 * pair : 2 * pair + 2]]
        word = lanes.i32(0)
        for n in range(3):
            rounded = lane_pairs.pack(*rest, s.dtype)
            word = lanes.where(part == n, rounded, word)
            rest = [x - y for x, y in zip(rest, lane_pairs.unpack(rounded, s.dtype), strict=True)]
        words.append(word)
    return words


def _score(s: Shape, of_row, shared, operand, meanwhile, first, stride, end, put) -> None:
    """Scores of candidates. In turn n a warp takes 16 blocks from `first + n * stride` on, those below `end`.

    of_row: index, page table, row, KV head. shared: the query operand, the warps' rings, their arrivals. operand: makes
    the first and the last, by all threads. put: called with a block and its key, in four lanes with different `lane %
    4`. The key is an order-preserving integer of the score, or NO_KEY where the block's page does not exist.
    """
    (index_ref, table_ref, row, head), (queries_s, ring_s, arrivals) = of_row, shared
    lane = lanes.lane()
    g = lane >> 2
    entries = row // s.num_queries * s.table_width

    def locate(n):  # the pages of the 16 blocks, in as many lanes
        block = lanes.minimum(first + n * stride + (lane & 15), s.blocks - 1)
        return [lanes.load_global_now(table_ref, entries + block // s.per_page)]

    def slot(n):
        return (lanes.warp() * s.depth + n % s.depth) * s.slot_words

    def arrival(n):
        return {"arrivals": arrivals, "number": lanes.warp() * s.depth + n % s.depth}

    def arrive(n):
        lane_copies.wait_for_arrival(**arrival(n), turn=n // s.depth)

    def fetch(n, place):
        page, block = place[0], first + n * stride + (lane & 15)
        if s.bulk:  # where there is no page, rows of another one come, and nobody asks for their scores
            mine = (lanes.maximum(page, 0) * s.num_kv_heads + head) * s.per_page + block % s.per_page
            sizes = {"row_bytes": 4 * s.row_words, "stride_bytes": 4 * s.stride_words}
            count = lanes.minimum(end - (first + n * stride), 16)
            lane_copies.copy_rows_bulk(ring_s, slot(n), index_ref, mine, count, **sizes, **arrival(n))
            return
        mine = (page * s.num_kv_heads + head) * s.per_page + block % s.per_page
        mine = lanes.where((page >= 0) & (block < end), mine, -1)

        def row_place(i):
            at = lanes.shuffle(mine, i)
            return index_ref, lanes.maximum(at, 0), 4 * s.row_words, lanes.i32(0), at >= 0

        lane_copies.copy_rows_async(ring_s, slot(n), row_place, rows=16, row_bytes=4 * s.row_words)

    def consume(n, place):
        scores = _products(s, ring_s, slot(n), queries_s, lane)
        for half, score in enumerate(scores):
            page = lanes.shuffle(place[0], g + 8 * half)
            block = first + n * stride + (g + 8 * half)
            with lanes.when(block < end):
                put(block, lanes.where(page >= 0, choose.key_of(score), choose.NO_KEY))
        return []

    turns = lanes.maximum((end - first + (stride - 1)) // stride, 0)
    # The operand comes first: queries loaded after the index rows would arrive after them, and all turns would wait.
    lane_copies.pipeline(turns, s.depth, locate, fetch, consume, [], meanwhile, operand, arrive if s.bulk else None)


def _products(s: Shape, ring_s, slot, queries_s, lane):
    """Scores of the index rows g and g + 8 of the slot, in each of the four lanes (g, t)."""

    def place(piece):
        row = lane & 15
        return row * s.stride_words + piece * 4 if s.bulk else lane_copies.swizzled(row, piece, 4 * s.row_words)

    rows = [lane_pairs.load_matrices(ring_s, slot + place((lane >> 4) + 2 * step)) for step in range(2 * s.chunks)]
    best = [lanes.f32(float("-inf"))] * 2
    for tile in range(s.column_tiles):
        sums = [
            [lanes.f32(0.0)] * 4 for _ in range(4)
        ]  # four independent chains, because a product waits for the one before it in its chain
        for j in range(s.chunks):
            b = lanes.load_shared(queries_s, (lane + (tile * s.chunks + j) * 32) * 4, count=4)
            for step in range(2):
                chain = (2 * j + step) % 4
                sums[chain] = lane_pairs.mma(sums[chain], rows[2 * j + step], b[2 * step :][:2], s.dtype)
        acc = [(a + b) + (c + d) for a, b, c, d in zip(*sums, strict=True)]
        for n in range(2):
            values = acc[2 * n : 2 * n + 2]
            if s.kind == "mean":  # the four columns are parts of one number
                total = values[0] + values[1]
                values = [total + lanes.shuffle_xor(total, 1)]
            for value in values:
                best[n] = lanes.maximum_or_nan(best[n], value)
    for distance in (1, 2):
        best = [lanes.maximum_or_nan(x, lanes.shuffle_xor(x, distance)) for x in best]
    return best


# 2. Choose.


def _meet(s: Shape) -> None:
    """Wait for the other CTAs of the cluster. What they sent has then arrived."""
    lanes.cluster_barrier() if s.ctas > 1 else lanes.cta_barrier(s.threads)


def _list_all(s: Shape, entries, table_ref, candidates, scratch):
    """Write every block that may be chosen, ascending, to `scratch["distant_s"]`; return their number. Every CTA does
    the same."""
    found = lanes.i32(0)
    for start in range(0, s.blocks, s.threads):
        number = lanes.thread() + start
        block = lanes.minimum(number + s.sink, s.blocks - 1)
        page = lanes.load_global_now(table_ref, entries + block // s.per_page)
        there = (number < candidates) & (page >= 0)
        earlier, count = lane_sums.before(lanes.where(there, lanes.i32(1), 0), scratch["counts_s"], s.threads)
        with lanes.when(there):
            lanes.store_shared(scratch["distant_s"], found + earlier, block)
        lanes.cta_barrier(s.threads)
        found = found + count
    return found


def _choose_at_once(s: Shape, cta, candidates, score, scratch):
    """Write the k best blocks, ascending, to `scratch["distant_s"]`; return their number. Every CTA gets the keys of
    all candidates."""
    keys_s, distant_s = scratch["keys_s"], scratch["distant_s"]

    def send(block, key):
        t = lanes.lane() & 3
        for start in range(0, s.ctas, 4):
            with lanes.when(t + start < s.ctas):
                lanes.store_cluster(t + start, keys_s, block - s.sink, key)

    score((lanes.warp() * s.ctas + cta) * 16 + s.sink, s.threads // 2 * s.ctas, candidates + s.sink, send)
    _meet(s)

    def keep(i, key, slot):
        lanes.store_shared(distant_s, slot, i + s.sink)

    found, _ = choose.best(s.k, s.threads, keys_s, scratch["counts_s"], count=candidates, most=s.blocks, stride=1, keep=keep)
    return found


def _choose_twice(s: Shape, cta, candidates, score, scratch):
    """The same in two steps: choose the k best of a span, then the k best of all spans' choices."""
    keys_s, survivors_s, distant_s, counts_s = (scratch[f"{name}_s"] for name in ("keys", "survivors", "distant", "counts"))
    per_cta = (candidates + (s.ctas - 1)) // s.ctas
    first = cta * per_cta + s.sink
    count = lanes.maximum(lanes.minimum(per_cta, candidates - cta * per_cta), 0)

    def hold(block, key):
        with lanes.when((lanes.lane() & 3) == 0):
            lanes.store_shared(keys_s, block - first, key)

    score(first + lanes.warp() * 16, s.threads // 2, first + count, hold)
    lanes.cta_barrier(s.threads)
    _send_survivors(s, cta, first, count, keys_s, survivors_s, counts_s)
    _meet(s)
    most = s.ctas * s.kept

    def keep(i, key, slot):
        lanes.store_shared(distant_s, slot, lanes.load_shared(survivors_s, i * 2 + 1)[0])

    found, _ = choose.best(s.k, s.threads, survivors_s, counts_s, count=lanes.i32(most), most=most, stride=2, keep=keep)
    return found


def _send_survivors(s: Shape, mine, first, count, keys_s, survivors_s, counts_s) -> None:
    """Send the best of this CTA's span, as (key, block), to every CTA of the cluster; NO_KEY where there are fewer than
    `s.kept`."""

    def send(slot, key, block):
        for cta in range(s.ctas):
            lanes.store_cluster(cta, survivors_s, (mine * s.kept + slot) * 2, key, block)

    def keep(i, key, slot):
        send(slot, key, first + i)

    total, _ = choose.best(s.k, s.threads, keys_s, counts_s, count=count, most=s.span, stride=1, keep=keep)
    for start in range(0, s.kept, s.threads):
        slot = lanes.thread() + start
        with lanes.when((slot >= total) & (slot < s.kept)):
            send(slot, lanes.i32(choose.NO_KEY), lanes.i32(-1))


# 3. List.


def _assemble(s: Shape, length, current, local_start, found, distant_s, ids_s) -> tuple:
    """Write the list: sink, distant, local, then -1. Returns how many there are of each."""
    there = length > 0
    sinks = lanes.where(there, lanes.minimum(current + 1, s.sink), 0)
    locals_ = lanes.where(there, lanes.maximum(current + 1 - local_start, 0), 0)
    with lanes.when(lanes.thread() == 0):
        lanes.store_shared(ids_s, s.width, sinks + found + locals_)
    for start in range(0, s.width, s.threads):
        i = lanes.thread() + start
        with lanes.when(i < s.width):
            distant = lanes.load_shared(distant_s, lanes.maximum(lanes.minimum(i - sinks, max(s.k, 1) - 1), 0))[0]
            after = i - sinks - found
            local = lanes.where(after < locals_, local_start + after, -1)
            lanes.store_shared(ids_s, i, lanes.where(i < sinks, i, lanes.where(after < 0, distant, local)))
    return sinks, found, locals_
