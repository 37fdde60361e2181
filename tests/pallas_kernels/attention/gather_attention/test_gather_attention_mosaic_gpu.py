"""gather_attention for Hopper without one: interpreted with race detection, lowered, compiled to machine code; who is
passed by.

What only a GPU can tell is in `test_gather_attention_on_hopper.py`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import paging
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from paging import gather_attention
from quick_cases import rest_long

from pallas_kernels.attention.gather_attention import listed, mosaic_gpu, xla
from pallas_kernels.attention.gather_attention.api import Call
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages
from pallas_kernels.hopper.decode import wgmma_fold as tiles

# 1. Interpreted. inputs of `make_paged`, then: window; blocks = (listed places, block size) or None for dense; splits;
# apart: the list has frames of its own.

SMALL = {"dtype": "bfloat16", "head_dim": 64, "page_size": 128, "kv_heads": 1, "width": 3, "splits": 1}
INTERPRETED = {
    "dense, two spans, an empty row": {"lengths": (300, 0), "group": 7, "splits": 2},
    "drafts in a window": {"lengths": (200,), "num_queries": 3, "window": (5, 70)},
    "two KV heads, full pages, head dim 128": {"lengths": (128,), "kv_heads": 2, "head_dim": 128, "group": 1},
    "a page is missing": {"lengths": (384, 300), "hole": True, "group": 8},
    "a list of pages": {"lengths": (300,), "group": 7, "blocks": (5, 128), "splits": 2},
    "blocks of 16, float16": {"lengths": (150,), "dtype": "float16", "blocks": (14, 16)},
    "drafts, blocks of 32, pages of 64": {"lengths": (150,), "num_queries": 2, "page_size": 64, "blocks": (7, 32)},
    "16 drafts of groups of 8, two tiles of queries": {"lengths": (131,), "num_queries": 16, "group": 8, "width": 2},
    "tiles apart": {"lengths": (300,), "kv_heads": 2, "group": 7, "blocks": (5, 128), "splits": 2, "apart": True},
    "tiles apart, blocks of 32, a page is missing": {"lengths": (150,), "page_size": 64, "blocks": (7, 32), "hole": True, "apart": True},
    "4 drafts, a list each": {"lengths": (129,), "num_queries": 4, "group": 7, "page_size": 64, "blocks": (3, 64, True)},
}
FOR_BUGS = ("dense, two spans, an empty row", "drafts, blocks of 32, pages of 64", "tiles apart")


@pytest.fixture
def check(tools, interpreter):
    """Runs the form without single threads, in the interpreter, on a case, with the LSE of blocks."""

    def run(case: str) -> None:
        spec = SMALL | INTERPRETED[case]
        window, blocks, splits, apart = (spec.pop(name, None) for name in ("window", "blocks", "splits", "apart"))
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        batch, page_size = len(paged.lengths), paged.k.shape[2]
        keywords = {"sm_scale": paged.sm_scale, "window": window, "blocks": None, "block_size": page_size, "return_block_lse": True}
        if blocks is not None:
            listed = tools.lists_for(paged, *blocks)
            listed = listed.at[-1, ..., :1, :].set(listed[-1, ..., -1:, :]) if batch == 1 else listed
            keywords |= {"blocks": listed, "block_size": blocks[1]}
        arrays = paged.arrays
        if apart:
            k, v, keywords["block_frames"] = tools.tiles_apart(paged, keywords["blocks"], keywords["block_size"])
            arrays = (paged.q, k, v, jnp.full_like(paged.page_table, -1), paged.lengths)
        expected = gather_attention(*arrays, **keywords, implementation="reference")
        config = mosaic_gpu.Config(splits=splits, array_code=True)
        kernel = paging.implementation("gather_attention", "mosaic_gpu", interpret=interpreter.params)
        found = interpreter.finished(kernel, *arrays, **keywords, config=config)
        tools.assert_rows_close(found[0], expected[0], 2 * tools.row_error[paged.q.dtype.name])
        for lse, ref in zip(found[1:], expected[1:], strict=True):
            tools.assert_lse_close(lse, ref)
        assert not interpreter.races_found(), "a race was found"

    return run


@pytest.mark.quick_but(
    "tiles apart", "4 drafts, a list each", "drafts, blocks of 32, pages of 64", "two KV heads, full pages, head dim 128"
)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "case",
    rest_long(
        INTERPRETED,
        "dense, two spans, an empty row",
        "drafts, blocks of 32, pages of 64",
        "two KV heads, full pages, head dim 128",
        "tiles apart",
        "4 drafts, a list each",
    ),
)
def test_interpreted_it_matches_the_reference_and_has_no_race(check, case):
    check(case)


def _nothing(*_, **__):
    pass


def _unpublished(monkeypatch):
    forget = tiles._forget_unwritten

    def without_commit(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plgpu, "commit_smem", _nothing)
            forget(*args)

    monkeypatch.setattr(tiles, "_forget_unwritten", without_commit)


def _last_tile_dropped(monkeypatch):
    span = tiles.span
    monkeypatch.setattr(tiles, "span", lambda *args: (span(*args)[0], jnp.maximum(span(*args)[1] - 1, 0)))


def _frames_of_the_table(monkeypatch):
    attend = mosaic_gpu._attend
    monkeypatch.setattr(mosaic_gpu, "_attend", lambda *arrays, **static: attend(*arrays[:6], None, **static))


BUGS = {
    "frames of listed blocks from the table": _frames_of_the_table,
    "copies are not waited for": lambda patch: patch.setattr(plgpu, "barrier_wait", _nothing),
    "results are not published before they are stored": lambda patch: patch.setattr(plgpu, "commit_smem", _nothing),
    "stores are not waited for": lambda patch: patch.setattr(plgpu, "wait_smem_to_gmem", _nothing),
    "values that were never written are multiplied": lambda patch: patch.setattr(tiles, "_forget_unwritten", _nothing),
    "zeroed values are not published": _unpublished,
    "the last tile of a span is dropped": _last_tile_dropped,
}


@pytest.mark.quick("stores are not waited for", "the last tile of a span is dropped")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tools, check, monkeypatch, fresh_caches, bug):
    BUGS[bug](monkeypatch)
    tools.must_fail(lambda _, case: check(case), None, FOR_BUGS)


# 2. and 3. Lowered and compiled, in the shapes that decoding has.


def production(
    batch: int = 1,
    heads: tuple[int, int] = (28, 4),
    head_dim: int = 128,
    page_size: int = 128,
    num_queries: int = 1,
    width: int | None = None,
    dtype: str = "bfloat16",
    per_query: bool = False,
    apart: bool = False,
    **static,
) -> tuple:
    """(op, arrays, keywords) of a call over 128K tokens a row. per_query: a list for each query. apart: frames of the
    list."""
    num_heads, kv_heads = heads
    pool, table = ((1024, kv_heads, page_size, head_dim), dtype), (batch, (128 << 10) // page_size)
    arrays = {"q": ((batch, num_queries, num_heads, head_dim), dtype), "k": pool, "v": pool, "table": (table, "int32")}
    arrays["lengths"] = ((batch,), "int32")
    keywords = {"block_size": page_size, "window": None, "sm_scale": head_dim**-0.5, "return_block_lse": False, "config": None} | static
    if width is None:
        return "gather_attention", arrays, keywords | {"blocks": None}
    rows = (batch, num_queries) if per_query else (batch,)
    lists = ("blocks", "block_frames") if apart else ("blocks",)
    return "gather_attention", arrays | dict.fromkeys(lists, ((*rows, kv_heads, width), "int32")), keywords


FORMS = {
    "dense": {},
    "dense, batch 8": {"batch": 8},
    "dense, batch 40": {"batch": 40},
    "list": {"width": 37},
    "list, batch 8": {"batch": 8, "width": 13},
    "list, batch 40": {"batch": 40, "width": 37},
    "list with LSE of blocks": {"width": 37, "return_block_lse": True},
    "blocks of 16": {"batch": 8, "width": 97, "block_size": 16},
}
SPILL_FREE = paging.for_each_model(production, FORMS) | {
    "blocks of 32 with their LSE": production(width=65, block_size=32, return_block_lse=True),
    "float16": production(dtype="float16"),
    "float16 list": production(dtype="float16", width=37, block_size=64),
    "dense with LSE of pages": production(return_block_lse=True),
    "window": production(batch=8, window=(4, 4096)),
    "list, two drafts": production(width=37, num_queries=2),
    "4 drafts": production(num_queries=4),
    "8 drafts, batch 8": production(num_queries=8, batch=8),
    "16 drafts": production(num_queries=16),
    "16 drafts of groups of 8": production(heads=(32, 4), num_queries=16),
    "16 drafts of groups of 8, a list each": production(heads=(32, 4), num_queries=16, width=37, per_query=True),
    "4 drafts, a list each, batch 8": production(num_queries=4, batch=8, width=37, per_query=True),
    "list, 8 drafts, window": production(width=37, num_queries=8, window=(4, 512)),
    "64 query rows": production(heads=(32, 4), num_queries=8, batch=8),
    "pages of 64": production(page_size=64, width=37),
    "pages of 256": production(page_size=256, width=37, block_size=128),
    "tiles of 128": production(config=mosaic_gpu.Config(tile_tokens=128, stages=2)),
    "tiles apart": production(width=37, apart=True),
    "tiles apart, batch 8": production(batch=8, heads=(32, 8), width=37, apart=True),
    "tiles apart, LSE of blocks": production(width=37, apart=True, return_block_lse=True),
    "tiles apart, 16 drafts of groups of 8": production(heads=(32, 4), num_queries=16, width=37, apart=True),
    "one span": production(batch=8, width=13, config=mosaic_gpu.Config(splits=1)),
}
WIDE = {
    "head dim 256": production(heads=(16, 2), head_dim=256),
    "head dim 256, batch 40": production(heads=(16, 2), head_dim=256, batch=40),
    "head dim 256, list": production(heads=(16, 2), head_dim=256, width=37),
    "head dim 256, list, float16": production(heads=(16, 2), head_dim=256, width=97, block_size=16, dtype="float16", batch=8),
    "head dim 256, LSE of blocks": production(heads=(16, 2), head_dim=256, width=37, return_block_lse=True),
}
"""Accumulators of 64 x 256 fill the registers of a warpgroup, so that spilling some is no news."""


@pytest.mark.parametrize("case", rest_long(SPILL_FREE | WIDE, "4 drafts, a list each, batch 8", "tiles apart, LSE of blocks"))
def test_lowers(cuda, case):
    assert "mosaic_gpu" in cuda.lower(*(SPILL_FREE | WIDE)[case])


@pytest.mark.long
def test_a_list_too_long_for_shared_memory_takes_spans(cuda):
    text = cuda.lower(*production(width=60_000, block_size=16))
    assert "span_kernel" in text
    assert "listed_kernel" not in text
    assert "listed_kernel" in cuda.lower(*production(width=592, block_size=16))


def test_a_list_with_frames_takes_one_launch_or_spans_as_one_without(cuda):
    for form, of in {"listed_kernel": {}, "span_kernel": {"return_block_lse": True}}.items():
        for apart in (False, True):
            assert form in cuda.lower(*production(width=37, apart=apart, **of))


PLACES = (130, 3, 300)
"""Places of lists: fewer than the kernel's threads, and more."""


