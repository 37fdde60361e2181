"""gather_attention for TPU: interpreted on the CPU with race detection, lowered, and compiled ahead of time where
libtpu is installed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
import tpu_kernels
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from paging import gather_attention
from quick_cases import one_in, rest_long

from pallas_kernels.attention.gather_attention import mosaic_tpu
from pallas_kernels.core import dispatch

pytestmark = pytest.mark.usefixtures("no_races")
KERNEL = paging.implementation("gather_attention", "mosaic_tpu")
INTERPRETED = paging.implementation("gather_attention", "mosaic_tpu", interpret=tpu_kernels.INTERPRET)
SMALL_TILES = jax.jit(
    functools.partial(INTERPRETED, config=mosaic_tpu.Config(tile_tokens=32)),
    static_argnames=("block_size", "window", "sm_scale", "return_block_lse"),
    compiler_options=tpu_kernels.QUICK,
)
"""With tiles this small the inputs below take several. The base of the mutants, too. The interpreter compiles for
longer than it runs."""

# inputs of `make_paged`, then: window; blocks = (listed places, block size) or None for dense; pages = their dtype
# where it is not q's.
CASES = {
    "dense": {"lengths": (0, 1, 15, 16, 17, 96)},
    "groups of 7, drafts in a window, a page is missing": {"group": 7, "num_queries": 3, "window": (5, 20), "hole": True},
    "blocks of 8, drafts, window": {"num_queries": 3, "blocks": (13, 8), "window": (5, 20)},
    "blocks are pages, one KV head of 8": {"kv_heads": 1, "group": 8, "blocks": (6, 16)},
    "one head, equal scores": {"kv_heads": 1, "group": 1, "keys": "equal"},
    "huge logits": {"lengths": (0, 1, 15, 16, 17, 96), "keys": "huge"},
    "denormal keys": {"lengths": (0, 1, 15, 16, 17, 96), "keys": "denormal"},
    "bfloat16 blocks of 16 in pages of 32": {"dtype": "bfloat16", "num_queries": 3, "page_size": 32, "width": 3, "blocks": (7, 16)},
    "bfloat16 pages, float32 queries": {"pages": "bfloat16"},
    "production heads": {"dtype": "bfloat16", "kv_heads": 4, "group": 7, "page_size": 128, "width": 3, "lengths": (129, 300)},
}
FOR_MUTANTS = ("blocks of 8, drafts, window", "dense", "blocks are pages, one KV head of 8")


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = {"head_dim": 128, "lengths": (0, 15, 17, 96)} | CASES[case]
        window, blocks, pages = spec.pop("window", None), spec.pop("blocks", None), spec.pop("pages", None)
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        page_size = paged.k.shape[2]
        keywords = {"sm_scale": paged.sm_scale, "window": window, "blocks": None, "block_size": page_size}
        if blocks is not None:
            width, size = blocks
            listed = tools.random_blocks(1, len(paged.lengths), paged.k.shape[1], paged.page_table.shape[1] * page_size // size, width)
            keywords |= {"blocks": listed, "block_size": size}
        q, k, v, table, lengths = paged.arrays
        return (q, k.astype(pages or k.dtype), v.astype(pages or v.dtype), table, lengths), keywords

    return build


@pytest.mark.quick_but("bfloat16 blocks of 16 in pages of 32", "dense", "huge logits")
@pytest.mark.parametrize(
    "case", rest_long(CASES, "blocks of 8, drafts, window", "dense", "huge logits", "bfloat16 blocks of 16 in pages of 32")
)
def test_matches_reference(check, case):
    check(SMALL_TILES, case)


@pytest.mark.long
def test_bits_twice_and_without_block_lse_and_in_any_company_and_table(tools, arguments):
    (q, k, v, table, lengths), keywords = arguments("bfloat16 blocks of 16 in pages of 32")
    op = functools.partial(SMALL_TILES, **keywords, return_block_lse=True)
    once = op(q, k, v, table, lengths)
    wide = jnp.pad(table, ((0, 0), (0, 5)), constant_values=-1)
    others = jnp.arange(4) != 2
    changed = op(
        jnp.where(others[:, None, None, None], -q, q),
        k,
        v,
        jnp.where(others[:, None], table[-1], table),
        jnp.where(others, 96, lengths),
    )
    again, in_wide = op(q, k, v, table, lengths), op(q, k, v, wide, lengths)
    without = SMALL_TILES(q, k, v, table, lengths, **keywords, return_block_lse=False)
    for a, *others in zip(once, again, in_wide, strict=True):
        for b in others:
            tools.assert_same_bits(a, b)
    for a, b in zip(once[:2], without, strict=True):
        tools.assert_same_bits(a, b)
    for a, b in zip(once, changed, strict=True):
        tools.assert_same_bits(a[2], b[2])


@pytest.mark.long
def test_ids_beyond_the_table_are_skipped(tools, arguments):
    arrays, keywords = arguments("blocks are pages, one KV head of 8")
    inside = jnp.broadcast_to(jnp.array([0, 2, -1, -1, -1, -1], jnp.int32), (4, 1, 6))
    beyond = jnp.broadcast_to(jnp.array([0, 2, 6, 2**24, 2**30, -7], jnp.int32), (4, 1, 6))
    op = functools.partial(SMALL_TILES, *arrays, return_block_lse=True)
    for a, b in zip(op(**(keywords | {"blocks": inside})), op(**(keywords | {"blocks": beyond})), strict=True):
        tools.assert_same_bits(a, b)


# Mutants: what a kernel gets wrong, on its arguments or its results, then inside it.


def _values_from_keys(q, k, v, *arrays, **keywords):
    return SMALL_TILES(q, k, k, *arrays, **keywords)


def _scale_off(*arrays, sm_scale, **keywords):
    return SMALL_TILES(*arrays, sm_scale=sm_scale * arrays[0].shape[-1] ** 0.5, **keywords)


def _length_off(by):
    return lambda q, k, v, table, lengths, **keywords: SMALL_TILES(q, k, v, table, jnp.maximum(lengths + by, 0), **keywords)


def _table(change):
    return lambda q, k, v, table, *rest, **keywords: SMALL_TILES(q, k, v, change(table), *rest, **keywords)


def _first_heads_list(*arrays, blocks, **keywords):
    return SMALL_TILES(*arrays, blocks=None if blocks is None else jnp.broadcast_to(blocks[:, :1], blocks.shape), **keywords)


def _window_wider(*arrays, window, **keywords):
    return SMALL_TILES(*arrays, window=window and (window[0], window[1] + 1), **keywords)


def _block_lse_shifted(*arrays, **keywords):
    out, lse, block_lse = SMALL_TILES(*arrays, **keywords)
    return out, lse, jnp.roll(block_lse, 1, axis=-1)


MUTANTS = {
    "zeros": lambda *arrays, **keywords: tuple(jnp.zeros_like(x) for x in SMALL_TILES(*arrays, **keywords)),
    "V read from K": _values_from_keys,
    "scale times sqrt(D)": _scale_off,
    "length one short": _length_off(-1),
    "length one long": _length_off(1),
    "one page dropped": _table(lambda table: table.at[:, -1].set(-1)),
    "one page read for another": _table(lambda table: table.at[:, 1].set(table[:, 0])),
    "the neighbour's table": _table(lambda table: jnp.roll(table, 1, axis=0)),
    "the first head's list": _first_heads_list,
    "window one token wider": _window_wider,
    "block LSE one place off": _block_lse_shifted,
}


@pytest.mark.quick("length one short", "zeros", "block LSE one place off")
@pytest.mark.parametrize(
    "mutant",
    rest_long(MUTANTS, "zeros", "one page read for another", "length one short", "the first head's list", "block LSE one place off"),
)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, MUTANTS[mutant], FOR_MUTANTS)


INSIDE = {
    "NaN of tokens never written": "dense",
    "weighted values not rescaled": "dense",
    "weights of 8 bits": "bfloat16 pages, float32 queries",
}
"""The case that finds each mutant of `tpu_kernels.IN_TILES`."""


@pytest.mark.quick_but("weights of 8 bits")
@pytest.mark.parametrize("mutant", INSIDE)
def test_mutant_inside_fails(tools, check, monkeypatch, mutant):
    where, name, change = tpu_kernels.IN_TILES[mutant]
    forget = (SMALL_TILES.clear_cache, mosaic_tpu._attend.clear_cache)
    for clear in forget:
        clear()
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    tools.must_fail(check, SMALL_TILES, (INSIDE[mutant],))
    for clear in forget:
        clear()


def test_races_are_found(capfd):
    """A kernel that does not wait for its copy: the message that no other test here may print, or with JAX 0.12
    raise."""

    def kernel(x, out, slot, arrived):
        copy = pltpu.make_async_copy(x, slot, arrived)
        copy.start()
        out[...] = slot[...]
        copy.wait()

    op = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=tpu_kernels.INTERPRET,
    )
    try:
        jax.block_until_ready(op(jnp.ones((8, 128))))
        told = capfd.readouterr().out
    except jax.errors.JaxRuntimeError as error:
        told = str(error)
    assert tpu_kernels.RACE in told


def _shapes(batch=1, heads=28, kv_heads=4, tokens=131072, page=128, dtype=jnp.bfloat16, head_dim=128, num_queries=1, blocks=37):
    """Shapes of the op's arrays; blocks: places of the list, or None."""
    shape, width = jax.ShapeDtypeStruct, tokens // page
    pool = shape((batch * width + 1, kv_heads, page, head_dim), dtype)
    q = shape((batch, num_queries, heads, head_dim), dtype)
    listed = None if blocks is None else shape((batch, kv_heads, blocks), jnp.int32)
    return q, pool, pool, shape((batch, width), jnp.int32), shape((batch,), jnp.int32), listed


