"""The suite of place_tiles: every implementation against what the op promises, and where that leaves no choice, against the reference."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest

from pallas_kernels import dispatch
from pallas_kernels.hopper import lanes
from pallas_kernels.place_tiles import WAYS, mosaic_gpu, place_tiles
from pallas_kernels.place_tiles.api import Placed

pytestmark = pytest.mark.optimized
"""It looks at the memory of programs."""

XLA = functools.partial(place_tiles, implementation="xla")
"""The base of the mutants."""

IMPLEMENTATIONS = {name: functools.partial(place_tiles, implementation=name) for name in dispatch.available("place_tiles")}
"""The reference, too: most cases leave a choice, so promises are what all are held to."""

NAMES = ("blocks", "page_table", "frames", "lengths", "tags", "ages", "now")
FIRST, GAP = 5, 2
"""Frame of the first place, and frames on the device between the last place and the border."""
NOW = 40


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call. held: part of the places that hold a tile. listed: part of those that the sequences may list. on_host: part of the
    pages in host memory. shared: whether all rows have one sequence. empty: -1 throughout the lists. settled: at most one tile of a head
    is missing in each set, so that nothing is left to choose."""

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
    """What `NAMES` says. Pages have ids far above the number of sets; some have no id, some no frame. Places hold tiles of pages that are
    listed, of others, or none. Rows end in an open page, and with a full one."""
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
    for head, row, w, page, _ in _asked(case, blocks, table, frames, lengths):
        number = page % case.sets
        if page not in tags[head, number] and seen.setdefault((head, number), page) != page:
            blocks[row, head, w] = -1


def _asked(case, blocks, table, frames, lengths):
    """head, row, place in the list, page id, frame of each entry that may be in the buffer: of full pages in host memory."""
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
    for head, _, _, page, _ in _asked(CASES[name], blocks, table, frames, lengths):
        number = page % CASES[name].sets
        found[head, number][page not in tags[head, number]].add(page)
    return found


def is_settled(name: str) -> bool:
    """Whether no two missing tiles of a head share a set, so that every result is determined."""
    return all(len(missing) < 2 for _, missing in by_set(name).values())