@pytest.mark.parametrize("width", PLACES)
def test_on_emulated_threads_the_frames_of_a_list_are_found(emulated, width):
    """For each unit, row and KV head: the list, its frames where the block is written, and the row's length. The
    single-launch form."""
    rng, lengths = np.random.default_rng(width), np.array([700, 0, 129], np.int32)
    blocks, frames = (rng.integers(-1, 8, (3, 2, width), np.int32) for _ in range(2))
    _check_frames(emulated, blocks, frames, lengths, np.where((blocks >= 0) & (blocks * 128 < lengths[:, None, None]), frames, -1))
    with pytest.raises(AssertionError):
        _check_frames(emulated, blocks, frames, lengths, frames)


def _check_frames(emulated, blocks, frames, lengths, expected) -> None:
    (batch, heads, width), page = blocks.shape, jnp.zeros((1, blocks.shape[1], 128, 128), jnp.bfloat16)
    sizes = {"width": width, "block_size": 128, "window": None, "sm_scale": 1.0, "words": {}}
    s = listed.shape_of(jnp.zeros((batch, 1, heads, 128), jnp.bfloat16), Pages(page, page), **sizes)
    found = emulated.run_clusters(
        lambda arrays, scratch, unit: listed.copy_list(s, unit, *arrays, None, scratch),
        clusters=batch * heads,
        ctas=1,
        threads=128 * s.warpgroups,
        arrays=(blocks, frames, lengths),
        scratch_words=listed.list_words(s),
        scalars=lambda unit, cta: {"unit": unit},
    )
    for unit, words in enumerate(found):
        row, head = divmod(unit, heads)
        np.testing.assert_array_equal(words["ids_s"][0, :width], blocks[row, head])
        np.testing.assert_array_equal(words["pages_s"][0], [*expected[row, head], lengths[row]])


