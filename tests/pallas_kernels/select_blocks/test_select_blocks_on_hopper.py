"""select_blocks in Mosaic GPU on a Hopper GPU: the very lists of the reference, mutants against the suite, long contexts, large pools.

Where scores are integers they are exact and full of ties, so that lists must agree entry by entry.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_index import INDEX_ROWS
from pallas_kernels.select_blocks import select_blocks, selection_width

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(select_blocks, implementation="mosaic_gpu")


@dataclasses.dataclass(frozen=True)
class Case:
    """index: integers (scores are exact, with many ties), floats, equal, infinite (scores overflow to -inf), nan, denormal."""

    kind: str = "bounds"
    index: str = "integers"
    lengths: tuple[int, ...] = (0, 1, 127, 128, 129, 300, 767, 768)
    num_queries: int = 1
    kv_heads: int = 4
    group: int = 7
    head_dim: int = 128
    page_size: int = 128
    width: int = 6
    block_size: int = 16
    k: int = 5
    sink: int = 1
    local: int = 2
    dtype: str = "bfloat16"
    hole: bool = False

    @property
    def sizes(self) -> dict:
        return {name: getattr(self, name) for name in ("kind", "page_size", "block_size", "k", "sink", "local")}


LONG = (5, 40000, 65536)
"""512 pages of 128."""

CASES = {
    "bounds": Case(),
    "mean": Case("mean"),
    "blocks are pages": Case(block_size=128, k=2, local=1),
    "blocks of 32, 32/8": Case(block_size=32, kv_heads=8, group=4),
    "mean, blocks of 64, 32/8 of 64": Case("mean", block_size=64, kv_heads=8, group=4, head_dim=64),
    "blocks of 4": Case(block_size=4, k=19, local=5),
    "pages of 64": Case(page_size=64, block_size=64, k=2, lengths=(0, 1, 63, 64, 65, 150, 383, 384)),
    "pages of 256": Case(page_size=256, block_size=128, k=3, lengths=(0, 1, 255, 256, 257, 600, 1535, 1536)),
    "floats": Case(index="floats"),
    "floats, mean": Case("mean", "floats"),
    "drafts": Case(num_queries=3, index="floats"),
    "drafts, mean": Case("mean", num_queries=3),
    "many drafts": Case(num_queries=9),
    "many drafts, mean": Case("mean", num_queries=9),
    "64 query rows": Case(num_queries=8, group=8, kv_heads=2),
    "float16": Case(dtype="float16", num_queries=2),
    "float16, mean": Case("mean", dtype="float16", index="floats"),
    "one head": Case(kv_heads=1, group=1),
    "8 KV heads": Case(kv_heads=8, group=1),
    "head dim 64": Case(head_dim=64, group=8),
    "head dim 256": Case(head_dim=256, kv_heads=2, group=8),
    "head dim 256, mean": Case("mean", head_dim=256, kv_heads=2, group=8, dtype="float16"),
    "equal scores": Case(index="equal"),
    "scores of -inf": Case(index="infinite"),
    "NaN in the index": Case(index="nan", k=30),
    "denormals": Case(index="denormal"),
    "k covers everything": Case(k=60),
    "k is far more than there is": Case(k=300, lengths=(768, 40)),
    "k of none": Case(k=0),
    "no sink": Case(sink=0),
    "wide sink and local": Case(sink=9, local=20),
    "sink beyond the end": Case(sink=60, k=2),
    "a page is missing": Case(hole=True, k=30),
    "batch of 1": Case(lengths=(768,), k=9),
    "batch of 1, equal scores": Case(lengths=(768,), k=9, index="equal"),
    "batch of 40": Case(lengths=tuple(range(0, 760, 19)), k=9),
    "long": Case(lengths=LONG, width=512, k=32, block_size=64),
    "long, floats": Case("mean", "floats", lengths=LONG, width=512, k=32, block_size=64),
    "long, equal scores": Case(index="equal", lengths=LONG, width=512, k=32, block_size=64),
    "long, NaN": Case(index="nan", lengths=LONG, width=512, k=1000, block_size=128, hole=True),
}
FOR_MUTANTS = ("bounds", "drafts", "equal scores", "NaN in the index", "a page is missing", "scores of -inf")


@functools.cache
def arguments(name: str) -> tuple:
    """q, index, page_table, lengths. Index rows of pages that are not sealed, or not named, hold NaN or scores that beat all others;
    page 0 and the last one are never named."""
    case = CASES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    used = [-(-n // case.page_size) for n in case.lengths]
    num_pages = sum(used) + 2
    table = np.full((len(used), case.width), -1, np.int32)
    free = list(rng.permutation(np.arange(1, num_pages - 1)))
    shape = (case.kv_heads, case.page_size // case.block_size, INDEX_ROWS[case.kind], case.head_dim)
    index = np.where(rng.random((num_pages, *shape[:2], 1, 1)) < 0.5, np.nan, 100.0) * np.ones((num_pages, *shape))
    for row, length in enumerate(case.lengths):
        table[row, : used[row]] = [free.pop() for _ in range(used[row])]
        if row == len(used) - 1 and len(used) > 1 and min(case.lengths[-2:]) >= case.page_size:
            table[row, 0] = table[row - 1, 0]
        sealed = max(length - case.num_queries, 0) // case.page_size
        content = rng.standard_normal((sealed, *shape)) if case.index == "floats" else rng.integers(-2, 3, (sealed, *shape)).astype(float)
        index[table[row, :sealed]] = -np.sort(-content, axis=-2)
    if case.index == "equal":
        index[:] = 1
    elif case.index == "infinite":
        index[table[-2, :4], :, 1:] = -3e38
    elif case.index == "nan":
        index[table[-1, 2:4], :, :2] = np.nan
    elif case.index == "denormal":
        index = index * 1e-40
    if case.hole:
        table[-1, 1:400:99] = -1
    q = rng.integers(-3, 4, (len(used), case.num_queries, case.kv_heads * case.group, case.head_dim)).astype(float) * case.group
    if case.index == "floats":
        q = rng.standard_normal(q.shape)
    elif case.index == "infinite":
        q = np.abs(q) + 1
    if 0 in case.lengths:
        q[case.lengths.index(0)] = np.nan
    index, q = (jnp.asarray(x, case.dtype) for x in (index, q))
    return q, index, jnp.asarray(table), jnp.asarray(case.lengths, jnp.int32)


@functools.cache
def expected(name: str) -> np.ndarray:
    return np.asarray(select_blocks(*arguments(name), **CASES[name].sizes, implementation="reference"))


def check(op, name: str) -> None:
    ids = op(*arguments(name), **CASES[name].sizes)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(ids), expected(name))


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case):
    check(KERNEL, case)


# Contexts of a million tokens, with shared pages; what to expect from `xla`, which sorts.

MILLION = {
    "blocks are pages": {"block_size": 128, "k": 32, "local": 1},
    "batch of 8": {"block_size": 128, "k": 32, "local": 1, "batch": 8},
    "blocks of 16": {"block_size": 16, "k": 256, "local": 32},
    "k in the thousands": {"block_size": 64, "k": 1024, "local": 8},
    "means": {"block_size": 32, "k": 64, "local": 8, "kind": "mean"},
    "few values": {"block_size": 16, "k": 64, "local": 8, "values": 1},
    "one value": {"block_size": 16, "k": 64, "local": 8, "values": 0},
}


@pytest.mark.parametrize("case", MILLION)
def test_a_million_tokens(case):
    spec = dict(MILLION[case])
    batch, values, kind = spec.pop("batch", 1), spec.pop("values", 3), spec.pop("kind", "bounds")
    keys = jax.random.split(jax.random.key(sum(map(ord, case))), 3)
    width = (1 << 20) // 128
    shape = (width + 3, 4, 128 // spec["block_size"], INDEX_ROWS[kind], 128)
    index = jax.random.randint(keys[0], shape, -values, values + 1).sort(axis=-2, descending=True).astype(jnp.bfloat16)
    q = (7 * jax.random.randint(keys[1], (batch, 1, 28, 128), -3, 4)).astype(jnp.bfloat16)
    table = jax.vmap(lambda key: jax.random.permutation(key, width + 3)[:width])(jax.random.split(keys[2], batch)).astype(jnp.int32)
    lengths = (1 << 20) - 1000 * jnp.arange(batch, dtype=jnp.int32)
    op = functools.partial(select_blocks, q, index, table, lengths, kind=kind, page_size=128, sink=1, **spec)
    np.testing.assert_array_equal(np.asarray(op(implementation="mosaic_gpu")), np.asarray(op(implementation="xla")))


# Mutants: what a selector gets wrong, expressed on its arguments or its results.


def _ids(change):
    return lambda *arrays, **sizes: change(KERNEL(*arrays, **sizes))


def _of_arrays(change):
    return lambda *arrays, **sizes: KERNEL(*change(*arrays), **sizes)


def _width(q, sizes) -> int:
    return selection_width(q.shape[1], **{name: sizes[name] for name in ("page_size", "block_size", "k", "sink", "local")})


def _sized(**by):
    """With sizes off by some, the list cut or filled to the right width."""

    def op(q, *arrays, **sizes):
        ids = KERNEL(q, *arrays, **(sizes | {name: max(sizes[name] + n, name == "local") for name, n in by.items()}))
        return jnp.pad(ids, ((0, 0), (0, 0), (0, _width(q, sizes))), constant_values=-1)[..., : _width(q, sizes)]

    return op


def _group(change):
    def op(q, index, *rest, **sizes):
        grouped = q.reshape(*q.shape[:2], index.shape[1], -1, q.shape[3])
        return KERNEL(jnp.broadcast_to(change(grouped), grouped.shape).reshape(q.shape), index, *rest, **sizes)

    return op


def _heads_interleaved(q, index, *rest):
    return q.reshape(*q.shape[:2], -1, index.shape[1], q.shape[3]).swapaxes(2, 3).reshape(q.shape), index, *rest


def _open_page_forgotten(q, *arrays, **sizes):
    """The selection as if every token but the last had been sealed with its page."""
    ids = KERNEL(q[:, -1:], *arrays, **sizes)
    return jnp.pad(ids, ((0, 0), (0, 0), (0, _width(q, sizes) - ids.shape[2])), constant_values=-1)


def _a_block_twice(ids):
    return ids.at[..., 1:2].set(jnp.where(ids[..., 1:2] >= 0, ids[..., :1], -1))


MUTANTS = {
    "zeros": _ids(jnp.zeros_like),
    "sink dropped": _ids(lambda ids: jnp.concatenate([ids[..., 1:], jnp.full_like(ids[..., :1], -1)], -1)),
    "descending": _ids(lambda ids: ids[..., ::-1]),
    "a block twice": _ids(_a_block_twice),
    "every block one off": _ids(lambda ids: jnp.where(ids >= 0, ids + 1, -1)),
    "the first head's list": _ids(lambda ids: jnp.broadcast_to(ids[:, :1], ids.shape)),
    "0 for none": _ids(lambda ids: jnp.maximum(ids, 0)),
    "length one short": _of_arrays(lambda *arrays: (*arrays[:3], jnp.maximum(arrays[3] - 1, 0))),
    "length one long": _of_arrays(lambda *arrays: (*arrays[:3], arrays[3] + 1)),
    "one distant block less": _sized(k=-1),
    "one sink block less": _sized(sink=-1),
    "one sink block more": _sized(sink=1),
    "one local block less": _sized(local=-1),
    "one local block more": _sized(local=1),
    "mean instead of maximum over the group": _group(lambda grouped: grouped.mean(3, keepdims=True)),
    "first head instead of the group": _group(lambda grouped: grouped[:, :, :, :1]),
    "heads interleaved": _of_arrays(_heads_interleaved),
    "only the last draft is scored": _of_arrays(lambda q, *rest: (jnp.broadcast_to(q[:, -1:], q.shape), *rest)),
    "open page forgotten": _open_page_forgotten,
    "lower bounds": _of_arrays(lambda q, index, *rest: (q, index[..., ::-1, :], *rest)),
    "maximum taken for minimum": _of_arrays(lambda q, index, *rest: (q, jnp.broadcast_to(index[..., :1, :], index.shape), *rest)),
    "blocks reversed in their page": _of_arrays(lambda q, index, *rest: (q, index[:, :, ::-1], *rest)),
    "NaN ranks first": _of_arrays(lambda q, index, *rest: (q, jnp.nan_to_num(index, nan=1000), *rest)),
    "-inf is no candidate": _of_arrays(lambda q, index, *rest: (jnp.where(q == 0, 1, q), jnp.maximum(index, -1e30), *rest)),
    "-1 in the table is a page": _of_arrays(lambda q, index, table, n: (q, index, jnp.where(table < 0, 0, table), n)),
    "the neighbour's table": _of_arrays(lambda q, index, table, n: (q, index, jnp.roll(table, 1, 0), n)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], FOR_MUTANTS)


# Bits.


@pytest.mark.parametrize("case", ["floats", "floats, mean", "drafts"])
def test_the_same_list_every_time_and_in_any_company_and_table(tools, case):
    q, index, table, lengths = arguments(case)
    op = functools.partial(KERNEL, **CASES[case].sizes)
    once = np.asarray(op(q, index, table, lengths))
    for _ in range(20):
        tools.assert_same_bits(once, op(q, index, table, lengths))
    tools.assert_same_bits(once, op(q, index, jnp.pad(table, ((0, 0), (0, 5)), constant_values=-1), lengths))
    for kept in (5, 6):
        others = jnp.arange(8) != kept
        for other_table, length in ((table[-1], 768), (-1, 0)):
            changed = op(
                jnp.where(others[:, None, None, None], -q, q),
                *(index, jnp.where(others[:, None], other_table, table), jnp.where(others, length, lengths)),
            )
            tools.assert_same_bits(once[kept], changed[kept])
    turned = op(jnp.roll(q, 3, 0), index, jnp.roll(table, 3, 0), jnp.roll(lengths, 3, 0))
    tools.assert_same_bits(np.roll(once, 3, 0), turned)


@functools.partial(jax.jit, static_argnames="num_pages")
def _pool(numbers, contents, *, num_pages: int):
    """NaN but for a few pages."""
    pool = jnp.full((num_pages, *contents.shape[1:]), jnp.nan, contents.dtype)
    for i in range(contents.shape[0]):
        pool = jax.lax.dynamic_update_index_in_dim(pool, contents[i], numbers[i], axis=0)
    return pool


@pytest.mark.parametrize("kind", ["bounds", "mean"])
def test_pool_past_2_to_the_31_elements(tools, kind):
    """The last pages of an index of more than 2^31 elements are scored as in one of eight pages."""
    keys = jax.random.split(jax.random.key(1), 2)
    near = jax.random.randint(keys[0], (8, 4, 16, INDEX_ROWS[kind], 128), -2, 3).sort(axis=-2, descending=True).astype(jnp.bfloat16)
    num_pages = 2**31 // near[0].size + 2
    numbers = jnp.array([num_pages - 1, 1, num_pages - 2, num_pages // 2, 2, num_pages - 3, num_pages // 4, num_pages - 4], jnp.int32)
    far = _pool(numbers, near, num_pages=num_pages)
    assert far.size > 2**31
    for i, number in enumerate(numbers):
        tools.assert_same_bits(jax.lax.dynamic_index_in_dim(far, number, keepdims=False), near[i])
    q = (7 * jax.random.randint(keys[1], (1, 1, 28, 128), -3, 4)).astype(jnp.bfloat16)
    lengths, sizes = jnp.array([2000], jnp.int32), {"kind": kind, "page_size": 256, "block_size": 16, "k": 11, "sink": 1, "local": 2}
    found = KERNEL(q, far, numbers[None], lengths, **sizes)
    own = jnp.arange(8, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(np.asarray(found), np.asarray(KERNEL(q, near, own, lengths, **sizes)))
    ref = select_blocks(q, near, own, lengths, **sizes, implementation="reference")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(ref))


def test_it_is_what_runs_here(tools):
    """Named or picked, the kernel runs; what it cannot do is refused by name, with the values, and done by another."""
    arrays, sizes = arguments("bounds"), CASES["bounds"].sizes
    tools.assert_same_bits(select_blocks(*arrays, **sizes), KERNEL(*arrays, **sizes))
    wide = tuple(x.astype(jnp.float32) for x in arrays[:2]) + arrays[2:]
    with pytest.raises(NotImplementedError, match="got q float32, index float32"):
        KERNEL(*wide, **sizes)
    np.testing.assert_array_equal(np.asarray(select_blocks(*wide, **sizes)), expected("bounds"))


def test_under_jit(tools):
    arrays, sizes = arguments("floats"), CASES["floats"].sizes
    tools.assert_same_bits(jax.jit(functools.partial(KERNEL, **sizes))(*arrays), KERNEL(*arrays, **sizes))
