"""What the suites of select_tiles share: cases, the worth of every block by definition, the check, mutants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selection.page_index import page_index
from pallas_kernels.selection.select_tiles import select_tiles

REFERENCE = functools.partial(select_tiles, implementation="reference")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences whose chunk of `num_queries` ends at `lengths` or, where `starts` say so, before; see `make_paged` of
    the tools."""

    lengths: tuple[int, ...] = (200, 333, 160)
    starts: tuple[int, ...] = (136, 272, 100)
    num_queries: int = 64
    query_tile: int = 32
    k: int = 3
    block_size: int = 16
    page_size: int = 16
    window: tuple[int, int] = (16, 32)
    pooling: str = "sum"
    ranked: bool = False
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 32
    dtype: str = "float32"
    hole: bool = False
    keys: str = "random"


def arguments(make, case: Case, name: str):
    """q, bounds, page_table, starts, lengths, keywords. Bounds of pages that are not sealed are NaN."""
    sizes = {key: getattr(case, key) for key in ("lengths", "num_queries", "kv_heads", "group", "head_dim", "page_size", "dtype", "keys")}
    width = -(-max(case.lengths) // case.page_size) + 1
    inputs = make(seed=sum(map(ord, name)), width=width, hole=case.hole, **sizes)
    bounds = page_index(inputs.k, kind="bounds", block_size=case.block_size)
    static = {key: getattr(case, key) for key in ("k", "block_size", "query_tile", "window", "pooling", "ranked")}
    return (inputs.q, bounds, inputs.page_table, jnp.asarray(case.starts, jnp.int32), inputs.lengths), static | {
        "sm_scale": inputs.sm_scale
    }


def worths(arrays, static) -> np.ndarray:
    """What each tile may pay each block, `[B, C, H, S]`, in float64, from the definition."""
    q, bounds, table, starts, lengths = (np.asarray(x, np.float64) if i < 2 else np.asarray(x) for i, x in enumerate(arrays))
    per_page, size = bounds.shape[2], static["block_size"]
    found = np.zeros((q.shape[0], -(-q.shape[1] // static["query_tile"]), q.shape[2], table.shape[1] * per_page))
    for b, t, h in np.ndindex(q.shape[:3]):
        position = starts[b] + t
        if position >= lengths[b]:
            continue
        rows = bounds[np.maximum(table[b], 0), h * bounds.shape[1] // q.shape[2]].reshape(-1, 2, q.shape[3])
        sealed = np.repeat((table[b] >= 0) & ((np.arange(table.shape[1]) + 1) * per_page * size <= lengths[b]), per_page)
        seen = sealed & (np.arange(len(rows)) * size <= position)
        if not seen.any():
            continue
        logits = static["sm_scale"] * (q[b, t, h] * np.where(q[b, t, h] > 0, rows[:, 0], rows[:, 1])).sum(-1)
        paid = np.where(seen, np.exp(np.where(seen, logits, -np.inf) - logits[seen].max()), 0)
        tile = (b, t // static["query_tile"], h)
        found[tile] = found[tile] + paid / paid.sum() if static["pooling"] == "sum" else np.maximum(found[tile], paid / paid.sum())
    return found


def _first_of_tiles(q, tile: int):
    return jnp.repeat(q[:, ::tile], tile, 1)[:, : q.shape[1]]


def _with(op, arrays, kw, **changes):
    return op(*arrays, **(kw | changes))


MUTANTS: dict[str, Callable] = {
    "nothing is listed": lambda op, *x, **kw: jnp.full_like(op(*x, **kw), -1),
    "the first blocks": lambda op, q, *x, **kw: op(jnp.zeros_like(q), *x, **kw),
    "maxima for minima": lambda op, q, b, *x, **kw: op(q, b[:, :, :, ::-1], *x, **kw),
    "maxima alone": lambda op, q, b, *x, **kw: op(q, jnp.concatenate([b[:, :, :, :1]] * 2, 3), *x, **kw),
    "scale off by sqrt(D)": lambda op, *x, **kw: _with(op, x, kw, sm_scale=kw["sm_scale"] * x[0].shape[3] ** 0.5),
    "one slot fewer": lambda op, *x, **kw: _with(op, x, kw, k=kw["k"] - 1),
    "the window is shorter": lambda op, *x, **kw: _with(op, x, kw, window=(kw["window"][0], kw["window"][1] // 2)),
    "sinks are candidates": lambda op, *x, **kw: _with(op, x, kw, window=(0, kw["window"][1])),
    "the other pooling": lambda op, *x, **kw: _with(op, x, kw, pooling="max" if kw["pooling"] == "sum" else "sum"),
    "the other order": lambda op, *x, **kw: _with(op, x, kw, ranked=not kw["ranked"]),
    "the tile's first query alone": lambda op, q, *x, **kw: op(_first_of_tiles(q, kw["query_tile"]), *x, **kw),
    "KV heads mixed up": lambda op, q, b, *x, **kw: op(q, b[:, ::-1], *x, **kw),
    "a length off by a page": lambda op, q, b, t, s, n, **kw: op(q, b, t, s, n - kw["block_size"] * b.shape[2], **kw),
    "starts off by a page": lambda op, q, b, t, s, n, **kw: op(q, b, t, s - kw["block_size"] * b.shape[2], n, **kw),
    "the table off by one": lambda op, q, b, t, *x, **kw: op(q, b, jnp.roll(t, 1, 1), *x, **kw),
}


@pytest.fixture(scope="session")
def suite_of(tools):
    """cases -> (check, arguments): what an op is held to, and case -> its (arrays, keywords)."""

    def suite(cases: dict[str, Case], tolerance: float = 2e-5):
        given = functools.cache(lambda name: arguments(tools.make_paged, cases[name], name))
        expected = functools.cache(lambda name: np.asarray(REFERENCE(*given(name)[0], **given(name)[1])))
        worth = functools.cache(lambda name: worths(*given(name)))

        def check(op: Callable, name: str) -> None:
            """Lists are the reference's, but that a block may be taken for another whose worth is the same up to
            rounding."""
            arrays, static = given(name)
            blocks = np.asarray(op(*arrays, **static))
            assert blocks.dtype == np.int32
            assert blocks.shape == expected(name).shape
            for place in np.ndindex(blocks.shape[:3]):
                found, wanted = (x[place][x[place] >= 0].tolist() for x in (blocks, expected(name)))
                assert blocks[place].tolist() == [*found, *[-1] * (blocks.shape[3] - len(found))], "-1 stands at the end"
                assert len(set(found)) == len(found), "each once"
                if static["ranked"]:
                    of_tile = worth(name)[place][found]
                    assert (of_tile[1:] <= of_tile[:-1] * (1 + tolerance)).all(), "the best first"
                else:
                    assert found == sorted(found), "ascending"
                assert len(found) == len(wanted), place
                gained, lost = (sorted(set(a) - set(b)) for a, b in ((found, wanted), (wanted, found)))
                if gained:
                    of_tile = worth(name)[place]
                    np.testing.assert_allclose(np.sort(of_tile[gained]), np.sort(of_tile[lost]), rtol=tolerance, atol=1e-30)

        return check, given

    return suite


@pytest.fixture(scope="session")
def case_type():
    return Case


@pytest.fixture(scope="session")
def mutants():
    return MUTANTS


@pytest.fixture(scope="session")
def worths_of():
    return worths


def pytest_generate_tests(metafunc):
    if "mutant" in metafunc.fixturenames:
        metafunc.parametrize("mutant", MUTANTS)
