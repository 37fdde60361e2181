"""The suite of gather_attention: every implementation against the reference, the reference against JAX, and mutants
against the suite."""

from __future__ import annotations

import functools

import as_on_accelerators
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import gather_attention

from pallas_kernels.attention.gather_attention import xla
from pallas_kernels.core import merge

SMALL_TILES = functools.partial(gather_attention, implementation="xla", config=xla.Config(tile_tokens=32, rows=1))
"""The base of the mutants: with tiles this small the inputs below take several."""

IMPLEMENTATIONS = {"xla": SMALL_TILES, "xla, accelerator": as_on_accelerators.xla_of("gather_attention")}
"""What does every input of this suite; the kernels for one chip have suites of their own beside it."""

OTHER_CONFIGS = {"default": None, "3 rows of 8 tokens": xla.Config(tile_tokens=8, rows=3)}

# inputs of `make_paged`, then: window; blocks = (listed places, block size, per query?) or None for dense; apart: the
# list has frames of its own, and the table names no page.
CASES = {
    "dense": {},
    "drafts": {"num_queries": 3},
    "drafts in a window": {"num_queries": 3, "window": (5, 20)},
    "window of one token": {"window": (0, 1)},
    "blocks are pages": {"blocks": (6, 16)},
    "blocks of 4, drafts, window": {"num_queries": 3, "blocks": (17, 4), "window": (5, 20)},
    "tokens": {"blocks": (40, 1)},
    "tiles apart, drafts, window": {"num_queries": 3, "blocks": (17, 4), "window": (5, 20), "apart": True},
    "tiles apart, a page is missing": {"blocks": (6, 16), "hole": True, "kv_heads": 4, "group": 2, "apart": True},
    "one head": {"kv_heads": 1, "group": 1, "head_dim": 64},
    "one KV head of 8": {"kv_heads": 1, "group": 8, "blocks": (6, 16)},
    "groups of 7": {"group": 7, "head_dim": 128, "num_queries": 2},
    "4 drafts of groups of 7, a list each": {"num_queries": 4, "group": 7, "blocks": (17, 4, True)},
    "8 drafts, a list each, window": {"num_queries": 8, "kv_heads": 1, "group": 1, "blocks": (5, 16, True), "window": (5, 20)},
    "16 drafts of groups of 8": {"num_queries": 16, "kv_heads": 1, "group": 8},
    "8 KV heads": {"kv_heads": 8, "group": 1, "blocks": (9, 8)},
    "bfloat16": {"dtype": "bfloat16", "num_queries": 3},
    "bfloat16 blocks": {"dtype": "bfloat16", "blocks": (17, 4)},
    "float16": {"dtype": "float16", "num_queries": 3, "blocks": (6, 16)},
    "equal scores": {"keys": "equal"},
    "huge logits": {"keys": "huge"},
    "denormal keys": {"keys": "denormal"},
    "a page is missing": {"hole": True, "num_queries": 3},
    "one row, page of 8": {"lengths": (29,), "page_size": 8, "width": 4},
}


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = dict(CASES[case])
        window, blocks, apart = (spec.pop(name, None) for name in ("window", "blocks", "apart"))
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        keywords = {"sm_scale": paged.sm_scale, "window": window}
        if blocks is not None:
            keywords |= {"blocks": tools.lists_for(paged, *blocks), "block_size": blocks[1]}
        if apart:
            k, v, keywords["block_frames"] = tools.tiles_apart(paged, keywords["blocks"], blocks[1])
            return (paged.q, k, v, jnp.full_like(paged.page_table, -1), paged.lengths), keywords
        return paged.arrays, keywords

    return build


SOON = (
    "window of one token",
    "blocks of 4, drafts, window",
    "tiles apart, drafts, window",
    "dense",
    "drafts in a window",
    "tokens",
    "8 drafts, a list each, window",
    "one row, page of 8",
)
"""Which find most mutants; programs of the first are those of quick cases."""


