"""The selectors of `query_sparse_attention` by the threads of a warpgroup, two to a row: state in, scores of a tile in,
state out.

Threads hold rows as the results of a `wgmma` lie: four neighbours share rows g and g + 8 of 16. Here the first two of
them take row g and the other two row g + 8. Both threads of a pair know the row's state, and each holds half of its
exact slots. The code has selects and no branches, so it can run while the tensor cores do. The exception is
`_InMemory`, for lists whose exact slots do not fit into registers: these slots lie in the results themselves, and the
pair searches for the worst one again after each replacement.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.wgmma_fold import LAYOUT, LOG2E
from pallas_kernels.hopper.threads import lane_math, lanes

IN_REGISTERS = 16
"""Most exact slots per row that are kept in registers."""

_FIRST = 2**31 - 1
"""Rank of empty slot 0. Empty slot i has rank `_FIRST` - i, a block its number. Of equal scores the greatest rank is
replaced."""
_EMPTY = _FIRST - 2**20
"""Every block's rank is below this."""
_ABSENT = -2
"""Rank of the padding slot where k_exact is odd. Its score is inf, so that it is never replaced."""


@dataclasses.dataclass(frozen=True)
class Selector:
    """Sizes of the lists, and which blocks are candidates: from `first` to the one before the row's end."""

    block_size: int
    k_blocks: int
    k_exact: int
    estimate: str
    gamma: int
    num_rows: int
    num_heads: int
    window: tuple[int, int] | None

    @property
    def estimated(self) -> int:
        """Slots of stage 2."""
        return self.k_blocks - self.k_exact

    @property
    def first(self) -> int:
        """First candidate."""
        return self.window[0] // self.block_size if self.window else 0

    @property
    def slots(self) -> _InRegisters | _InMemory | None:
        """Where stage 1 keeps its slots."""
        if self.k_exact == 0:
            return None
        return _InRegisters(self) if self.k_exact <= IN_REGISTERS else _InMemory(self)

    @property
    def types(self) -> tuple[plgpu.ShapeDtypeStruct, plgpu.ShapeDtypeStruct]:
        """Types of the state: integers (end, row of the lists or -1, stage 2's slots filled or blocks offered, those of
        the slots), and floats (`known` numbers of stage 2, those of the slots)."""
        integers, floats = self.slots.counts if self.slots else (0, 0)
        return lanes.per_thread(3 + integers, jnp.int32), lanes.per_thread(self.known + floats, jnp.float32)

    @property
    def by_quantile(self) -> bool:
        """Whether stage 2 has a threshold."""
        return self.estimated > 0 and self.estimate == "quantile"

    @property
    def known(self) -> int:
        """How many numbers stage 2 keeps: seen, mean and squares of the scores; or the score in the slot whose turn it
        is."""
        return 0 if self.estimated == 0 else 3 if self.by_quantile else 1

    def nothing_known(self):
        """These numbers before the first block."""
        return [lanes.f32(0.0 if self.by_quantile else -math.inf)] * self.known

    def empty(self, refs, row, head, first_row, position, length):
        """Nothing selected yet. first_row: of 64, in the lists of this row of the batch. position: of the first row's
        query."""
        splat = plgpu.Layout.WG_SPLAT(())

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *(splat,) * 5), return_type=self.types)
        def inline(_, ids_ref, scores_ref, *scalars):
            row, head, first_row, position, length = map(lanes.of_splat, scalars)
            place = _row_of_pair()
            position = position + place * self.gamma
            listed = first_row + place < self.num_rows
            end = _floor_divide(position, self.block_size) + 1
            if self.window:
                end = _floor_divide(position - self.window[1], self.block_size) + 1
            end = lanes.where(listed & (position < length), end, 0)
            at = ((row * self.num_rows + first_row + place) * self.num_heads) + head
            at = lanes.where(listed, at, -1)
            integers, floats = self.slots.empty((ids_ref, scores_ref), at) if self.slots else ([], [])
            return lanes.holding([end, at, lanes.i32(0), *integers]), lanes.holding([*self.nothing_known(), *floats])

        return inline(*refs, row, head, first_row, position, length)

    def offer(self, refs, block, tops, sums, state):
        """Offer consecutive blocks to all rows. tops, sums: per block its maximum in log2 units and sum of exp2
        relative to it, `[64]`."""
        rows, splat = LAYOUT.reduce(1), plgpu.Layout.WG_SPLAT(())
        arrays = (*(rows,) * (2 * len(tops)), *(t.layout for t in self.types))

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), splat, *arrays), return_type=self.types)
        def inline(_, ids_ref, scores_ref, block, *arrays):
            *of_blocks, integers, floats = map(lanes.held, arrays)
            block, state = lanes.of_splat(block), (integers, floats)
            upper = (lanes.lane() & 2) == 0
            for i in range(len(tops)):
                top, total = (lanes.where(upper, *of_blocks[2 * i + j]) for j in range(2))
                score = lane_math.multiply(top + lane_math.log2_approx(total), 1 / LOG2E)
                state = self._offer_one((ids_ref, scores_ref), block + i, score, *state)
            return tuple(map(lanes.holding, state))

        return inline(*refs, block, *(x for pair in zip(tops, sums, strict=True) for x in pair), *state)

    def finish(self, refs, state) -> None:
        """Write the slots that are in registers, and empty slots."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *(t.layout for t in self.types)))
        def inline(_, ids_ref, scores_ref, *arrays):
            self._finish((ids_ref, scores_ref), *map(lanes.held, arrays))

        inline(*refs, *state)

    def row_at(self, at) -> dict[str, Any]:
        """Where a row's list begins, for the functions of `lanes`."""
        return {"block": at, "block_bytes": 4 * self.k_blocks}

    def _finish(self, refs, integers, floats) -> None:
        _, at, turns, *integers = integers
        if self.slots:
            self.slots.finish(refs, at, integers, floats[self.known :])
        odd = (lanes.lane() & 1) == 1
        nothing = lanes.where(odd, lanes.bits(lanes.f32(-math.inf)), -1)

        def clear(slot):
            lanes.store_global_if(at >= 0, lanes.either(odd, refs[1], refs[0]), slot * 4, nothing, **self.row_at(at))
            return [slot + 1]

        lanes.while_loop(lambda slot: slot < self.k_blocks, clear, [lanes.minimum(turns, self.estimated) + self.k_exact])

    def _offer_one(self, refs, block, score, integers, floats):
        (end, at, turns, *slot_integers), known, slot_floats = integers, floats[: self.known], floats[self.known :]
        offered = (block >= self.first) & (block < end) & (score > -math.inf)
        if self.by_quantile:
            known = _count(offered, score, *known)
        lost, lost_block, left_over = score, block, offered
        if self.slots:
            lost, lost_block, slot_integers, slot_floats = self.slots.replace(refs, at, offered, score, block, slot_integers, slot_floats)
            left_over = offered & (lost_block >= 0)
        if self.by_quantile:
            turns = self._fill(refs, at, left_over, lost, lost_block, end - block, turns, *known)
        elif self.estimated:
            turns, *known = self._contend(refs, at, left_over, lost, lost_block, turns, *known)
        return [end, at, turns, *slot_integers], [*known, *slot_floats]

    def _contend(self, refs, at, offered, score, block, turns, kept):
        """Stage 2 in buckets: the slot whose turn it is takes the block if the block scores more than `kept`. Returns
        the turns, and the score in the slot whose turn is next, loaded before it is needed."""
        take = offered & (score > kept)
        self._put(refs, at, take, turns % self.estimated, score, block)
        turns = turns + lanes.where(offered, lanes.i32(1), 0)
        if self.estimated == 1:
            return turns, lanes.where(take, score, kept)
        kept = lanes.load_written(refs[1], (turns % self.estimated + self.k_exact) * 4, "f32", **self.row_at(at), only=at >= 0)
        lanes.warp_barrier()  # both threads have read what one may overwrite, and from here on both see what it wrote
        return turns, lanes.where(turns < self.estimated, lanes.f32(-math.inf), kept)

    def _fill(self, refs, at, offered, score, block, left, filled, seen, mean, squares):
        """Stage 2 by the quantile: the next free slot, if the score reaches the threshold. left: candidates, the
        present one included."""
        slots = lanes.i32(self.estimated) - filled
        share = lanes.number(slots) * lane_math.reciprocal(lanes.number(left))
        sigma = lane_math.sqrt(squares * lane_math.reciprocal(seen))
        take = offered & (slots > 0) & ((slots >= left) | (score - mean >= upper_quantile(share) * sigma))
        self._put(refs, at, take, filled, score, block)
        return filled + lanes.where(take, lanes.i32(1), 0)

    def _put(self, refs, at, take, slot, score, block) -> None:
        """Write a slot of stage 2: one thread of the pair writes the block, the other its score."""
        odd = (lanes.lane() & 1) == 1
        word = lanes.where(odd, lanes.bits(score), block)
        lanes.store_global_if(take, lanes.either(odd, refs[1], refs[0]), (slot + self.k_exact) * 4, word, **self.row_at(at))


