"""append_tokens over packed pages: `xla` against the definition, the Hopper kernel on emulated threads against `xla`,
with bugs planted; lowered; who is passed by.

What only a GPU can tell is in `test_append_tokens_packed_on_hopper.py`.
"""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import packed_append_suite as suite
import paging
import pytest
from emulator.kernels import kernels
from emulator.values import Fault, Race
from packed_append_suite import CASES, MUTANTS, ONLY_XLA, Case, arguments, check
from quick_cases import one_in, rest_long

from pallas_kernels.cache.append_tokens import append_tokens, mosaic_gpu
from pallas_kernels.cache.append_tokens.packing import Packing
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import OpenPages, Pages
from pallas_kernels.hopper.threads import lane_math, lane_pairs, lanes
from pallas_kernels.selection.page_index import index_dtype, index_shape

QUICK = ("int8, drafts", "int8, a page is missing", "fp8", "q8_0, halves", "keys as they are, int4 values")

DEFINED = {
    name: case for name, case in (CASES | ONLY_XLA).items() if name not in ("int8, codes of keys", "int8, codes and means alone", "d4")
}
"""Without those whose definition takes minutes, or picks another of several nearest lattice points."""


def emulated(*arrays, **keywords):
    """The kernel on emulated threads."""
    with kernels():
        return paging.implementation("append_tokens", "mosaic_gpu")(*arrays, **keywords)


@pytest.mark.parametrize("case", rest_long(DEFINED, "int8, drafts", "int8, a page is missing", "q4_0"))
def test_xla_matches_the_definition(case):
    case = DEFINED[case]
    reference = functools.partial(append_tokens, implementation="reference")
    form = {"form": suite.as_read} if case.content == "not finite" else {}
    check(suite.XLA, case, suite.run(reference, case), **form)


@pytest.mark.parametrize("case", rest_long(CASES, *QUICK))
def test_emulated_it_has_the_bits_of_xla(case):
    check(emulated, CASES[case])


@pytest.mark.quick_but("codes of neighbours exchanged", "keys for values")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], [CASES[name] for name in ("int8, drafts", "int8, a page is missing")])


def _in(target, name: str, change) -> dict:
    """What is put in place of something: change(what there is)."""
    return {"target": target, "name": name, "value": change(getattr(target, name))}


def _last_of_the_largest(first):
    """The order within a piece turned round."""
    return lambda self, numbers, magnitudes, largest: first(self, numbers[::-1], magnitudes[::-1], largest)


KERNEL_MUTANTS = {
    "a scale of each piece": ("int8", _in(Packing, "_largest", lambda _: lambda self, x: functools.reduce(lanes.maximum, x))),
    "scales of all pieces": ("int8 per 16", _in(Packing, "sharing", lambda _: property(lambda self: self.pieces))),
    "scales rounded to the nearest": ("int8", _in(lane_math, "quotient_of_xla", lambda div: lambda a, b: div(a, b) - div(a, b) * 0.004)),
    "a NaN is no number": ("int8, not finite", _in(mosaic_gpu.packing, "INFINITY", lambda _: 0x7FFFFFFF)),
    "tiny scales are kept": ("int8, tiny", _in(mosaic_gpu.packing, "SMALLEST", lambda _: 0.0)),
    "halves away from zero": (
        "int8, halves",
        _in(lane_math, "nearest", lambda _: lambda x: lane_math.truncated(x + lanes.where(x < 0.0, lanes.f32(-0.5), lanes.f32(0.5)))),
    ),
    "halves to even": ("q8_0, halves", _in(Packing, "_code", lambda _: lambda self, x: lane_math.nearest(x))),
    "the last of the largest": ("q4_0, halves", _in(Packing, "_first", _last_of_the_largest)),
    "low bits for high ones": ("int4", _in(Packing, "_bytes", lambda found: lambda self, codes: found(self, codes[::-1]))),
    "bits of another piece": ("q4_0", _in(Packing, "_half", lambda _: property(lambda self: 1))),
    "channels of one warp": ("int8 per channel", _in(lanes, "warp", lambda _: lambda: lanes.i32(0))),
    "a scale of the first channel": ("int8 per channel", _in(Packing, "_stored", lambda _: lambda self, scale: lanes.f32(0.02))),
    "bytes reversed": ("fp8", _in(lane_pairs, "to_e4m3", lambda to: lambda *x: to(*x[::-1]))),
    "indexes of the rows": ("int8", _in(Packing, "_piece", lambda of: lambda self, words, *rest: (*of(self, words, *rest)[:2], words))),
    "every head is the first": ("int8", _in(mosaic_gpu, "_pack", lambda pack: lambda s, head, *rest: pack(s, head * 0, *rest))),
}


