"""append_tokens for TPU: interpreted on the CPU with race detection, its copies counted, lowered, and compiled ahead of
time where libtpu is installed."""

from __future__ import annotations

import functools
import re

import append_suite
import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
import tpu_kernels
from append_suite import TPU_CASES, check
from quick_cases import one_in, rest_long

from pallas_kernels.cache.append_tokens import mosaic_tpu
from pallas_kernels.core import dispatch
from pallas_kernels.selection.page_index import INDEX_ROWS

pytestmark = pytest.mark.usefixtures("no_races")
INTERPRETED = paging.implementation("append_tokens", "mosaic_tpu", interpret=tpu_kernels.INTERPRET)
KERNEL = jax.jit(
    functools.partial(INTERPRETED, config=mosaic_tpu.Config(tile_tokens=8)), static_argnames="kinds", compiler_options=tpu_kernels.QUICK
)
"""With tiles this small the inputs below take several."""
DRAFTS, CHUNK, INDEXES, _ = TPU_CASES


@pytest.mark.parametrize(
    "case", rest_long(TPU_CASES, "TPU, bfloat16, four indexes, a NaN shows", "TPU, a chunk in several tiles, padding, a page is missing")
)
def test_matches_reference(case):
    check(KERNEL, case)


def test_copies_move_what_the_tokens_name():
    """Per group of 8 rows that gets a token K and V of all heads, in and out; per page that fills its keys in and its
    index rows out."""
    for case in (DRAFTS, CHUNK):
        with tpu_kernels.counted_copies() as copied:
            jax.block_until_ready(KERNEL(*append_suite.arguments(case), kinds=TPU_CASES[case].named_kinds))
        k_pages, _, _, _, _, *places = append_suite.arguments(case)
        (positions, valid, table), page_size = (np.asarray(x) for x in places), k_pages.shape[2]
        groups, sealed = set(), 0
        for row, t in zip(*np.nonzero(valid), strict=True):
            position = int(positions[row, t])
            logical = position // page_size
            if 0 <= logical < table.shape[1] and table[row, logical] >= 0:
                groups.add((row, position // 8))
                sealed += position % page_size == page_size - 1
        moved = 2 * len(groups) * k_pages[0, :, :8].nbytes
        index = sum(k_pages[0, :, : INDEX_ROWS[kind]].nbytes * (page_size // size) for kind, size in TPU_CASES[case].kinds)
        assert sealed
        assert copied["in"] == moved + sealed * k_pages[0].nbytes
        assert copied["out"] == moved + sealed * index


@pytest.mark.long
def test_bits_twice_and_pages_by_frame_and_indexes_by_id(tools):
    """Every page in another frame: the same bits; not so with one table for the other."""
    k_pages, v_pages, indexes, *tokens, table = append_suite.arguments(INDEXES)
    frame_of = jnp.asarray(np.random.default_rng(0).permutation(len(k_pages)), jnp.int32)
    moved = [jnp.zeros_like(x).at[frame_of].set(x) for x in (k_pages, v_pages)]
    op = functools.partial(KERNEL, kinds=TPU_CASES[INDEXES].named_kinds)

    def found(ids, frames):
        k, v, built = op(*moved, indexes, *tokens, ids, frames=frames)
        return k[frame_of], v[frame_of], built

    once = op(k_pages, v_pages, indexes, *tokens, table)
    jax.tree.map(tools.assert_same_bits, once, op(k_pages, v_pages, indexes, *tokens, table))
    jax.tree.map(tools.assert_same_bits, once, found(table, frame_of[table]))
    for wrong in ((table, table), (frame_of[table], table)):
        with pytest.raises(AssertionError):
            jax.tree.map(tools.assert_same_bits, once, found(*wrong))


@pytest.mark.long
def test_wide_pages_a_page_at_a_time():
    """The default tile, production heads."""
    check(jax.jit(INTERPRETED, static_argnames="kinds", compiler_options=tpu_kernels.QUICK), "pages of 128")


@pytest.mark.quick("past the table is its last page", "NaN ignored")
@pytest.mark.parametrize("mutant", append_suite.MUTANTS)
def test_mutant_fails(tools, mutant):
    """What the suite makes of a mutant on these cases does not depend on who computes it: another does it faster."""
    tools.must_fail(check, append_suite.MUTANTS[mutant], TPU_CASES)


def _first_group_only(places):
    def change(sizes, *arrays):
        scalars, token = places(sizes, *arrays)
        scalars[1] = jnp.where(jnp.arange(scalars[1].size) % (sizes.groups * sizes.tiles) == 0, scalars[1], -1)
        return scalars, token

    return change


def _whole_groups(places):
    def change(sizes, *arrays):
        scalars, token = places(sizes, *arrays)
        scalars[2] = jnp.full_like(scalars[2], 255)
        return scalars, token

    return change


INSIDE = {
    "only the first group of a row": (DRAFTS, "_places", _first_group_only),
    "the rest of a group is overwritten": (DRAFTS, "_places", _whole_groups),
    "blocks of an index exchanged": (INDEXES, "_build", lambda build: lambda kind, blocks, *rest: build(kind, blocks[::-1], *rest)),
    "NaN ignored": (INDEXES, "_build", lambda build: lambda kind, blocks, *rest: build(kind, jnp.nan_to_num(blocks), *rest)),
    "nothing is sealed": (DRAFTS, "_seal", lambda seal: lambda *_: None),
}


@pytest.mark.quick("nothing is sealed")
@pytest.mark.parametrize("mutant", INSIDE)
def test_mutant_inside_fails(tools, monkeypatch, mutant):
    case, name, change = INSIDE[mutant]
    forget = (KERNEL.clear_cache, mosaic_tpu._append.clear_cache)
    for clear in forget:
        clear()
    monkeypatch.setattr(mosaic_tpu, name, change(getattr(mosaic_tpu, name)))
    tools.must_fail(check, KERNEL, (case,))
    for clear in forget:
        clear()


def _shapes(batch=1, num_tokens=1, kv_heads=4, page=128, head_dim=128, dtype="bfloat16", kinds=(("bounds", 128),), frames=False):
    """Shapes of the op's arrays, and its indexes to build."""
    named = tuple((f"{kind}{size}", kind, size) for kind, size in kinds)
    shape = jax.ShapeDtypeStruct
    pool, tokens = shape((4096, kv_heads, page, head_dim), dtype), shape((batch, num_tokens, kv_heads, head_dim), dtype)
    indexes = {name: shape((4096, kv_heads, page // size, INDEX_ROWS[kind], head_dim), dtype) for name, kind, size in named}
    table = shape((batch, 1024), jnp.int32)
    places = shape((batch, num_tokens), jnp.int32), shape((batch, num_tokens), bool)
    return (pool, pool, indexes, tokens, tokens, *places, table), {"kinds": named, "frames": table if frames else None}


PRODUCTION = {
    "28/4 heads": {},
    "32/8 heads, batch of 8, frames, three indexes": {
        **{"batch": 8, "kv_heads": 8, "frames": True},
        "kinds": (("bounds", 128), ("bounds", 16), ("mean", 128)),
    },
    "drafts, no index": {"batch": 4, "num_tokens": 8, "kinds": ()},
    "a chunk of 8,192": {"num_tokens": 8192},
    "float32, head dim 256": {"batch": 2, "dtype": "float32", "head_dim": 256, "kinds": (("mean", 128), ("bounds", 32), ("mean", 32))},
}


def _op(*arrays, **keywords):
    return paging.implementation("append_tokens", "mosaic_tpu")(*arrays, **keywords)


@pytest.mark.parametrize("case", one_in(3, PRODUCTION))
def test_lowers_for_tpu(case):
    arrays, keywords = _shapes(**PRODUCTION[case])
    op = jax.jit(_op, static_argnames="kinds")
    assert op.trace(*arrays, **keywords).lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 1


@pytest.mark.parametrize("chip", tpu_kernels.TOPOLOGIES)
@pytest.mark.parametrize("case", PRODUCTION)
def test_compiles_ahead_of_time(case, chip):
    """Without a TPU; in place, and without a copy of the pool or of an index."""
    arrays, keywords = _shapes(**PRODUCTION[case])
    frames = keywords.pop("frames")
    op = lambda *a: _op(*a[:8], frames=a[8] if frames else None, **keywords)  # noqa: E731
    compiled = tpu_kernels.compile_ahead(op, (*arrays, *([frames] if frames else [])), chip, donate=(0, 1, 2))
    memory = compiled.memory_analysis()
    k_pages, _, indexes, tokens = arrays[:4]
    assert memory.temp_size_in_bytes < 2**20 + 4 * tokens.size * tokens.dtype.itemsize
    assert memory.alias_size_in_bytes >= 2 * k_pages.size * k_pages.dtype.itemsize
    tpu_kernels.assert_not_copied(compiled, k_pages, *indexes.values())


UNSUPPORTED = {
    "float16": ({"dtype": "float16"}, "TPUs do not compute in float16"),
    "head dim": ({"head_dim": 64}, "head dim 64 is not a multiple of 128"),
    "page size": ({"page": 4, "kinds": ()}, "page size 4 is not a multiple of 8"),
    "blocks of 4": ({"kinds": (("mean", 4),)}, "block_size 4 of index 'mean4' is not a multiple of 8"),
    "many rows": ({"batch": 64, "num_tokens": 2**15}, "bytes of scalar memory, at most 786432"),
    "many heads": ({"kv_heads": 256, "dtype": "float32"}, "bytes of vector memory, at most 12582912"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_it_cannot_do_goes_to_another(on_tpu, case):
    changes, reason = UNSUPPORTED[case]
    arrays, keywords = _shapes(**changes)
    op = functools.partial(paging.append_tokens, **keywords)
    with dispatch.listening() as heard:
        jax.eval_shape(op, *arrays)
    assert heard["append_tokens"] == "xla"
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax.eval_shape(functools.partial(op, implementation="mosaic_tpu"), *arrays)


@pytest.mark.parametrize("tile_tokens", [0, -8, 12, 8.0])
def test_config_validates_itself(tile_tokens):
    with pytest.raises(ValueError, match="tile_tokens must be a positive multiple of 8"):
        mosaic_tpu.Config(tile_tokens=tile_tokens)