class _InRegisters:
    """Stage 1 with its slots in registers: each thread of the pair has half of the ranks and scores, and both have the
    worst one's."""

    def __init__(self, selector: Selector):
        self.selector, self.half = selector, -(-selector.k_exact // 2)
        self.counts = self.half + 1, self.half + 1

    def empty(self, refs, at):
        ranks, scores = [], []
        for i in range(self.half):
            there = self._slot(i) < self.selector.k_exact
            ranks.append(lanes.where(there, lanes.i32(_FIRST) - self._slot(i), _ABSENT))
            scores.append(lanes.where(there, lanes.f32(-math.inf), math.inf))
        return [lanes.i32(_FIRST), *ranks], [lanes.f32(-math.inf), *scores]

    def replace(self, refs, at, offered, score, block, integers, floats):
        (worst_rank, *ranks), (worst, *scores) = integers, floats
        take = offered & (score > worst)
        lost = lanes.where(take, worst, score)
        lost_block = lanes.where(take, lanes.where(worst_rank > _EMPTY, -1, worst_rank), block)
        for i in range(self.half):
            here = take & (ranks[i] == worst_rank)
            scores[i], ranks[i] = lanes.where(here, score, scores[i]), lanes.where(here, block, ranks[i])
        worst, worst_rank = _worst_of_pair(list(zip(scores, ranks, strict=True)))
        return lost, lost_block, [worst_rank, *ranks], [worst, *scores]

    def finish(self, refs, at, integers, floats):
        for i in range(self.half):
            there = (at >= 0) & (self._slot(i) < self.selector.k_exact)
            block = lanes.where(integers[1 + i] > _EMPTY, -1, integers[1 + i])
            for ref, word in zip(refs, (block, floats[1 + i]), strict=True):
                lanes.store_global_if(there, ref, self._slot(i) * 4, word, **self.selector.row_at(at))

    def _slot(self, i: int):
        return (lanes.lane() & 1) * self.half + i


class _InMemory:
    """Stage 1 with its slots in the results. Both threads of the pair know the worst slot, its score and rank."""

    counts = 2, 1

    def __init__(self, selector: Selector):
        self.selector = selector

    def empty(self, refs, at):
        odd = lanes.lane() & 1

        def clear(slot):
            place = self.selector.row_at(at)
            lanes.store_global_if(at >= 0, refs[0], slot * 4, lanes.i32(-1), **place)
            lanes.store_global_if(at >= 0, refs[1], slot * 4, lanes.f32(-math.inf), **place)
            return [slot + 2]

        lanes.while_loop(lambda slot: slot < self.selector.k_exact, clear, [odd])
        lanes.warp_barrier()
        return [lanes.i32(_FIRST), lanes.i32(0)], [lanes.f32(-math.inf)]

    def replace(self, refs, at, offered, score, block, integers, floats):
        (worst_rank, worst_slot), (worst,) = integers, floats
        take = offered & (score > worst)
        lost = lanes.where(take, worst, score)
        lost_block = lanes.where(take, lanes.where(worst_rank > _EMPTY, -1, worst_rank), block)

        def again(worst, worst_rank, worst_slot, _):
            odd = (lanes.lane() & 1) == 1
            word = lanes.where(odd, lanes.bits(score), block)
            lanes.store_global_if(take, lanes.either(odd, refs[1], refs[0]), worst_slot * 4, word, **self.selector.row_at(at))
            lanes.warp_barrier()
            found = self._scan(refs, at)
            kept = zip(found, (worst, worst_rank, worst_slot), strict=True)
            return [*(lanes.where(take, new, old) for new, old in kept), lanes.i32(0)]

        todo = lanes.where(lanes.ballot(take) == 0, lanes.i32(0), 1)
        worst, worst_rank, worst_slot, _ = lanes.while_loop(lambda *carry: carry[3] > 0, again, [worst, worst_rank, worst_slot, todo])
        return lost, lost_block, [worst_rank, worst_slot], [worst]

    def _scan(self, refs, at):
        """Score, rank and number of the worst slot. Each thread of the pair looks at every second slot."""
        place, listed = self.selector.row_at(at), at >= 0

        def look(turn, worst, rank, slot):
            for i in range(4):
                this = turn + 2 * i + (lanes.lane() & 1)
                there = this < self.selector.k_exact
                block = lanes.load_written(refs[0], this * 4, "i32", **place, only=there & listed)
                score = lanes.where(there, lanes.load_written(refs[1], this * 4, "f32", **place, only=there & listed), math.inf)
                of_slot = lanes.where(there, lanes.where(block < 0, lanes.i32(_FIRST) - this, block), _ABSENT)
                worse = _worse((score, of_slot), (worst, rank))
                worst, rank, slot = (lanes.where(worse, a, b) for a, b in ((score, worst), (of_slot, rank), (this, slot)))
            return [worst, rank, slot]

        begin = [lanes.f32(math.inf), lanes.i32(_ABSENT), lanes.i32(0)]
        mine = lanes.loop(self.selector.k_exact, begin, look, step=8)
        theirs = [lanes.bits(lanes.shuffle_xor(lanes.bits(mine[0]), 1)), *(lanes.shuffle_xor(x, 1) for x in mine[1:])]
        worse = _worse(theirs[:2], mine[:2])
        return [lanes.where(worse, a, b) for a, b in zip(theirs, mine, strict=True)]

    def finish(self, refs, at, integers, floats):
        """Nothing to do: the slots are in the results already."""


def _row_of_pair():
    """This thread's row of the warpgroup's 64."""
    lane = lanes.lane()
    return (lanes.warp() & 3) * 16 + (lane >> 2) + ((lane >> 1) & 1) * 8


def _floor_divide(a, b: int):
    """Division rounded down, for a >= -2^24. `//` would round towards zero."""
    shift = -(-(2**24) // b)
    return (a + shift * b) // b - shift


def _worse(a, b):
    """Whether slot a = (score, rank) is replaced before b."""
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] > b[1]))