@pytest.mark.quick("scales of all pieces", "the last of the largest", "low bits for high ones")
@pytest.mark.parametrize("mutant", KERNEL_MUTANTS)
def test_kernel_with_a_bug_fails(monkeypatch, mutant):
    name, change = KERNEL_MUTANTS[mutant]
    monkeypatch.setattr(**change)
    with pytest.raises((AssertionError, Fault)):
        check(emulated, CASES[name])


@pytest.mark.parametrize("barrier", ["before a page is packed", "before its keys are read"])
def test_every_barrier_is_needed(monkeypatch, barrier):
    """A page fills with a token of this step, and its indexes come from shared memory."""
    real, seen = lanes.cta_barrier, []

    def barriers(threads):
        caller = inspect.currentframe().f_back.f_code.co_name
        seen.append(caller)
        if caller == "_pack" and seen.count("_pack") % 2 == (barrier == "before a page is packed"):
            return
        real(threads)

    monkeypatch.setattr(lanes, "cta_barrier", barriers)
    with pytest.raises(Race):
        suite.run(emulated, CASES["int8"])


# Without a GPU.


def production(format: str | tuple[str, str], batch: int = 1, num_tokens: int = 1, kinds=(("bounds", 128),), **sizes) -> tuple:
    """(op, arrays, keywords) of a call."""
    case = Case(format, (0,) * batch, num_tokens, kinds, **({"kv_heads": 4, "head_dim": 128, "page_size": 128} | sizes))
    tile, arrays = (4096, case.kv_heads, case.page_size), {}
    for n, name in enumerate("kv"):
        format = case.format(n)
        codes = (case.head_dim, case.dtype) if format is None else (format.width(case.head_dim), format.code_dtype.name)
        arrays |= {name: ((*tile, codes[0]), codes[1]), f"{name}_packed": format}
        if format is not None and format.scale_dtype is not None:
            arrays[f"{name}_scales"] = ((*tile[:2], *format.scale_shape(case.page_size, case.head_dim)), format.scale_dtype.name)
    rows, tokens = (((n, *rest, case.head_dim), case.dtype) for n, *rest in ((2 * batch, *tile[1:]), (batch, num_tokens, tile[1])))
    pages = Pages(**arrays, open=OpenPages(rows, rows, ((4096,), "int32")))
    indexes = {
        name: ((*tile[:2], case.page_size // size, *index_shape(kind, size, case.head_dim)), index_dtype(kind, case.dtype).name)
        for name, kind, size in case.named_kinds
    }
    places = {"positions": ((batch, num_tokens), "int32"), "valid": ((batch, num_tokens), "bool"), "table": ((batch, 1024), "int32")}
    return "append_tokens", {"k_pages": pages, "indexes": indexes, "k": tokens, "v": tokens} | places, {"kinds": case.named_kinds}


PRODUCTION = {
    "int8": production("int8"),
    "int8, batch 8, drafts, float16": production("int8", 8, 8, dtype="float16", head_dim=64),
    "int8, head dim 256, three indexes": production("int8", head_dim=256, kinds=(("bounds", 128), ("mean", 16), ("keys4", 128))),
    "int8 keys per channel, float16": production(("int8 per channel", "int8"), dtype="float16"),
    "fp8": production("fp8"),
    "fp8 without scales, no index": production("fp8 without scales", kinds=()),
    "int4": production("int4"),
    "int4 per 32, 64 tokens": production("int4 per 32", 2, 64),
    "q8_0": production("q8_0"),
    "q4_0": production("q4_0"),
    "int8 keys, values as they are": production(("int8", "as they are")),
}


@pytest.mark.parametrize("case", one_in(5, PRODUCTION))
def test_it_lowers_to_one_kernel_and_updates_in_place(cuda, case):
    """Open rows, codes, scales and indexes are handed back as its results."""
    op, arrays, static = PRODUCTION[case]
    text = cuda.lower(op, arrays, static)
    pages = arrays["k_pages"]
    written = 2 + 2 + (pages.k_scales is not None) + (pages.v_scales is not None) + len(static["kinds"])
    assert text.count("custom_call @") == 1
    assert text.count("#stablehlo.output_operand_alias<") == written


def test_it_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION, launches=1)


@pytest.mark.long
def test_it_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(PRODUCTION, launches=1)


def test_a_donated_pool_is_not_copied():
    """By `xla`: the compiled program needs no memory of its size."""
    _, arrays, static = production("int8")
    structs = jax.tree.map(lambda of: jax.ShapeDtypeStruct(of[0], jnp.dtype(of[1])), arrays, is_leaf=lambda x: isinstance(x, tuple))
    pages, *rest = (structs[name] for name in ("k_pages", "indexes", "k", "v", "positions", "valid", "table"))
    op = jax.jit(functools.partial(suite.XLA, **static), donate_argnums=(0, 1))
    memory = op.lower(pages, *rest).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pages.k.size
    assert memory.temp_size_in_bytes < 2**21


REFUSED = {
    "int8 per page": "it finds scales of a token or a channel, not of a whole page",
    "int8 rotated": "it does not pack int8 with rotation",
    "d4": "it does not pack d4",
    "float32": "it packs numbers of 16 bits",
    "head dim 96": "it packs tokens of 16, 32, 64, 128 or 256 numbers, got head dim 96",
    "pages of 5": "it packs pages of an even number of tokens, got page size 5",
}


@pytest.mark.parametrize("name", ONLY_XLA)
def test_what_the_kernel_does_not_do_goes_to_xla_with_the_reason(on_hopper, caplog, name):
    *given, frames = arguments(ONLY_XLA[name])
    caplog.set_level("INFO", logger="pallas_kernels.core.dispatch")
    dispatch._chosen.clear()
    with dispatch.listening() as heard:
        jax.eval_shape(functools.partial(append_tokens, kinds=ONLY_XLA[name].named_kinds, frames=frames), *given)
    assert heard["append_tokens"] == "xla"
    assert f"not mosaic_gpu: {REFUSED[name]}" in caplog.text


def test_what_the_kernel_does_goes_to_it(on_hopper):
    for case in CASES.values():
        *given, frames = arguments(case)
        assert paging.unsupported("append_tokens", "mosaic_gpu", *given, kinds=case.named_kinds, frames=frames) is None
    too_wide = Case("int8", page_size=4096, head_dim=256, starts=(0,), width=1)
    *given, frames = arguments(too_wide)
    said = paging.unsupported("append_tokens", "mosaic_gpu", *given, kinds=too_wide.named_kinds, frames=frames)
    assert "words of shared memory, at most" in said


def test_packed_pages_without_open_rows_are_refused():
    pages, *rest, frames = arguments(CASES["int8"])
    with pytest.raises(ValueError, match="give pages with `open`, or pack whole pages by pack_pages"):
        append_tokens(pages.replace(open=None), *rest, kinds=(), frames=frames)
