"""The suite of place_tiles: every implementation against what the op promises, and where that leaves no choice, against
the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from place_suite import CASES, FIRST, GAP, NAMES, NOW, arguments, asked_entries, by_set, check, is_settled, production

from pallas_kernels.cache.place_tiles import WAYS, place_tiles
from pallas_kernels.core import dispatch

pytestmark = pytest.mark.optimized
"""It looks at the memory of programs."""

XLA = functools.partial(place_tiles, implementation="xla")
"""The base of the mutants."""

IMPLEMENTATIONS = {name: functools.partial(place_tiles, implementation=name) for name in dispatch.available("place_tiles")}
"""The reference, too: most cases leave a choice, so promises are what all are held to."""


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
        asked = list(asked_entries(case, blocks, table, frames, lengths))
        twice += len(asked) - len({(head, page) for head, _, _, page, _ in asked})
        full += sum((blocks[row, head, w] + 1) * case.page_size == lengths[row] - case.num_queries for head, row, w, _, _ in asked)
        for (row, head, _), block in np.ndenumerate(blocks):
            if 0 <= block < case.table_width and table[row, block] in tags[head]:
                is_full = (block + 1) * case.page_size <= lengths[row] - case.num_queries
                held_but_open += frames[row, block] >= case.static["border"] and not is_full
                held_but_here += frames[row, block] == case.static["border"] - 1 and is_full
    assert min(full, twice, held_but_open, held_but_here) > 3


@pytest.mark.quick_but(
    "xla-more entries than threads, rows of one sequence",
    "xla-settled, more entries than threads",
    "xla-settled, rows of one sequence",
    "xla-one set, all of it listed",
    "xla-rows of one sequence",
    "xla-an odd number of sets",
    "xla-eight heads",
    "xla-settled",
    "xla-drafts",
    "xla-pages of one token",
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_promises(name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_places_hold_what_tables_say_step_after_step(name):
    """Random lists and growing sequences; copies are made in a pool of which only the page ids are kept. No list is
    ever led to another page, and few tiles are copied when lists repeat."""
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


@pytest.mark.quick_but("places begin one late", "the border is one early", "the border is one late")
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
