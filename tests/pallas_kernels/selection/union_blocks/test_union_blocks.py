"""The suite of union_blocks: xla against the plain-Python reference, the reference against numpy, and mutants against
the suite."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from quick_cases import rest_long

from pallas_kernels.core import dispatch
from pallas_kernels.selection.union_blocks import union_blocks

REFERENCE = functools.partial(union_blocks, implementation="reference")
XLA = functools.partial(union_blocks, implementation="xla")
"""The base of the mutants."""

KNOWN = {"mosaic_gpu": {"num_blocks": 1000}}
"""What implementations need to know."""

IMPLEMENTATIONS = {
    name: functools.partial(union_blocks, implementation=name, **KNOWN.get(name, {}))
    for name in dispatch.available("union_blocks")
    if name != "reference" and (name != "xla" or jax.default_backend() == "cpu")  # XLA's division on GPUs is not exact
}


@dataclasses.dataclass(frozen=True)
class Case:
    """scores: "floats"; "integers" (means tie often); "equal"; "nowhere" (-inf and NaN strewn in); "infinite" (-inf);
    "zeros" (both)."""

    scores: str = "floats"
    num_rows: int = 8
    rows: int = 4
    heads: int = 3
    k: int = 6
    k_trim: int = 6
    num_blocks: int = 16
    empty: float = 0.2
    rank: str = "mean"


CASES = {
    "floats": Case(),
    "ties": Case("integers"),
    "equal scores": Case("equal"),
    "-inf and NaN": Case("nowhere"),
    "all -inf": Case("infinite", k_trim=3),
    "zeros of both signs": Case("zeros"),
    "last tile is short": Case("integers", num_rows=9),
    "one row a tile": Case(rows=1, num_rows=3, k_trim=4),
    "one tile for all, and more": Case(num_rows=5, rows=8, k_trim=20),
    "the whole union": Case("integers", k_trim=24),
    "more room than choices": Case(k_trim=40),
    "one slot": Case(k=1, k_trim=1, num_blocks=3),
    "empty lists": Case(empty=1.0),
    "sums": Case(rank="sum"),
    "sums that tie": Case("integers", num_rows=9, k=5, k_trim=5, rank="sum"),
    "sums of -inf and NaN": Case("nowhere", k=7, k_trim=9, rank="sum"),
    "few blocks, full lists": Case("integers", num_blocks=6, empty=0.0, k_trim=3),
    "as in the paper": Case(num_rows=16, rows=8, k=128, k_trim=128, num_blocks=400, heads=2, empty=0.05),
}


@functools.cache
def arguments(name: str) -> tuple[jax.Array, jax.Array]:
    """ids, scores: distinct blocks per row in no order, -1 strewn in with scores beside it that would win."""
    case = CASES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    shape = (2, case.num_rows, case.heads, case.k)
    ids = np.stack([rng.permutation(case.num_blocks)[: case.k] for _ in range(np.prod(shape[:3]))]).reshape(shape).astype(np.int32)
    scores = {
        "integers": lambda: rng.integers(-2, 3, shape),
        "equal": lambda: np.full(shape, 0.1),
        "infinite": lambda: np.full(shape, -np.inf),
        "zeros": lambda: rng.choice([0.0, -0.0], shape),
    }.get(case.scores, lambda: 3 * rng.standard_normal(shape))()
    if case.scores == "nowhere":
        scores = np.where(rng.random(shape) < 0.5, rng.choice([np.nan, -np.inf], shape), scores)
    none = rng.random(shape) < case.empty
    return jnp.asarray(np.where(none, -1, ids)), jnp.asarray(np.where(none, 99, scores), jnp.float32)


@functools.cache
def expected(name: str) -> np.ndarray:
    case = CASES[name]
    return np.asarray(union_blocks(*arguments(name), rows=case.rows, k_trim=case.k_trim, rank=case.rank, implementation="reference"))


def check(op, name: str) -> None:
    case = CASES[name]
    blocks = op(*arguments(name), rows=case.rows, k_trim=case.k_trim, rank=case.rank)
    assert blocks.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(blocks), expected(name))


@pytest.mark.quick_but(*(f"xla-{case}" for case in ("one slot", "one tile for all, and more", "all -inf") if "xla" in IMPLEMENTATIONS))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.quick_but("sums of -inf and NaN", "ties", "few blocks, full lists", "the whole union", "one row a tile", "last tile is short")
@pytest.mark.parametrize(
    "name",
    rest_long(
        CASES,
        "sums of -inf and NaN",
        "last tile is short",
        "one row a tile",
        "ties",
        "zeros of both signs",
        "few blocks, full lists",
        "as in the paper",
        "the whole union",
        "empty lists",
    ),
)
def test_the_kernel_on_emulated_threads(emulated_kernels, name):
    def op(*lists, **sizes):
        with emulated_kernels.kernels():
            return paging.implementation("union_blocks", "mosaic_gpu")(*lists, **sizes, num_blocks=1000)

    check(op, name)


@pytest.mark.parametrize("name", ["floats", "last tile is short", "as in the paper", "few blocks, full lists", "sums"])
def test_reference_is_a_masked_mean_and_a_sort(name):
    """Against numpy's masked mean or sum over a dense (row, block) matrix and its stable sort."""
    case, (ids, scores) = CASES[name], map(np.asarray, arguments(name))
    dense = np.full((*ids.shape[:3], case.num_blocks + 1), np.nan)
    np.put_along_axis(dense, ids, scores, axis=-1)  # -1 lands in the last column
    for tile in range(-(-case.num_rows // case.rows)):
        rows = np.ma.masked_invalid(dense[:, tile * case.rows : (tile + 1) * case.rows, :, :-1])
        mean = np.asarray(getattr(rows, case.rank)(axis=1).filled(-np.inf), np.float32)
        order = np.argsort(-mean, axis=-1, kind="stable")[..., : case.k_trim]
        for where in np.ndindex(*mean.shape[:2]):
            best = sorted(j for j in order[where] if mean[where][j] > -np.inf)
            kept = expected(name)[where[0], tile, where[1]]
            assert kept[kept >= 0].tolist() == best
            assert (kept[len(best) :] == -1).all()


def test_by_hand():
    """Tile of two rows: block 5 has mean 2, block 1 has 1, block 7 has 3, block 2 ties with 1."""
    ids = jnp.array([[5, 1], [7, 5], [2, -1], [1, -1]], jnp.int32).reshape(1, 4, 1, 2)
    scores = jnp.array([[1.0, 1.0], [3.0, 3.0], [1.0, 9.0], [1.0, 9.0]]).reshape(1, 4, 1, 2)
    for op in (REFERENCE, *IMPLEMENTATIONS.values()):
        assert op(ids, scores, rows=2, k_trim=2).tolist() == [[[[5, 7]], [[1, 2]]]]
        assert op(ids, scores, rows=4, k_trim=3).tolist() == [[[[1, 5, 7]]]]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bits_twice_and_in_any_order_of_a_list_and_any_company(tools, name):
    op = functools.partial(IMPLEMENTATIONS[name], rows=4, k_trim=6)
    ids, scores = arguments("ties")
    once = op(ids, scores)
    tools.assert_same_bits(once, op(ids, scores))
    order = np.random.default_rng(1).permutation(ids.shape[3])
    tools.assert_same_bits(once, op(ids[..., order], scores[..., order]))
    others = (jnp.arange(2) != 1)[:, None, None, None]
    tools.assert_same_bits(once[1], op(jnp.where(others, ids[::-1], ids), jnp.where(others, 7.0, scores))[1])


def test_sums_run_in_the_order_of_the_rows():
    """1e8 + 1 - 1e8 is 0 in this order and 1 in others; block 3 then loses to block 9's mean of 0.1."""
    ids = jnp.array([[3, 9]] * 3, jnp.int32).reshape(1, 3, 1, 2)
    scores = jnp.array([[1e8, 0.1], [1.0, 0.1], [-1e8, 0.1]]).reshape(1, 3, 1, 2)
    for op in (REFERENCE, *IMPLEMENTATIONS.values()):
        assert op(ids, scores, rows=3, k_trim=1).tolist() == [[[[9]]]]


# Mutants: what an implementation gets wrong.


def _results(change):
    return lambda *arrays, **sizes: change(XLA(*arrays, **sizes))


def _scores(change):
    """change: (ids, scores, sizes) -> scores."""
    return lambda ids, scores, **sizes: XLA(ids, change(ids, scores, sizes), **sizes)


def _summed(ids, scores, sizes):
    """Sums instead of means: each score times the number of rows of its tile that chose the block."""
    tile = jnp.arange(ids.shape[1]) // sizes["rows"]
    same_tile = tile[:, None] == tile
    chose = ids[:, None, :, :, :, None] == ids[:, :, None].swapaxes(1, 2)[:, :, :, :, None, :]
    return scores * (chose & same_tile[None, :, :, None, None, None]).sum((2, 5))


def _greatest(ids, scores, sizes):
    """The maximum over the rows instead of their mean."""
    tile = jnp.arange(ids.shape[1]) // sizes["rows"]
    same = (tile[:, None] == tile)[None, :, :, None, None, None]
    chose = same & (ids[:, :, None, :, :, None] == ids[:, None, :, :, None, :])
    return jnp.where(chose, scores[:, None, :, :, None, :], -jnp.inf).max((2, 5))


def _higher_of_equal(ids, scores, **sizes):
    mirrored = XLA(jnp.where(ids < 0, -1, 999 - ids), scores, **sizes)
    blocks = jnp.sort(jnp.where(mirrored < 0, 10**6, 999 - mirrored), axis=-1)
    return jnp.where(blocks == 10**6, -1, blocks)


MUTANTS = {
    "zeros": _results(jnp.zeros_like),
    "descending": _results(lambda blocks: blocks[..., ::-1]),
    "list of the first head": _results(lambda blocks: jnp.broadcast_to(blocks[:, :, :1], blocks.shape)),
    "tiles reversed": _results(lambda blocks: blocks[:, ::-1]),
    "the worst dropped": _results(lambda blocks: blocks.at[..., -1].set(-1)),
    "not trimmed": lambda ids, scores, **sizes: XLA(ids, scores, **(sizes | {"k_trim": 10**3}))[..., : sizes["k_trim"]],
    "sums, not means": _scores(_summed),
    "means, not sums": lambda ids, scores, **sizes: XLA(ids, scores, **(sizes | {"rank": "mean"})),
    "maxima, not means": _scores(_greatest),
    "the worst kept": _scores(lambda ids, scores, sizes: -scores),
    "scores ignored": _scores(lambda ids, scores, sizes: jnp.zeros_like(scores)),
    "higher of equal blocks": _higher_of_equal,
    "-1 is a block": lambda ids, scores, **sizes: XLA(jnp.maximum(ids, 0), scores, **sizes),
    "-inf is nothing": lambda ids, scores, **sizes: XLA(jnp.where(scores > -jnp.inf, ids, -1), scores, **sizes),
    "only the first row": lambda ids, scores, **sizes: XLA(ids[:, :: sizes["rows"]], scores[:, :: sizes["rows"]], **(sizes | {"rows": 1})),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


SIZES = {"rows": 4, "k_trim": 6}
BAD = {
    "ids without heads": ({"ids": (2, 8, 6)}, {}, r"takes ids and scores \[B,R,H,k\]"),
    "shapes differ": ({"scores": (2, 8, 3, 5)}, {}, "of one shape"),
    "nothing listed": ({"ids": (2, 8, 3, 0), "scores": (2, 8, 3, 0)}, {}, "no axis empty"),
    "no rows": ({}, {"rows": 0}, "rows must be a positive int, got 0"),
    "unknown rank": ({}, {"rank": "max"}, "rank must be 'mean' or 'sum', got 'max'"),
    "k_trim no int": ({}, {"k_trim": 2.5}, "k_trim must be a positive int, got 2.5"),
    "no block": ({}, {"num_blocks": 0}, "num_blocks must be a positive int, got 0"),
    "unknown implementation": ({}, {"implementation": "cub"}, "'cub' of union_blocks is unknown; there are mosaic_gpu, xla, reference"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, sizes, message = BAD[case]
    shapes = {"ids": (2, 8, 3, 6), "scores": (2, 8, 3, 6)} | shapes
    with pytest.raises(ValueError, match=message):
        union_blocks(jnp.zeros(shapes["ids"], jnp.int32), jnp.zeros(shapes["scores"]), **(SIZES | sizes))


@pytest.mark.parametrize(("name", "dtype"), [("ids", jnp.uint8), ("scores", jnp.bfloat16)])
def test_wrong_dtype_is_refused(name, dtype):
    arrays = dict(zip(("ids", "scores"), arguments("floats"), strict=True))
    arrays[name] = arrays[name].astype(dtype)
    with pytest.raises(ValueError, match=jnp.dtype(dtype).name):
        union_blocks(**arrays, **SIZES)


def test_memory_is_a_few_times_that_of_the_lists():
    """65536 measured rows of 4 heads and 32 slots: 32 MiB of ids."""
    shape = (1, 65536, 4, 32)
    lowered = jax.jit(functools.partial(XLA, rows=8, k_trim=32)).lower(
        jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 8 * 32 * 2**20


# For Hopper.


def production(num_blocks: int = 2048, rows: int = 8, k: int = 128, k_trim: int = 128, rank: str = "mean") -> tuple:
    """(op, arrays, keywords) for a chunk of 8192 queries of which 512 are measured."""
    lists = (1, 512, 28, k)
    arrays = {"ids": (lists, "int32"), "scores": (lists, "float32")}
    return "union_blocks", arrays, {"rows": rows, "k_trim": k_trim, "rank": rank, "num_blocks": num_blocks}


PRODUCTION = {
    "128K": production(),
    "1M": production(16384, rank="sum"),
    "16M": production(262144),
    "many entries": production(16384, rows=64),
    "untrimmed": production(k_trim=1024),
    "32 slots": production(k=32, rows=16),
}


def test_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION)


def test_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(PRODUCTION)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({}, "it needs num_blocks"),
        ({"num_blocks": 10**6}, "num_blocks must be at most"),
        ({"num_blocks": 100, "rows": 100}, "it holds at most 64"),
    ],
)
def test_what_the_kernel_cannot_do_is_passed_by(monkeypatch, sizes, reason):
    monkeypatch.setattr(dispatch, "available", lambda op, backend=None: ("mosaic_gpu", "xla", "reference"))
    lists = jnp.zeros((1, 100, 1, 6), jnp.int32), jnp.zeros((1, 100, 1, 6))
    sizes = {"rows": 4, "k_trim": 6} | sizes
    with pytest.raises(NotImplementedError, match=reason):
        union_blocks(*lists, **sizes, implementation="mosaic_gpu")
    with dispatch.listening() as heard:
        jax.eval_shape(functools.partial(union_blocks, **sizes), *lists)
    assert heard["union_blocks"] == "xla"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("num_blocks", [1, 130, 4097, 16384, 24576, 400_000])
@pytest.mark.parametrize("rank", ["mean", "sum"])
@pytest.mark.parametrize("rows", [16, 40])
def test_lists_of_any_width_on_hopper(num_blocks, rank, rows):
    """Against the definition, bit for bit: two tiles and a half, and one with so many entries that more threads take
    part."""
    rng = np.random.default_rng(num_blocks)
    k = min(128, num_blocks)
    near = min(num_blocks, 3 * k)  # so that rows share blocks
    ids = np.stack([num_blocks - 1 - rng.choice(near, k, replace=False) for _ in range(80)])
    ids[::7] = rng.choice(num_blocks, k, replace=False)
    ids = jnp.asarray(ids.reshape(1, 40, 2, k).astype(np.int32))
    scores = jnp.asarray(rng.integers(-9, 9, ids.shape) / 7, jnp.float32)
    static = {"rows": rows, "k_trim": 100, "rank": rank}
    found = union_blocks(ids, scores, **static, num_blocks=num_blocks, implementation="mosaic_gpu")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(REFERENCE(ids, scores, **static)))
