"""Pages whose frame is not their id: every op that reads or writes pages gives the same bits, finds bytes by frame and
rows of an index by id, and needs no frame for what it does not read; `missing` counts what it would have read."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import paging
import pytest

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import missing
from pallas_kernels.selection.page_index import page_index

SMALL = {"lengths": (160, 17, 40), "width": 10, "dtype": "float32"}
FOR_KERNELS = {"lengths": (1280, 129, 300), "width": 10, "page_size": 128, "head_dim": 128, "group": 7, "dtype": "bfloat16"}
DECODING = ("gather_attention", "selected_attention", "append_tokens")
OPS = ("block_mass", "block_sparse_attention", "flash_attention", "gather_attention", "query_sparse_attention", "selected_attention")
FORMS = {op: [op] for op in OPS} | {"gather_attention": ["dense", "a list", "a list each"]}
CALLS = [
    pytest.param(form, op, name, id=f"{op}, {form}, {name}" if form != op else f"{op}, {name}")
    for op, forms in FORMS.items()
    for form in forms
    for name in dispatch.available(op)
    if name != "reference"
]


class Pool:
    """A suite's input, and the same tokens in other frames: more of them than pages, in another order, the rest NaN."""

    def __init__(self, tools, op: str, kernel: bool):
        sizes = FOR_KERNELS if kernel else SMALL
        paged = tools.make_paged(seed=5, num_queries=4 if op in DECODING else 130 if kernel else 7, **sizes)
        self.paged, self.ids = paged, paged.page_table
        rng, pages = np.random.default_rng(1), len(paged.k)
        self.frame_of = jnp.asarray(rng.permutation(pages + 3)[:pages], jnp.int32)
        self.frames = jnp.where(self.ids >= 0, self.frame_of[self.ids], -1)
        self.size = paged.k.shape[2]
        kinds = {"kind": "bounds", "block_size": self.block_size}
        keys = jnp.nan_to_num(paged.k)
        # As many rows as there are frames, so that a lookup by frame finds one: of pages past the ids, and those would
        # be chosen.
        self.index = jnp.pad(page_index(keys, **kinds), ((0, 3), *[(0, 0)] * 4), constant_values=50)

    @property
    def block_size(self) -> int:
        return self.size // 4

    def moved(self, pool):
        """The pool in its frames."""
        return jnp.full((len(pool) + 3, *pool.shape[1:]), jnp.nan, pool.dtype).at[self.frame_of].set(pool)

    def back(self, pool):
        """Pages by id again."""
        return pool[self.frame_of]


def for_kernels(name: str) -> bool:
    """Whether an implementation takes only sizes that suit matrix units."""
    return name == "cudnn" or name.startswith("mosaic")


@functools.cache
def pool_of(tools_class, op: str, kernel: bool) -> Pool:
    return Pool(tools_class, op, kernel)