def test_cases_have_what_can_go_wrong():
    """Counted over all heads and sets of all cases, and over all entries."""
    assert {name for name in CASES if is_settled(name)} > {name for name in CASES if CASES[name].settled}
    of_sets = [(CASES[name], *pages) for name in CASES for pages in by_set(name).values()]
    assert any(present and not missing for _, present, missing in of_sets)
    assert any(present and missing for _, present, missing in of_sets)
    assert any(len(missing) > WAYS for _, _, missing in of_sets)
    assert any(len(present) == WAYS and missing for _, present, missing in of_sets), "a listed tile must make room"
    assert any(page >= case.sets for case, _, missing in of_sets for page in missing)
    full, twice, held_but_open, held_but_here = 0, 0, 0, 0
    for name, case in CASES.items():
        blocks, table, frames, lengths, tags, *_ = map(np.asarray, arguments(name))
        asked = list(_asked(case, blocks, table, frames, lengths))
        twice += len(asked) - len({(head, page) for head, _, _, page, _ in asked})
        full += sum((blocks[row, head, w] + 1) * case.page_size == lengths[row] - case.num_queries for head, row, w, _, _ in asked)
        for (row, head, _), block in np.ndenumerate(blocks):
            if 0 <= block < case.table_width and table[row, block] in tags[head]:
                is_full = (block + 1) * case.page_size <= lengths[row] - case.num_queries
                held_but_open += frames[row, block] >= case.static["border"] and not is_full
                held_but_here += frames[row, block] == case.static["border"] - 1 and is_full
    assert min(full, twice, held_but_open, held_but_here) > 3


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
    for head, row, w, page, frame in _asked(case, blocks, table, frames, lengths):
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_promises(name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_places_hold_what_tables_say_step_after_step(name):
    """Random lists and growing sequences; copies are made in a pool of which only the page ids are kept. No list is ever led to another
    page, and few tiles are copied when lists repeat."""
    rng, batch, heads, width, pages, sets = np.random.default_rng(0), 2, 3, 6, 30, 4
    border = FIRST + sets * WAYS
    table = rng.permutation(500)[: batch * pages].reshape(batch, pages).astype(np.int32)
    frames = border + np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    content = np.full((border + batch * pages, heads), -1)
    content[frames] = table[..., None]
    tags, ages = (jnp.full((heads, sets, WAYS), value, jnp.int32) for value in (-1, 0))
    copies = []
    for now in range(1, 31):
        lengths = np.full(batch, (pages - 3) * 4 + now // 2, np.int32)
        places = np.arange(max(0, 12 - now), 30 - now // 4)
        if now <= 20:  # afterwards lists repeat
            blocks = np.stack([rng.permutation(places)[:width] for _ in range(batch * heads)]).reshape(batch, heads, width).astype(np.int32)
        given = (*map(jnp.asarray, (blocks, table, frames, lengths)), tags, ages, jnp.int32(now))
        found = IMPLEMENTATIONS[name](*given, page_size=4, num_queries=1, first=FIRST, border=border)
        entries, which = np.nonzero(np.asarray(found.sources) >= 0)
        content[np.asarray(found.targets)[entries, which], which] = content[np.asarray(found.sources)[entries, which], which]
        rows = np.arange(batch)[:, None, None]
        np.testing.assert_array_equal(content[np.asarray(found.block_frames), np.arange(heads)[:, None]], table[rows, blocks])
        tags, ages = found.tags, found.ages
        held = np.asarray(tags).reshape(heads, -1)
        np.testing.assert_array_equal(content[FIRST:border].T[held >= 0], held[held >= 0])
        copies.append(len(entries))
    assert sum(copies) > 20
    assert copies[-1] == 0


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_arguments_stay_as_they_are(tools, name):
    """Without donation it is a function like any other, however tags and ages are updated."""
    before = [np.array(x) for x in arguments("two heads")]
    jax.block_until_ready(IMPLEMENTATIONS[name](*arguments("two heads"), **CASES["two heads"].static))
    for old, kept in zip(before, arguments("two heads"), strict=True):
        tools.assert_same_bits(old, kept)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bits_twice(tools, name):
    tools.assert_all_same_bits(*(IMPLEMENTATIONS[name](*arguments("settled"), **CASES["settled"].static) for _ in range(2)))


@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name != "reference"])
def test_donated_tags_and_ages_are_not_copied(name):
    """A buffer far larger than the lists: the compiled program needs no memory of its size."""
    _, arrays, static = production(batch=1, kv_heads=4, width=37, sets=2**16)
    structs = [jax.ShapeDtypeStruct(arrays[name][0], jnp.int32) for name in NAMES]
    donated = NAMES.index("tags"), NAMES.index("ages")  # in the order of the results, to which donated arrays of one shape are given
    memory = jax.jit(functools.partial(IMPLEMENTATIONS[name], **static), donate_argnums=donated).lower(*structs).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * structs[donated[0]].size * 4
    assert memory.temp_size_in_bytes < 2**18


# The GPU form, without a GPU: lowered, compiled, and whole on emulated threads.


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
    "as many entries as it takes": production(8, 8, mosaic_gpu.MOST_ENTRIES // 8),
}


@pytest.mark.parametrize("case", PRODUCTION)
def test_gpu_form_lowers_and_updates_in_place(cuda, case):
    """One kernel, which hands tags and ages back as its results."""
    text = cuda.lower(*PRODUCTION[case])
    assert text.count("custom_call @") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 2


def test_gpu_form_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION, launches=1)


def test_gpu_form_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(PRODUCTION, launches=1)


TAGS, AGES = 5, 6
"""Numbers of the kernel's arguments of which several threads may write one word: tiles may want one place, and rows may list one tile."""


@pytest.fixture(scope="session")
def on_emulated_threads(emulated_kernels):
    kernel = paging.implementation("place_tiles", "mosaic_gpu")

    def op(*arrays, contested=(TAGS, AGES), **keywords):
        with emulated_kernels.kernels(contested):
            return kernel(*arrays, **keywords)

    return op


@pytest.mark.parametrize("case", CASES)
def test_on_emulated_threads_it_keeps_the_promises(on_emulated_threads, case):
    check(on_emulated_threads, case)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.settled and not case.shared])
def test_on_emulated_threads_nothing_is_contested_where_all_is_settled(on_emulated_threads, case):
    check(functools.partial(on_emulated_threads, contested=()), case)


