"""What every implementation of append_tokens is tested with: inputs, the checker, and mutants that the checker must
reject."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from paging import append_tokens

from pallas_kernels.selection.page_index import CODED, coded_keys, index_dtype, index_shape, page_index

XLA = functools.partial(append_tokens, implementation="xla")
"""The base of the mutants."""
BOTH = (("bounds", 16), ("mean", 8))


@dataclasses.dataclass(frozen=True)
class Case:
    """starts: position of each row's first token. padding: tokens before the first and after the last valid one, per
    row in turn.

    content: what the keys of the pool and the tokens hold. hole: the last row has no second page. kinds: (kind, block
    size).
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
    "codes": Case(kinds=(("keys4", 16), ("bounds", 16), ("keys1", 4)), head_dim=64, dtype="bfloat16", num_tokens=2),
    "codes, a NaN shows": Case(
        starts=(15, 31, 14), kinds=(("keys8", 1), ("keys4", 8)), content="nan", dtype="bfloat16", num_tokens=2, head_dim=32
    ),
    "codes, float16": Case(kinds=(("keys2", 8), ("keys8", 16)), dtype="float16", head_dim=48, num_tokens=2, kv_heads=1),
    "codes of pages of 128": Case(
        starts=(127, 100, 383), page_size=128, head_dim=128, kinds=(("bounds", 128), ("keys4", 128)), dtype="bfloat16", kv_heads=1
    ),
    "codes of float32": Case(kinds=(("keys4", 16),), num_tokens=2),
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


TPU_CASES = {
    "TPU, drafts": Case(starts=(0, 11, 14, 93), num_tokens=3, head_dim=128),
    "TPU, a chunk in several tiles, padding, a page is missing": Case(
        starts=(-9, 5), num_tokens=40, padding=((0, 0), (2, 3)), hole=True, head_dim=128, kinds=(("bounds", 8),)
    ),
    "TPU, bfloat16, four indexes, a NaN shows": Case(
        starts=(15, 31, 30),
        num_tokens=2,
        dtype="bfloat16",
        kv_heads=3,
        head_dim=128,
        kinds=(("bounds", 16), ("bounds", 8), ("mean", 16), ("mean", 8)),
        content="nan",
    ),
    "TPU, no index": Case(starts=(7, 8), head_dim=128, kinds=()),
}
"""Of the shapes that the TPU form takes, small ones: it is interpreted."""
ALL_CASES = CASES | TPU_CASES


@functools.cache
def arguments(name: str) -> tuple:
    """k_pages, v_pages, indexes, k, v, positions, valid, page_table. Pages that no table names hold numbers that have
    to stay, page 0 and the last one are never named."""
    case = ALL_CASES[name]
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
        shape = (num_pages, case.kv_heads, case.page_size // size, *index_shape(kind, size, case.head_dim))
        old = rng.integers(0, 256, shape) if kind in CODED else rng.standard_normal(shape)
        indexes[key] = jnp.asarray(old.astype(jnp.dtype(index_dtype(kind, case.dtype))))
    t = np.arange(case.num_tokens)
    padding = [case.padding[row % len(case.padding)] for row in range(batch)]
    valid = np.array([(t >= before) & (t < case.num_tokens - after) for before, after in padding])
    positions = (np.array(case.starts)[:, None] + t).astype(np.int32)
    pages, tokens = pages.astype(jnp.dtype(case.dtype)), tokens.astype(jnp.dtype(case.token_dtype or case.dtype))
    (k_pages, v_pages), (k, v) = map(jnp.asarray, pages), map(jnp.asarray, tokens)
    return k_pages, v_pages, indexes, k, v, jnp.asarray(positions), jnp.asarray(valid), jnp.asarray(table)


@functools.cache
def expected(name: str) -> tuple:
    case = ALL_CASES[name]
    if not {kind for kind, _ in case.kinds} & set(CODED):
        return append_tokens(*arguments(name), kinds=case.named_kinds, implementation="reference")
    # The definition of codes takes minutes. The suite of `page_index` compares it with what any CPU computes.
    with jax.default_device(jax.devices("cpu")[0]):
        return XLA(*jax.device_put(arguments(name), jax.devices("cpu")[0]), kinds=case.named_kinds)


def check(op, name: str) -> None:
    """Pages bit for bit; bounds and what codes stand for exactly; a mean may differ by one rounding of the result; the
    rest stays bit for bit."""
    case = ALL_CASES[name]
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
        if kind in CODED:
            ours, ref = (np.asarray(coded_keys(kind, x[~kept].astype(np.uint8))) for x in (ours, ref))
            np.testing.assert_array_equal(ours, ref)
            continue
        tiny = float(jnp.finfo(jnp.float32).tiny)  # where denormals are flushed, both may give zero
        rtol = max(float(jnp.finfo(case.dtype).eps), 2e-6) if kind == "mean" else 0
        atol = 1e-6 * (kind == "mean" and case.content != "denormal") + tiny
        np.testing.assert_allclose(ours[~kept], ref[~kept], rtol=rtol, atol=atol)


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