def _worst_of_pair(slots):
    """(score, rank) of the worst slot of both threads of a pair."""
    while len(slots) > 1:
        rest = slots[2 * (len(slots) // 2) :]
        slots = [tuple(_choose(_worse(a, b), a, b)) for a, b in zip(slots[::2], slots[1::2], strict=False)] + rest
    mine = slots[0]
    theirs = lanes.bits(lanes.shuffle_xor(lanes.bits(mine[0]), 1)), lanes.shuffle_xor(mine[1], 1)
    return _choose(_worse(theirs, mine), theirs, mine)


def _choose(condition, a, b):
    return [lanes.where(condition, x, y) for x, y in zip(a, b, strict=True)]


def _count(offered, score, seen, mean, squares):
    """Welford's update. The mean is rounded as the interface says."""
    counted = seen + 1.0
    before = score - mean
    new_mean = mean + lane_math.divide(before, counted)
    new_squares = lanes.fma(before, score - new_mean, squares)
    return [lanes.where(offered, a, b) for a, b in ((counted, seen), (new_mean, mean), (new_squares, squares))]


_CENTRAL = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def upper_quantile(share):
    """z with Pr(X > z) = share for a standard normal X, relative error about 1e-6: sqrt(2) times the inverse error
    function of 1 - 2 share.

    Source: M. Giles, "Approximating the erfinv function", GPU Computing Gems Jade Edition, 2011 (single precision).
    """
    w = lane_math.log2_approx(lane_math.multiply(share * 4.0, lanes.f32(1.0) - share)) * (-1 / LOG2E)
    in_tail = w >= 5.0
    at = lanes.where(in_tail, lane_math.sqrt(w) - 3.0, w - 2.5)
    p = lanes.where(in_tail, lanes.f32(_TAIL[0]), _CENTRAL[0])
    for tail, central in zip(_TAIL[1:], _CENTRAL[1:], strict=True):
        p = lanes.fma(p, at, lanes.where(in_tail, lanes.f32(tail), central))
    return p * (lanes.f32(1.0) - share * 2.0) * math.sqrt(2)
