"""The suite of append_tokens: every implementation against the reference, the reference against numpy, promises, mutants, refusals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from paging import append_tokens

from pallas_kernels import dispatch
from pallas_kernels.append_tokens import mosaic_gpu
from pallas_kernels.page_index import INDEX_ROWS, page_index

IMPLEMENTATIONS = {
    name: functools.partial(append_tokens, implementation=name) for name in dispatch.available("append_tokens") if name != "reference"
}
XLA = IMPLEMENTATIONS["xla"]
BOTH = (("bounds", 16), ("mean", 8))


@dataclasses.dataclass(frozen=True)
class Case:
    """starts: position of each row's first token. padding: tokens before the first and after the last valid one, per row in turn.

    content: what the keys of the pool and the tokens hold. hole: the last row has no second page. kinds: (kind, block size).
    """

    starts: tuple[int, ...] = (0, 14, 15, 31, 95, 40, 47)
    num_tokens: int = 1
    padding: tuple[tuple[int, int], ...] = ((0, 0),)
    kinds: tuple[tuple[str, int], ...] = BOTH
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    width: int = 6
    dtype: str = "float32"
    token_dtype: str | None = None
    content: str = "random"
    hole: bool = False

    @property
    def named_kinds(self) -> tuple[tuple[str, str, int], ...]:
        return tuple((f"{kind}{size}", kind, size) for kind, size in self.kinds)


DRAFTS = (0, 11, 12, 13, 14, 15, 93)
CASES = {
    "one token": Case(),
    "drafts": Case(starts=DRAFTS, num_tokens=3),
    "a NaN shows": Case(starts=(15, 31, 14), content="nan", num_tokens=2),
    "several pages fill": Case(starts=(0, 1, 15, 16, 40), num_tokens=56),
    "padding": Case(starts=(0, 3, 8), num_tokens=45, padding=((17, 0), (0, 13), (9, 6))),
    "padding after a page's last token": Case(starts=(13, 13, 13), num_tokens=4, padding=((0, 1), (0, 2), (3, 0))),
    "a row has no tokens": Case(starts=(15, 15, 15), padding=((0, 0), (0, 1), (0, 0))),
    "past the table": Case(starts=(95, 96, 110, 93), num_tokens=5),
    "before the first token": Case(starts=(-3, -1, -16, -20), num_tokens=18),
    "a page is missing": Case(starts=(15, 15, 15), num_tokens=18, hole=True),
    "the page that fills is missing": Case(starts=(31, 31, 31), hole=True),
    "no index": Case(kinds=()),
    "mean": Case(kinds=(("mean", 16),)),
    "blocks of one token": Case(kinds=(("bounds", 1), ("mean", 1)), num_tokens=2),
    "four indexes": Case(kinds=(("bounds", 16), ("bounds", 4), ("mean", 16), ("mean", 2)), num_tokens=2),
    "bfloat16": Case(dtype="bfloat16", num_tokens=2),
    "float16": Case(dtype="float16", num_tokens=2),
    "tokens are rounded": Case(dtype="bfloat16", token_dtype="float32", num_tokens=2),
    "one KV head": Case(kv_heads=1, head_dim=64),
    "pages of one token": Case(page_size=1, width=96, kinds=(("bounds", 1),), num_tokens=2),
    "blocks of 24": Case(page_size=48, head_dim=80, width=2, kinds=(("bounds", 24), ("mean", 24), ("mean", 3)), dtype="bfloat16"),
    "pages of 128": Case(starts=(127, 100, 383), page_size=128, head_dim=128, kinds=(("bounds", 128), ("mean", 128)), dtype="bfloat16"),
    "pages of 128, blocks of 16": Case(starts=(120, 255), page_size=128, num_tokens=8, kinds=(("bounds", 16),), dtype="bfloat16"),
    "head dim 256": Case(starts=(63, 127), page_size=64, head_dim=256, kinds=(("bounds", 64), ("mean", 16))),
    "head dim 6": Case(head_dim=6, num_tokens=2),
    "a chunk": Case(starts=(0, 26), num_tokens=70),
    "a new NaN shows": Case(starts=(15, 31, 14), content="new nan", num_tokens=2),
    "infinities": Case(starts=(15, 31, 14), content="infinite", num_tokens=2),
    "denormals": Case(content="denormal"),
    "far from zero": Case(starts=(127, 255), page_size=128, kinds=(("mean", 128),), dtype="bfloat16", content="offset"),
}


def _numbers(rng, shape, content: str) -> np.ndarray:
    found = rng.standard_normal(shape)
    if content == "offset":
        found += 100
    elif content == "denormal":
        found *= 1e-40
    return found


@functools.cache
def arguments(name: str) -> tuple:
    """k_pages, v_pages, indexes, k, v, positions, valid, page_table. Pages that no table names hold numbers that have to stay, page 0 and
    the last one are never named."""
    case = CASES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    batch = len(case.starts)
    num_pages = batch * case.width + 3
    table = rng.permutation(np.arange(1, num_pages - 1))[: batch * case.width].reshape(batch, case.width).astype(np.int32)
    if case.hole:
        table[-1, 1] = -1
    page, token = (case.kv_heads, case.page_size, case.head_dim), (batch, case.num_tokens, case.kv_heads, case.head_dim)
    pages, tokens = _numbers(rng, (2, num_pages, *page), case.content), _numbers(rng, (2, *token), case.content)
    if case.content == "nan":
        pages[0, :, 0, 3, :5] = np.nan
    elif case.content == "new nan":
        tokens[0, :, :, 1, 2:4] = np.nan
    elif case.content == "infinite":
        pages[0, :, 0, 3], pages[0, :, :, 5, 2], tokens[0, :, :, 1, 4] = np.inf, -np.inf, -np.inf
    indexes = {}
    for key, kind, size in (*case.named_kinds, ("other", "mean", case.page_size)):
        shape = (num_pages, case.kv_heads, case.page_size // size, INDEX_ROWS[kind], case.head_dim)
        indexes[key] = jnp.asarray(rng.standard_normal(shape), case.dtype)
    t = np.arange(case.num_tokens)
    padding = [case.padding[row % len(case.padding)] for row in range(batch)]
    valid = np.array([(t >= before) & (t < case.num_tokens - after) for before, after in padding])
    positions = (np.array(case.starts)[:, None] + t).astype(np.int32)
    (k_pages, v_pages), (k, v) = (jnp.asarray(pages, case.dtype), jnp.asarray(tokens, case.token_dtype or case.dtype))
    return k_pages, v_pages, indexes, k, v, jnp.asarray(positions), jnp.asarray(valid), jnp.asarray(table)


@functools.cache
def expected(name: str) -> tuple:
    return append_tokens(*arguments(name), kinds=CASES[name].named_kinds, implementation="reference")


def check(op, name: str) -> None:
    """Pages bit for bit; bounds exactly; a mean may differ by one rounding of the result; what is not written stays bit for bit."""
    case = CASES[name]
    before, after = arguments(name)[2], op(*arguments(name), kinds=case.named_kinds)
    for ours, ref in zip(after[:2], expected(name)[:2], strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(ref).tobytes(), "pages differ"
    assert after[2].keys() == before.keys()
    for key, kind, _ in (*case.named_kinds, ("other", None, None)):
        ours, ref, old = after[2][key], expected(name)[2][key], before[key]
        assert (ours.shape, ours.dtype) == (ref.shape, ref.dtype)
        ours, ref, old = (np.asarray(x, np.float64) for x in (ours, ref, old))
        kept = (ref == old).all((1, 2, 3, 4))
        np.testing.assert_array_equal(ours[kept], old[kept])
        tiny = float(jnp.finfo(jnp.float32).tiny)  # where denormals are flushed, both may give zero
        rtol = max(float(jnp.finfo(case.dtype).eps), 2e-6) if kind == "mean" else 0
        atol = 1e-6 * (kind == "mean" and case.content != "denormal") + tiny
        np.testing.assert_allclose(ours[~kept], ref[~kept], rtol=rtol, atol=atol)


def skip_unsupported(name: str, case: str) -> None:
    """Skip a case that the implementation says it does not do."""
    if reason := paging.unsupported("append_tokens", name, *arguments(case), kinds=CASES[case].named_kinds):
        pytest.skip(reason)


@pytest.mark.parametrize("case", CASES)
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
    indexes = {name: ((4096, kv_heads, page_size // size, INDEX_ROWS[kind], head_dim), dtype) for name, kind, size in named}
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
    "many tokens": production(1, 64, 2, 16, 16, "bfloat16", (("bounds", 1),)),
}


@pytest.mark.parametrize("case", PRODUCTION)
def test_gpu_form_lowers_and_updates_in_place(cuda, case):
    """One kernel, which hands the pool and every index back as its results."""
    text = cuda.lower(*PRODUCTION[case])
    assert text.count("custom_call @") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 2 + len(PRODUCTION[case][2]["kinds"])


def test_gpu_form_compiles_without_spilling(cuda, tmp_path, capsys):
    found = cuda.compile(PRODUCTION, tmp_path)
    with capsys.disabled():
        for case, kernels in found.items():
            print(f"\n  {case}: {kernels}", end="")
    assert found.keys() == PRODUCTION.keys()
    assert all(len(kernels) == 1 and not kernels[0]["spill_stores"] for kernels in found.values())


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
            monkeypatch.setattr(mosaic_gpu, "lanes", cta)
            monkeypatch.setattr(mosaic_gpu, "lane_pairs", cta)
            unit = [threads.Numbers(np.int32(x)) for x in (row, head)]
            mosaic_gpu._write(s, *unit, places, tables, tokens, pools)
            mosaic_gpu._seal(s, *unit, places, tables, pools[0], built, partial_s)
            for memory in (*pools, *built):  # the CTA is done
                memory.settle()
        return *(x.array for x in pools), dict(indexes) | {name: x.array for (name, _, _), x in zip(kinds, built, strict=True)}

    return op


@pytest.mark.parametrize("case", CASES)
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


# Mutants: what an append gets wrong, expressed on its arguments or its results.

NAMES = ("k_pages", "v_pages", "indexes", "k", "v", "positions", "valid", "table")


def _given(**changes):
    """With some arguments changed: name -> function of all arguments by name."""

    def op(*arrays, kinds):
        named = dict(zip(NAMES, arrays, strict=True))
        return XLA(*(named | {name: change(named) for name, change in changes.items()}).values(), kinds=kinds)

    return op


def _index_from(change):
    """Pages as they should be, indexes as `change(arguments by name, the right result, kinds)` says."""

    def op(*arrays, kinds):
        right = XLA(*arrays, kinds=kinds)
        return *right[:2], change(dict(zip(NAMES, arrays, strict=True)), right, kinds)

    return op


def _built(keys, kinds, others):
    return others | {name: page_index(keys, kind=kind, block_size=size) for name, kind, size in kinds}


def _on_sealed(built):
    """`built(...)` where the right index is new, else the old one."""

    def change(named, right, kinds):
        found = built(named, right, kinds)
        return jax.tree.map(lambda old, new, ours: jnp.where(new == old, old, ours), named["indexes"], right[2], found)

    return _index_from(change)


def _only_the_first_page_that_fills(named, right, kinds):
    fills = named["valid"] & (named["positions"] % named["k_pages"].shape[2] == named["k_pages"].shape[2] - 1)
    upto = named | {"valid": named["valid"] & (jnp.cumsum(fills, axis=1) - fills < 1)}
    return XLA(*upto.values(), kinds=kinds)[2]


MUTANTS = {
    "nothing": lambda *arrays, kinds: arrays[:3],
    "keys and values exchanged": _given(k=lambda a: a["v"], v=lambda a: a["k"]),
    "keys for values": _given(v=lambda a: a["k"]),
    "values not written": lambda *arrays, kinds: (XLA(*arrays, kinds=kinds)[0], arrays[1], XLA(*arrays, kinds=kinds)[2]),
    "heads reversed": _given(k=lambda a: a["k"][:, :, ::-1]),
    "rows reversed": _given(k=lambda a: a["k"][::-1]),
    "the first token for all": _given(k=lambda a: jnp.broadcast_to(a["k"][:, :1], a["k"].shape)),
    "one position early": _given(positions=lambda a: a["positions"] - 1),
    "one position late": _given(positions=lambda a: a["positions"] + 1),
    "padding is written": _given(valid=lambda a: jnp.ones_like(a["valid"])),
    "the last token is not": _given(valid=lambda a: a["valid"].at[:, -1].set(False)),
    "only the first token": _given(valid=lambda a: a["valid"].at[:, 1:].set(False)),
    "-1 is page 0": _given(table=lambda a: jnp.maximum(a["table"], 0)),
    "-1 is the last page": _given(table=lambda a: a["table"] % len(a["k_pages"])),
    "past the table is its last page": _given(table=lambda a: jnp.pad(a["table"], ((0, 0), (0, 9)), mode="edge")),
    "before the first token is the first": _given(positions=lambda a: jnp.maximum(a["positions"], 0)),
    "the neighbour's table": _given(table=lambda a: jnp.roll(a["table"], 1, 0)),
    "never sealed": _index_from(lambda a, right, kinds: a["indexes"]),
    "always sealed": _index_from(lambda a, right, kinds: _built(right[0], kinds, right[2])),
    "sealed before the write": _on_sealed(lambda a, right, kinds: _built(a["k_pages"], kinds, right[2])),
    "index of the values": _on_sealed(lambda a, right, kinds: _built(right[1], kinds, right[2])),
    "index of other dtype": _index_from(lambda a, right, kinds: jax.tree.map(lambda x: x.astype(jnp.float32), right[2])),
    "one page is sealed": _index_from(_only_the_first_page_that_fills),
    "padding seals": _index_from(lambda a, right, kinds: XLA(*(a | {"valid": jnp.ones_like(a["valid"])}).values(), kinds=kinds)[2]),
    "sealed one token early": _index_from(lambda a, right, kinds: XLA(*(a | {"positions": a["positions"] + 1}).values(), kinds=kinds)[2]),
    "one index is forgotten": lambda *arrays, kinds: XLA(*arrays, kinds=kinds[:1]),
    "other indexes are dropped": _index_from(lambda a, right, kinds: {name: right[2][name] for name, _, _ in kinds}),
    "rows of the index exchanged": _on_sealed(lambda a, right, kinds: {name: x[..., ::-1, :] for name, x in right[2].items()}),
    "blocks reversed": _on_sealed(lambda a, right, kinds: {name: x[:, :, ::-1] for name, x in right[2].items()}),
    "only the first head": _index_from(
        lambda a, right, kinds: {name: a["indexes"][name].at[:, 0].set(x[:, 0]) for name, x in right[2].items()}
    ),
    "NaN ignored": _on_sealed(lambda a, right, kinds: _built(jnp.where(jnp.isnan(right[0]), 0, right[0]), kinds, right[2])),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


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
        ({}, (("bounds16", "median", 16),), "'median' is unknown; there are bounds, mean"),
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