def keywords_of(tools, form: str, pool: Pool) -> dict:
    """The static arguments and lists of a call."""
    paged, block = pool.paged, pool.block_size
    scale = {"sm_scale": paged.sm_scale}
    if form in ("a list", "a list each"):
        return scale | {"blocks": tools.lists_for(paged, 9, block, form == "a list each"), "block_size": block}
    if form == "selected_attention":
        return scale | {"kind": "bounds", "block_size": block, "budget": 1, "sink": 1, "local": 2}
    if form == "query_sparse_attention":
        return scale | {"gamma": 16, "block_size": pool.size, "k_blocks": 3, "k_exact": 2, "estimate": "buckets"}
    if form == "block_sparse_attention":
        tile, (batch, queries, heads) = 128 if pool.size == 128 else 3, paged.q.shape[:3]
        blocks = tools.ragged_lists(1, (batch, -(-queries // tile), heads), 12, 6)
        return scale | {"blocks": blocks, "block_size": max(block, 64) if pool.size == 128 else block, "query_tile": tile}
    return scale


def run(tools, form: str, op: str, name: str, pool: Pool, kv, table, frames=None, **changes):
    """A call of the op over `kv`. frames: for ops that take both tables."""
    paged = pool.paged
    arrays = [paged.q, *kv, table, paged.lengths]
    keywords = keywords_of(tools, form, pool) | changes
    if op == "selected_attention":
        arrays.insert(3, pool.index if frames is not None else pool.index[: len(kv[0])])
        keywords["frames"] = frames
    elif op not in DECODING:
        arrays.insert(4, jnp.maximum(paged.lengths - paged.q.shape[1], 0))
    if op == "block_mass":
        lse = jnp.ones(paged.q.shape[:3], jnp.float32)
        arrays, keywords = [paged.q, kv[0], *arrays[3:], lse, jnp.zeros_like(paged.lengths)], keywords | {"block_size": pool.size}
    return paging.public(op)(*arrays, **keywords, implementation=name)


def same(tools, found, expected) -> None:
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    tools.assert_all_same_bits(found, expected)


@pytest.mark.quick_but(
    "block_mass, xla",
    "query_sparse_attention, xla",
    "flash_attention, xla",
    "gather_attention, dense, xla",
    "selected_attention, composed",
)
@pytest.mark.parametrize(("form", "op", "name"), CALLS)
def test_frames_apart_from_ids_give_the_same_bits(tools, form, op, name):
    pool = pool_of(tools, op, for_kernels(name))
    kv = pool.paged.k, pool.paged.v
    expected = run(tools, form, op, name, pool, kv, pool.ids)
    there = [pool.moved(x) for x in kv]
    if op == "selected_attention":
        same(tools, run(tools, form, op, name, pool, there, pool.ids, pool.frames), expected)
    else:
        same(tools, run(tools, form, op, name, pool, there, pool.frames), expected)


# A list with frames of its own: the tiles of a page lie in another frame for each KV head.

TABLES = {
    "no page": lambda table: jnp.full_like(table, -1),
    "wrong frames": lambda table: jnp.roll(table, 1, axis=1),
    "one page wide": lambda table: jnp.full_like(table[:, :1], -1),
}


def run_apart(tools, name: str, change=lambda frames: frames, table: str = "no page", **changes):
    """(found, expected): by `block_frames`, which `change` alters, and by the table."""
    pool = pool_of(tools, "gather_attention", for_kernels(name))
    blocks = keywords_of(tools, "a list", pool)["blocks"]
    k, v, frames = tools.tiles_apart(pool.paged, blocks, pool.block_size)
    call = functools.partial(run, tools, "a list", "gather_attention", name, pool, **changes)
    found = call((k, v), TABLES[table](pool.ids), block_frames=change(frames))
    return found, call((pool.paged.k, pool.paged.v), pool.ids)


def takes_block_frames(name: str) -> bool:
    return name != "mosaic_tpu"


APART = [name for name in dispatch.available("gather_attention") if takes_block_frames(name)]


@pytest.mark.parametrize("changes", [{}, {"return_block_lse": True}, {"window": (3, 40)}], ids=["list", "LSE of blocks", "window"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", APART)
def test_a_list_with_frames_of_its_own_gives_the_same_bits(tools, name, table, changes):
    same(tools, *run_apart(tools, name, table=table, **changes))


@pytest.mark.parametrize("name", APART)
def test_a_listed_block_without_a_frame_is_not_read(tools, name):
    """The same as a list without it."""
    pool = pool_of(tools, "gather_attention", for_kernels(name))
    blocks = keywords_of(tools, "a list", pool)["blocks"]
    gone = jnp.arange(blocks.shape[2]) % 3 == 1
    found, _ = run_apart(tools, name, lambda frames: jnp.where(gone, -1, frames), return_block_lse=True)
    kv = pool.paged.k, pool.paged.v
    static = {"blocks": jnp.where(gone, -1, blocks), "return_block_lse": True}
    same(tools, found, run(tools, "a list", "gather_attention", name, pool, kv, pool.ids, **static))


APART_MUTANTS = {
    "the table's": lambda frames: None,
    "the first head's": lambda frames: jnp.broadcast_to(frames[:, :1], frames.shape),
    "the neighbour's": lambda frames: jnp.roll(frames, 1, axis=0),
    "those of the block before": lambda frames: jnp.roll(frames, 1, axis=2),
    "one dropped": lambda frames: frames.at[0, 0, jnp.argmax(frames[0, 0] >= 0)].set(-1),
}


@pytest.mark.parametrize("mutant", APART_MUTANTS)
@pytest.mark.parametrize("table", ["no page", "wrong frames"])
def test_other_frames_than_those_of_the_list_fail(tools, mutant, table):
    with pytest.raises(AssertionError):
        same(tools, *run_apart(tools, "xla", APART_MUTANTS[mutant], table))


LOST = {
    "bytes by page id": lambda ids, frames: (ids, ids),
    "index by frame": lambda ids, frames: (frames, frames),
    "tables exchanged": lambda ids, frames: (frames, ids),
}


@pytest.mark.parametrize("mutant", LOST)
def test_one_table_for_the_other_fails_in_selected_attention(tools, mutant):
    pool = pool_of(tools, "selected_attention", False)
    kv, call = (pool.paged.k, pool.paged.v), (tools, "selected_attention", "selected_attention", "composed", pool)
    expected = run(*call, kv, pool.ids)
    with pytest.raises(AssertionError):
        same(tools, run(*call, [pool.moved(x) for x in kv], *LOST[mutant](pool.ids, pool.frames)), expected)


@pytest.mark.parametrize("op", [op for op in OPS if op != "selected_attention"])
def test_page_ids_for_frames_fail(tools, op):
    form, pool = FORMS[op][0], pool_of(tools, op, False)
    kv = pool.paged.k, pool.paged.v
    expected = run(tools, form, op, "xla", pool, kv, pool.ids)
    with pytest.raises(AssertionError):
        same(tools, run(tools, form, op, "xla", pool, [pool.moved(x) for x in kv], pool.ids), expected)


# Pages without a frame.


def unlisted(blocks, pool: Pool):
    """`[B, M]`: whether no list of the row names a block of the page."""
    pages = np.asarray(blocks).reshape(len(blocks), -1) // (pool.size // pool.block_size)
    return jnp.asarray([[page not in row for page in range(pool.ids.shape[1])] for row in pages])


@pytest.mark.parametrize(("form", "op", "name"), [x for x in CALLS if x.values[0] in ("a list", "a list each", "selected_attention")])
def test_what_no_list_names_needs_no_frame(tools, form, op, name):
    pool = pool_of(tools, op, for_kernels(name))
    there = [pool.moved(x) for x in (pool.paged.k, pool.paged.v)]
    sizes = {"page_size": pool.size, "block_size": pool.block_size, "num_queries": pool.paged.q.shape[1]}
    if op == "selected_attention":
        expected = run(tools, form, op, name, pool, there, pool.ids, pool.frames)
        blocks = expected[2]
        frames = jnp.where(unlisted(blocks, pool), -1, pool.frames)
        found = run(tools, form, op, name, pool, there, pool.ids, frames)
    else:
        blocks = keywords_of(tools, form, pool)["blocks"]
        blocks = jnp.where(jnp.arange(blocks.shape[-1]) < 2, blocks, -1)
        expected = run(tools, form, op, name, pool, there, pool.frames, blocks=blocks)
        frames = jnp.where(unlisted(blocks, pool), -1, pool.frames)
        found = run(tools, form, op, name, pool, there, frames, blocks=blocks)
    assert (frames[0] != pool.frames[0]).any()
    same(tools, found, expected)
    assert not missing(frames, pool.paged.lengths, blocks, **sizes).any()
    listed = ~unlisted(blocks, pool) & (frames >= 0)
    gone = jnp.where(listed & (jnp.arange(frames.shape[1]) == listed.argmax(1)[:, None]), -1, frames)  # the first listed page
    assert missing(gone, pool.paged.lengths, blocks, **sizes)[0] > 0


@pytest.mark.parametrize("op", ["gather_attention", "flash_attention"])
def test_what_a_window_leaves_out_needs_no_frame(tools, op):
    for name in set(dispatch.available(op)) - {"reference", "cudnn"}:  # cuDNN has no window with sinks
        pool = pool_of(tools, op, for_kernels(name))
        kv, window = (pool.paged.k, pool.paged.v), (0, pool.size + 3)
        oldest = pool.paged.lengths - pool.paged.q.shape[1] - window[1] + 1
        given_back = (jnp.arange(pool.ids.shape[1]) + 1) * pool.size <= oldest[:, None]
        frames = jnp.where(given_back, -1, pool.ids)
        assert (frames != pool.ids).any()
        call = (tools, "dense", op, name, pool, kv)
        same(tools, run(*call, frames, window=window), run(*call, pool.ids, window=window))
        sizes = {"page_size": pool.size, "num_queries": pool.paged.q.shape[1]}
        assert not missing(frames, pool.paged.lengths, window=window, **sizes).any()
        assert missing(frames, pool.paged.lengths, **sizes).tolist() == given_back.sum(1).tolist()


# Append.


@functools.cache
def appended(name: str, apart: bool, swapped: str = ""):
    """Pages by id and index after a step of 4 tokens over a border; apart: in other frames."""
    rng = np.random.default_rng(2)
    k, v, new_k, new_v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in [(9, 2, 16, 32)] * 2 + [(2, 4, 2, 32)] * 2)
    index = jnp.asarray(rng.standard_normal((12, 2, 4, 2, 32)), jnp.float32)
    table, frame_of = jnp.array([[3, 1], [5, 8]], jnp.int32), jnp.asarray(rng.permutation(12)[:9], jnp.int32)
    positions = jnp.array([[13, 14, 15, 16], [12, 13, 14, 15]], jnp.int32)
    pools, frames = (k, v), None
    if apart:
        pools = [jnp.full((12, *x.shape[1:]), jnp.nan).at[frame_of].set(x) for x in pools]
        table, frames = {"": (table, frame_of[table]), "index by frame": (frame_of[table],) * 2, "bytes by id": (table, table)}[swapped]
    own = {"bounds": index if apart else index[:9]}
    given = (*pools, own, new_k, new_v, positions, jnp.ones(positions.shape, bool), table)
    found = paging.append_tokens(*given, kinds=(("bounds", "bounds", 4),), frames=frames, implementation=name)
    pools = [x[frame_of] for x in found[:2]] if apart else list(found[:2])
    return *pools, found[2]["bounds"][:9]


@pytest.mark.parametrize("name", dispatch.available("append_tokens"))
def test_append_writes_to_frames_and_seals_by_id(tools, name):
    tools.assert_all_same_bits(appended(name, True), appended(name, False))


@pytest.mark.parametrize("mutant", ["index by frame", "bytes by id"])
def test_append_with_one_table_for_the_other_fails(tools, mutant):
    with pytest.raises(AssertionError):
        tools.assert_all_same_bits(appended("xla", True, mutant), appended("xla", False))


@pytest.mark.parametrize("name", dispatch.available("append_tokens"))
def test_a_token_whose_page_is_in_one_table_only_is_dropped(tools, name):
    k = jnp.zeros((3, 1, 4, 8), jnp.float32)
    index, new = {"bounds": jnp.zeros((3, 1, 1, 2, 8), jnp.float32)}, jnp.ones((2, 1, 1, 8), jnp.float32)
    places = jnp.array([[3], [3]], jnp.int32), jnp.ones((2, 1), bool)
    tables = {"table": jnp.array([[1], [-1]], jnp.int32), "frames": jnp.array([[-1], [2]], jnp.int32)}
    found = paging.append_tokens(k, k, index, new, new, *places, **tables, kinds=(("bounds", "bounds", 4),), implementation=name)
    assert not any(np.asarray(x).any() for x in (*found[:2], found[2]["bounds"]))


# `missing`, and refusals.

COUNTS = {
    "dense": ({}, [2, 1]),
    "dense, blocks": ({"block_size": 2}, [4, 1]),
    "dense, the window": ({"window": (0, 3)}, [0, 1]),
    "dense, a wider window": ({"window": (0, 6)}, [1, 1]),
    "dense, the window of two queries": ({"window": (0, 5), "num_queries": 2}, [1, 1]),
    "dense, sinks": ({"window": (1, 1)}, [0, 1]),
    "lists": ({"blocks": [[[1, 3, -1], [1, -1, -1]], [[0, 2, 3], [-1, -1, -1]]]}, [2, 1]),
    "lists past the end": ({"blocks": [[[4, 9]], [[3, 9]]]}, [0, 0]),
    "lists past the table": ({"blocks": [[[0, 5]], [[3, 9]]], "lengths": [25, 12]}, [1, 0]),
    "lists of two queries": ({"blocks": [[[[1, 2]], [[1, 3]]], [[[2, 3]], [[1, 2]]]]}, [3, 1]),
    "lists of two queries, a window": ({"blocks": [[[[1, 2]], [[1, 3]]], [[[2, 3]], [[1, 2]]]], "window": (0, 5)}, [1, 1]),
}


@pytest.mark.parametrize("case", COUNTS)
def test_missing_counts_what_would_be_read(case):
    """Pages of 4 tokens; the first row has 16 tokens, its second and third page no frame; the second row 9, its third
    none."""
    spec, expected = COUNTS[case]
    lengths = jnp.asarray(spec.get("lengths", [16, 9]), jnp.int32)
    frames = jnp.array([[0, -1, -1, 7], [4, 5, -1, -1]], jnp.int32)
    blocks = None if "blocks" not in spec else jnp.asarray(spec["blocks"], jnp.int32)
    static = {name: x for name, x in spec.items() if name not in ("blocks", "lengths")}
    assert missing(frames, lengths, blocks, page_size=4, **static).tolist() == expected


@pytest.mark.parametrize("frames", [jnp.zeros((3, 5), jnp.int32), jnp.zeros((3, 6), jnp.float32)])
def test_frames_that_do_not_lie_beside_the_table_are_refused(tools, frames):
    pool = pool_of(tools, "selected_attention", False)
    with pytest.raises(ValueError, match=r"frames must be int32 of the page table's shape"):
        run(tools, "selected_attention", "selected_attention", None, pool, (pool.paged.k, pool.paged.v), pool.ids, frames)
