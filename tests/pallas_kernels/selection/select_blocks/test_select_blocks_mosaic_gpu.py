"""select_blocks for Hopper without one: on emulated threads, lowered, compiled to machine code; who is passed by.

What only a GPU can tell is in `test_select_blocks_on_hopper.py`.
"""

from __future__ import annotations

import jax
import paging
import pytest
from emulator.values import Fault
from quick_cases import rest_long

from pallas_kernels.core import dispatch
from pallas_kernels.hopper.decode import clusters
from pallas_kernels.hopper.threads import lane_copies, lanes
from pallas_kernels.selection.page_index import INDEX_ROWS
from pallas_kernels.selection.select_blocks import mosaic_gpu

# On emulated threads: the very lists of the reference.

COMMON = {"kv_heads": 2, "group": 4, "head_dim": 64, "page_size": 64, "block_size": 16, "dtype": "bfloat16", "lengths": (0, 65, 300, 384)}
EMULATED: dict[str, dict] = {
    "bounds": {},
    "mean": {"kind": "mean", "group": 7},
    "float16, a page is missing": {"dtype": "float16", "hole": True, "k": 30},
    "equal scores": {"index": "equal", "kv_heads": 1},
    "NaN in the index": {"index": "nan", "k": 12},
    "4 drafts": {"num_queries": 4, "group": 7, "lengths": (2, 130, 384), "local": 1},
    "4 drafts, mean": {"kind": "mean", "num_queries": 4, "lengths": (66, 384), "local": 1},
    "8 drafts, groups of 8": {"num_queries": 8, "group": 8, "kv_heads": 1, "lengths": (5, 263)},
    "16 drafts, groups of 1": {"num_queries": 16, "group": 1, "kv_heads": 1, "lengths": (135,), "block_size": 64, "k": 1, "local": 1},
    "every block is listed, 4 drafts, a page is missing": {"num_queries": 4, "lengths": (3, 130, 384), "k": 40, "hole": True},
    "every block is listed, in two rounds": {"lengths": (300, 1023), "block_size": 2, "k": 512, "kv_heads": 1, "width": 16},
    "groups of 9": {"group": 9, "lengths": (384,)},
    "a long table, chosen twice": {"lengths": (2100,), "width": 33, "page_size": 64, "block_size": 1, "kv_heads": 1, "k": 9},
    "chosen twice, a page is missing": {"lengths": (2100,), "width": 33, "block_size": 1, "kv_heads": 1, "k": 9, "hole": True},
    "chosen twice, means, NaN in the index": {
        "lengths": (2100,),
        "width": 33,
        "block_size": 1,
        "kv_heads": 1,
        "kind": "mean",
        "index": "nan",
    },
}
BY_BULK_COPIES = tuple(case for case in EMULATED if "chosen twice" in case)
FOR_MUTANTS = ("4 drafts", "4 drafts, mean", "bounds")


@pytest.fixture(scope="module")
def suite(suite_of):
    return suite_of(EMULATED, **COMMON)


@pytest.fixture(scope="session")
def on_emulated_threads(emulated_kernels):
    kernel = paging.implementation("select_blocks", "mosaic_gpu")

    def op(*arrays, **sizes):
        with emulated_kernels.kernels():
            return kernel(*arrays, **sizes)

    return op


@pytest.mark.quick("NaN in the index", "every block is listed, 4 drafts, a page is missing", "chosen twice, a page is missing")
@pytest.mark.parametrize("case", EMULATED)
def test_on_emulated_threads_it_matches_the_reference(suite, on_emulated_threads, case):
    suite.check(on_emulated_threads, case)


