"""Indexes and queries that catch real bugs in a selection of blocks, the check against the reference, and mutants; for
the suites of all implementations. They come by the fixture `suite_of`; a test that takes `mutant` runs over all of
`MUTANTS` but its module's `NO_MUTANTS`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selection.page_index import INDEX_ROWS
from pallas_kernels.selection.select_blocks import select_blocks, selection_width

SIZES = ("page_size", "block_size", "k", "sink", "local")


@dataclasses.dataclass(frozen=True)
class Case:
    """index: integers (scores are exact, with many ties), floats, equal, infinite (scores overflow to -inf), nan,
    denormal."""

    lengths: tuple[int, ...]
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    block_size: int
    kind: str = "bounds"
    index: str = "integers"
    num_queries: int = 1
    width: int = 6
    k: int = 5
    sink: int = 1
    local: int = 2
    dtype: str = "float32"
    hole: bool = False

    @property
    def sizes(self) -> dict:
        return {name: getattr(self, name) for name in ("kind", *SIZES)}


def make_arguments(case: Case, seed: int) -> tuple:
    """q, index, page_table, lengths. Index rows of pages that the last query does not see as sealed, or that are not
    named, hold NaN or scores that beat all others; page 0 and the last one are never named. Two sequences share a page,
    if they have a whole one."""
    rng = np.random.default_rng(seed)
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
        sealed = max(length - 1, 0) // case.page_size
        content = rng.standard_normal((sealed, *shape)) if case.index == "floats" else rng.integers(-2, 3, (sealed, *shape)).astype(float)
        index[table[row, :sealed]] = -np.sort(-content, axis=-2)
    if case.index == "equal":
        index[:] = 1
    elif case.index == "infinite":
        index[table[int(np.argmax(used)), :4], :, 1:] = -3e38
    elif case.index == "nan":
        index[table[-1, 2:4], :, :2] = np.nan
    elif case.index == "denormal":
        index = index * 1e-40
    if case.hole:
        table[-1, 1:400:29] = -1
    q = rng.integers(-3, 4, (len(used), case.num_queries, case.kv_heads * case.group, case.head_dim)).astype(float) * case.group
    if case.index == "floats":
        q = rng.standard_normal(q.shape)
    elif case.index == "infinite":
        q = np.abs(q) + 1
    if 0 in case.lengths:
        q[case.lengths.index(0)] = np.nan
    index, q = (jnp.asarray(x.astype(jnp.dtype(case.dtype))) for x in (index, q))
    return q, index, jnp.asarray(table), jnp.asarray(case.lengths, jnp.int32)


class Suite:
    """Cases by name; what they select among, and what the reference selects, is made once."""

    def __init__(self, cases: dict[str, dict], common: dict):
        self.cases = {name: Case(**(common | fields)) for name, fields in cases.items()}
        self.arguments = functools.cache(lambda name: make_arguments(self.cases[name], sum(map(ord, name))))
        self.expected = functools.cache(lambda name: np.asarray(self.select(name, implementation="reference")))

    def sizes(self, name: str) -> dict:
        return self.cases[name].sizes

    def select(self, name: str, **keywords):
        return select_blocks(*self.arguments(name), **self.sizes(name), **keywords)

    def check(self, op, name: str) -> None:
        ids = op(*self.arguments(name), **self.sizes(name))
        assert ids.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(ids), self.expected(name))


@pytest.fixture(scope="session")
def suite_of():
    """(cases, **common) -> `Suite`. cases: by name the fields of a `Case` that are its own; common: those of all."""
    return lambda cases, **common: Suite(cases, common)


# Mutants: what a selector gets wrong, expressed on its arguments or its results. Each makes of an op one that is wrong.


def _ids(change):
    return lambda op: lambda *arrays, **sizes: change(op(*arrays, **sizes))


def _of_arrays(change):
    return lambda op: lambda *arrays, **sizes: op(*change(*arrays), **sizes)


def _index(change):
    return _of_arrays(lambda q, index, *rest: (q, change(index), *rest))


def _table(change):
    return _of_arrays(lambda q, index, table, lengths: (q, index, change(table), lengths))


def _group(change):
    def changed(q, index, *rest):
        grouped = q.reshape(*q.shape[:2], index.shape[1], -1, q.shape[3])
        return jnp.broadcast_to(change(grouped), grouped.shape).reshape(q.shape), index, *rest

    return _of_arrays(changed)


def _wide_as_promised(ids, sizes):
    """Cut or filled to the width that the sizes promise."""
    width = selection_width(**{name: sizes[name] for name in SIZES})
    return jnp.pad(ids, ((0, 0), (0, 0), (0, 0), (0, width)), constant_values=-1)[..., :width]


def _sized(**by):
    """With sizes off by some."""

    def changed(op):
        def mutant(q, *arrays, **sizes):
            off = {name: max(sizes[name] + n, name == "local") for name, n in by.items()}
            return _wide_as_promised(op(q, *arrays, **(sizes | off)), sizes)

        return mutant

    return changed


def _sealed_too_early(op):
    """The selection as if a page were sealed for the query that fills it, too: one token later, without that token's
    block."""

    def mutant(q, index, table, lengths, **sizes):
        ids = op(q, index, table, lengths + 1, **(sizes | {"local": sizes["local"] + 1}))
        current = (lengths[:, None] - q.shape[1] + jnp.arange(q.shape[1])) // sizes["block_size"]
        ids = jnp.where(ids > current[..., None, None], -1, ids)
        return _wide_as_promised(ids, sizes)

    return mutant


def _later_drafts_visible(op):
    """Every query as if it were the last one of the step."""

    def mutant(q, *arrays, **sizes):
        return jnp.concatenate([op(q[:, t : t + 1], *arrays, **sizes) for t in range(q.shape[1])], axis=1)

    return mutant


def _heads_interleaved(q, index, *rest):
    return q.reshape(*q.shape[:2], -1, index.shape[1], q.shape[3]).swapaxes(2, 3).reshape(q.shape), index, *rest


def _later_is_better(q, index, table, lengths):
    """One dimension more, in which later blocks are a thousandth better: integers still decide first."""
    place = jnp.zeros(index.shape[0]).at[table].set(jnp.arange(table.shape[1]) * index.shape[2], mode="drop")
    better = (place[:, None] + jnp.arange(index.shape[2])) / 1000
    better = jnp.broadcast_to(better[:, None, :, None, None], (*index.shape[:-1], 1))
    ones = jnp.ones((*q.shape[:-1], 1))
    return jnp.concatenate([q, ones], -1), jnp.concatenate([index, better], -1), table, lengths


MUTANTS = {
    "zeros": _ids(jnp.zeros_like),
    "sink dropped": _ids(lambda ids: jnp.concatenate([ids[..., 1:], jnp.full_like(ids[..., :1], -1)], -1)),
    "second block dropped": _ids(lambda ids: jnp.concatenate([ids[..., :1], ids[..., 2:], jnp.full_like(ids[..., :1], -1)], -1)),
    "descending": _ids(lambda ids: ids[..., ::-1]),
    "a block twice": _ids(lambda ids: ids.at[..., 1:2].set(jnp.where(ids[..., 1:2] >= 0, ids[..., :1], -1))),
    "every block one off": _ids(lambda ids: jnp.where(ids >= 0, ids + 1, -1)),
    "the first head's list": _ids(lambda ids: jnp.broadcast_to(ids[:, :, :1], ids.shape)),
    "the first draft's list": _ids(lambda ids: jnp.broadcast_to(ids[:, :1], ids.shape)),
    "the last draft's list": _ids(lambda ids: jnp.broadcast_to(ids[:, -1:], ids.shape)),
    "drafts in reverse": _of_arrays(lambda q, *rest: (q[:, ::-1], *rest)),
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
    "later drafts are visible": _later_drafts_visible,
    "a page is sealed too early": _sealed_too_early,
    "lower bounds": _index(lambda index: index[..., ::-1, :]),
    "maximum taken for minimum": _index(lambda index: jnp.broadcast_to(index[..., :1, :], index.shape)),
    "blocks reversed in their page": _index(lambda index: index[:, :, ::-1]),
    "NaN ranks first": _index(lambda index: jnp.nan_to_num(index, nan=1000)),
    "-inf is no candidate": _of_arrays(lambda q, index, *rest: (jnp.where(q == 0, 1, q), jnp.maximum(index, -1e30), *rest)),
    "ties to the higher block": _of_arrays(_later_is_better),
    "one page read for another": _table(lambda table: table.at[:, 1].set(table[:, 0])),
    "a page dropped": _table(lambda table: table.at[:, 2].set(-1)),
    "-1 in the table is a page": _table(lambda table: jnp.where(table < 0, 0, table)),
    "the neighbour's table": _table(lambda table: jnp.roll(table, 1, 0)),
}


def pytest_generate_tests(metafunc):
    if "mutant" in metafunc.fixturenames:
        names = [name for name in MUTANTS if name not in getattr(metafunc.module, "NO_MUTANTS", ())]
        metafunc.parametrize("mutant", [MUTANTS[name] for name in names], ids=names)