def test_compiles_without_spilling(spill_free):
    spill_free(SPILL_FREE, WIDE)


def test_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(SPILL_FREE, WIDE)


# Valid input that is none for this kernel: refused when named, passed by when picked.

NOT_HERE = {
    "float32": (production(dtype="float32"), "bfloat16 or float16, q and k alike; got q float32, k float32"),
    "head dim 32": (production(head_dim=32), "head dim must be 64, 128 or 256, got 32"),
    "pages of 16": (production(page_size=16), "page size must be a multiple of 64, got 16"),
    "blocks of 8": (production(width=9, block_size=8), "block_size must be 16, 32, 64 or 128, got 8"),
    "pages of 96": (production(page_size=96, width=9, block_size=32), "page size must be a multiple of 64, got 96"),
    "groups of 65": (production(heads=(65, 1)), "at most 64 query heads per KV head, got 65"),
}


@pytest.mark.parametrize("case", NOT_HERE)
def test_what_it_cannot_do_is_refused_by_name_and_passed_by(on_hopper, picked, case):
    call, reason = NOT_HERE[case]
    with pytest.raises(NotImplementedError, match=reason):
        picked(call, implementation="mosaic_gpu")
    assert picked(call)["gather_attention"] == "xla"


@pytest.mark.parametrize("case", ["28/4, dense", "28/4, list", "list, 8 drafts, window", "64 query rows", "16 drafts of groups of 8"])
def test_what_it_can_do_is_picked(on_hopper, picked, case):
    assert picked(SPILL_FREE[case])["gather_attention"] == "mosaic_gpu"


