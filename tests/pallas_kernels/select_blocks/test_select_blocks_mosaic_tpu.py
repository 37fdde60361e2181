"""select_blocks for TPU: interpreted on the CPU with race detection, lowered, and compiled ahead of time where libtpu is installed.

That the race detector prints what is looked for here is tested beside gather_attention for TPU.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_index import INDEX_ROWS
from pallas_kernels.select_blocks import mosaic_tpu, select_blocks, selection_width

RACE = "RACE DETECTED"
SMALL_TILES = jax.jit(
    functools.partial(
        mosaic_tpu.select_blocks, config=mosaic_tpu.Config(tile_rows=128), interpret=pltpu.InterpretParams(detect_races=True)
    ),
    static_argnames=("kind", "page_size", "block_size", "k", "sink", "local"),
    compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
)
"""Tiles as small as they can be. The base of the mutants, too. The interpreter compiles for longer than it runs."""


@dataclasses.dataclass(frozen=True)
class Case:
    """index: integers (scores are exact, with many ties), floats, equal, infinite (scores overflow to -inf), nan, denormal."""

    kind: str = "bounds"
    index: str = "integers"
    lengths: tuple[int, ...] = (0, 1, 15, 16, 17, 96)
    num_queries: int = 1
    kv_heads: int = 2
    group: int = 4
    page_size: int = 16
    width: int = 6
    block_size: int = 4
    k: int = 5
    sink: int = 1
    local: int = 2
    dtype: str = "float32"
    hole: bool = False

    @property
    def sizes(self) -> dict:
        return {name: getattr(self, name) for name in ("kind", "page_size", "block_size", "k", "sink", "local")}


CASES = {
    "bounds": Case(),
    "floats": Case(index="floats"),
    "equal scores": Case(index="equal"),
    "scores of -inf": Case(index="infinite"),
    "denormals": Case(index="denormal"),
    "a page is missing": Case(hole=True, index="floats"),
    "NaN in the index, a page is missing": Case(index="nan", k=12, hole=True),
    "mean of groups of 7, drafts": Case("mean", num_queries=2, group=7, k=17),
    "tokens, in tiles": Case(block_size=1, k=9, local=5, index="floats"),
    "mean of pages, 8 KV heads": Case("mean", block_size=16, k=2, local=1, kv_heads=8, group=1, lengths=(0, 40, 96)),
    "bfloat16, drafts, a group of 8": Case(dtype="bfloat16", num_queries=3, group=8, kv_heads=1),
    "k covers everything, no sink, wide local": Case(k=40, sink=0, local=9),
    "k of none, blocks are pages, one head": Case(k=0, sink=2, local=3, block_size=16, kv_heads=1, group=1),
    "in tiles, pages missing": Case(lengths=(1600, 3, 1300), width=101, kv_heads=1, k=30, hole=True, dtype="bfloat16"),
}
FOR_MUTANTS = ("bounds", "equal scores", "NaN in the index, a page is missing", "bfloat16, drafts, a group of 8")


@pytest.fixture(autouse=True)
def no_races(capfd):
    """With JAX 0.11 a race is only printed."""
    yield
    pltpu.reset_tpu_interpret_mode_state()
    assert RACE not in capfd.readouterr().out


@functools.cache
def arguments(name: str) -> tuple:
    """q, index, page_table, lengths. Index rows of pages that are not sealed, or not named, hold NaN or scores that beat all others;
    page 0 and the last one are never named."""
    case = CASES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    used = [-(-n // case.page_size) for n in case.lengths]
    num_pages = sum(used) + 2
    free = list(rng.permutation(np.arange(1, num_pages - 1)))
    table = np.full((len(used), case.width), -1, np.int32)
    shape = (case.kv_heads, case.page_size // case.block_size, INDEX_ROWS[case.kind], 128)
    index = np.where(rng.random((num_pages, *shape[:2], 1, 1)) < 0.5, np.nan, 100.0) * np.ones((num_pages, *shape))
    for row, length in enumerate(case.lengths):
        table[row, : used[row]] = [free.pop() for _ in range(used[row])]
        sealed = max(length - case.num_queries, 0) // case.page_size
        content = rng.standard_normal((sealed, *shape)) if case.index == "floats" else rng.integers(-2, 3, (sealed, *shape)).astype(float)
        index[table[row, :sealed]] = -np.sort(-content, axis=-2)
    if case.index == "equal":
        index[:] = 1
    elif case.index == "infinite":
        index[table[-1, :4], :, 1:] = -3e38
    elif case.index == "nan":
        index[table[-1, 2:4], :, :2] = np.nan
    elif case.index == "denormal":
        index = index * 1e-40
    if case.hole:
        table[-1, 1:60:29] = -1
    q = rng.integers(-3, 4, (len(used), case.num_queries, case.kv_heads * case.group, 128)).astype(float) * case.group
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
    check(SMALL_TILES, case)


def test_ties_go_to_the_lower_block():
    ids = np.asarray(SMALL_TILES(*arguments("equal scores"), **CASES["equal scores"].sizes))
    assert ids[-1, 0].tolist()[:6] == [0, 1, 2, 3, 4, 5]


def test_bits_twice_and_in_any_company_and_table(tools):
    q, index, table, lengths = arguments("floats")
    op = functools.partial(SMALL_TILES, **CASES["floats"].sizes)
    once = np.asarray(op(q, index, table, lengths))
    tools.assert_same_bits(once, op(q, index, table, lengths))
    tools.assert_same_bits(once, op(q, index, jnp.pad(table, ((0, 0), (0, 99)), constant_values=-1), lengths))
    others = jnp.arange(6) != 4
    changed = op(
        jnp.where(others[:, None, None, None], -q, q),
        index,
        jnp.where(others[:, None], table[-1], table),
        jnp.where(others, 96, lengths),
    )
    tools.assert_same_bits(once[4], changed[4])


# Mutants: what a selector gets wrong, on its arguments or its results, then inside it.


def _ids(change):
    return lambda *arrays, **sizes: change(SMALL_TILES(*arrays, **sizes))


def _length_off(by):
    return lambda q, index, table, lengths, **sizes: SMALL_TILES(q, index, table, jnp.maximum(lengths + by, 0), **sizes)


def _index(change):
    return lambda q, index, table, lengths, **sizes: SMALL_TILES(q, change(index), table, lengths, **sizes)


def _table(change):
    return lambda q, index, table, lengths, **sizes: SMALL_TILES(q, index, change(table), lengths, **sizes)


def _second_block_dropped(ids):
    return jnp.concatenate([ids[..., :1], ids[..., 2:], jnp.full_like(ids[..., :1], -1)], axis=-1)


def _first_head_of_the_group(q, index, *arrays, **sizes):
    grouped = q.reshape(*q.shape[:2], index.shape[1], -1, q.shape[3])
    return SMALL_TILES(jnp.broadcast_to(grouped[:, :, :, :1], grouped.shape).reshape(q.shape), index, *arrays, **sizes)


def _last_query_only(q, *arrays, **sizes):
    return SMALL_TILES(jnp.broadcast_to(q[:, -1:], q.shape), *arrays, **sizes)


MUTANTS = {
    "zeros": _ids(jnp.zeros_like),
    "descending": _ids(lambda ids: ids[..., ::-1]),
    "the first head's list": _ids(lambda ids: jnp.broadcast_to(ids[:, :1], ids.shape)),
    "length one short": _length_off(-1),
    "length one long": _length_off(1),
    "one distant block less": _ids(_second_block_dropped),
    "first head instead of the group": _first_head_of_the_group,
    "only the last draft is scored": _last_query_only,
    "lower bounds": _index(lambda index: index[..., ::-1, :]),
    "maximum taken for minimum": _index(lambda index: jnp.broadcast_to(index[..., :1, :], index.shape)),
    "NaN ranks first": _index(lambda index: jnp.nan_to_num(index, nan=1000)),
    "one page read for another": _table(lambda table: table.at[:, 1].set(table[:, 0])),
    "a page dropped": _table(lambda table: table.at[:, 2].set(-1)),
    "-1 in the table wraps": _table(lambda table: jnp.where(table < 0, 0, table)),
    "the neighbour's table": _table(lambda table: jnp.roll(table, 1, 0)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], FOR_MUTANTS)


def _one_tie_less(sizes, keys, tiles):
    kth, ties, kept = THRESHOLD(sizes, keys, tiles)
    return kth, jnp.maximum(ties - 1, 0), kept


THRESHOLD = mosaic_tpu._threshold
INSIDE = {
    "one tie less": ("equal scores", mosaic_tpu, "_threshold", _one_tie_less),
    "bits of floats as they are": (
        "mean of groups of 7, drafts",
        mosaic_tpu,
        "_ordered",
        lambda score: jax.lax.bitcast_convert_type(score, jnp.int32),
    ),
    "missing pages are candidates": ("NaN in the index, a page is missing", mosaic_tpu._Pages, "strike", lambda *_: None),
}


@pytest.mark.parametrize("mutant", INSIDE)
def test_mutant_inside_fails(tools, monkeypatch, mutant):
    case, *change = INSIDE[mutant]
    forget = (SMALL_TILES.clear_cache, mosaic_tpu._select.clear_cache)
    for clear in forget:
        clear()
    monkeypatch.setattr(*change)
    tools.must_fail(check, SMALL_TILES, (case,))
    for clear in forget:
        clear()


def test_ordered_integers_keep_the_order_of_floats():
    values = np.array([np.finfo(np.float32).min, -1e30, -1, -1e-38, 0, 1e-38, 0.5, 1, 3e38, np.inf], np.float32)
    ordered = np.asarray(mosaic_tpu._ordered(values))
    assert (np.diff(ordered.astype(np.int64)) > 0).all()
    assert ordered.min() > mosaic_tpu._NO
    assert mosaic_tpu._ordered(np.float32(-0.0)) == mosaic_tpu._ordered(np.float32(0.0))


def _shapes(batch=1, heads=28, kv_heads=4, tokens=131072, page=128, block=128, kind="bounds", dtype=jnp.bfloat16, head_dim=128, drafts=1):
    """Shapes of the op's arrays."""
    shape, width = jax.ShapeDtypeStruct, tokens // page
    index = shape((batch * width + 1, kv_heads, page // block, INDEX_ROWS[kind], head_dim), dtype)
    return shape((batch, drafts, heads, head_dim), dtype), index, shape((batch, width), jnp.int32), shape((batch,), jnp.int32)


def _sizes(block=128, kind="bounds", page=128, k=32) -> dict:
    return {"kind": kind, "page_size": page, "block_size": block, "k": k, "sink": 1, "local": 4}


PRODUCTION = {
    "28/4 heads": ({}, {}),
    "32/8 heads, 1M": ({"heads": 32, "kv_heads": 8, "tokens": 2**20}, {"k": 8}),
    "28/4 heads, 1M, batch of 8": ({"batch": 8, "tokens": 2**20}, {}),
    "blocks of 16, drafts": ({"block": 16, "drafts": 4, "tokens": 2**20}, {"block": 16, "k": 256}),
    "mean": ({"kind": "mean", "tokens": 2**20}, {"kind": "mean"}),
    "mean of blocks of 16, 32/8 heads": (
        {"kind": "mean", "block": 16, "heads": 32, "kv_heads": 8, "tokens": 2**20},
        {"kind": "mean", "block": 16},
    ),
    "float32": ({"dtype": jnp.float32, "tokens": 8192}, {}),
}


@pytest.mark.parametrize("case", PRODUCTION)
def test_lowers_for_tpu(case):
    shapes, sizes = PRODUCTION[case]
    op = functools.partial(mosaic_tpu.select_blocks, **_sizes(**sizes))
    assert "tpu_custom_call" in jax.jit(op).trace(*_shapes(**shapes)).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("case", PRODUCTION)
def test_compiles_ahead_of_time(case, monkeypatch):
    """For a v5e, without one; and XLA makes no copy of the index to give the kernel the layout it wants."""
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes, sizes = PRODUCTION[case]
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _shapes(**shapes))
    op = functools.partial(mosaic_tpu.select_blocks, **_sizes(**sizes))
    compiled = jax.jit(op).trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
    pages = f"[{arrays[1].shape[0]},"
    made = [line for line in compiled.as_text().splitlines() if pages in line.partition(" = ")[2].partition("(%")[0]]
    assert all("parameter(" in line or " bitcast" in line for line in made), made


UNSUPPORTED = {
    "float16": ({"dtype": jnp.float16}, {}, "bfloat16 and float32 only"),
    "head dim": ({"head_dim": 64}, {}, "head dim 64 is not a multiple of 128"),
    "table": ({"batch": 32, "tokens": 2**20}, {}, "1048704 bytes of scalar memory, at most 786432"),
    "scores": ({"tokens": 2**22, "block": 16}, {"block": 16}, "bytes of vector memory, at most 12582912"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_it_cannot_do_is_refused_with_the_values(case):
    shapes, sizes, message = UNSUPPORTED[case]
    arrays, sizes = _shapes(**shapes), _sizes(**sizes)
    reason = mosaic_tpu.unsupported(*arrays, **sizes)
    assert message in reason
    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(functools.partial(mosaic_tpu.select_blocks, **sizes), *arrays)
    assert reason in str(error.value)


def test_result_has_the_promised_width():
    width = selection_width(4, page_size=128, block_size=16, k=256, sink=1, local=4)
    shapes, sizes = PRODUCTION["blocks of 16, drafts"]
    result = jax.eval_shape(functools.partial(mosaic_tpu.select_blocks, **_sizes(**sizes)), *_shapes(**shapes))
    assert result.shape == (1, 4, width)


@pytest.mark.parametrize("tile_rows", [0, -1, 1.5])
def test_config_validates_itself(tile_rows):
    with pytest.raises(ValueError, match="tile_rows must be a positive int"):
        mosaic_tpu.Config(tile_rows=tile_rows)
