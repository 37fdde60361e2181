"""The suite of flash_attention: every implementation against the reference, the reference against JAX, and mutants
against the suite."""

from __future__ import annotations

import functools

import as_on_accelerators
import jax
import jax.numpy as jnp
import pytest
from flash_mutants import MUTANTS
from paging import flash_attention
from quick_cases import rest_long

from pallas_kernels.attention.flash_attention import xla
from pallas_kernels.core import dispatch

SMALL_TILES = functools.partial(flash_attention, implementation="xla", config=xla.Config(query_tile=8, key_tile=32))
"""The base of the mutants: with tiles this small the inputs below take several."""

IMPLEMENTATIONS = {
    name: SMALL_TILES if name == "xla" else functools.partial(flash_attention, implementation=name)
    for name in dispatch.available("flash_attention")
    if name not in ("mosaic_gpu", "cudnn", "reference")  # the first has a suite of its own
}
OTHER_CONFIGS = {"default": None, "3 rows, odd tiles": xla.Config(query_tile=7, key_tile=1, rows=3)}

AT_END = (0, 0, 0, 0, 0, 16, 71, 72)
"""Chunks of 24 tokens that end where sequences of `make_paged` end; the short ones have padding after them."""
ANYWHERE = (0, 0, 3, 5, 9, 29, 80, 50)
"""The last one has keys after it that must not be seen."""

CASES = {
    "chunks at the end": {},
    "chunks anywhere": {"starts": ANYWHERE},
    "window": {"window": (5, 20)},
    "window that skips tiles": {"starts": ANYWHERE, "window": (3, 9)},
    "window of one token": {"window": (0, 1)},
    "one head": {"kv_heads": 1, "group": 1, "head_dim": 64},
    "one KV head of 8": {"kv_heads": 1, "group": 8, "starts": ANYWHERE},
    "groups of 7": {"group": 7, "head_dim": 128},
    "8 KV heads": {"kv_heads": 8, "group": 1},
    "bfloat16": {"dtype": "bfloat16", "starts": ANYWHERE},
    "float16": {"dtype": "float16"},
    "equal scores": {"keys": "equal"},
    "huge logits": {"keys": "huge"},
    "denormal keys": {"keys": "denormal"},
    "one token": {"num_queries": 1, "starts": (0, 0, 14, 15, 16, 39, 94, 95)},
    "a page is missing": {"hole": True},
    "pages of 4, one row": {"lengths": (29,), "page_size": 4, "width": 9, "num_queries": 29, "starts": (0,)},
}


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = {"num_queries": 24, "starts": AT_END} | CASES[case]
        window, starts = spec.pop("window", None), jnp.asarray(spec.pop("starts"), jnp.int32)
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        return (*paged.arrays[:4], starts, paged.lengths), {"sm_scale": paged.sm_scale, "window": window}

    return build


@pytest.fixture(scope="module")
def check(tools, arguments):
    """The checker that both implementations and mutants face."""

    reference = functools.partial(flash_attention, implementation="reference")
    exact, rounding = (tools.chunk_checker(arguments, reference, slack) for slack in (1, 2))

    def run(op, case: str) -> None:
        (q, *_), _ = arguments(case)
        (exact if q.dtype == jnp.float32 else rounding)(op, case)  # shorter types round weights, too

    return run


QUICK = (
    "groups of 7",
    "chunks at the end",
    "pages of 4, one row",
    "window of one token",
    "window that skips tiles",
    "one token",
    "bfloat16",
    "one head",
)


