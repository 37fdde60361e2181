"""selected_attention that chooses from a shortlist by keys in few bits: on any backend, and the kernel on emulated
threads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import packed_suite
import paging
import pytest
from emulator.kernels import kernels
from quick_cases import rest_long
from refined_suite import SMALL, arguments_of, checker

from pallas_kernels.attention.selected_attention import mosaic_gpu, refined, selected_attention
from pallas_kernels.attention.selected_attention.api import Call
from pallas_kernels.core.page_format import PageFormat
from pallas_kernels.hopper.decode import decode_fold, packed_operands
from pallas_kernels.hopper.decode.index_scores import CodedKeys
from pallas_kernels.hopper.decode.key_scores import PageKeys
from pallas_kernels.hopper.threads import lanes
from pallas_kernels.selection.page_index import INDEX_ROWS, index_shape

OF_64 = {"block_size": 64, "page_size": 128, "shortlist": 7, "budget": 2, "local": 1, "lengths": (768,)}
CASES = {
    "4 bits": {"lengths": (0, 65, 384)},
    "1 bit": {"codes_kind": "keys1", "head_dim": 128},
    "2 bits, float16, by means": {"codes_kind": "keys2", "dtype": "float16", "kind": "mean"},
    "equal keys": {"keys": "equal", "lengths": (384,)},
    "a page is missing": {"hole": True},
    "drafts": {"num_queries": 3, "lengths": (66, 330), "local": 1},
    "blocks of 64": OF_64,
    "groups of 9, two KV heads": {"group": 9, "kv_heads": 2, "lengths": (384,)},
    "frames": {"framed": True, "lengths": (384,)},
    "more than a block for each CTA": {"shortlist": 19, "budget": 9, "lengths": (384,)},
    "all that are short-listed": {"shortlist": 3, "lengths": (384,)},
    "a warp takes whole blocks": OF_64 | {"shortlist": 130, "lengths": (700,), "group": 9},
    "budget of none": {"budget": 0, "lengths": (384,)},
    "a shortlist longer than the table": {"shortlist": 40, "lengths": (384,)},
    "a shortlist longer than a CTA has threads": {"shortlist": 260, "budget": 9, "lengths": (384,)},
    "int8 pages": {"format": "int8"},
    "int4 pages, drafts": {"format": "int4", "num_queries": 3, "lengths": (66, 330), "local": 1},
    "q4_0 pages, blocks of 64": {"format": "q4_0"} | OF_64,
    "int8 pages per channel, groups of 9": {"format": "int8 per channel", "group": 9, "kv_heads": 2, "lengths": (384,)},
    "fp8 pages, no local block but those of the own page": {"format": "fp8", "local": 1, "lengths": (330, 384)},
    "int8 keys, values as they are": {"format": "int8 keys, values as they are", "lengths": (384,)},
    "keys as they are, int4 values": {"format": "keys as they are, int4 values", "lengths": (384,)},
    "by its own keys": {"codes_kind": None, "framed": True},
    "by its own keys, int8, drafts": {"codes_kind": None, "format": "int8", "num_queries": 3, "lengths": (66, 330), "local": 1},
    "by its own keys, q4_0, blocks of 64": {"codes_kind": None, "format": "q4_0"} | OF_64,
    "by its own keys, blocks of 64, two KV heads": {"codes_kind": None, "kv_heads": 2} | OF_64,
    "by its own keys, int4 per channel": {"codes_kind": None, "format": "int4 keys per channel, values per 32", "group": 9, "kv_heads": 2}
    | {"framed": True},
}
QUICK = ("4 bits", "frames", "by its own keys, int8, drafts")


@pytest.fixture(scope="module")
def arguments(tools):
    return arguments_of(tools, {name: SMALL | spec for name, spec in CASES.items()})


@pytest.fixture(scope="module")
def check(tools, arguments):
    return checker(tools, arguments)


@pytest.mark.parametrize("case", rest_long(CASES, "frames"))
def test_composed_matches_the_reference(check, case):
    check(functools.partial(selected_attention, implementation="composed"), case, rounds=True)


@pytest.fixture(scope="module")
def on_emulated_threads():
    kernel = paging.implementation("selected_attention", "mosaic_gpu")

    def op(*arrays, **keywords):
        with kernels():
            return kernel(*arrays, **keywords)

    return op


@pytest.mark.parametrize("case", rest_long(CASES, *QUICK))
def test_on_emulated_threads_it_matches_the_reference(check, on_emulated_threads, case):
    check(on_emulated_threads, case)


@pytest.mark.long
def test_on_emulated_threads_of_a_small_cta_it_matches_the_reference(check, on_emulated_threads, monkeypatch):
    """A GPU with little shared memory: CTAs of 128 threads."""
    monkeypatch.setattr(lanes, "shared_words", lambda: 13_000)
    check(on_emulated_threads, "more than a block for each CTA")


def test_a_row_has_the_same_bits_in_any_company(tools, arguments, on_emulated_threads):
    (q, pages, index, table, lengths), keywords, _ = arguments("a page is missing")
    once = on_emulated_threads(q, pages, index, table, lengths, **keywords)
    others = jnp.arange(2) != 0
    changed = jnp.where(others[:, None, None, None], -q, q), pages, index, table[jnp.array([0, 0])], jnp.where(others, 70, lengths)
    for a, b in zip(once, on_emulated_threads(*changed, **keywords), strict=True):
        tools.assert_same_bits(a[:1], b[:1])
    for a, b in zip(once, on_emulated_threads(q, pages, index, table, lengths, **keywords), strict=True):
        tools.assert_same_bits(a, b)


@pytest.mark.parametrize("codes_kind", rest_long([None, "keys4"], "keys4"))
def test_a_page_without_a_frame_is_not_chosen_by_its_keys(tools, on_emulated_threads, codes_kind):
    """Nor does it count among the attention that others get."""
    cases = arguments_of(tools, {"it": SMALL | {"codes_kind": codes_kind, "lengths": (384,), "shortlist": 6}})
    (q, pages, index, table, lengths), keywords, _ = cases("it")
    keywords |= {"frames": table.at[:, 3].set(-1), "sm_scale": 1e-3}
    found = on_emulated_threads(q, pages, index, table, lengths, **keywords)
    expected = selected_attention(q, pages, index, table, lengths, **keywords, implementation="reference")
    assert (found[2] == expected[2]).all()


# Planted bugs.

TOTAL, SHARE, COPY, COPY_KEYS = refined._total, refined._share, CodedKeys.copy, PageKeys.copy


def _without_near(r, found, row, scratch):
    """The total as if no CTA had any."""
    load = lanes.load_shared
    with mock.patch.object(lanes, "load_shared", lambda ref, at, *kind: [x * (len(kind) < 2) for x in load(ref, at, *kind)]):
        return TOTAL(r, found, row, scratch)


def _last_of_equals(r, number, scratch):
    share = SHARE(r, number, scratch)
    return share + lanes.number(number) * 1e-3


def _of_the_first_head(r, number, scratch):
    return SHARE(dataclasses.replace(r, attend=dataclasses.replace(r.attend, num_heads=r.attend.num_kv_heads)), number, scratch)


def _emptied(folded):
    nothing = lambda numbers: [nothing(x) for x in numbers] if isinstance(numbers, list) else lanes.f32(0.0)  # noqa: E731
    return decode_fold.Folded(folded.m, nothing(folded.total), nothing(folded.acc))


def _without_barrier(function, number: int):
    """The stage without one of its barriers of a CTA."""

    def stage(*args):
        wait, numbers = lanes.cta_barrier, itertools.count()
        with mock.patch.object(lanes, "cta_barrier", lambda threads: None if next(numbers) == number else wait(threads)):
            return function(*args)

    return stage


BUGS = {
    "sink and local keys are not in the softmax": (refined, "_total", _without_near),
    "of equal blocks the higher": (refined, "_share", _last_of_equals),
    "the first head chooses": (refined, "_share", _of_the_first_head),
    "codes of the block before": (CodedKeys, "copy", lambda *args: COPY(*args[:4], args[4] - 1, *args[5:])),
    "every turn has the keys of the first": (CodedKeys, "copy", lambda *args: COPY(*args[:5], args[5] * 0, *args[6:])),
    "sums of lanes are added up twice": (decode_fold.Folded, "to_go_on", lambda self: self),
    "sink and local keys are not attended to": (decode_fold.Folded, "to_go_on", _emptied),
    "what CTAs have found is not sent": (refined, "_exchange", lambda *args: None),
    "CTAs do not wait for each other": (lanes, "cluster_barrier", lambda: None),
    "the places of the shortlist are the blocks": (refined, "_chosen", lambda r, sinks, kept, n, scratch: sinks + n),
}
BUGS |= {f"barrier {n} of the choice": (refined, "_choose", _without_barrier(refined._choose, n)) for n in range(4)}
BUGS["the CTA's barrier of the exchange"] = refined, "_exchange", _without_barrier(refined._exchange, 0)
BUGS["the barrier after parts of blocks are added up"] = refined, "_fold_key_tiles", _without_barrier(refined._fold_key_tiles, 0)
BUGS["each lane has a block's sum of its own keys"] = refined, "_over_keys", lambda m, total: (m, total)
BUGS |= {
    f"every {name} has the keys of the first": (PageKeys, "copy", lambda *args, n=n: COPY_KEYS(*args[:n], args[n] * 0, *args[n + 1 :]))
    for n, name in ((4, "head"), (6, "block of a page"), (7, "turn of a block"))
}
BUGS["queries are scaled for no block"] = CodedKeys, "scaled", lambda self, *args: self.nothing_scaled()
BUGS["sums of near keys stay in their natural order"] = packed_operands, "coded_order", lambda acc: acc
BUGS["sums of codes stay in the order of bytes"] = packed_operands, "natural_order", lambda acc: acc
FOR_BUGS = (
    "equal keys",
    "blocks of 64",
    "a warp takes whole blocks",
    "groups of 9, two KV heads",
    "int8 pages",
    "by its own keys, blocks of 64, two KV heads",
)


@pytest.mark.quick("CTAs do not wait for each other")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tools, check, on_emulated_threads, monkeypatch, bug):
    jax.clear_caches()
    monkeypatch.setattr(*BUGS[bug])
    tools.must_fail(check, on_emulated_threads, FOR_BUGS)


@pytest.mark.quick("own pages as packed")
@pytest.mark.parametrize("change", packed_suite.CHANGES)
def test_changed_packed_pages_are_noticed(tools, check, on_emulated_threads, change):
    def op(q, pages, *others, **keywords):
        parts = packed_suite.CHANGES[change]
        if any(getattr(pages, name) is None for name in parts):
            return on_emulated_threads(q, pages, *others, **keywords)
        changed = {name: make(getattr(pages, name)) for name, make in parts.items()}
        return on_emulated_threads(q, pages.replace(**changed), *others, **keywords)

    tools.must_fail(check, op, ("int8 pages", "q4_0 pages, blocks of 64", "int8 pages per channel, groups of 9"))


# Lowered and compiled, in the shapes that decoding has.


def production(
    batch: int = 1,
    heads: tuple[int, int] = (28, 4),
    head_dim: int = 128,
    page_size: int = 128,
    tokens: int = 128 << 10,
    num_queries: int = 1,
    dtype: str = "bfloat16",
    frames: bool = False,
    format: str | None = None,
    opened: bool = True,
    **static,
) -> tuple:
    """(op, arrays, keywords) over `tokens` tokens a row: cascade:4/32, if `static` does not say otherwise. frames: with
    a table of them. format: of packed pages, see `packed_suite`; opened: with open ones beside them."""
    sizes = {"kind": "bounds", "block_size": 128, "budget": 4, "shortlist": 32, "codes_kind": "keys4", "sink": 1, "local": 4}
    keywords = sizes | {"sm_scale": head_dim**-0.5, "config": None} | static
    num_heads, kv_heads = heads
    pool, block_size = (packed_suite.POOL_PAGES, kv_heads, page_size, head_dim), keywords["block_size"]
    index = (*pool[:2], page_size // block_size)
    arrays = {"q": ((batch, num_queries, num_heads, head_dim), dtype), "k": (pool, dtype), "v": (pool, dtype)}
    arrays |= {"index": ((*index, INDEX_ROWS[keywords["kind"]], head_dim), dtype), "table": ((batch, tokens // page_size), "int32")}
    arrays |= {"lengths": ((batch,), "int32")}
    if kind := keywords["codes_kind"]:
        arrays["codes"] = (*index, *index_shape(kind, block_size, head_dim)), "uint8"
    if format is not None:
        packed = packed_suite.production(format, batch, heads, head_dim, page_size, dtype=dtype, opened=opened)[1]
        arrays = {name: x for name, x in arrays.items() if name != "v"} | {"k": packed["k"]}
    return "selected_attention", arrays | ({"frames": arrays["table"]} if frames else {}), keywords


FORMS = {
    "batch 8": {"batch": 8},
    "batch 40": {"batch": 40},
    "1 bit": {"codes_kind": "keys1"},
    "2 bits": {"codes_kind": "keys2"},
    "a million tokens": {"tokens": 1 << 20},
}
SPILL_FREE = {
    f"{name}, {form}": production(heads=heads, **FORMS[form])
    for name, heads in {"28/4": (28, 4), "32/8": (32, 8)}.items()
    for form in FORMS
} | {
    "cascade:4/32": production(),
    "head dim 64": production(heads=(32, 8), head_dim=64),
    "float16": production(dtype="float16", batch=8),
    "batch 8, a million tokens": production(batch=8, tokens=1 << 20),
    "4 drafts, batch 8, frames": production(num_queries=4, batch=8, frames=True),
    "16 drafts of groups of 8": production(heads=(32, 4), num_queries=16),
    "blocks of 16": production(block_size=16, budget=32, shortlist=256, local=32),
    "blocks of 64, means": production(block_size=64, kind="mean"),
    "pages of 256": production(page_size=256, batch=8),
    "a shortlist of 128": production(budget=16, shortlist=128, batch=8),
    "cascade:8": production(budget=8, shortlist=256),
    "cascade:8, 32K tokens": production(budget=8, shortlist=256, tokens=32 << 10),
    "cascade:8, a million tokens": production(budget=8, shortlist=256, tokens=1 << 20),
    "cascade:8, head dim 256": production(heads=(4, 1), head_dim=256, budget=8, shortlist=256),
    "int8 pages": production(format="int8"),
    "int8 pages per channel, batch 8": production(format="int8 per channel", batch=8),
    "fp8 pages, batch 8, a million tokens": production(format="fp8", batch=8, tokens=1 << 20),
    "int4 pages, 32/8": production(format="int4", heads=(32, 8)),
    "int4 keys per channel, values per 32, frames": production(format="int4 keys per channel, values per 32", frames=True),
    "q8_0 keys, q4_0 values": production(format="q8_0 keys, q4_0 values"),
    "by its own keys": production(codes_kind=None),
    "by its own keys, int8": production(codes_kind=None, format="int8"),
    "by its own keys, int8 per channel, batch 8": production(codes_kind=None, format="int8 per channel", batch=8),
    "by its own keys, fp8, a million tokens": production(codes_kind=None, format="fp8", tokens=1 << 20),
    "by its own keys, int4, 32/8, batch 8": production(codes_kind=None, format="int4", heads=(32, 8), batch=8),
    "by its own keys, q4_0, 4 drafts, frames": production(codes_kind=None, format="q4_0", num_queries=4, frames=True),
}
WIDE = {
    "groups of 16": production(heads=(16, 1)),
    "head dim 256": production(heads=(16, 2), head_dim=256),
}
"""Twice the accumulators, so that spilling some is no news."""


@pytest.mark.parametrize("case", rest_long(SPILL_FREE | WIDE, "by its own keys, int8"))
def test_lowers_and_is_picked_on_hopper(cuda, on_hopper, picked, case):
    call = (SPILL_FREE | WIDE)[case]
    assert "refined_kernel" in cuda.lower(*call)
    assert picked(call) == {"selected_attention": "mosaic_gpu"}


@pytest.mark.long
def test_compiles_without_spilling(spill_free):
    spill_free(SPILL_FREE, WIDE, launches=1)


@pytest.mark.long
def test_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(SPILL_FREE, WIDE, launches=1)


# Valid input that is none for this kernel: refused when named, passed by when picked.

NOT_HERE = {
    "17 query rows": (production(heads=(17, 1)), r"T \* G must be at most 16 in one launch, got 17"),
    "codes of 8 bytes": (production(head_dim=64, codes_kind="keys1"), "codes of whole 16 bytes; keys1 of head dim 64 has 8 a key"),
    "a long shortlist": (production(budget=64, shortlist=8192), "leave no shared memory"),
    "float32": (production(dtype="float32"), "bfloat16 or float16, q and index alike"),
    "scales of pages": (
        production(format=(PageFormat("int8", "page", read_as="bfloat16"),) * 2),
        "scales per token or channel, not per page",
    ),
}


@pytest.mark.parametrize("case", NOT_HERE)
def test_what_it_cannot_do_is_refused_by_name_and_passed_by(on_hopper, picked, case):
    call, reason = NOT_HERE[case]
    with pytest.raises(NotImplementedError, match=reason):
        picked(call, implementation="mosaic_gpu")
    assert picked(call)["selected_attention"] == "composed"


@pytest.mark.parametrize("capability", ["9.0", "12.0"])
def test_what_is_taken_fits_into_shared_memory(monkeypatch, capability):
    """Each array begins at a multiple of 1,024 bytes, Mosaic needs some bytes of its own, and the rings of keys have
    room for a turn of index rows: with a shortlist and without."""
    monkeypatch.setattr("pallas_kernels.core.dispatch._compute_capability", lambda: capability)
    room, taken = {"9.0": 226, "12.0": 98}[capability] << 10, 0
    forms = ("int8", "int4 per 32", "q8_0 keys, q4_0 values", "int8 per channel", (PageFormat("q8_0", read_as="bfloat16"),) * 2)
    sizes = itertools.product(forms, (64, 128, 256), (1, 8, 64), ((128, 128), (64, 128)), ((32, 4), (128, 16)), (None, "keys4", "none"))
    for number, (form, head_dim, batch, (block_size, page_size), (shortlist, budget), codes_kind) in enumerate(sizes):
        fields = {"heads": (28, 4), "head_dim": head_dim, "batch": batch, "page_size": page_size, "block_size": block_size}
        fields |= {"codes_kind": codes_kind, "shortlist": shortlist} if codes_kind != "none" else {"codes_kind": None, "shortlist": None}
        _, arrays, keywords = production(format=form, budget=budget, opened=number % 3 > 0, **fields)
        structs = jax.tree.map(lambda of: jax.ShapeDtypeStruct(of[0], of[1]), arrays, is_leaf=lambda x: isinstance(x, tuple))
        call, given = Call(**keywords), [structs.get(name) for name in ("q", "k", "index", "table", "lengths", "frames", "codes")]
        if mosaic_gpu.unsupported(call, *given) is not None:
            continue
        taken += 1
        chosen, s, _ = mosaic_gpu._form(call, *given[:4], *given[5:])
        words = mosaic_gpu.scratch_of_key_tiles(chosen, s)
        assert sum(-(-count // 256) * 1024 for count in words.values()) <= room, (form, fields)
        assert chosen.depth > 0, (form, fields)
    assert taken > 50


def test_the_kernel_for_tpus_is_passed_by(on_tpu, picked):
    assert picked(production())["selected_attention"] == "composed"
    with pytest.raises(NotImplementedError, match="in one stage, not from a shortlist of 32 by keys4"):
        picked(production(), implementation="mosaic_tpu")


WRONG = {
    "codes are missing": ({"codes": None}, {}, "go together, with a shortlist; missing: codes"),
    "no shortlist": ({}, {"shortlist": None}, "go together, with a shortlist; missing: shortlist"),
    "shortlist below the budget": ({}, {"shortlist": 2}, "shortlist must be at least budget 4 and 1, got 2"),
    "unknown codes": ({}, {"codes_kind": "keys3"}, "'keys3' is unknown; there are keys1, keys2, keys4"),
    "codes of another kind": ({}, {"codes_kind": "keys1"}, r"must be uint8 \[1100, 4, 1, 160, 16\]"),
    "codes of other pages": ({"codes": ((1099, 4, 1, 136, 64), "uint8")}, {}, r"must be uint8 \[1100, 4, 1, 136, 64\]"),
    "codes that are none": ({"codes": ((1100, 4, 1, 136, 64), "int8")}, {}, "must be uint8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused(picked, case):
    arrays, static, reason = WRONG[case]
    op, right, keywords = production()
    right = {name: x for name, x in (right | arrays).items() if x is not None}
    with pytest.raises(ValueError, match=reason):
        picked((op, right, keywords | static))