def test_on_emulated_threads_missing_tiles_contend_for_places(emulated, on_emulated_threads):
    with pytest.raises(emulated.Race, match=r"different words to one place of arrays\[5\] at once"):
        on_emulated_threads(*arguments("an empty buffer"), contested=[AGES], **CASES["an empty buffer"].static)


@pytest.mark.parametrize("number", [0, 1])
def test_on_emulated_threads_every_barrier_is_needed(monkeypatch, emulated, on_emulated_threads, number):
    """Between looking up and taking places, and between taking and seeing who got them."""
    count, name = iter(range(10**6)), "rows of one sequence"
    monkeypatch.setattr(lanes, "cta_barrier", lambda threads: None if next(count) % 2 == number else BARRIER(threads))
    with pytest.raises(emulated.Race, match=r"arrays\[[56]\], which .*; no barrier between"):
        on_emulated_threads(*arguments(name), **CASES[name].static)


def _one_turn(s, step):
    with lanes.when(lanes.thread() < s.entries):
        step(lanes.thread())


BARRIER, PLACE, FOR_ENTRIES = lanes.cta_barrier, mosaic_gpu.place_head, mosaic_gpu._for_entries
INSIDE = {
    "only as many entries as threads": (mosaic_gpu, "_for_entries", _one_turn),
    "half of the places": (mosaic_gpu, "WAYS", WAYS // 2),
    "the first head": (mosaic_gpu, "place_head", lambda s, head, *rest: PLACE(s, head * 0, *rest)),
    "a set too many": (mosaic_gpu, "place_head", lambda s, *rest: PLACE(dataclasses.replace(s, sets=s.sets + 1), *rest)),
    "a table of another width": (
        *(mosaic_gpu, "place_head"),
        lambda s, *rest: PLACE(dataclasses.replace(s, table_width=s.table_width - 1), *rest),
    ),
    "the last entry is missing": (
        *(mosaic_gpu, "_for_entries"),
        lambda s, step: FOR_ENTRIES(dataclasses.replace(s, batch=1, width=s.entries - 1), step),
    ),
}


@pytest.mark.parametrize("mutant", INSIDE)
def test_mutant_inside_fails(tools, monkeypatch, emulated, on_emulated_threads, mutant):
    monkeypatch.setattr(*INSIDE[mutant])

    def op(*arrays, **keywords):
        try:
            return on_emulated_threads(*arrays, **keywords)
        except emulated.FAULTS as fault:
            raise AssertionError(str(fault)) from fault

    tools.must_fail(check, op, ("settled", "two heads", "more entries than threads"))


# Mutants: what an implementation gets wrong, expressed on its arguments or its results.


def _given(**changes):
    """changes: name -> function of all arguments by name, static ones too, that gives the wrong one."""

    def op(*arrays, **static):
        given = dict(zip(NAMES, arrays, strict=True)) | static
        return XLA(
            **given
            | {name: jnp.asarray(change(given)).astype(jnp.int32) if name in NAMES else change(given) for name, change in changes.items()}
        )

    return op


def _found(**changes):
    """changes: field of the results -> function of all arguments by name and the results that gives the wrong one."""

    def op(*arrays, **static):
        found, given = XLA(*arrays, **static), dict(zip(NAMES, arrays, strict=True)) | static
        return found._replace(**{name: jnp.asarray(change(given, found)).astype(jnp.int32) for name, change in changes.items()})

    return op


def _by_ages(change):
    """Another place goes; ages that no tile got or kept are as they were."""

    def op(*arrays, **static):
        ages, now = (arrays[NAMES.index(name)] for name in ("ages", "now"))
        found = _given(ages=lambda given: change(given["ages"]))(*arrays, **static)
        return found._replace(ages=jnp.where(found.ages == now, now, ages))

    return op


def _tags_of_other_heads(*arrays, **static):
    """Head h has the places of the last head but h."""
    *lists, tags, ages, now = arrays
    found = XLA(*lists, tags[::-1], ages[::-1], now, **static)
    return found._replace(tags=found.tags[::-1], ages=found.ages[::-1])


def _found_tiles_are_copied(given, found, places: bool):
    """Sources, or targets, of all entries that hold a place."""
    entries = found.block_frames.swapaxes(1, 2).reshape(found.sources.shape)
    blocks = jnp.clip(given["blocks"], 0, given["frames"].shape[1] - 1)
    before = jnp.take_along_axis(given["frames"], blocks.reshape(len(blocks), -1), axis=1).reshape(blocks.shape)
    before = before.swapaxes(1, 2).reshape(found.sources.shape)
    held = (entries >= given["first"]) & (entries < given["border"] - GAP)
    return jnp.where(held, entries if places else before, -1)


def _old_tags_held(given, found):
    return (given["tags"] == found.tags) & (found.tags >= 0)


MUTANTS = {
    "the place used last goes": _by_ages(lambda ages: NOW - 1 - ages),
    "the first place that no listed tile has goes": _by_ages(jnp.zeros_like),
    "ages are those of the other heads": _by_ages(lambda ages: ages[::-1]),
    "an open page is placed": _given(lengths=lambda of: of["lengths"] + of["page_size"]),
    "a page is full one token early": _given(lengths=lambda of: of["lengths"] + 1),
    "a page is full one token late": _given(lengths=lambda of: of["lengths"] - 1),
    "one query": _given(num_queries=lambda of: 1),
    "the step's tokens count as there": _given(lengths=lambda of: of["lengths"] + of["num_queries"]),
    "another row's length": _given(lengths=lambda of: of["lengths"][::-1]),
    "another row's table": _given(page_table=lambda of: of["page_table"][::-1]),
    "another row's frames": _given(frames=lambda of: of["frames"][::-1]),
    "the border is one late": _given(border=lambda of: of["border"] + 1),
    "the border is one early": _given(border=lambda of: of["border"] - 1),
    "places begin one late": _given(first=lambda of: of["first"] + 1),
    "frames are page ids": _given(page_table=lambda of: of["frames"]),
    "logical pages are page ids": _given(page_table=lambda of: jnp.broadcast_to(jnp.arange(of["frames"].shape[1]), of["frames"].shape)),
    "a page without an id is page 0": _given(page_table=lambda of: jnp.maximum(of["page_table"], 0)),
    "no block is block 0": _given(blocks=lambda of: jnp.maximum(of["blocks"], 0)),
    "a block past the table is the last one": _given(blocks=lambda of: jnp.minimum(of["blocks"], of["frames"].shape[1] - 1)),
    "the next head's list": _given(blocks=lambda of: jnp.roll(of["blocks"], 1, axis=1)),
    "one entry is forgotten": _given(blocks=lambda of: of["blocks"].at[-1, -1, -1].set(-1)),
    "tags of another head": _tags_of_other_heads,
    "tags of the first head": _given(tags=lambda of: jnp.broadcast_to(of["tags"][:1], of["tags"].shape)),
    "nothing is ever found": _given(tags=lambda of: jnp.full_like(of["tags"], -1)),
    "found tiles are copied": _found(
        sources=lambda given, found: _found_tiles_are_copied(given, found, places=False),
        targets=lambda given, found: _found_tiles_are_copied(given, found, places=True),
    ),
    "nothing is copied": _found(sources=lambda _, found: jnp.full_like(found.sources, -1)),
    "one tile is not copied": _found(
        targets=lambda _, found: found.targets.reshape(-1).at[found.targets.argmax()].set(-1).reshape(found.targets.shape)
    ),
    "sources and targets exchanged": _found(sources=lambda _, found: found.targets, targets=lambda _, found: found.sources),
    "copies of the heads exchanged": _found(targets=lambda _, found: found.targets[:, ::-1]),
    "copies in another order": _found(
        sources=lambda _, found: found.sources[::-1],
        targets=lambda _, found: found.targets[::-1],
    ),
    "found tiles are read in host memory": lambda *arrays, **static: XLA(*arrays, **static)._replace(
        block_frames=_given(tags=lambda of: jnp.full_like(of["tags"], -1))(*arrays, **static | {"border": 2**30}).block_frames
    ),
    "a tile that got no place is read in one": _found(
        block_frames=lambda of, found: jnp.where(found.block_frames >= of["border"], of["first"], found.block_frames)
    ),
    "frames are places": _found(block_frames=lambda of, found: found.block_frames - of["first"]),
    "ages stay": _found(ages=lambda of, found: of["ages"]),
    "ages of found tiles stay": _found(ages=lambda of, found: jnp.where(_old_tags_held(of, found), of["ages"], found.ages)),
    "ages of copied tiles stay": _found(ages=lambda of, found: jnp.where(_old_tags_held(of, found), found.ages, of["ages"])),
    "all ages are now": _found(ages=lambda of, found: jnp.full_like(found.ages, NOW)),
    "the step before": _given(now=lambda of: of["now"] - 1),
    "tags stay": _found(tags=lambda of, found: of["tags"]),
    "other tags are forgotten": _found(tags=lambda of, found: jnp.where(found.ages == NOW, found.tags, -1)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


# Refusals.


def _zeros(*shape, dtype="int32"):
    return jnp.zeros(shape, dtype)


BAD = {
    "no heads": ({"blocks": _zeros(2, 12)}, r"needs blocks \[B, K, W\].*got blocks int32\[2, 12\]"),
    "frames of other pages": ({"frames": _zeros(2, 15)}, r"page_table int32\[2, 16\] frames int32\[2, 15\]"),
    "lengths of other rows": ({"lengths": _zeros(3)}, r"lengths \[B\]; got .*lengths int32\[3\]"),
    "tables of other rows": ({"page_table": _zeros(3, 16), "frames": _zeros(3, 16)}, r"same batch.*page_table int32\[3, 16\]"),
    "empty lists": ({"blocks": _zeros(2, 2, 0)}, r"no axis may be empty; got blocks int32\[2, 2, 0\]"),
    "an empty table": ({"page_table": _zeros(2, 0), "frames": _zeros(2, 0)}, r"no axis may be empty; got .*int32\[2, 0\]"),
    "ages of other places": ({"ages": _zeros(2, 3, WAYS)}, r"must be \[K, S, 8\]; got .*ages int32\[2, 3, 8\]"),
    "no sets": ({"tags": _zeros(2, 0, WAYS), "ages": _zeros(2, 0, WAYS)}, r"must be \[K, S, 8\]; got .*tags int32\[2, 0, 8\]"),
    "other heads": ({"tags": _zeros(3, 4, WAYS), "ages": _zeros(3, 4, WAYS)}, r"must be \[K, S, 8\]; got .*tags int32\[3, 4, 8\]"),
    "four ways": ({"tags": _zeros(2, 4, 4), "ages": _zeros(2, 4, 4)}, r"must be \[K, S, 8\]; got .*tags int32\[2, 4, 4\]"),
    "blocks are no int32": ({"blocks": _zeros(2, 2, 12, dtype="int16")}, r"must be int32.*blocks int16"),
    "ages are no int32": ({"ages": _zeros(2, 4, WAYS, dtype="float32")}, r"must be int32.*ages float32"),
    "now is no int32": ({"now": jnp.float32(3)}, r"now a scalar; got .*now float32\[\]"),
    "now is a row": ({"now": _zeros(2)}, r"now a scalar; got .*now int32\[2\]"),
    "places past the border": ({"border": FIRST + 4 * WAYS - 1}, "the 32 places from frame 5 on must lie before the border 36"),
    "places before the pool": ({"first": -1}, "the 32 places from frame -1 on"),
    "pages of no tokens": ({"page_size": 0}, "page_size 0 and num_queries 1 must be at least 1"),
    "no queries": ({"num_queries": 0}, "page_size 4 and num_queries 0 must be at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        place_tiles(**dict(zip(NAMES, arguments("two heads"), strict=True)) | CASES["two heads"].static | changes)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_config_is_refused(name):
    with pytest.raises(ValueError, match=f"implementation '{name}' of place_tiles takes no config, got 7"):
        place_tiles(*arguments("two heads"), **CASES["two heads"].static, config=7, implementation=name)


def test_places_may_end_at_the_border():
    XLA(*arguments("two heads"), **CASES["two heads"].static | {"border": FIRST + 4 * WAYS})


def test_on_hopper_the_kernel_is_picked(on_hopper, picked):
    assert picked(PRODUCTION["as many entries as it takes"])["place_tiles"] == "mosaic_gpu"


def test_more_entries_than_the_kernel_takes_go_to_another(on_hopper, picked):
    case = production(3, 2, (mosaic_gpu.MOST_ENTRIES + 1) // 3)
    assert picked(case)["place_tiles"] == "xla"
    with pytest.raises(NotImplementedError, match="a head may list at most 8192 tiles, got 8193"):
        picked(case, implementation="mosaic_gpu")
