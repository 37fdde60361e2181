"""What every implementation of place_tiles is tested with: inputs, the checker, and calls to compile."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache.place_tiles import WAYS, mosaic_gpu, place_tiles
from pallas_kernels.cache.place_tiles.api import Placed

NAMES = ("blocks", "page_table", "frames", "lengths", "tags", "ages", "now")
FIRST, GAP = 5, 2
"""Frame of the first place, and frames on the device between the last place and the border."""
NOW = 40


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call. held: part of the places that hold a tile. listed: part of those that the sequences may list.
    on_host: part of the pages in host memory. shared: whether all rows have one sequence. empty: -1 throughout the
    lists. settled: at most one tile of a head is missing in each set, so that nothing is left to choose."""

    batch: int = 2
    kv_heads: int = 2
    width: int = 12
    table_width: int = 16
    sets: int = 4
    page_size: int = 4
    num_queries: int = 1
    held: float = 0.8
    listed: float = 0.5
    on_host: float = 0.8
    shared: bool = False
    empty: bool = False
    settled: bool = False
    past_table: int = 0
    seed: int = 0

    @property
    def static(self) -> dict:
        border = FIRST + self.sets * WAYS + GAP
        return {"page_size": self.page_size, "num_queries": self.num_queries, "first": FIRST, "border": border}


CASES = {
    "settled": Case(settled=True),
    "settled, one head": Case(settled=True, batch=1, kv_heads=1),
    "settled, rows of one sequence": Case(settled=True, shared=True, batch=3, kv_heads=3),
    "settled, more entries than threads": Case(settled=True, batch=3, width=60, table_width=64, sets=64),
    "two heads": Case(),
    "one head, one row": Case(batch=1, kv_heads=1),
    "eight heads": Case(kv_heads=8, width=7),
    "rows of one sequence": Case(shared=True, batch=3),
    "lists longer than the buffer": Case(batch=3, width=30, table_width=40, sets=1, kv_heads=1),
    "one set": Case(sets=1, width=6),
    "an odd number of sets": Case(sets=7, width=14),
    "an empty buffer": Case(held=0),
    "all held": Case(held=1, listed=1, sets=8, batch=1),
    "one set, all of it listed": Case(held=1, listed=1, sets=1, width=24, table_width=24, batch=1, on_host=1, seed=1),
    "drafts": Case(num_queries=5),
    "pages of one token": Case(page_size=1, num_queries=2),
    "blocks past the table": Case(width=16, table_width=9, past_table=6),
    "all -1": Case(empty=True),
    "nothing in host memory": Case(on_host=0),
    "more entries than threads": Case(batch=4, width=100, table_width=110, sets=5),
    "more entries than threads, rows of one sequence": Case(batch=5, width=37, table_width=40, sets=5, shared=True, listed=0.8),
}


