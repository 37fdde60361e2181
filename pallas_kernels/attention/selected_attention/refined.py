"""From a shortlist to attention over the best of it: stages of `mosaic_gpu`, by the threads of `hopper.threads.lanes`.

`select_blocks` has written sink, shortlist and local blocks to every CTA of the cluster. Then:

1. Estimate. Each CTA takes some blocks of the shortlist, its warps up to 32 of their keys at a time, from an index
   (`hopper.decode.index_scores`), or 16 from the pages (`hopper.decode.key_scores`). Meanwhile the keys and values of
   sink and local blocks arrive, and each warp folds its part of them (`hopper.decode.decode_fold`).
2. Exchange. Every CTA gets the log-sum-exp of every block of the shortlist, and of sink and local keys, for each query
  head.
3. Choose. Every CTA makes the same choice: the softmax of each query head, the sum over the heads, the k largest; of
  equal ones the lower.
4. Attend. Warps fold the chosen blocks after what they had, and the cluster merges the parts (`gather_attention.mma`).

Sink and local keys are read once: they are a part of the softmax and of the output. Nothing is added in order of
arrival.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.attention.gather_attention import mma
from pallas_kernels.hopper.decode import decode_fold
from pallas_kernels.hopper.decode.index_scores import CodedKeys
from pallas_kernels.hopper.decode.key_scores import PageKeys
from pallas_kernels.hopper.decode.packed_operands import KEYS
from pallas_kernels.hopper.decode.wgmma_fold import LOG2E, LOWEST
from pallas_kernels.hopper.threads import lane_copies, lane_math, lane_sums, lanes
from pallas_kernels.selection.select_blocks import choose
from pallas_kernels.selection.select_blocks import mosaic_gpu as select

DEPTH = 2
"""Turns of codes that a warp has in flight."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """keys: where those of the shortlist are read. shortlist, k: blocks to choose from, and to keep. width: of the list
    that is returned. framed: whether codes are found by page ids that are not frames."""

    attend: decode_fold.Shape
    keys: CodedKeys | PageKeys
    shortlist: int
    k: int
    width: int
    framed: bool

    @property
    def each(self) -> int:
        """Most blocks of the shortlist that a CTA estimates."""
        return -(-self.shortlist // self.attend.splits)

    @property
    def whole_blocks(self) -> bool:
        """Whether a warp takes all key tiles of a block, for which it scales the queries once. Of few blocks each warp
        takes a key tile."""
        return isinstance(self.keys, CodedKeys) and self.keys.key_tiles > 1 and self.each >= self.attend.warps

    def scratch_words(self) -> dict[str, int]:
        """Words of shared memory: the ring of the shortlist's keys; maximum and sum of each key tile, where warps do
        not take whole blocks; log-sum-exp of this CTA's blocks, and of each block; maximum and sum of each CTA's sink
        and local keys; total of each head; keys of the choice, and the places that it keeps; a word of each warp;
        queries in the order of codes; page ids of the list, where frames are others."""
        s = self.attend
        sizes = {
            "codes_s": s.warps * DEPTH * self.keys.words,
            "own_s": self.each * s.rows,
            "blocks_s": self.shortlist * s.rows,
            "near_s": 2 * s.splits * s.rows,
            "totals_s": s.rows,
            "shares_s": -(-self.shortlist // 32) * 32,
            "chosen_s": max(self.k, 1),
            "exchange_s": -(-s.warps // 4) * 4,
        }
        if not self.whole_blocks:
            sizes["key_tiles_s"] = 2 * self.each * self.keys.key_tiles * s.rows
        if isinstance(self.keys, CodedKeys):
            sizes["coded_q_s"] = s.rows * s.head_dim // 2
        return sizes | ({"page_ids_s": s.width + 1} if self.framed else {})

    def scratch_beside(self, chosen: select.Shape) -> dict[str, int]:
        """The same, and the words of the choice of the shortlist. Its survivors lie where keys of the shortlist come
        later."""
        words = chosen.scratch_words() | self.scratch_words()
        survivors = words.pop("survivors_s")
        return words | {"codes_s": max(words["codes_s"], survivors)}


def load_queries(r: Shape, unit, q_ref, scratch) -> None:
    """By all threads of a CTA: the queries of a unit, as codes are multiplied with them and as keys are. `attend` needs
    both."""
    s, place = r.attend, (unit // r.attend.num_kv_heads, unit % r.attend.num_kv_heads)
    if isinstance(r.keys, CodedKeys):
        decode_fold.store_queries(s, *place, q_ref, scratch["coded_q_s"], 0, True)
    decode_fold.load_queries(s, *place, q_ref, scratch["q_s"])


def attend(r: Shape, unit, cta, parts, inputs, outputs, scratch) -> None:
    """By all threads of all CTAs of a cluster: the best of the shortlist, attention over them and over sink and local
    blocks, the list.

    parts: how many sink, distant and local blocks the list in `scratch["ids_s"]` has, for which `listed.locate` has
    found the frames (and the page ids, if `r.framed`). inputs: codes or None, and `mma.arrays_of` the pages. outputs:
    out, lse, lists.
    """
    s, (codes_ref, *pools), (*attended, ids_ref) = r.attend, inputs, outputs
    pools = decode_fold.Pools.of(s, pools)
    row, head = unit // s.num_kv_heads, unit % s.num_kv_heads
    sinks, found, locals_ = parts
    (length,) = lanes.load_shared(scratch["pages_s"], s.width)
    fold = functools.partial(_fold, s, cta, pools, head, length, scratch)

    estimate = functools.partial(_estimate, r, cta, head, sinks, found, pools if codes_ref is None else codes_ref, scratch)
    near = fold(sinks + locals_, lambda n: lanes.where(n < sinks, n, n + found), meanwhile=estimate)
    _exchange(r, cta, found, near, scratch)
    kept = _choose(r, found, scratch)

    def chosen(n):
        return _chosen(r, sinks, kept, n, scratch)

    folded = fold(kept, chosen, before=near, opened=False)
    mma.merge_and_store(s, folded, (row, head, cta), attended, scratch)
    for start in range(0, r.width, s.threads):
        i = lanes.thread() + start
        with lanes.when((i < r.width) & (cta == 0)):
            distant = (i >= sinks) & (i < sinks + kept)
            entry = lanes.where(distant, chosen(i - sinks), lanes.where(i < sinks, i, i - kept + found))
            (block,) = lanes.load_shared(scratch["ids_s"], lanes.minimum(entry, s.width - 1))
            lanes.store_global(ids_ref, unit * r.width + i, lanes.where(i < sinks + kept + locals_, block, -1))


def _chosen(r: Shape, sinks, kept, n, scratch):
    """The entry of the n-th chosen block; past them that of another block."""
    (place,) = lanes.load_shared(scratch["chosen_s"], lanes.maximum(lanes.minimum(n, max(r.k, 1) - 1), 0))
    return lanes.where(n < kept, sinks + place, 0)


def _fold(s: decode_fold.Shape, cta, pools, head, length, scratch, number, entry_of, meanwhile=lambda: None, before=None, opened=True):
    """By each warp: fold its part of `number` blocks. entry_of: a number below that -> the block's entry in the list.
    Turns are dealt out: first one to a warp of each CTA, then to the next. opened: whether some of them may lie in the
    query's own page."""
    total, workers = number * (s.block_size // KEYS), s.splits * s.warps
    first = lanes.warp() * s.splits + cta

    def place(n):
        key_tile = first + n * workers
        return mma.place_listed(s, key_tile, lanes.minimum(entry_of(key_tile * KEYS // s.block_size), s.width - 1), length, scratch)

    count = lanes.maximum(total - first + (workers - 1), 0) // workers
    first_from = None if opened else lambda position: count  # none of these key tiles is read open
    return decode_fold.fold(s, pools, scratch, head, length, count, place, meanwhile, first_from=first_from, before=before)


# 1. Estimate.


def _estimate(r: Shape, cta, head, sinks, found, source, scratch) -> None:
    """By each warp: the logits of its key tiles, for every query row. Of whole blocks their log-sum-exp (log2 units) to
    `scratch["own_s"]`, of other key tiles maximum and sum to `scratch["key_tiles_s"]`.

    A CTA takes every `splits`-th block of the shortlist. Its warps take their key tiles one after the other, or whole
    blocks. source: codes, or the pools.
    """
    s, keys, coded = r.attend, r.keys, isinstance(r.keys, CodedKeys)
    ring_s, per_page = scratch["codes_s"], s.page_size // s.block_size
    ids_s, pages_s = scratch["ids_s"], scratch["page_ids_s" if r.framed else "pages_s"]

    def key_tile_of(n):
        if r.whole_blocks:
            return (lanes.warp() + n // keys.key_tiles * s.warps) * keys.key_tiles + n % keys.key_tiles
        return lanes.warp() + n * s.warps

    def locate(n):
        number = key_tile_of(n) // keys.key_tiles * s.splits + cta
        entry = lanes.minimum(sinks + number, s.width - 1)
        (block,), (page,) = (lanes.load_shared(ref, entry) for ref in (ids_s, pages_s))
        of_page = lanes.maximum(block, 0) % per_page
        return [lanes.where(number < found, page, -1), of_page]

    def slot(n):
        return (lanes.warp() * DEPTH + n % DEPTH) * keys.words

    def fetch(n, place):
        (page, block), key_tile = place, key_tile_of(n) % keys.key_tiles
        if coded:
            row = (page * s.num_kv_heads + head) * per_page + block
            keys.copy(ring_s, slot(n), source, lanes.where(page >= 0, row, -1), key_tile, key_tile == 0 if r.whole_blocks else True)
        else:
            keys.copy(ring_s, slot(n), source, head, page, block, key_tile)

    def logits_of(n, scaled):
        """In log2 units, per column tile, of the lane's keys: those of query row 2t, and of 2t + 1."""
        if coded:
            tiles = ([x for four in keys.logits(ring_s, slot(n), each) for x in four] for each in scaled)
        else:
            tiles = ([x * (s.sm_scale * LOG2E) for x in four] for four in keys.logits(ring_s, slot(n), scratch["q_s"]))
        return [(logits[::2], logits[1::2]) for logits in tiles]

    def scaled_for(n, carry):
        """Per column tile, queries scaled by the steps of the block of key tile n: anew in a block's first key tile."""

        def anew(*_):
            tiles = (functools.partial(_query_words, s, scratch["coded_q_s"], tile) for tile in range(s.column_tiles))
            return [x for words in tiles for x in keys.scaled(ring_s, slot(n), words, s.dtype.name, s.sm_scale * LOG2E)]

        first = lanes.where(n % keys.key_tiles == 0, lanes.i32(1), 0)
        return lanes.loop(first, carry, anew) if r.whole_blocks else anew()

    def consume_key_tile(n, place, *_):
        there = place[0] >= 0
        for tile, pair in enumerate(logits_of(n, _tiles_of(s, scaled_for(n, [])) if coded else None)):
            for j, logits in enumerate(pair):
                m, total = _over_keys(*_folded(logits if coded else [lanes.where(there, x, float("-inf")) for x in logits]))
                at = key_tile_of(n) * s.rows + (lanes.lane() & 3) * 2 + (8 * tile + j)
                with lanes.when(lanes.lane() < 4):
                    lanes.store_shared(scratch["key_tiles_s"], at * 2, m, total)
        return []

    def consume_block(n, _, *carry):
        before, key_tile = carry[: 2 * s.rows // 4], n % keys.key_tiles
        scaled = scaled_for(n, carry[len(before) :])
        fresh = [lanes.where(key_tile == 0, value, x) for value, x in zip([LOWEST, 0.0] * (len(before) // 2), before, strict=True)]
        pairs = [logits for pair in logits_of(n, _tiles_of(s, scaled)) for logits in pair]
        after = [_folded(logits, *fresh[2 * i :][:2]) for i, logits in enumerate(pairs)]
        with lanes.when(key_tile == keys.key_tiles - 1):
            m, total, row = lanes.f32(0.0), lanes.f32(0.0), lanes.lane() >> 2
            for i, pair in enumerate([_over_keys(*pair) for pair in after]):
                m, total = (lanes.where(row == i, x, y) for x, y in zip(pair, (m, total), strict=True))
            with lanes.when(row < len(after)):
                at = key_tile_of(n) // keys.key_tiles * s.rows + (row // 2 * 8 + (lanes.lane() & 3) * 2 + row % 2)
                lanes.store_shared(scratch["own_s"], at, _log_sum(m, total))
        return [x for pair in after for x in pair] + scaled

    blocks = lanes.maximum(found - cta + (s.splits - 1), 0) // s.splits
    if not r.whole_blocks:
        count = lanes.maximum(blocks * keys.key_tiles - lanes.warp() + (s.warps - 1), 0) // s.warps
        lane_copies.pipeline(count, DEPTH, locate, fetch, consume_key_tile, [])
        return
    count = lanes.maximum(blocks - lanes.warp() + (s.warps - 1), 0) // s.warps * keys.key_tiles
    carry = [lanes.f32(0.0)] * (s.rows // 2) + keys.nothing_scaled() * s.column_tiles
    lane_copies.pipeline(count, DEPTH, locate, fetch, consume_block, carry)


def _tiles_of(s: decode_fold.Shape, numbers: list) -> list[list]:
    """What `CodedKeys.scaled` found, per column tile."""
    each = len(numbers) // s.column_tiles
    return [numbers[i * each :][:each] for i in range(s.column_tiles)]


def _query_words(s: decode_fold.Shape, q_s, tile: int, block: int) -> list:
    """Of the lane's query, 16 channels as `CodedKeys.logits` wants them."""
    at = lanes.lane() * 4 + ((tile * (s.head_dim // 32) + block // 2) * 128 + 2 * (block % 2))
    return lanes.load_shared(q_s, at, count=2)


def _folded(logits, before=None, total=0.0) -> tuple:
    """Maximum and sum of logits of a lane, and of what it had before."""
    m = functools.reduce(lanes.maximum, logits, lanes.f32(LOWEST) if before is None else before)
    parts = [lane_math.exp2(x - m) for x in logits]
    return m, functools.reduce(_add, parts if before is None else [total * lane_math.exp2(before - m), *parts])


def _over_keys(m, total) -> tuple:
    """Maximum and sum of the lanes with the same query rows, from those of each."""
    most = _over(m, lanes.maximum, (4, 8, 16))
    return most, _over(total * lane_math.exp2(m - most), _add, (4, 8, 16))


# 2. Exchange.


def _exchange(r: Shape, cta, found, near: decode_fold.Folded, scratch) -> None:
    """Send what this CTA has found to every CTA of the cluster, and wait for what they found."""
    s = r.attend
    decode_fold.share_totals(s, near, scratch)
    lanes.cta_barrier(s.threads)
    if not r.whole_blocks:
        _fold_key_tiles(r, scratch)
    for start in range(0, r.each * s.rows // 4 * s.splits, s.threads):
        i = lanes.thread() + start
        local, row = i // s.splits // (s.rows // 4), i // s.splits % (s.rows // 4) * 4
        number = local * s.splits + cta
        with lanes.when((i < r.each * s.rows // 4 * s.splits) & (number < found)):
            logs = lanes.load_shared(scratch["own_s"], local * s.rows + row, "f32", 4)
            lanes.store_cluster(i % s.splits, scratch["blocks_s"], number * s.rows + row, *logs)
    for start in range(0, s.rows * s.splits, s.threads):
        i = lanes.thread() + start
        with lanes.when(i < s.rows * s.splits):
            m, _, total = decode_fold.merged_total(s, i // s.splits, scratch)
            lanes.store_cluster(i % s.splits, scratch["near_s"], (cta * s.rows + i // s.splits) * 2, m, total)
    lanes.cluster_barrier() if s.splits > 1 else lanes.cta_barrier(s.threads)


def _fold_key_tiles(r: Shape, scratch) -> None:
    """By all threads of a CTA: the log-sum-exp of its blocks, from maximum and sum of their key tiles."""
    s = r.attend
    for start in range(0, r.each * s.rows, s.threads):
        i = lanes.thread() + start
        with lanes.when(i < r.each * s.rows):
            key_tiles_of = [(i // s.rows * r.keys.key_tiles + n) * s.rows + i % s.rows for n in range(r.keys.key_tiles)]
            stats = [lanes.load_shared(scratch["key_tiles_s"], at * 2, "f32", 2) for at in key_tiles_of]
            m = functools.reduce(lanes.maximum, [x for x, _ in stats])
            total = functools.reduce(_add, [lane_math.exp2(x - m) * y for x, y in stats])
            lanes.store_shared(scratch["own_s"], i, _log_sum(m, total))
    lanes.cta_barrier(s.threads)


# 3. Choose.


def _choose(r: Shape, found, scratch):
    """Write the places of the chosen blocks in the shortlist, ascending, to `scratch["chosen_s"]`; return their
    number."""
    s = r.attend
    for first in range(0, s.rows, s.warps):
        row = lanes.warp() + first
        with lanes.when(row < s.rows):  # whole warps
            total = _total(r, found, row, scratch)
            with lanes.when(lanes.lane() == 0):
                lanes.store_shared(scratch["totals_s"], row, total)
    lanes.cta_barrier(s.threads)
    size = r.scratch_words()["shares_s"]
    for start in range(0, size, s.threads):
        i = lanes.thread() + start
        share = _share(r, lanes.minimum(i, r.shortlist - 1), scratch)
        with lanes.when(i < size):
            lanes.store_shared(scratch["shares_s"], i, lanes.where(i < found, choose.key_of(share), choose.NO_KEY))
    lanes.cta_barrier(s.threads)
    kept = lanes.i32(0)
    for start in range(0, r.shortlist, s.threads):
        i = lanes.thread() + start
        chosen = (i < found) & (_better(size, i, scratch["shares_s"]) < r.k)
        slot, count = lane_sums.before(lanes.where(chosen, lanes.i32(1), 0), scratch["exchange_s"], s.threads)
        with lanes.when(chosen):
            lanes.store_shared(scratch["chosen_s"], kept + slot, i)
        kept = kept + count
        lanes.cta_barrier(s.threads)
    return kept


def _better(size: int, i, shares_s):
    """How many of `size` keys are chosen before key number i: larger ones, and equal ones that come before it.

    The numbers of a warp are 32 that follow one another. So of 32 others the whole warp knows whether equal ones count,
    but for its own.
    """
    (key,) = lanes.load_shared(shares_s, lanes.minimum(i, size - 1))
    own, better = i - lanes.lane(), lanes.i32(0)
    for start in range(0, size, 32):
        least = lanes.where(own > start, key, key + 1)
        for at in range(start, start + 32, 4):
            for other in lanes.load_shared(shares_s, at, count=4):
                better = better + lanes.where(other >= least, lanes.i32(1), 0)
    for at in range(0, 32, 4):
        for j, other in enumerate(lanes.load_shared(shares_s, lanes.minimum(own, size - 32) + at, count=4)):
            better = better + lanes.where((other == key) & (lanes.lane() > at + j), lanes.i32(1), 0)
    return better


def _total(r: Shape, found, row, scratch):
    """By a warp: the log-sum-exp of all logits of a query head."""
    s, lane = r.attend, lanes.lane()
    logs = []
    for start in range(0, r.shortlist, 32):
        number = lane + start
        (x,) = lanes.load_shared(scratch["blocks_s"], lanes.minimum(number, r.shortlist - 1) * s.rows + row, "f32")
        logs.append(lanes.where(number < found, x, float("-inf")))
    m_near, near = lanes.load_shared(scratch["near_s"], (lanes.minimum(lane, s.splits - 1) * s.rows + row) * 2, "f32", 2)
    near = lanes.where(lane < s.splits, near, 0.0)
    m = _over(functools.reduce(lanes.maximum, logs, m_near), lanes.maximum, (1, 2, 4, 8, 16))
    parts = [lane_math.exp2(x - m) for x in logs]
    return _log_sum(m, _over(functools.reduce(_add, parts, lane_math.exp2(m_near - m) * near), _add, (1, 2, 4, 8, 16)))


def _share(r: Shape, number, scratch):
    """The logarithm of the attention that a block of the shortlist gets, summed over the query heads."""
    s = r.attend
    logs = []
    for row in range(s.group):
        (x,), (total,) = (
            lanes.load_shared(scratch[name], at, "f32") for name, at in (("blocks_s", number * s.rows + row), ("totals_s", row))
        )
        logs.append(x - total)
    m = functools.reduce(lanes.maximum, logs, lanes.f32(LOWEST))
    return _log_sum(m, functools.reduce(_add, [lane_math.exp2(x - m) for x in logs]))


def _log_sum(m, total):
    return lanes.where(total == 0.0, float("-inf"), m + lanes.log2(lanes.where(total == 0.0, 1.0, total)))


def _over(x, merge, distances):
    """Over lanes; each of them gets the result, and the same bits."""
    for distance in distances:
        x = merge(x, lanes.shuffle_xor(x, distance))
    return x


def _add(a, b):
    return a + b