def _op(q, k, v, table, lengths, blocks, **keywords):
    static = {"block_size": k.shape[2], "window": None, "sm_scale": 0.1, "return_block_lse": False, "config": None}
    return KERNEL(q, k, v, table, lengths, blocks=blocks, **(static | keywords))


PRODUCTION = {
    "28/4 heads, list": ({}, {}),
    "28/4 heads, dense": ({"blocks": None}, {}),
    "32/8 heads, list": ({"heads": 32, "kv_heads": 8}, {}),
    "32/8 heads, dense, batch of 8": ({"heads": 32, "kv_heads": 8, "batch": 8, "blocks": None}, {}),
    "28/4 heads, dense, 1M, block LSE": ({"blocks": None, "tokens": 2**20}, {"return_block_lse": True}),
    "blocks of 16, drafts, window, block LSE": (
        {"num_queries": 8, "blocks": 300},
        {"block_size": 16, "window": (4, 4096), "return_block_lse": True},
    ),
    "float32": ({"dtype": jnp.float32, "num_queries": 2}, {}),
    "head dim 256": ({"heads": 16, "kv_heads": 8, "head_dim": 256}, {}),
}


@pytest.mark.parametrize("case", one_in(3, PRODUCTION))
def test_lowers_for_tpu(case):
    shapes, keywords = PRODUCTION[case]
    lowered = jax.jit(functools.partial(_op, **keywords)).trace(*_shapes(**shapes)).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.parametrize("chip", tpu_kernels.TOPOLOGIES)