@functools.cache
def arguments(name: str) -> tuple:
    """What `NAMES` says. Pages have ids far above the number of sets; some have no id, some no frame. Places hold tiles
    of pages that are listed, of others, or none. Rows end in an open page, and with a full one."""
    case = CASES[name]
    rng = np.random.default_rng([case.seed, *map(ord, name)])
    batch, border = case.batch, case.static["border"]
    ids = rng.permutation(50 * case.sets + 6 * batch * case.table_width)
    rows = 1 if case.shared else batch
    table = np.tile(ids[: rows * case.table_width].reshape(rows, -1), (batch // rows, 1)).astype(np.int32)
    on_host = rng.random(len(ids)) < case.on_host
    elsewhere = np.array([0, FIRST - 1, border - 1])
    frame_of = np.where(on_host, border + rng.permutation(len(ids)), elsewhere[rng.integers(0, 3, len(ids))]).astype(np.int32)
    frame_of[table[0, :3]] = border, border - 1, -1
    frames = frame_of[table]
    table[0, 3] = -1
    if case.shared:
        table[:], frames[:] = table[0], frames[0]

    most = case.table_width * case.page_size
    lengths = most - rng.integers(0, 3 * case.page_size, batch)
    lengths[0] = most + case.num_queries - case.page_size  # the last page but one is just full, the last one is open
    if batch > 1:
        lengths[-1] -= (lengths[-1] - case.num_queries) % case.page_size + 1  # one token is missing
    blocks = np.full((batch, case.kv_heads, case.width), -1, np.int32)
    for row, head in np.ndindex(batch, case.kv_heads):
        count = 0 if case.empty else min(case.width - (case.width > 2), case.table_width + case.past_table)
        blocks[row, head, rng.permutation(case.width)[:count]] = rng.permutation(case.table_width + case.past_table)[:count]

    tags = np.full((case.kv_heads, case.sets, WAYS), -1, np.int32)
    ages = rng.permuted(np.broadcast_to(np.arange(NOW - WAYS - 2, NOW - 2), tags.shape), axis=2).astype(np.int32)
    named = np.isin(ids, table)
    for head, number in np.ndindex(case.kv_heads, case.sets):
        mine = [rng.permutation(ids[(ids % case.sets == number) & (named == which)]) for which in (True, False)]
        count = round(case.held * WAYS) - (rng.random() < 0.3) * (0 < case.held < 1)
        known = mine[0][: round(case.listed * count)]
        tags[head, number, rng.permutation(WAYS)[:count]] = np.concatenate([known, mine[1]])[:count]
    ages[tags < 0] = 0
    if case.settled:
        _settle(case, blocks, table, frames, lengths, tags)
    return tuple(jnp.asarray(x, jnp.int32) for x in (blocks, table, frames, lengths, tags, ages, NOW))


def _settle(case, blocks, table, frames, lengths, tags) -> None:
    """Take all missing tiles but those of one page per set out of the lists."""
    seen = {}
    for head, row, w, page, _ in asked_entries(case, blocks, table, frames, lengths):
        number = page % case.sets
        if page not in tags[head, number] and seen.setdefault((head, number), page) != page:
            blocks[row, head, w] = -1


def asked_entries(case, blocks, table, frames, lengths):
    """head, row, place in the list, page id, frame of each entry that may be in the buffer: of full pages in host
    memory."""
    for head, row, w in np.ndindex(blocks.shape[1], blocks.shape[0], blocks.shape[2]):
        block = blocks[row, head, w]
        if 0 <= block < table.shape[1]:
            page, frame = int(table[row, block]), int(frames[row, block])
            tokens_before = lengths[row] - case.num_queries
            if page >= 0 and frame >= case.static["border"] and tokens_before >= (block + 1) * case.page_size:
                yield head, row, w, page, frame


def by_set(name: str) -> dict[tuple[int, int], tuple[set[int], set[int]]]:
    """(head, set) -> the listed pages that it holds before the call, and those that are missing there."""
    blocks, table, frames, lengths, tags, *_ = map(np.asarray, arguments(name))
    found = collections.defaultdict(lambda: (set(), set()))
    for head, _, _, page, _ in asked_entries(CASES[name], blocks, table, frames, lengths):
        number = page % CASES[name].sets
        found[head, number][page not in tags[head, number]].add(page)
    return found


def is_settled(name: str) -> bool:
    """Whether no two missing tiles of a head share a set, so that every result is determined."""
    return all(len(missing) < 2 for _, missing in by_set(name).values())


@functools.cache
def expected(name: str) -> Placed:
    return place_tiles(*arguments(name), **CASES[name].static, implementation="reference")


def check(op, name: str) -> None:
    """What the op promises; where that leaves no choice, the reference's results bit for bit."""
    found = op(*arguments(name), **CASES[name].static)
    for field, ours, ref in zip(Placed._fields, found, expected(name), strict=True):
        assert (ours.shape, ours.dtype) == (ref.shape, ref.dtype)
        if is_settled(name):
            np.testing.assert_array_equal(ours, ref, err_msg=field)
    _check_buffer(name, found)
    _check_lists(name, found)


def _check_buffer(name: str, found: Placed) -> None:
    """Tags and ages: a missing tile takes the place that was unused for longest, and everything else stays."""
    *_, old_tags, old_ages, now = map(np.asarray, arguments(name))
    tags, ages = (np.asarray(x) for x in (found.tags, found.ages))
    listed = by_set(name)
    for head, number in np.ndindex(tags.shape[:2]):
        before, at = old_tags[head, number], (head, number)
        present, missing = listed.get(at, (set(), set()))
        young = np.where(np.isin(before, list(present)), now, old_ages[at])
        changed = np.flatnonzero(tags[at] != before)
        assert len(changed) == bool(missing), f"set {at}: places {changed} changed, pages {missing} are missing"
        for way in changed:
            assert young[way] == young.min(), f"set {at}: place {way} was used at {young[way]}, another one at {young.min()}"
            assert tags[(*at, way)] in missing, f"set {at}: page {tags[(*at, way)]} has a place; missing are {missing}"
            young[way] = now
        np.testing.assert_array_equal(ages[at], young, err_msg=f"ages of set {at}")


def _check_lists(name: str, found: Placed) -> None:
    """Frames and copies, by the tags before and after."""
    case = CASES[name]
    blocks, table, frames, lengths, old_tags, *_ = map(np.asarray, arguments(name))
    there = (blocks >= 0) & (blocks < table.shape[1])
    rows = np.arange(case.batch)[:, None, None]
    block_frames = np.where(there, frames[rows, np.where(there, blocks, 0)], -1)
    sources, targets = (np.full((case.batch * case.width, case.kv_heads), -1) for _ in range(2))
    for head, row, w, page, frame in asked_entries(case, blocks, table, frames, lengths):
        number = page % case.sets
        ways = np.flatnonzero(np.asarray(found.tags)[head, number] == page)
        assert len(ways) < 2, f"page {page} has several places of head {head}"
        if len(ways):
            block_frames[row, head, w] = FIRST + number * WAYS + ways[0]
            if page not in old_tags[head, number]:
                entry = row * case.width + w, head
                sources[entry], targets[entry] = frame, block_frames[row, head, w]
    np.testing.assert_array_equal(found.block_frames, block_frames, err_msg="block_frames")
    np.testing.assert_array_equal(found.sources, sources, err_msg="sources")
    np.testing.assert_array_equal(found.targets, targets, err_msg="targets")


def production(batch: int, kv_heads: int, width: int, sets: int = 512, table_width: int = 8192, num_queries: int = 1) -> tuple:
    """(op, arrays, keywords) of a call."""
    shapes = {"blocks": (batch, kv_heads, width), "page_table": (batch, table_width), "frames": (batch, table_width), "lengths": (batch,)}
    shapes |= {"tags": (kv_heads, sets, WAYS), "ages": (kv_heads, sets, WAYS), "now": ()}
    static = {"page_size": 128, "num_queries": num_queries, "first": 64, "border": 64 + sets * WAYS}
    return "place_tiles", {name: (shape, "int32") for name, shape in shapes.items()}, static


PRODUCTION = {
    "28/4": production(1, 4, 37),
    "32/8, batch 8": production(8, 8, 37),
    "one set": production(1, 1, 37, sets=1),
    "drafts": production(2, 4, 300, num_queries=4),
    "as many entries as it takes": production(8, 8, mosaic_gpu.MAX_ENTRIES // 8),
}
