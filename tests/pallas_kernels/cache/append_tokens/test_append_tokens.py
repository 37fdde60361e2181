"""The suite of append_tokens: every implementation against the reference, the reference against numpy, promises,
mutants, refusals."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from append_suite import CASES, MUTANTS, NAMES, arguments, check, expected
from paging import append_tokens
from quick_cases import one_in, rest_long

from pallas_kernels.cache.append_tokens import append_tokens as pages_append
from pallas_kernels.cache.append_tokens import coded_rows, mosaic_gpu, mosaic_tpu
from pallas_kernels.cache.append_tokens.api import Call
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import index_dtype, index_shape, page_index

IMPLEMENTATIONS = {
    name: functools.partial(append_tokens, implementation=name) for name in dispatch.available("append_tokens") if name != "reference"
}


def skip_unsupported(name: str, case: str) -> None:
    """Skip a case that the implementation says it does not do."""
    if reason := paging.unsupported("append_tokens", name, *arguments(case), kinds=CASES[case].named_kinds):
        pytest.skip(reason)


QUICK = (
    "one token",
    "drafts",
    "past the table",
    "a page is missing",
    "a NaN shows",
    "bfloat16",
    "tokens are rounded",
    "four indexes",
    "no index",
    "codes",
)


@pytest.mark.quick_but(
    "xla-several pages fill",
    "xla-padding",
    "xla-bfloat16",
    "xla-tokens are rounded",
    "xla-one token",
    "xla-past the table",
)
@pytest.mark.parametrize("case", rest_long(CASES, *QUICK, "several pages fill", "padding", "before the first token", "pages of one token"))
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(name, case):
    skip_unsupported(name, case)
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("case", ["one token", "drafts", "several pages fill", "padding", "past the table", "a page is missing", "a chunk"])
def test_reference_against_numpy(case):
    """The tokens that have a page, one after the other; then every page whose last slot was among them."""
    k_pages, v_pages, indexes, k, v, positions, valid, table = jax.tree.map(np.array, arguments(case))
    page_size, sealed = k_pages.shape[2], []
    for row, t in np.ndindex(positions.shape):
        logical, offset = divmod(int(positions[row, t]), page_size)
        if valid[row, t] and 0 <= logical < table.shape[1] and table[row, logical] >= 0:
            k_pages[table[row, logical], :, offset], v_pages[table[row, logical], :, offset] = k[row, t], v[row, t]
            sealed += [table[row, logical]] if offset == page_size - 1 else []
    assert sealed
    for name, kind, size in CASES[case].named_kinds:
        blocks = k_pages[sealed].reshape(len(sealed), k_pages.shape[1], -1, size, k_pages.shape[3])
        bounds = np.stack([blocks.max(-2), blocks.min(-2)], -2)
        indexes[name][sealed] = bounds if kind == "bounds" else blocks.mean(-2, keepdims=True)
    found = expected(case)
    np.testing.assert_array_equal(found[0], k_pages)
    np.testing.assert_array_equal(found[1], v_pages)
    for name in indexes:
        np.testing.assert_allclose(found[2][name], indexes[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_arguments_stay_as_they_are(tools, name):
    """Without donation an append is a function like any other, however the pool is updated."""
    before = [np.array(x) for x in jax.tree.leaves(arguments("drafts"))]
    jax.block_until_ready(IMPLEMENTATIONS[name](*arguments("drafts"), kinds=CASES["drafts"].named_kinds))
    for old, now in zip(before, jax.tree.leaves(arguments("drafts")), strict=True):
        tools.assert_same_bits(old, now)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bits_twice_and_in_any_company_and_table(tools, name):
    """Pages and indexes of a row do not depend on what other rows write, nor on how wide the table is."""
    op = functools.partial(IMPLEMENTATIONS[name], kinds=CASES["bfloat16"].named_kinds)
    *pool, k, v, positions, valid, table = arguments("bfloat16")
    once = op(*pool, k, v, positions, valid, table)
    others = jnp.arange(len(positions)) != 3
    wide = jnp.pad(table, ((0, 0), (0, 5)), constant_values=-1)
    company = op(*pool, jnp.where(others[:, None, None, None], -k, k), v, positions, valid & ~others[:, None] | (k[:, :, 0, 0] > 0), table)
    for again, pages in ((op(*pool, k, v, positions, valid, table), slice(None)), (op(*pool, k, v, positions, valid, wide), slice(None))):
        jax.tree.map(lambda a, b, pages=pages: tools.assert_same_bits(a[pages], b[pages]), once, again)
    jax.tree.map(lambda a, b: tools.assert_same_bits(a[table[3]], b[table[3]]), once, company)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_donated_pool_is_not_copied(name):
    """A pool far larger than the tokens: the compiled program needs no memory of its size."""
    pool, tokens = jax.ShapeDtypeStruct((512, 2, 128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 1, 2, 64), jnp.bfloat16)
    index = {"bounds16": jax.ShapeDtypeStruct((512, 2, 8, 2, 64), jnp.bfloat16)}
    rest = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((2, 1), jnp.int32), ((2, 1), jnp.bool_), ((2, 8), jnp.int32))]
    op = functools.partial(IMPLEMENTATIONS[name], kinds=(("bounds16", "bounds", 16),))
    memory = jax.jit(op, donate_argnums=(0, 1, 2)).lower(pool, pool, index, tokens, tokens, *rest).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 512 * 2 * 128 * 64 * 2
    assert memory.temp_size_in_bytes < 2**20


# The GPU form, without a GPU.


def production(
    batch: int, num_tokens: int, kv_heads: int, page_size: int, head_dim: int, dtype: str, kinds: tuple, frames: bool = False
) -> tuple:
    """(op, arrays, keywords) of a call. frames: with a table of them."""
    named = tuple((f"{kind}{size}", kind, size) for kind, size in kinds)
    pool, tokens = ((4096, kv_heads, page_size, head_dim), dtype), ((batch, num_tokens, kv_heads, head_dim), dtype)
    indexes = {
        name: ((4096, kv_heads, page_size // size, *index_shape(kind, size, head_dim)), index_dtype(kind, dtype).name)
        for name, kind, size in named
    }
    places = {"positions": ((batch, num_tokens), "int32"), "valid": ((batch, num_tokens), "bool"), "table": ((batch, 1024), "int32")}
    arrays = {"k_pages": pool, "v_pages": pool, "indexes": indexes, "k": tokens, "v": tokens} | places
    arrays |= {"frames": places["table"]} if frames else {}
    return "append_tokens", arrays, {"kinds": named, "config": None}


PRODUCTION = {
    "batch 1": production(1, 1, 4, 128, 128, "bfloat16", (("bounds", 128),)),
    "batch 8, three indexes": production(8, 1, 8, 128, 128, "bfloat16", (("bounds", 128), ("bounds", 16), ("mean", 128))),
    "frames, 16 drafts": production(4, 16, 8, 128, 128, "bfloat16", (("bounds", 128),), frames=True),
    "drafts, float16": production(4, 8, 2, 64, 64, "float16", (("bounds", 32),)),
    "float32": production(2, 3, 2, 128, 256, "float32", (("mean", 128), ("bounds", 128))),
    "no index": production(1, 1, 4, 128, 128, "bfloat16", ()),
    "codes": production(1, 1, 4, 128, 128, "bfloat16", (("bounds", 128), ("keys4", 128))),
    "codes, drafts, float16": production(8, 4, 8, 64, 64, "float16", (("keys1", 16), ("keys8", 64))),
    "many tokens": production(1, 64, 2, 16, 16, "bfloat16", (("bounds", 1),)),
}


@pytest.mark.parametrize("case", one_in(4, PRODUCTION))
def test_gpu_form_lowers_and_updates_in_place(cuda, case):
    """One kernel, which hands the pool and every index back as its results."""
    text = cuda.lower(*PRODUCTION[case])
    assert text.count("custom_call @") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 2 + len(PRODUCTION[case][2]["kinds"])


def test_gpu_form_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION, launches=1)


def test_gpu_form_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(PRODUCTION, launches=1)


def _struct(*shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "v_dtype", "reason"),
    [(64, 128, None, None), (65, 128, None, "at most 64"), (1, 12, None, "16 bytes"), (1, 128, "float32", "one shape and format")],
)
def test_gpu_form_says_what_it_does_not_do(num_tokens, head_dim, v_dtype, reason):
    struct = functools.partial(_struct, dtype="bfloat16")
    pool, tokens = struct(4, 2, 16, head_dim), struct(1, num_tokens, 2, head_dim)
    v_pool = _struct(*pool.shape, dtype=v_dtype or "bfloat16")
    rest = (struct(1, num_tokens, dtype="int32"), struct(1, num_tokens, dtype="bool"), struct(1, 4, dtype="int32"))
    said = paging.unsupported("append_tokens", "mosaic_gpu", pool, v_pool, {}, tokens, tokens, *rest, kinds=())
    assert said is None if reason is None else reason in said


# The GPU form's code, thread by thread in numpy (see conftest.py): no GPU is needed.


def _thread_by_thread(threads, monkeypatch, without=None):
    def op(k_pages, v_pages, indexes, k, v, positions, valid, page_table, *, kinds, frames=None):
        _, num_kv_heads, page_size, head_dim = k_pages.shape
        s = mosaic_gpu.Shape(num_kv_heads, page_size, head_dim, k.shape[1], page_table.shape[1], k_pages.dtype.name, kinds)
        k, v = k.astype(k_pages.dtype), v.astype(k_pages.dtype)
        places = jnp.where(valid, positions, -1)
        tokens = [threads.Memory(x, fixed=True) for x in (k, v)]
        places, *tables = (threads.Memory(x, fixed=True) for x in (places, page_table, frames) if x is not None)
        pools = [threads.Memory(x) for x in (k_pages, v_pages)]
        built = [threads.Memory(indexes[name]) for name, _, _ in kinds]
        for row, head in np.ndindex(k.shape[0], num_kv_heads):
            partial_s = threads.Memory(np.full(mosaic_gpu.PARTIAL_WORDS, -1, np.int32))
            cta = threads.Cta([*pools, *built, partial_s], without)
            for module, name in itertools.product((mosaic_gpu, coded_rows), ("lanes", "lane_pairs", "lane_math")):
                monkeypatch.setattr(module, name, cta, raising=False)
            unit = [threads.Numbers(np.int32(x)) for x in (row, head)]
            mosaic_gpu._write(s, *unit, places, tables, None, tokens, pools)
            keys_at = functools.partial(mosaic_gpu._in_pool, s, pools[0], unit[1])
            mosaic_gpu._seal(s, *unit, places, tables, None, keys_at, built, partial_s)
            for memory in (*pools, *built):  # the CTA is done
                memory.settle()
        return *(x.array for x in pools), dict(indexes) | {name: x.array for (name, _, _), x in zip(kinds, built, strict=True)}

    return op


@pytest.mark.quick_but("a row has no tokens", "padding after a page's last token")
@pytest.mark.parametrize(
    "case",
    rest_long(
        CASES,
        *QUICK,
        "padding after a page's last token",
        "a row has no tokens",
        "the page that fills is missing",
        "mean",
        "blocks of one token",
    ),
)
def test_threads_of_the_gpu_form(threads, monkeypatch, case):
    skip_unsupported("mosaic_gpu", case)
    check(_thread_by_thread(threads, monkeypatch), case)


def test_threads_of_the_gpu_form_find_bytes_by_frame_and_indexes_by_id(threads, monkeypatch):
    """Every page in another frame: the same keys, values and indexes; not so with one table for the other."""
    name = "four indexes"
    k_pages, v_pages, indexes, *tokens, table = arguments(name)
    frame_of = jnp.asarray(np.random.default_rng(0).permutation(len(k_pages)), jnp.int32)
    moved = [jnp.zeros_like(x).at[frame_of].set(x) for x in (k_pages, v_pages)]

    def found(ids, frames):
        op = _thread_by_thread(threads, monkeypatch)
        k, v, built = op(*moved, indexes, *tokens, ids, frames=frames, kinds=CASES[name].named_kinds)
        return k[frame_of], v[frame_of], built

    check(lambda *_, **__: found(table, frame_of[table]), name)
    for wrong in ((table, table), (frame_of[table], frame_of[table]), (frame_of[table], table)):
        with pytest.raises(AssertionError):
            check(lambda *_, wrong=wrong, **__: found(*wrong), name)


@pytest.mark.parametrize("barrier", [0, 1, 2])
def test_every_barrier_of_the_gpu_form_is_needed(threads, monkeypatch, barrier):
    """After the rows are written, after the partial results, before these are overwritten."""
    with pytest.raises(AssertionError, match="without a barrier"):
        _thread_by_thread(threads, monkeypatch, barrier)(*arguments("four indexes"), kinds=CASES["four indexes"].named_kinds)


@pytest.mark.quick_but("past the table is its last page")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_codes_of_keys_are_built_by_the_last_token_of_a_page(name):
    kinds, random = (("keys48", "keys4", 8),), np.random.default_rng(0)
    pages = Pages(*(jnp.asarray(random.standard_normal((3, 2, 16, 16)), jnp.float32) for _ in "kv"))
    indexes = {"keys48": jnp.zeros((3, 2, 2, 16, 8), jnp.uint8)}
    table, valid = jnp.array([[2, 0]], jnp.int32), jnp.ones((1, 1), bool)
    for position in (14, 15):
        token = jnp.asarray(random.standard_normal((1, 1, 2, 16)), jnp.float32)
        at = jnp.array([[position]], jnp.int32)
        pages, indexes = pages_append(pages, indexes, token, token, at, valid, table, kinds=kinds, implementation=name)
        built = page_index(pages.k[2], kind="keys4", block_size=8) if position == 15 else 0
        np.testing.assert_array_equal(indexes["keys48"], jnp.zeros_like(indexes["keys48"]).at[2].set(built))
    wide, token = Pages(*(jnp.zeros((3, 2, 16, 128)) for _ in "kv")), jnp.zeros((1, 1, 2, 128))
    given = Call(kinds, None), wide, indexes, token, token, at, valid, table, None
    refused = [kernel.unsupported(*given) for kernel in (mosaic_gpu, mosaic_tpu)]
    assert "index 'keys48': it codes keys of 16 bits, got float32" in refused[0]
    assert "not the codes of index 'keys48'" in refused[1]


def _of_codes(name: str, change) -> dict:
    """What is put in place of something in `coded_rows`: change(what there is)."""
    return {"target": coded_rows.CodedRows, "name": name, "value": change(getattr(coded_rows.CodedRows, name))}


CODED_MUTANTS = {
    "keys of the token before": _of_codes("_keys", lambda keys: lambda self, ref, token, word: keys(self, ref, token - (token % 2), word)),
    "levels of the first block": _of_codes("_levels", lambda found: lambda self, own, block, word: found(self, own, block - block, word)),
    "levels of the first channels": _of_codes("_levels", lambda found: lambda self, own, block, word: found(self, own, block, word - word)),
    "codes in the other order": _of_codes("_codes", lambda codes: lambda self, keys, *levels: codes(self, keys[::-1], *levels)),
    "bounds exchanged": _of_codes("store_levels", lambda store: lambda self, *rest: store(self, *rest[:-1], rest[-1][8:] + rest[-1][:8])),
    "no codes": _of_codes("store_codes", lambda store: lambda self, *_: None),
}


@pytest.mark.quick("levels of the first block")
@pytest.mark.parametrize("mutant", CODED_MUTANTS)
def test_codes_built_wrongly_fail(tools, threads, monkeypatch, mutant):
    monkeypatch.setattr(**CODED_MUTANTS[mutant])
    tools.must_fail(check, _thread_by_thread(threads, monkeypatch), ("codes",))


@pytest.mark.parametrize(("case", "barrier"), [("codes", 2), ("codes, a NaN shows", 1)])
def test_codes_need_the_barrier_after_their_levels(threads, monkeypatch, case, barrier):
    """With and without threads that share the reduction of a block."""
    with pytest.raises(AssertionError, match="without a barrier"):
        _thread_by_thread(threads, monkeypatch, barrier)(*arguments(case), kinds=CASES[case].named_kinds)


def _arguments(**changes) -> list:
    named = dict(zip(NAMES, arguments("one token"), strict=True)) | changes
    return [named[name] for name in NAMES]


@pytest.mark.parametrize(
    ("changes", "kinds", "message"),
    [
        ({"k": jnp.zeros((7, 1, 16))}, (), "takes pages, k"),
        ({"v": jnp.zeros((7, 2, 2, 16))}, (), "k and v must have the same batch and tokens"),
        ({"v_pages": jnp.zeros((4, 2, 16, 16))}, (), "same pages, KV heads and page size"),
        ({"v": None}, (), "give v where the pages have one"),
        ({"k": jnp.zeros((7, 1, 2, 16), jnp.int32)}, (), "floating point"),
        ({"k": jnp.zeros((7, 1, 3, 16)), "v": jnp.zeros((7, 1, 3, 16))}, (), "same KV heads and head dim"),
        ({"table": jnp.zeros((7, 0), jnp.int32)}, (), "no axis may be empty"),
        ({"valid": jnp.ones((7, 2), bool)}, (), r"must be \[B,T\]"),
        ({"table": jnp.zeros((6, 6), jnp.int32)}, (), r"with the B and T of k"),
        ({"positions": jnp.zeros((7, 1))}, (), "must be int32"),
        ({"valid": jnp.ones((7, 1), jnp.int32)}, (), "valid bool"),
        ({}, (("bounds16", "median", 16),), "'median' is unknown; there are bounds, keys1, keys2, keys4, keys8, mean"),
        ({}, (("bounds16", "bounds", 5),), "block_size 5 of index 'bounds16' does not divide the page size 16"),
        ({}, (("bounds16", "bounds", 0),), "block_size 0"),
        ({}, (("mean4", "mean", 4),), "no index 'mean4'; there are bounds16, mean8, other"),
        ({}, (("bounds16", "bounds", 8),), r"'bounds16' must be float32\[45, 2, 2, 2, 16\], got float32\[45, 2, 1, 2, 16\]"),
    ],
)
def test_wrong_input_is_refused(changes, kinds, message):
    with pytest.raises(ValueError, match=message):
        append_tokens(*_arguments(**changes), kinds=kinds)


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "reference"])
def test_a_config_is_refused(name):
    with pytest.raises(ValueError, match=f"implementation '{name}' of append_tokens takes no config, got 7"):
        append_tokens(*_arguments(), kinds=(), config=7, implementation=name)


def test_gpu_form_refuses_what_it_does_not_do():
    with pytest.raises(NotImplementedError, match="append_tokens 'mosaic_gpu': it is for decode steps"):
        paging.implementation("append_tokens", "mosaic_gpu")(*arguments("a chunk"), kinds=())