@pytest.mark.parametrize("case", PRODUCTION)
def test_compiles_ahead_of_time(case, chip):
    """Without a TPU; and XLA makes no copy of the pool to give the kernel the layout it wants."""
    shapes, keywords = PRODUCTION[case]
    arrays = _shapes(**shapes)
    compiled = tpu_kernels.compile_ahead(functools.partial(_op, **keywords), arrays, chip)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**23
    tpu_kernels.assert_not_copied(compiled, arrays[1])


UNSUPPORTED = {
    "float16": ({"dtype": jnp.float16}, {}, "float16"),
    "head dim": ({"head_dim": 64}, {}, "head dim 64 is not a multiple of 128"),
    "block size": ({}, {"block_size": 4}, "block_size 4 is not a multiple of 8"),
    "table": ({"tokens": 2**20, "batch": 32, "blocks": None}, {}, "1048704 bytes of scalar memory, at most 786432"),
    "list": ({"batch": 64, "blocks": 1024}, {}, "1310976 bytes of scalar memory, at most 786432"),
    "tile": ({}, {"config": mosaic_tpu.Config(tile_tokens=2**14), "block_size": 128}, None),
    "long tile": ({"blocks": None}, {"config": mosaic_tpu.Config(tile_tokens=2**14)}, "bytes of vector memory, at most 12582912"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_it_cannot_do_is_refused_with_the_values(case):
    shapes, keywords, message = UNSUPPORTED[case]
    *arrays, blocks = _shapes(**shapes)
    static = {"block_size": 128, "window": None, "sm_scale": 0.1, "return_block_lse": False, "config": None} | keywords
    reason = paging.unsupported("gather_attention", "mosaic_tpu", *arrays, blocks=blocks, **static)
    if message is None:  # a list of 37 blocks is at most one tile of them
        assert reason is None
        return
    assert message in reason
    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(functools.partial(_op, **keywords), *arrays, blocks)
    assert reason in str(error.value)


def test_frames_of_listed_blocks_are_refused_and_go_to_another(on_tpu):
    *arrays, blocks = _shapes()
    op = functools.partial(gather_attention, *arrays, blocks=blocks, block_frames=blocks, sm_scale=0.1)
    with dispatch.listening() as heard:
        jax.eval_shape(op)
    assert heard["gather_attention"] == "xla"
    with pytest.raises(NotImplementedError, match="it finds frames in the page table alone, not in block_frames; got"):
        jax.eval_shape(functools.partial(op, implementation="mosaic_tpu"))


@pytest.mark.parametrize("tile_tokens", [0, -1, 1.5])
def test_config_validates_itself(tile_tokens):
    with pytest.raises(ValueError, match="tile_tokens must be a positive int"):
        mosaic_tpu.Config(tile_tokens=tile_tokens)


def test_another_config_is_refused(arguments):
    arrays, keywords = arguments("dense")
    with pytest.raises(ValueError, match=r"takes a pallas_kernels.attention.gather_attention.mosaic_tpu.Config, got \{'tile_tokens': 8\}"):
        KERNEL(*arrays, **keywords, config={"tile_tokens": 8})


def test_inputs_are_not_flat(check, arguments):
    """Of six blocks, the best holds far more than a sixth of the mass: a softmax near uniform would hide errors."""
    arrays, keywords = arguments("dense")
    _, lse, block_lse = gather_attention(*arrays, **keywords, return_block_lse=True, implementation="reference")
    assert np.median(np.exp(block_lse[-1].max(-1) - lse[-1])) > 0.4
