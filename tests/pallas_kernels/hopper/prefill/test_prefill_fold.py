"""The prefill kernels for Hopper without one: interpreted, compiled to machine code; who is passed by.

What only a GPU can tell is in `test_flash_attention_on_hopper.py` and `test_block_sparse_attention_on_hopper.py`.
"""

from __future__ import annotations

import dataclasses
import itertools

import as_on_accelerators
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator.kernels import kernels
from quick_cases import rest_long

from pallas_kernels.core import merge
from pallas_kernels.hopper.decode import clusters
from pallas_kernels.hopper.prefill import prefill_fold


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("chosen", ["matches", "planted"])
def test_interpreted(with_threads, chosen):
    """Values and races, and planted bugs: `query_tiles_interpreted.py`, with threads enough for its warpgroups."""
    with_threads("query_tiles_interpreted.py", chosen)


def production(heads=(28, 4), head_dim: int = 128, page_size: int = 128, batch: int = 1, tokens: int = 8192, dtype="bfloat16", **static):
    """(op, arrays, keywords) of a prefill of a chunk over 128K tokens; over lists where a block size is given."""
    num_heads, kv_heads = heads
    pool, width = ((1024, kv_heads, page_size, head_dim), dtype), (128 << 10) // page_size
    arrays = {"q": ((batch, tokens, num_heads, head_dim), dtype), "k": pool, "v": pool, "table": ((batch, width), "int32")}
    arrays |= dict.fromkeys(("starts", "lengths"), ((batch,), "int32"))
    static = {"window": None, "sm_scale": head_dim**-0.5, "config": None} | static
    if "block_size" not in static:
        return "flash_attention", arrays, static
    static = {"query_tile": 128} | static
    blocks = (batch, -(-tokens // static["query_tile"]), num_heads, 128)
    return "block_sparse_attention", arrays | {"blocks": (blocks, "int32")}, static


SPILL_FREE = {
    "dense": production(),
    "dense 32/8": production(heads=(32, 8)),
    "dense chunk of 512": production(tokens=512),
    "dense float16, batch of 8, odd chunk": production(dtype="float16", batch=8, tokens=1001),
    "dense head dim 64": production(head_dim=64),
    "dense head dim 256": production(head_dim=256, heads=(16, 2)),
    "dense window": production(window=(64, 1024)),
    "dense pages of 64": production(page_size=64),
    "lists": production(block_size=64, window=(64, 1024)),
    "lists 32/8": production(heads=(32, 8), block_size=64, window=(64, 1024)),
    "lists head dim 64": production(head_dim=64, block_size=64, window=(64, 1024)),
    "lists of 128": production(block_size=128),
}
SPLIT = {
    "chunk of 128": production(tokens=128),
    "chunk of 256": production(tokens=256),
    "chunk of 512, 14 of the heads": production(tokens=512, heads=(14, 2)),
    "chunk of 300, float16, head dim 64": production(tokens=300, head_dim=64, dtype="float16"),
}
"""Chunks that do not fill the device: one launch folds parts, another merges them."""
WIDE_SPLIT = {"chunk of 256, head dim 256": production(tokens=256, head_dim=256, heads=(16, 2))}
WIDE = {
    "lists head dim 256": production(head_dim=256, heads=(16, 2), block_size=64, window=(64, 1024)),
    "lists of 16": production(block_size=16, window=(64, 1024)),
}
"""Too many values at once; a few of them wait in memory."""


def test_compiles_without_spilling(spill_free):
    spill_free(SPILL_FREE, WIDE, launches=1)


def test_split_compiles_without_spilling(spill_free):
    spill_free(SPLIT, WIDE_SPLIT, launches=2)


@pytest.mark.quick("lists")
@pytest.mark.parametrize(
    "case", rest_long(SPILL_FREE | WIDE | SPLIT | WIDE_SPLIT, "chunk of 256", "dense window", "dense head dim 256", "lists", "lists of 128")
)
def test_lowers(cuda, case):
    assert "mosaic_gpu" in cuda.lower(*(SPILL_FREE | WIDE | SPLIT | WIDE_SPLIT)[case])


# Splits.


@pytest.mark.parametrize("heads", [1, 4, 7, 8, 14, 16, 28, 32, 40, 48, 64, 96, 128])
def test_splits_depend_on_heads_until_a_chunk_fills_the_device(heads):
    """Every chunk of fewer than 99 of 132 CTAs has the same number of splits, which fills the multiprocessors, if 32
    splits can."""
    found = [clusters.splits_of(heads, tiles) for tiles in range(1, 160)]
    full = [heads * tiles >= 99 for tiles in range(1, 160)]
    assert {splits for splits, fills in zip(found, full, strict=True) if fills} <= {1}
    if all(full):
        return
    (splits,) = {splits for splits, fills in zip(found, full, strict=True) if not fills}
    rounds = -(-heads * splits // 132)
    assert heads * splits >= 0.95 * 132 * rounds or splits == 32
    assert all(heads * fewer < 0.95 * 132 * -(-heads * fewer // 132) for fewer in range(1, splits))


def test_splits_of_the_production_shapes():
    assert [clusters.splits_of(28, tiles) for tiles in (1, 2, 3, 4, 16, 64)] == [9, 9, 9, 1, 1, 1]
    assert [clusters.splits_of(32, tiles) for tiles in (1, 3, 4)] == [4, 4, 1]


@pytest.mark.parametrize("splits", [1, 2, 9])
def test_parts_of_a_walk_are_its_tiles_at_fixed_positions(splits):
    """Each tile is in one part, in ascending order; a longer walk only adds tiles at the end of parts."""
    parts = {}
    for steps in (0, 1, 8, 9, 23):
        walk = prefill_fold.Walk(jnp.int32(steps), lambda step: (step * 128, step * 128 + 64), None, None, None)
        found = [walk.part(jnp.int32(number), splits) for number in range(splits)]
        tiles = [[tuple(map(int, part.starts(step))) for step in range(int(part.steps))] for part in found]
        assert sorted(itertools.chain(*tiles)) == [(128 * n, 128 * n + 64) for n in range(steps)]
        for number, before in parts.items():
            assert tiles[number][: len(before)] == before
        parts = dict(enumerate(tiles))


def test_a_walk_that_leaves_keys_out_is_not_split():
    walk = prefill_fold.Walk(3, lambda step: (step,), None, None, None, seen=lambda *_: True)
    with pytest.raises(ValueError, match="only a walk over all keys is split"):
        walk.part(0, 2)


def _parts(splits: int, heads: int = 2, rows: int = 5, head_dim: int = 128):
    """A shape, and the parts of its rows: of the first row no part has keys, of the second only the last one. Parts
    without keys are NaN, except the first."""
    rng = np.random.default_rng(splits)
    out = rng.standard_normal((1, heads, splits, 128, head_dim)).astype(np.float32)
    lse = (5 * rng.standard_normal((1, heads, splits, 128))).astype(np.float32)
    lse[..., 0], lse[:, :, :-1, 1] = -np.inf, -np.inf
    out = np.where(np.isinf(lse)[..., None], np.nan, out)
    out[:, :, 0] = np.where(np.isinf(lse[:, :, 0, :, None]), 0, out[:, :, 0])
    arrays = jax.ShapeDtypeStruct((1, rows, heads, head_dim), "bfloat16"), jax.ShapeDtypeStruct((3, 1, 128, head_dim), "bfloat16")
    s = dataclasses.replace(prefill_fold.shape_of(*arrays, sm_scale=1.0), splits=splits)
    return s, jnp.asarray(out), jnp.asarray(lse)


@pytest.mark.parametrize("splits", [2, 9])
def test_parts_are_merged_as_the_merge_of_arrays_does(tools, monkeypatch, splits):
    """The second launch, thread by thread in the emulator: out `[B, R, H, D]`, and which head and row a part belongs
    to."""
    monkeypatch.setattr(prefill_fold, "TILE_ROWS", 4)  # 8 rows in place of 128
    s, out, lse = _parts(splits)
    out, lse = out[:, :, :, :8], lse[:, :, :, :8]
    with kernels():
        found = prefill_fold.merge_parts(s, out, lse)
    expected = merge.merge_attention([out[:, :, n] for n in range(splits)], [lse[:, :, n] for n in range(splits)])
    assert found[0].shape == (1, 8, 2, 128)
    assert found[0].dtype == jnp.bfloat16
    tools.assert_rows_close(found[0], expected[0].swapaxes(1, 2).astype(jnp.bfloat16), 4e-3)
    tools.assert_lse_close(found[1], expected[1].swapaxes(1, 2))


# Valid input that is none for these kernels: refused when named, passed by when picked.

NOT_HERE = {
    "float32": (production(dtype="float32"), "bfloat16 or float16, q and k alike; got q float32, k float32"),
    "head dim 32": (production(head_dim=32), "head dim must be 64, 128 or 256, got 32"),
    "pages of 16": (production(page_size=16), "page size must be a multiple of 64, got 16"),
    "negative scale": (production(sm_scale=-0.1), r"sm_scale must be positive, got -0\.1"),
    "lists, float32": (production(dtype="float32", block_size=64), "bfloat16 or float16, q and k alike; got q float32, k float32"),
    "lists for 64 queries": (production(block_size=64, query_tile=64), "query_tile must be a multiple of 128, got 64"),
    "lists of 8": (production(block_size=8), "block_size must be a multiple of 16, got 8"),
}


@pytest.mark.parametrize("case", NOT_HERE)
def test_what_it_cannot_do_goes_to_another(on_hopper, picked, monkeypatch, case):
    monkeypatch.setattr(jax.nn, "dot_product_attention", as_on_accelerators.dot_product_attention)  # there is no cuDNN here
    call, reason = NOT_HERE[case]
    cudnn_can = call[0] == "flash_attention" and case != "float32"
    assert picked(call) == {call[0]: "cudnn" if cudnn_can else "xla"}
    with pytest.raises(NotImplementedError, match=reason):
        picked(call, implementation="mosaic_gpu")


@pytest.mark.parametrize("case", ["dense", "lists"])
def test_it_is_preferred_on_hopper(on_hopper, picked, case):
    assert picked(SPILL_FREE[case]) == {SPILL_FREE[case][0]: "mosaic_gpu"}


@pytest.mark.parametrize("case", ["dense", "lists"])
def test_it_takes_no_config(on_hopper, picked, case):
    op, arrays, static = SPILL_FREE[case]
    with pytest.raises(ValueError, match=f"'mosaic_gpu' of {op} takes no config, got 3"):
        picked((op, arrays, static | {"config": 3}), implementation="mosaic_gpu")


@pytest.mark.parametrize("registers", [(208, 96), (232, 48)])
def test_warpgroups_cannot_ask_for_more_registers_than_a_cta_has(registers):
    """They would wait for ever, which only a GPU shows."""
    with pytest.raises(ValueError, match=r"2 x the first \+ the second must be at most 504"):
        prefill_fold.Fetcher(registers, prefill_fold.fetch)
    assert prefill_fold.Fetcher((208, 88), prefill_fold.fetch).registers == (208, 88)