def test_mixed_dtypes_are_passed_by(on_hopper, picked):
    op, arrays, static = production()
    mixed = op, arrays | {"q": (arrays["q"][0], "float16")}, static
    with pytest.raises(NotImplementedError, match="got q float16, k bfloat16"):
        picked(mixed, implementation="mosaic_gpu")
    assert picked(mixed)["gather_attention"] == "xla"


def test_elsewhere_it_is_refused(picked):
    if "mosaic_gpu" in dispatch.available("gather_attention"):
        pytest.skip("it runs here")
    with pytest.raises(NotImplementedError, match="no implementation 'mosaic_gpu' on backend"):
        picked(production(), implementation="mosaic_gpu")


def test_config_of_another_is_refused(on_hopper, picked):
    with pytest.raises(
        ValueError, match=r"takes a pallas_kernels.attention.gather_attention.mosaic_gpu.Config, got Config\(tile_tokens=512"
    ):
        picked(production(config=xla.Config()), implementation="mosaic_gpu")


@pytest.mark.parametrize("sizes", [{"tile_tokens": 96}, {"stages": 0}, {"splits": -1}])
def test_config_validates_itself(sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} must be .* got {next(iter(sizes.values()))}"):
        mosaic_gpu.Config(**sizes)
    assert dataclasses.asdict(mosaic_gpu.Config())["array_code"] is False


@pytest.mark.parametrize(
    ("num_queries", "group", "size"),
    [(1, 1, 1), (1, 64, 1), (4, 7, 4), (8, 8, 8), (16, 7, 8), (16, 8, 8), (16, 1, 16), (13, 5, 1), (6, 20, 3)],
)
def test_queries_are_cut_into_equal_tiles(num_queries, group, size):
    assert mosaic_gpu.queries_per_tile(num_queries, group) == size


@pytest.mark.parametrize("queries", [1, 8])
def test_spans_share_the_tiles_out(queries):
    """Every tile once, in order, whatever the number of spans."""
    pages = Pages(*[jnp.zeros((1, 1, 64, 64), jnp.bfloat16)] * 2)
    call = Call(64, None, 1.0, False, mosaic_gpu.Config(splits=7))
    shape = mosaic_gpu._shape(call, jnp.zeros((1, queries, 4, 64), jnp.bfloat16), pages, None)
    for length in range(0, 23 * shape.tile, 13):
        spans = [tuple(map(int, tiles.span(shape, split, jnp.int32(length)))) for split in range(7)]
        number = -(-length // shape.tile)
        np.testing.assert_array_equal([first + i for first, count in spans for i in range(count)], np.arange(number))


@pytest.mark.parametrize("num_queries", [1, 2, 8, 16])
@pytest.mark.parametrize("page_size", [64, 128])
def test_a_tile_goes_without_a_mask_if_every_query_sees_all_of_it(num_queries, page_size):
    """By a count of the keys that each query sees. Pages that are missing have no keys."""
    q, pages = jnp.zeros((1, num_queries, 8, 128), jnp.bfloat16), Pages(*[jnp.zeros((9, 2, page_size, 128), jnp.bfloat16)] * 2)
    s = mosaic_gpu._shape(Call(page_size, None, 1.0, False, mosaic_gpu.Config(multiprocessors=132)), q, pages, None)
    whole = 0
    for missing in (-1, 0, 1):

        def page_of(_, start, missing=missing):
            return jnp.where(start // page_size == missing, -1, start // page_size)

        for length in (*range(num_queries, 20), *range(126, 148), *range(254, 275)):
            for tile in range(3):
                pieces = tiles.places(s, None, page_of, jnp.int32(length), jnp.int32(tile))
                starts, written = [int(each[2]) for each in pieces], [int(each[3]) for each in pieces]
                keys = [start + n for start, count in zip(starts, written, strict=True) for n in range(count)]
                expected = len(keys) == s.tile and max(keys) <= length - num_queries
                assert bool(tiles._sees_all(s, pieces, length)) == expected
                whole += expected
    assert whole > 20
    assert not tiles._sees_all(dataclasses.replace(s, window=(4, 100)), [(0, 0, 0, s.piece)] * s.pieces, 10_000)
