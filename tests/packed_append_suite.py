"""What append_tokens over packed pages is tested with: inputs, the checker, and mutants that the checker must
reject."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache.append_tokens import append_tokens
from pallas_kernels.core.page_format import CODES, PageFormat
from pallas_kernels.core.pages import OpenPages, Pages
from pallas_kernels.selection.page_index import index_dtype, index_shape

XLA = functools.partial(append_tokens, implementation="xla")
FORMATS = {
    "int8": ("int8", "token"),
    "fp8": ("fp8_e4m3", "token"),
    "fp8 without scales": ("fp8_e4m3", None),
    "int4": ("int4", "token"),
    "int4 per 32": ("int4", "token", 32),
    "int8 per 16": ("int8", "token", 16),
    "q8_0": ("q8_0",),
    "q4_0": ("q4_0",),
    "as they are": None,
    "int8 per channel": ("int8", "channel"),
    "int4 per channel": ("int4", "channel"),
    "fp8 per channel": ("fp8_e4m3", "channel"),
    "int8 per page": ("int8", "page"),
    "int8 rotated": ("int8", "token", None, None, True),
    "d4": ("d4", None, None, 38),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """formats: of keys and of values, by name. starts: position of each row's first token; the last row has no second
    page where there is a hole, and the first none open where `closed`. content: of tokens and open rows."""

    formats: str | tuple[str, str]
    starts: tuple[int, ...] = (15, 0, 14, 31, 47)
    num_tokens: int = 1
    kinds: tuple[tuple[str, int], ...] = (("bounds", 16), ("mean", 8))
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    width: int = 4
    dtype: str = "bfloat16"
    token_dtype: str | None = None
    content: str = "random"
    hole: bool = False
    closed: bool = False
    frames: bool = False

    @property
    def named_kinds(self) -> tuple[tuple[str, str, int], ...]:
        return tuple((f"{kind}{size}", kind, size) for kind, size in self.kinds)

    def format(self, n: int) -> PageFormat | None:
        given = FORMATS[self.formats if isinstance(self.formats, str) else self.formats[n]]
        if given is None:
            return None
        return PageFormat(**dict(zip(("codes", "scale", "group", "levels", "rotate"), given, strict=False)), read_as=self.dtype)


CASES = {
    "int8": Case("int8"),
    "int8, drafts": Case("int8", starts=(0, 11, 14, 61), num_tokens=5, frames=True),
    "int8, several pages fill": Case("int8", starts=(3, 16), num_tokens=40, width=5, kv_heads=1),
    "int8, a page is missing": Case("int8", starts=(15, 30, 30), num_tokens=3, hole=True, closed=True),
    "int8, not finite": Case("int8", starts=(15, 31, 47), content="not finite"),
    "int8, halves": Case("int8", starts=(15, 31), content="halves"),
    "int8, tiny": Case("int8", starts=(15, 31), content="tiny"),
    "int8, codes of keys": Case("int8", starts=(15, 31), kinds=(("keys4", 16), ("bounds", 4)), num_tokens=2),
    "int8, no index": Case("int8", kinds=()),
    "int8, pages of 6": Case("int8", page_size=6, starts=(5, 10, 11), kinds=(("bounds", 6),)),
    "int8 of 128 tokens of 128": Case("int8", starts=(127,), page_size=128, head_dim=128, kv_heads=1, kinds=(("bounds", 128),), width=1),
    "int8, head dim 256, float16": Case("int8", starts=(15, 31), head_dim=256, dtype="float16", token_dtype="float32", kv_heads=1),
    "int8 per 16": Case("int8 per 16", starts=(15, 31), head_dim=64),
    "int8 per channel": Case("int8 per channel", starts=(15, 31, 14), num_tokens=2),
    "int8 keys per channel, not finite": Case(
        ("int8 per channel", "int8"), starts=(15, 31, 47), content="not finite", head_dim=64, kinds=(("mean", 8),)
    ),  # no bounds: where a whole block is NaN, those of XLA on a CPU may be infinities
    "int8, codes and means alone": Case("int8", starts=(15, 31), kinds=(("keys4", 16), ("mean", 4))),
    "int4 keys per channel, head dim 256": Case(("int4 per channel", "int4 per 32"), starts=(15,), head_dim=256, kv_heads=1),
    "fp8 per channel, pages of 6": Case("fp8 per channel", page_size=6, starts=(5, 11), kinds=(("bounds", 6),), content="tiny"),
    "fp8": Case("fp8", starts=(15, 31, 14), head_dim=64),
    "fp8, not finite": Case("fp8", starts=(15, 31, 47), content="not finite"),
    "fp8 without scales": Case("fp8 without scales", starts=(15, 31), content="large"),
    "fp8 without scales, not finite": Case("fp8 without scales", starts=(15, 31), content="not finite"),
    "int4": Case("int4", starts=(15, 31), head_dim=64),
    "int4 per 32": Case("int4 per 32", starts=(15, 31), head_dim=128),
    "int4, not finite": Case("int4", starts=(15, 31), content="not finite"),
    "q8_0": Case("q8_0", starts=(15, 31, 14), head_dim=64),
    "q8_0, halves": Case("q8_0", starts=(15, 31), content="halves"),
    "q8_0, not finite": Case("q8_0", starts=(15, 31), content="not finite"),
    "q4_0": Case("q4_0", starts=(15, 31, 14), head_dim=64),
    "q4_0, halves": Case("q4_0", starts=(15, 31), head_dim=128, content="halves"),
    "q4_0, not finite": Case("q4_0", starts=(15, 31), content="not finite"),
    "int8 keys, values as they are": Case(("int8", "as they are"), starts=(15, 31, 14)),
    "keys as they are, int4 values": Case(("as they are", "int4"), starts=(15, 31, 14)),
    "fp8 keys, q4_0 values": Case(("fp8", "q4_0"), starts=(15, 31)),
}
ONLY_XLA = {
    "int8 per page": Case(("int8", "int8 per page")),
    "int8 rotated": Case("int8 rotated"),
    "d4": Case("d4"),
    "float32": Case("int8", dtype="float32"),
    "head dim 96": Case("int8", head_dim=96),
    "pages of 5": Case("int8", page_size=5, starts=(4, 9, 11), kinds=(("bounds", 5),)),
}
"""Cases for which there is no kernel, and which it has to refuse."""


def _numbers(rng, shape, content: str) -> np.ndarray:
    found = rng.standard_normal(shape).astype(np.float32)
    if content == "tiny":
        found *= np.float32(1e-37)
        found[..., : shape[-1] // 2] *= np.float32(1e-4)
    elif content == "large":
        found *= 300
    elif content == "halves":  # halfway between codes of 8 bits; of each 32, three have the largest magnitude
        found = rng.integers(-60, 60, shape).astype(np.float32) + np.float32(0.5)
        for place in (3, 6, 20):
            found[..., place::32] = rng.choice([-127, 127], found[..., place::32].shape)
    return found


@functools.cache
def arguments(case: Case) -> tuple:
    """pages, indexes, k, v, positions, valid, table, frames. Page 0 and the last one are never named; what pools hold
    before is random."""
    rng, batch, pages = np.random.default_rng(len(case.starts) + case.head_dim), len(case.starts), len(case.starts) * case.width + 3
    tile, token = (case.kv_heads, case.page_size, case.head_dim), (batch, case.num_tokens, case.kv_heads, case.head_dim)
    table = rng.permutation(np.arange(1, pages - 1))[: batch * case.width].reshape(batch, case.width).astype(np.int32)
    if case.hole:
        table[-1, 1] = -1
    frames = rng.permutation(pages).astype(np.int32)[table] if case.frames else None
    positions = (np.array(case.starts)[:, None] + np.arange(case.num_tokens)).astype(np.int32)
    logical = sorted({(b, n) for b, row in enumerate(positions // case.page_size) for n in row if 0 <= n < case.width})
    row_of = np.full(pages, -1, np.int32)
    places = (table if frames is None else frames)[tuple(np.array(logical).T)]
    row_of[places[places >= 0]] = rng.permutation(len(logical) + 2)[: (places >= 0).sum()]
    if case.closed:
        row_of[places[0]] = -1
    opened = _numbers(rng, (2, len(logical) + 2, *tile), case.content)
    new = _numbers(rng, (2, *token), case.content)
    if case.content == "not finite":
        opened[:, :, 0, 3, 5], opened[:, :, 0, 4, 1], opened[:, :, :, 5, 2], new[:, :, 0, 0, 7] = np.nan, -np.inf, np.inf, np.inf
        opened[:, :, 0, 6, 3], opened[:, :, 0, 6, 4] = np.inf, np.nan
    arrays: dict = {}
    for n, name in enumerate("kv"):
        format = case.format(n)
        width = case.head_dim if format is None else format.width(case.head_dim)
        arrays |= {name: jnp.asarray(rng.integers(0, 100, (pages, *tile[:2], width)), format.code_dtype if format else case.dtype)}
        arrays |= {f"{name}_packed": format}
        if format is not None and format.scale_dtype is not None:
            shape = format.scale_shape(case.page_size, case.head_dim)
            arrays[f"{name}_scales"] = jnp.asarray(rng.random((pages, case.kv_heads, *shape)), format.scale_dtype)
    arrays["open"] = OpenPages(*(jnp.asarray(x.astype(jnp.dtype(case.dtype))) for x in opened), jnp.asarray(row_of))
    indexes = {}
    for key, kind, size in (*case.named_kinds, ("other", "mean", case.page_size)):
        shape = (pages, case.kv_heads, case.page_size // size, *index_shape(kind, size, case.head_dim))
        indexes[key] = jnp.asarray(rng.integers(0, 100, shape), index_dtype(kind, case.dtype))
    valid = np.ones(positions.shape, bool)
    valid[0, 1:2] = False
    k, v = (jnp.asarray(x.astype(jnp.dtype(case.token_dtype or case.dtype))) for x in new)
    found = Pages(**arrays), indexes, k, v, *map(jnp.asarray, (positions, valid, table))
    return *found, None if frames is None else jnp.asarray(frames)


def run(op, case: Case) -> tuple:
    """What an op with the arguments of `append_tokens` makes of a case."""
    *given, frames = arguments(case)
    return op(*given, kinds=case.named_kinds, frames=frames)


@functools.cache
def expected(case: Case) -> tuple:
    """By `xla`, on the device that the kernel is compared on."""
    return jax.jit(functools.partial(XLA, kinds=case.named_kinds))(*arguments(case)[:-1], frames=arguments(case)[-1])


def as_read(result: tuple) -> tuple:
    """Numbers in place of codes: of a scale that is NaN they may be any."""
    pages, indexes = result
    return pages.keys, pages.values, pages.open, indexes


def check(op, case: Case, wanted: tuple | None = None, form=lambda result: result) -> None:
    """All arrays bit for bit, but any NaN is like any other, and a mean may differ by a rounding. form: of results,
    what is compared."""
    found, wanted = (dict(jax.tree_util.tree_leaves_with_path(form(x))) for x in (run(op, case), wanted or expected(case)))
    assert found.keys() == wanted.keys()
    for path, ours in found.items():
        ref, name = wanted[path], jax.tree_util.keystr(path)
        assert (ours.shape, ours.dtype) == (ref.shape, ref.dtype), name
        if "mean" in name:
            np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (ours, ref)), rtol=2**-7, atol=1e-6, err_msg=name)
            continue
        if ours.dtype.name in CODES:
            ours, ref = (jnp.where(jnp.isnan(x), jnp.nan, x) for x in (ours, ref))
        assert np.asarray(ours).tobytes() == np.asarray(ref).tobytes(), name


# Mutants: what an append gets wrong, expressed on its results or its arguments.


def _result(change):
    """`change(before, after)` of the pages."""

    def op(pages, indexes, *rest, **keywords):
        after, built = XLA(pages, indexes, *rest, **keywords)
        return change(pages, after), built

    return op


def _given(**changes):
    names = ("pages", "indexes", "k", "v", "positions", "valid", "table")

    def op(*arrays, **keywords):
        named = dict(zip(names, arrays, strict=True))
        return XLA(*(named | {name: change(named) for name, change in changes.items()}).values(), **keywords)

    return op


def _indexes_of_the_rows(pages, indexes, *rest, **keywords):
    """Indexes of keys as they were before they were packed."""
    after, _ = XLA(pages, indexes, *rest, **keywords)
    as_they_are = pages.replace(k=jnp.zeros(pages.k.shape[:3] + pages.open.k.shape[3:], pages.open.k.dtype), k_scales=None, k_packed=None)
    return after, XLA(as_they_are, indexes, *rest, **keywords)[1]


MUTANTS = {
    "nothing": lambda *arrays, **_: arrays[:2],
    "not packed": _result(lambda old, new: new.replace(k=old.k, v=old.v, k_scales=old.k_scales, v_scales=old.v_scales)),
    "values not packed": _result(lambda old, new: new.replace(v=old.v, v_scales=old.v_scales)),
    "scales not written": _result(lambda old, new: new.replace(k_scales=old.k_scales, v_scales=old.v_scales)),
    "rows not written": _result(lambda old, new: new.replace(open=old.open)),
    "packed before the last token": _given(valid=lambda a: a["valid"] & ((a["positions"] + 1) % a["pages"].page_size != 0)),
    "another row": _given(
        pages=lambda a: a["pages"].replace(open=a["pages"].open.replace(row_of=jnp.where(a["pages"].open.row_of >= 0, 0, -1)))
    ),
    "closed pages are row 0": _given(
        pages=lambda a: a["pages"].replace(open=a["pages"].open.replace(row_of=jnp.maximum(a["pages"].open.row_of, 0)))
    ),
    "page ids for frames": lambda *arrays, frames, **keywords: XLA(*arrays, **keywords),
    "keys for values": _given(v=lambda a: a["k"]),
    "codes of neighbours exchanged": _result(lambda old, new: new.replace(k=new.k[..., ::-1])),
    "scales of the token before": _result(lambda old, new: new.replace(k_scales=jnp.roll(new.k_scales, 1, 2))),
    "indexes of the rows": _indexes_of_the_rows,
}
