"""gather_attention without `wgmma`, whole kernels on emulated threads: against the reference, and with bugs planted.

What only a GPU can tell is in `test_gather_attention_on_hopper.py`, which runs this form too.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import paging
import pytest
from emulator.kernels import kernels
from paging import gather_attention

from pallas_kernels.attention.gather_attention import mma, mosaic_gpu
from pallas_kernels.attention.gather_attention.mosaic_gpu import Config
from pallas_kernels.core import dispatch
from pallas_kernels.hopper.decode import decode_fold
from pallas_kernels.hopper.threads import lane_copies, lane_pairs, lanes

# inputs of `make_paged`, then: window; blocks = (listed places, block size) or None for dense; lse; config.

SMALL = {"dtype": "bfloat16", "head_dim": 64, "page_size": 64, "kv_heads": 2, "width": 4, "group": 7}
CASES = {
    "dense, an empty row": {"lengths": (200, 0, 17), "config": Config(splits=2)},
    "drafts in a window": {"lengths": (200, 33), "num_queries": 2, "window": (5, 70), "config": Config(splits=3)},
    "dense, LSE of pages": {"lengths": (200, 100), "lse": True, "config": Config(splits=1)},
    "a list of pages": {"lengths": (200, 100), "blocks": (5, 64)},
    "a list of blocks of 16, float16": {"lengths": (200, 100), "blocks": (9, 16), "dtype": "float16", "group": 3},
    "3 CTAs, whose columns of the output are not equally many": {"lengths": (33,) * 16, "width": 1, "blocks": (3, 64)},
    "a list of blocks of 32, drafts, LSE": {
        **{"lengths": (200,), "blocks": (9, 32), "num_queries": 3, "lse": True, "kv_heads": 1},
        "config": Config(splits=1, stages=1),
    },
    "head dim 128, groups of 16, one span": {"lengths": (130,), "head_dim": 128, "group": 16, "config": Config(splits=1)},
    "8 drafts in one tile": {"lengths": (140,), "num_queries": 8, "kv_heads": 1, "config": Config(splits=2)},
    "8 drafts of head dim 128, two tiles": {
        **{"lengths": (70,), "num_queries": 8, "kv_heads": 1, "head_dim": 128, "width": 2},
        "config": Config(splits=1),
    },
    "tiles apart": {"lengths": (200, 100), "blocks": (5, 64), "apart": True},
    "tiles apart, LSE of blocks": {"lengths": (200, 100), "blocks": (9, 16), "apart": True, "lse": True, "config": Config(splits=2)},
    "a page is missing": {"lengths": (200, 256), "hole": True, "blocks": (5, 64), "kv_heads": 1},
}
FOR_BUGS = ("drafts in a window", "dense, LSE of pages", "a list of blocks of 16, float16", "8 drafts in one tile", "a page is missing")


@pytest.fixture
def check(tools):
    """Runs the form without `wgmma` on emulated threads and compares with the reference."""

    def run(case: str) -> None:
        spec = SMALL | CASES[case]
        window, blocks, lse, config, apart = (spec.pop(name, None) for name in ("window", "blocks", "lse", "config", "apart"))
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        keywords = {"sm_scale": paged.sm_scale, "window": window, "return_block_lse": bool(lse), "block_size": spec["page_size"]}
        keywords["blocks"] = None
        if blocks is not None:
            listed = tools.lists_for(paged, *blocks)
            listed = listed.at[-1, :1].set(listed[-1, -1:]) if len(paged.lengths) == 1 else listed
            keywords |= {"blocks": listed, "block_size": blocks[1]}
        expected = gather_attention(*paged.arrays, **keywords, implementation="reference")
        kernel, arrays = paging.implementation("gather_attention", "mosaic_gpu"), list(paged.arrays)
        if apart:
            *arrays[1:3], keywords["block_frames"] = tools.tiles_apart(paged, keywords["blocks"], keywords["block_size"])
            arrays[3] = jnp.full_like(arrays[3], -1)  # it is not read
        with dispatch._forced(dispatch.BLACKWELL), kernels():
            found = kernel(*arrays, **keywords, config=config)
        tools.assert_rows_close(found[0], expected[0], 2 * tools.row_error[paged.q.dtype.name])
        for a, b in zip(found[1:], expected[1:], strict=True):
            tools.assert_lse_close(a, b)

    return run


@pytest.mark.quick("8 drafts in one tile", "tiles apart, LSE of blocks", "a page is missing")
@pytest.mark.parametrize("case", CASES)
def test_emulated_it_matches_the_reference(check, case):
    check(case)


def _unscaled(s, folded, tile, x):
    """What was found before a larger maximum is not scaled down."""
    before = folded.acc[tile]
    weights = RESCALE(s, folded, tile, x)
    folded.acc[tile] = before
    return weights


def _all_seen(s, tile, start, written, length):
    return [key < written for key in ((lanes.lane() >> 2) + 8 * (i // 2) for i in range(4))]


def _never_written_too(s, tile, start, written, length):
    return SEEN(s, tile, start, lanes.where(written > 0, lanes.i32(decode_fold.KEYS), 0), length)


RESCALE, SEEN, SPAN, PLACE = decode_fold._rescale, decode_fold._seen, mma._span, mma._place
BUGS = {
    "copies are not waited for": lambda patch: patch.setattr(lane_copies, "wait_for_copies", lambda groups: None),
    "a turn too few is waited for": lambda patch: patch.setattr(lane_copies, "wait_for_copies", _waiting_less),
    "weights are not turned round": lambda patch: patch.setattr(lane_pairs, "transposed", lambda word: word),
    "sums of the lanes are not added": lambda patch: patch.setattr(decode_fold, "_over_keys", _maxima_only),
    "older sums are not scaled": lambda patch: patch.setattr(decode_fold, "_rescale", _unscaled),
    "drafts and windows see every key": lambda patch: patch.setattr(decode_fold, "_seen", _all_seen),
    "keys that were never written count": lambda patch: patch.setattr(decode_fold, "_seen", _never_written_too),
    "warps do not wait for each other": lambda patch: patch.setattr(lanes, "cta_barrier", lambda threads: None),
    "CTAs do not wait for each other": lambda patch: patch.setattr(lanes, "cluster_barrier", lambda: None),
    "the last turn of a span is dropped": lambda patch: patch.setattr(mma, "_span", _last_dropped),
    "columns of the last warp are left out": lambda patch: patch.setattr(decode_fold, "merged", _a_warp_short),
    "pages that are missing are read": lambda patch: patch.setattr(mma.listed, "locate", _page_for_hole),
}
LOCATE, WAIT, OVER_KEYS = mma.listed.locate, lane_copies.wait_for_copies, decode_fold._over_keys


def _waiting_less(groups):
    WAIT(groups + 1)


def _maxima_only(x, merge):
    return OVER_KEYS(x, merge) if merge is lanes.maximum else x


def _last_dropped(s, split, length):
    first, count = SPAN(s, split, length)
    return first, lanes.maximum(count - 1, 0)


def _a_warp_short(s, r, column, scratch):
    m, weights, total = decode_fold.merged_total(s, r, scratch)
    found = [lanes.load_shared(scratch["ring_s"], (r + w * s.rows) * (s.head_dim + 4) + column, "f32", 2) for w in range(s.warps - 1)]
    low, high = (sum((w * x[i] for w, x in zip(weights, found, strict=False)), lanes.f32(0.0)) for i in range(2))
    return m, total, [low, high]


def _page_for_hole(s, length, table_ref, row, table_width, scratch):
    LOCATE(s, length, table_ref, row, table_width, scratch)
    threads = s.warpgroups * 128
    for start in range(0, s.width, threads):
        i = lanes.thread() + start
        with lanes.when(i < s.width):
            (page,) = lanes.load_shared(scratch["pages_s"], i)
            lanes.store_shared(scratch["pages_s"], i, lanes.maximum(page, 0))
    lanes.cta_barrier(threads)


@pytest.mark.quick(
    "copies are not waited for", "a turn too few is waited for", "warps do not wait for each other", "the last turn of a span is dropped"
)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tools, check, monkeypatch, fresh_caches, bug):
    BUGS[bug](monkeypatch)
    tools.must_fail(lambda _, case: check(case), None, FOR_BUGS)


def test_lengths_past_the_table_read_no_other_row(tools):
    """The kernel may be called so by mistake: it must not follow what lies behind the row. The engine refuses such
    lengths."""
    paged = tools.make_paged(seed=1, **(SMALL | {"lengths": (256,), "kv_heads": 1}))
    kernel = paging.implementation("gather_attention", "mosaic_gpu")
    beyond = paged.lengths + 40
    keywords = {"sm_scale": paged.sm_scale, "window": None, "return_block_lse": False, "block_size": 64, "config": Config(splits=1)}
    with dispatch._forced(dispatch.BLACKWELL), kernels():
        found = [kernel(*paged.arrays[:4], lengths, **keywords, blocks=None)[0] for lengths in (paged.lengths, beyond)]
    np.testing.assert_array_equal(np.asarray(found[0], np.float32), np.asarray(found[1], np.float32))


@pytest.mark.parametrize(("heads", "head_dim", "reason"), [((33, 1), 128, "at most 32 query heads of dim 128"), ((17, 1), 256, "got 17")])
def test_large_groups_are_refused(on_hopper, picked, heads, head_dim, reason):
    arrays = {"q": ((1, 1, heads[0], head_dim), "bfloat16"), "table": ((1, 4), "int32"), "lengths": ((1,), "int32")}
    arrays |= dict.fromkeys(("k", "v"), ((8, heads[1], 64, head_dim), "bfloat16"))
    static = {"block_size": 64, "window": None, "sm_scale": 1.0, "return_block_lse": False, "config": None, "blocks": None}
    call = "gather_attention", arrays, static
    with dispatch._forced(dispatch.BLACKWELL):
        with pytest.raises(NotImplementedError, match=reason):
            picked(call, implementation="mosaic_gpu")
        assert picked(call)["gather_attention"] == "xla"
    assert picked(call)["gather_attention"] == "mosaic_gpu"


def test_frames_of_listed_blocks_are_found(on_hopper, picked):
    arrays = {"q": ((1, 1, 7, 128), "bfloat16"), "table": ((1, 4), "int32"), "lengths": ((1,), "int32")}
    arrays |= dict.fromkeys(("k", "v"), ((8, 1, 64, 128), "bfloat16")) | dict.fromkeys(("blocks", "block_frames"), ((1, 1, 3), "int32"))
    call = "gather_attention", arrays, {"sm_scale": 1.0}
    with dispatch._forced(dispatch.BLACKWELL):
        assert picked(call)["gather_attention"] == "mosaic_gpu"
    assert picked(call)["gather_attention"] == "mosaic_gpu"


def test_a_config_of_the_other_form_is_refused(tools):
    paged = tools.make_paged(**(SMALL | {"lengths": (40,)}))
    with dispatch._forced(dispatch.BLACKWELL), pytest.raises(NotImplementedError, match="no tile_tokens"):
        paging.implementation("gather_attention", "mosaic_gpu")(
            *paged.arrays, sm_scale=1.0, window=None, return_block_lse=False, block_size=64, blocks=None, config=Config(tile_tokens=64)
        )


@pytest.mark.parametrize(
    ("num_queries", "group", "windowed", "size"),
    [(8, 7, False, 4), (8, 7, True, 2), (16, 8, False, 4), (16, 1, True, 16), (5, 7, False, 1)],
)
def test_queries_are_cut_into_tiles_that_fit_registers(num_queries, group, windowed, size):
    assert mosaic_gpu.queries_per_tile(num_queries, group, decode_fold.most_rows(128, windowed)) == size