def _of_the_last_query(num_queries, lengths_ref, row):
    return TOKENS_SEEN(1, lengths_ref, row // num_queries)


def _of_the_next_query(num_queries, lengths_ref, row):
    return TOKENS_SEEN(num_queries, lengths_ref, row) + 1


TOKENS_SEEN, QUERY_WORDS = mosaic_gpu.tokens_seen, mosaic_gpu._query_words
PLANTED = {
    "later drafts are visible": ("tokens_seen", _of_the_last_query),
    "a query sees one token too many": ("tokens_seen", _of_the_next_query),
    "scored by the first draft": ("_query_words", lambda s, q_ref, row, *rest: QUERY_WORDS(s, q_ref, row - row % s.num_queries, *rest)),
    "scored by the group's first head": (
        "_query_words",
        lambda s, q_ref, row, head, member, d: QUERY_WORDS(s, q_ref, row, head, member * 0, d),
    ),
}


@pytest.mark.quick("scored by the first draft")
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(suite, tools, on_emulated_threads, monkeypatch, bug):
    monkeypatch.setattr(mosaic_gpu, *PLANTED[bug])
    tools.must_fail(suite.check, on_emulated_threads, FOR_MUTANTS)


def _row_before(shared, offset, ref, row, count, **sizes):
    COPY_ROWS(shared, offset, ref, lanes.maximum(row - 1, 0), count, **sizes)


COPY_ROWS = lane_copies.copy_rows_bulk
NOT_COPIED = {
    "nobody waits for a copy": ("wait_for_arrival", lambda arrivals, number, turn: None),
    "the row before": ("copy_rows_bulk", _row_before),
    "the first row alone": ("copy_rows_bulk", lambda *args, **sizes: COPY_ROWS(*args[:4], lanes.i32(1), **sizes)),
}


@pytest.mark.quick("the row before")
@pytest.mark.parametrize("bug", NOT_COPIED)
def test_a_bug_of_bulk_copies_is_caught(suite, on_emulated_threads, monkeypatch, bug):
    suite.check(on_emulated_threads, BY_BULK_COPIES[0])
    monkeypatch.setattr(lane_copies, *NOT_COPIED[bug])
    with pytest.raises((AssertionError, Fault)):
        suite.check(on_emulated_threads, BY_BULK_COPIES[0])


ONE_CTA = {"lengths": (700,), "width": 11, "block_size": 1, "kv_heads": 1, "k": 9, "hole": True}


def test_slots_of_bulk_copies_are_used_again(suite_of, on_emulated_threads, monkeypatch):
    """A warp has more turns than slots. An arrival that is awaited for its first copy again would be a wait without
    end, or no wait."""
    monkeypatch.setattr(mosaic_gpu, "AT_ONCE", 4)
    monkeypatch.setattr(clusters, "ctas_per_unit", lambda units: 1)
    suite = suite_of({"one CTA": ONE_CTA}, **COMMON)
    suite.check(on_emulated_threads, "one CTA")
    wait = lane_copies.wait_for_arrival
    monkeypatch.setattr(lane_copies, "wait_for_arrival", lambda arrivals, number, turn: wait(arrivals, number, turn * 0))
    with pytest.raises((AssertionError, Fault)):
        suite.check(on_emulated_threads, "one CTA")


@pytest.mark.parametrize(("tokens", "bulk"), [(128 << 10, False), (256 << 10, False), (512 << 10, True), (1 << 20, True)])
def test_rows_of_long_tables_come_by_bulk_copies(tokens, bulk):
    _, arrays, sizes = production(tokens=tokens)
    structs = [jax.ShapeDtypeStruct(*arrays[name]) for name in ("q", "index", "table")]
    call = mosaic_gpu.Call(**{name: sizes[name] for name in ("kind", "page_size", "block_size", "k", "sink", "local")})
    s = mosaic_gpu.shape_of(call, *structs)
    assert (s.bulk, s.depth) == (bulk, 3)
    words = s.threads // 32 * s.slot_words
    assert s.with_ring(words).bulk is False, "a ring of one turn"
    assert s.with_ring(words - 1).depth == (0 if not bulk else 1)


# Lowered and compiled, in the shapes that decoding has.


def production(
    batch: int = 1,
    heads: tuple[int, int] = (28, 4),
    head_dim: int = 128,
    tokens: int = 128 << 10,
    num_queries: int = 1,
    dtype: str = "bfloat16",
    **sizes,
) -> tuple:
    """(op, arrays, keywords) of a call over `tokens` tokens a row."""
    sizes = {"kind": "bounds", "page_size": 128, "block_size": 128, "k": 32, "sink": 1, "local": 4} | sizes
    num_heads, kv_heads = heads
    index = (1024, kv_heads, sizes["page_size"] // sizes["block_size"], INDEX_ROWS[sizes["kind"]], head_dim)
    arrays = {"q": ((batch, num_queries, num_heads, head_dim), dtype), "index": (index, dtype)}
    return "select_blocks", arrays | {"table": ((batch, tokens // sizes["page_size"]), "int32"), "lengths": ((batch,), "int32")}, sizes


FORMS = {
    "k 8": {"k": 8},
    "batch 8": {"batch": 8},
    "batch 40": {"batch": 40},
    "means": {"kind": "mean"},
    "blocks of 16": {"block_size": 16, "k": 256, "local": 32},
    "a million tokens": {"tokens": 1 << 20},
}
SPILL_FREE = paging.for_each_model(production, FORMS) | {
    "float16": production(dtype="float16", batch=8),
    "a million tokens in blocks of 16": production(tokens=1 << 20, block_size=16, k=64, local=32),
    "batch 8, a million tokens": production(batch=8, tokens=1 << 20),
    "4 drafts": production(num_queries=4),
    "8 drafts, means": production(num_queries=8, kind="mean", batch=2),
    "16 drafts": production(heads=(32, 8), num_queries=16, batch=2),
    "groups of 64": production(heads=(64, 1)),
    "blocks of 32": production(block_size=32),
    "blocks of 64, means": production(block_size=64, kind="mean"),
    "pages of 64": production(page_size=64, block_size=64),
    "pages of 256": production(page_size=256, block_size=128, batch=8),
    "k of none": production(k=0),
    "a short table": production(tokens=1024),
}
WIDE = {
    "head dim 256": production(heads=(16, 2), head_dim=256),
    "head dim 256, means, float16": production(heads=(16, 2), head_dim=256, kind="mean", dtype="float16", batch=8),
}


@pytest.mark.parametrize("case", rest_long(SPILL_FREE | WIDE, "32/8 of 64, a million tokens", "blocks of 64, means"))
def test_lowers(cuda, case):
    assert "mosaic_gpu" in cuda.lower(*(SPILL_FREE | WIDE)[case])


def test_compiles_without_spilling(spill_free):
    spill_free(SPILL_FREE, WIDE, launches=1)


def test_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(SPILL_FREE, WIDE, launches=1)


# Valid input that is none for this kernel: refused when named, passed by when picked.

NOT_HERE = {
    "float32": (production(dtype="float32"), "bfloat16 or float16, q and index alike; got q float32, index float32"),
    "head dim 32": (production(head_dim=32), "head dim must be 64, 128 or 256, got 32"),
    "groups of 65": (production(heads=(65, 1)), "at most 64 query heads per KV head, got 65"),
    "too many candidates": (
        production(batch=40, tokens=1 << 20, block_size=16),
        r"chooses among at most \d+ blocks; 1048576 tokens in blocks of 16 over 1 CTAs give 65536",
    ),
    "no room for index rows": (
        production(batch=40, heads=(16, 4), head_dim=256, tokens=384 << 10, block_size=16),
        "leave no shared memory for index rows of head dim 256",
    ),
}

COMPOSED = {"select_blocks": "composed", "top_k": "mosaic_gpu"}


@pytest.mark.parametrize("case", NOT_HERE)
def test_what_it_cannot_do_is_refused_by_name_and_passed_by(on_hopper, picked, case):
    call, reason = NOT_HERE[case]
    with pytest.raises(NotImplementedError, match=reason):
        picked(call, implementation="mosaic_gpu")
    assert picked(call) == COMPOSED


@pytest.mark.parametrize("case", ["28/4, batch 40", "28/4, means", "16 drafts", "groups of 64", "k of none"])
def test_what_it_can_do_is_picked(on_hopper, picked, case):
    assert picked(SPILL_FREE[case])["select_blocks"] == "mosaic_gpu"


def test_mixed_dtypes_are_passed_by(on_hopper, picked):
    op, arrays, sizes = production()
    mixed = op, arrays | {"q": (arrays["q"][0], "float16")}, sizes
    with pytest.raises(NotImplementedError, match="got q float16, index bfloat16"):
        picked(mixed, implementation="mosaic_gpu")
    assert picked(mixed) == COMPOSED


def test_elsewhere_it_is_refused(picked):
    if "mosaic_gpu" in dispatch.available("select_blocks"):
        pytest.skip("it runs here")
    with pytest.raises(NotImplementedError, match="no implementation 'mosaic_gpu' on backend"):
        picked(production(), implementation="mosaic_gpu")