@pytest.mark.quick(
    "xla-window of one token",
    "xla-blocks of 4, drafts, window",
    "xla-tiles apart, drafts, window",
    "xla, accelerator-dense",
    "xla, accelerator-8 drafts, a list each, window",
    "xla, accelerator-float16",
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(check, name, case):
    check(IMPLEMENTATIONS[name], case, slack=2 if "accelerator" in name else 1)  # weights are rounded, too


@pytest.mark.parametrize("case", ["drafts in a window", "blocks of 4, drafts, window"])
@pytest.mark.parametrize("config", OTHER_CONFIGS)
def test_xla_configs_match_reference(check, config, case):
    check(functools.partial(gather_attention, implementation="xla", config=OTHER_CONFIGS[config]), case)


def test_inputs_are_not_flat(arguments):
    """A softmax near uniform would hide errors: of six blocks, the best holds far more than a sixth of the mass."""
    arrays, keywords = arguments("dense")
    _, lse, block_lse = gather_attention(*arrays, **keywords, return_block_lse=True)
    top_block = np.asarray(block_lse[-1].max(-1) - lse[-1])
    assert np.median(np.exp(top_block)) > 0.4


def test_reference_is_attention(tools):
    """Against jax.nn.dot_product_attention on contiguous keys: grouped heads, ragged lengths, and a sliding window."""
    paged = tools.make_paged(lengths=(96, 17, 40), num_queries=1, group=4)
    k, v = (jnp.nan_to_num(x[paged.page_table].swapaxes(2, 3).reshape(3, 96, 2, 32)) for x in (paged.k, paged.v))
    for window in (None, (0, 9)):
        out, lse = gather_attention(*paged.arrays, sm_scale=paged.sm_scale, window=window, implementation="reference")
        behind = paged.lengths[:, None, None, None] - 1 - jnp.arange(96)
        mask = (behind >= 0) & (behind < (window[1] if window else 96))
        with jax.default_matmul_precision("highest"):
            theirs = jax.nn.dot_product_attention(paged.q, k, v, mask=mask, scale=paged.sm_scale)
        tools.assert_rows_close(out, theirs, 1e-5)
        logits = jnp.einsum("bthd,bshd->bths", paged.q, jnp.repeat(k, 4, axis=2), precision="highest") * paged.sm_scale
        tools.assert_lse_close(lse, jax.nn.logsumexp(jnp.where(mask.swapaxes(1, 2), logits, -jnp.inf), axis=-1))


def test_reference_drafts_are_causal(tools):
    """Three drafted tokens against three separate calls, each of which sees one token more."""
    paged = tools.make_paged(num_queries=3)
    q, k, v, table, lengths = paged.arrays
    together = gather_attention(*paged.arrays, sm_scale=paged.sm_scale, implementation="reference")
    for t in range(3):
        seen = jnp.maximum(lengths - 2 + t, 0)
        alone = gather_attention(q[:, t : t + 1], k, v, table, seen, sm_scale=paged.sm_scale, implementation="reference")
        tools.assert_rows_close(together[0][:, t : t + 1], alone[0], 1e-5)
        tools.assert_lse_close(together[1][:, t : t + 1], alone[1])


@pytest.mark.quick_but(
    "16 drafts of groups of 8-xla", "16 drafts of groups of 8-reference", "4 drafts of groups of 7, a list each-reference"
)
@pytest.mark.parametrize("name", ["reference", "xla"])
@pytest.mark.parametrize("case", ["4 drafts of groups of 7, a list each", "8 drafts, a list each, window", "16 drafts of groups of 8"])
def test_a_draft_sees_what_a_step_of_its_own_would(tools, arguments, name, case):
    """T steps of one token, each at its position and with its own list, against one step of T."""
    (q, *pools, table, lengths), keywords = arguments(case)
    op = functools.partial(gather_attention, implementation=name)
    together, blocks = op(q, *pools, table, lengths, **keywords), keywords.get("blocks")
    for t in range(q.shape[1]):
        own = {} if blocks is None else {"blocks": blocks[:, t]}
        alone = op(q[:, t : t + 1], *pools, table, jnp.maximum(lengths - q.shape[1] + 1 + t, 0), **(keywords | own))
        tools.assert_rows_close(together[0][:, t : t + 1], alone[0], 1e-5)
        tools.assert_lse_close(together[1][:, t : t + 1], alone[1])


def test_block_lse_sums_to_lse(check, arguments):
    arrays, keywords = arguments("blocks of 4, drafts, window")
    for implementation in ("reference", "xla"):
        _, lse, block_lse = gather_attention(*arrays, **keywords, return_block_lse=True, implementation=implementation)
        np.testing.assert_allclose(jax.nn.logsumexp(block_lse, axis=-1), lse, atol=1e-5)


def test_without_block_lse_the_bits_are_the_same(tools, arguments):
    arrays, keywords = arguments("blocks of 4, drafts, window")
    for a, b in zip(SMALL_TILES(*arrays, **keywords), SMALL_TILES(*arrays, **keywords, return_block_lse=True), strict=False):
        tools.assert_same_bits(a, b)


def test_ids_beyond_the_table_are_skipped(tools):
    paged = tools.make_paged(lengths=(96, 40))
    inside = jnp.broadcast_to(jnp.array([0, 2, -1, -1], jnp.int32), (2, 2, 4))
    beyond = jnp.broadcast_to(jnp.array([0, 2, 6, 2**24], jnp.int32), (2, 2, 4))
    for implementation in ("reference", "xla"):
        op = functools.partial(gather_attention, *paged.arrays, sm_scale=paged.sm_scale, implementation=implementation)
        tools.assert_rows_close(op(blocks=beyond)[0], op(blocks=inside)[0], 1e-6)


def test_a_page_missing_inside_the_sequence_is_skipped(tools):
    paged = tools.make_paged(lengths=(96, 40))
    q, k, v, table, lengths = paged.arrays
    without = functools.partial(gather_attention, q, k, v, table.at[:, 1].set(-1), lengths, sm_scale=paged.sm_scale)
    listed = jnp.broadcast_to(jnp.array([0, 2, 3, 4, 5], jnp.int32), (2, 2, 5))
    expected, _ = gather_attention(*paged.arrays, blocks=listed, sm_scale=paged.sm_scale, implementation="reference")
    for implementation in ("reference", "xla"):
        tools.assert_rows_close(without(implementation=implementation)[0], expected, 1e-5)


# Mutants: what a kernel gets wrong, expressed on its arguments or its results.


def _zeros(*arrays, **keywords):
    return tuple(jnp.zeros_like(x) for x in SMALL_TILES(*arrays, **keywords))


def _values_from_keys(q, k, v, table, lengths, **keywords):
    return SMALL_TILES(q, k, k, table, lengths, **keywords)


def _keys_from_values(q, k, v, table, lengths, **keywords):
    return SMALL_TILES(q, v, v, table, lengths, **keywords)


def _page_dropped(q, k, v, table, lengths, **keywords):
    return SMALL_TILES(q, k, v, table.at[:, -1].set(-1), lengths, **keywords)


def _page_read_for_another(q, k, v, table, lengths, **keywords):
    return SMALL_TILES(q, k, v, table.at[:, 1].set(table[:, 0]), lengths, **keywords)


def _page_doubled(q, k, v, table, lengths, **keywords):
    out, lse, block_lse = SMALL_TILES(q, k, v, table, lengths, **keywords)
    again, lse_again, _ = SMALL_TILES(q, k, v, table.at[:, 1:].set(-1), lengths, **keywords)
    return *merge.merge_attention([out, again], [lse, lse_again]), block_lse


def _scaled(factor):
    def op(*arrays, sm_scale, **keywords):
        return SMALL_TILES(*arrays, sm_scale=sm_scale * arrays[0].shape[-1] ** factor, **keywords)

    return op


def _length_off(by):
    def op(q, k, v, table, lengths, **keywords):
        return SMALL_TILES(q, k, v, table, jnp.maximum(lengths + by, 0), **keywords)

    return op


def _drafts_see_each_other(q, *arrays, blocks=None, **keywords):
    lists = [blocks[:, t] if blocks is not None and blocks.ndim == 4 else blocks for t in range(q.shape[1])]
    each = [SMALL_TILES(q[:, t : t + 1], *arrays, blocks=lists[t], **keywords) for t in range(q.shape[1])]
    return tuple(jnp.concatenate(x, axis=1) for x in zip(*each, strict=True))


def _window(sink, recent):
    def op(*arrays, window, **keywords):
        return SMALL_TILES(*arrays, window=window and (window[0] + sink, window[1] + recent), **keywords)

    return op


def _heads_interleaved(q, k, *arrays, **keywords):
    split = q.reshape(*q.shape[:2], -1, k.shape[1], q.shape[3]).swapaxes(2, 3).reshape(q.shape)
    return SMALL_TILES(split, k, *arrays, **keywords)


def _neighbours_table(q, k, v, table, lengths, **keywords):
    return SMALL_TILES(q, k, v, jnp.roll(table, 1, axis=0), lengths, **keywords)


def _none_wraps_around(q, k, v, table, lengths, **keywords):
    return SMALL_TILES(q, k, v, jnp.where(table < 0, k.shape[0] - 1, table), lengths, **keywords)


def _no_block_wraps_around(*arrays, blocks=None, block_size=None, **keywords):
    if blocks is not None:
        last = (arrays[4].reshape(-1, *[1] * (blocks.ndim - 1)) - 1) // block_size
        blocks = jnp.where(blocks < 0, last, blocks)
    return SMALL_TILES(*arrays, blocks=blocks, block_size=block_size, **keywords)


def _first_heads_list(*arrays, blocks=None, **keywords):
    return SMALL_TILES(*arrays, blocks=None if blocks is None else jnp.broadcast_to(blocks[..., :1, :], blocks.shape), **keywords)


def _last_drafts_list(*arrays, blocks=None, **keywords):
    each = blocks is not None and blocks.ndim == 4
    return SMALL_TILES(*arrays, blocks=jnp.broadcast_to(blocks[:, -1:], blocks.shape) if each else blocks, **keywords)


def _first_heads_frames(*arrays, block_frames=None, **keywords):
    frames = None if block_frames is None else jnp.broadcast_to(block_frames[:, :1], block_frames.shape)
    return SMALL_TILES(*arrays, block_frames=frames, **keywords)


def _no_frame_wraps_around(*arrays, block_frames=None, **keywords):
    frames = None if block_frames is None else jnp.where(block_frames < 0, arrays[1].shape[0] - 1, block_frames)
    return SMALL_TILES(*arrays, block_frames=frames, **keywords)


def _frames_of_the_table(*arrays, block_frames=None, **keywords):
    return SMALL_TILES(*arrays, **keywords)


def _lse_in_base_2(*arrays, **keywords):
    out, lse, block_lse = SMALL_TILES(*arrays, **keywords)
    return out, lse / np.log(2), block_lse


def _block_lse_shifted(*arrays, **keywords):
    out, lse, block_lse = SMALL_TILES(*arrays, **keywords)
    return out, lse, jnp.roll(block_lse, 1, axis=-1)


def _multiplied_in_bfloat16(q, k, v, *arrays, **keywords):
    out, lse, block_lse = SMALL_TILES(*(x.astype(jnp.bfloat16) for x in (q, k, v)), *arrays, **keywords)
    return out.astype(q.dtype), lse, block_lse


def _empty_is_mean(*arrays, **keywords):
    out, lse, block_lse = SMALL_TILES(*arrays, **keywords)
    return jnp.where(lse[..., None] == -jnp.inf, 1e-3, out).astype(out.dtype), lse, block_lse


MUTANTS = {
    "zeros": _zeros,
    "V read from K": _values_from_keys,
    "K read from V": _keys_from_values,
    "one page dropped": _page_dropped,
    "one page read for another": _page_read_for_another,
    "one page doubled": _page_doubled,
    "scale times sqrt(D)": _scaled(0.5),
    "scale over sqrt(D)": _scaled(-0.5),
    "length one short": _length_off(-1),
    "length one long": _length_off(1),
    "drafts see each other": _drafts_see_each_other,
    "one sink token more": _window(1, 0),
    "window one token wider": _window(0, 1),
    "heads interleaved": _heads_interleaved,
    "the neighbour's table": _neighbours_table,
    "-1 in the table wraps": _none_wraps_around,
    "-1 in the list wraps": _no_block_wraps_around,
    "the first head's list": _first_heads_list,
    "the last draft's list": _last_drafts_list,
    "the first head's frames of listed blocks": _first_heads_frames,
    "frames of listed blocks from the table": _frames_of_the_table,
    "-1 in the frames of listed blocks wraps": _no_frame_wraps_around,
    "LSE in base 2": _lse_in_base_2,
    "block LSE one place off": _block_lse_shifted,
    "multiplied in bfloat16": _multiplied_in_bfloat16,
    "nothing to read is not 0": _empty_is_mean,
}


@pytest.mark.quick_but("-1 in the table wraps")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    first = ["tiles apart, a page is missing"] if "frames" in mutant else []  # the only case that shows one of these
    tools.must_fail(check, MUTANTS[mutant], [*first, *SOON, *CASES])


def test_drafts_with_lists_of_their_own_that_see_each_other_fail(tools, check):
    tools.must_fail(check, _drafts_see_each_other, ("4 drafts of groups of 7, a list each",))


def test_reference_takes_no_config(tools):
    paged = tools.make_paged(lengths=(5,), width=1)
    with pytest.raises(ValueError, match="takes no config"):
        gather_attention(*paged.arrays, sm_scale=1.0, config=xla.Config(), implementation="reference")