@pytest.mark.quick_but("xla-pages of 4, one row", "xla-groups of 7", "xla-one head")
@pytest.mark.parametrize("case", rest_long(CASES, *QUICK))
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(check, name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("case", ["window that skips tiles", "bfloat16"])
@pytest.mark.parametrize("config", OTHER_CONFIGS)
def test_xla_configs_match_reference(check, config, case):
    check(functools.partial(flash_attention, implementation="xla", config=OTHER_CONFIGS[config]), case)


@pytest.mark.quick_but("float16", "8 KV heads", "one KV head of 8", "one head", "groups of 7", "bfloat16", "pages of 4, one row")
@pytest.mark.parametrize("case", [case for case in CASES if "window" not in CASES[case]])
def test_cudnn_matches_reference(tools, arguments, case):
    """The parts are rounded before they are combined. Log-sum-exps in the thousands have an error of 2e-4 in
    float32."""
    slack = {"huge logits": 50, "bfloat16": 2, "float16": 2}.get(case, 1)
    reference = functools.partial(flash_attention, implementation="reference")
    tools.chunk_checker(arguments, reference, slack)(as_on_accelerators.cudnn_attention, case)


def test_cudnn_of_a_chunk_that_lacks_a_page(tools):
    """Its keys cannot be left out by their number, so `xla` takes the chunk."""
    paged = tools.make_paged(lengths=(96, 96), num_queries=24, hole=True)
    starts = jnp.asarray([72, 10], jnp.int32)
    arrays = *paged.arrays[:4], starts, paged.lengths
    found = as_on_accelerators.cudnn_attention(*arrays, sm_scale=paged.sm_scale)
    expected = flash_attention(*arrays, sm_scale=paged.sm_scale, implementation="reference")
    tools.assert_chunk_close(found, expected, starts, paged.lengths, 1e-5)


@pytest.mark.parametrize("window", [None, (0, 9)])
def test_reference_is_causal_attention(tools, window):
    """Against jax.nn.dot_product_attention, causal, on contiguous keys; its LSE against logsumexp."""
    paged = tools.make_paged(lengths=(96, 96), num_queries=96)
    k, v = (x[paged.page_table].swapaxes(2, 3).reshape(2, 96, 2, 32) for x in (paged.k, paged.v))
    starts = jnp.zeros(2, jnp.int32)
    out, lse = flash_attention(*paged.arrays[:4], starts, paged.lengths, sm_scale=paged.sm_scale, window=window, implementation="reference")
    local = window and (window[1] - 1, 0)
    with jax.default_matmul_precision("highest"):
        theirs = jax.nn.dot_product_attention(paged.q, k, v, is_causal=True, scale=paged.sm_scale, local_window_size=local)
    tools.assert_rows_close(out, theirs, 1e-5)
    logits = jnp.einsum("bthd,bshd->bths", paged.q, jnp.repeat(k, 4, axis=2), precision="highest") * paged.sm_scale
    behind = jnp.arange(96)[:, None] - jnp.arange(96)
    mask = (behind >= 0) & (behind < (window[1] if window else 96))
    tools.assert_lse_close(lse, jax.nn.logsumexp(jnp.where(mask[:, None], logits, -jnp.inf), axis=-1))


def test_chunks_are_slices_of_the_whole(tools):
    """Sinks, window and causality at any start: a chunk gives what the same queries give in one call from 0."""
    paged = tools.make_paged(lengths=(96, 96), num_queries=96)
    q, k, v, table, _ = paged.arrays
    op = functools.partial(flash_attention, sm_scale=paged.sm_scale, window=(5, 20))
    whole, whole_lse = op(q, k, v, table, jnp.zeros(2, jnp.int32), paged.lengths, implementation="reference")
    for start, stop in ((0, 31), (31, 33), (33, 96)):
        starts = jnp.full(2, start, jnp.int32)
        out, lse = op(q[:, start:stop], k, v, table, starts, starts + stop - start)
        tools.assert_rows_close(out, whole[:, start:stop], 1e-5)
        tools.assert_lse_close(lse, whole_lse[:, start:stop])


@pytest.mark.parametrize("window", [None, (5, 20)])
@pytest.mark.parametrize("fresh", [(0, 3), (40, 71), (200, 40)])
def test_queries_before_fresh_are_left_out(tools, fresh, window):
    """Whole tiles of them, of 8 queries, are 0 and finite. The others have the bits that they have without `fresh`."""
    paged = tools.make_paged(lengths=(96, 70), num_queries=48)
    starts, fresh = jnp.asarray([48, 40], jnp.int32), jnp.asarray(fresh, jnp.int32)
    op = functools.partial(SMALL_TILES, *paged.arrays[:4], starts, paged.lengths, sm_scale=paged.sm_scale, window=window)
    position = starts[:, None] + jnp.arange(48)
    old = fresh[:, None] >= starts[:, None] + 8 * (jnp.arange(48) // 8 + 1)
    tools.assert_all_same_bits(op(fresh=fresh), op(), position >= fresh[:, None])
    out = op(fresh=fresh)[0]
    assert jnp.isfinite(out).all()
    assert not out[old].any()


@pytest.mark.quick_but("-1 in the table wraps")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, functools.partial(MUTANTS[mutant], SMALL_TILES), [*QUICK, *CASES])


def test_reference_takes_no_config(arguments):
    arrays, keywords = arguments("one token")
    with pytest.raises(ValueError, match="takes no config"):
        flash_attention(*arrays, **keywords, config=xla.Config(), implementation="reference")
