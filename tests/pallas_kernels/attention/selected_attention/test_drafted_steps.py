"""A drafted step as an engine takes it, append then select and attend, against as many steps of one token: lists,
outputs, pages."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import append_tokens, selected_attention
from quick_cases import rest_long

PAGE, KV_HEADS, HEAD_DIM, WIDTH = 16, 2, 32, 6
COMMITTED = (0, 3, 15, 16, 29, 60, 79)
"""Tokens of each row before the step."""
KINDS = (("index", "bounds", 4),)
SELECT = {"kind": "bounds", "block_size": 4, "budget": 5, "sink": 1, "local": 2, "sm_scale": 0.3}


@functools.cache
def inputs(num_tokens: int, group: int) -> dict:
    """Pages of the committed tokens with their indexes, on permuted pages; what nobody wrote is NaN, and index rows of
    pages that are not sealed would beat all others. The step's queries, keys and values."""
    rng = np.random.default_rng(num_tokens * 10 + group)
    rows = len(COMMITTED)
    table = rng.permutation(rows * WIDTH).reshape(rows, WIDTH).astype(np.int32)
    pool = np.full((2, rows * WIDTH, KV_HEADS, PAGE, HEAD_DIM), np.nan, np.float32)
    index = np.full((rows * WIDTH, KV_HEADS, PAGE // 4, 2, HEAD_DIM), 99, np.float32)
    for row, length in enumerate(COMMITTED):
        for position in range(length):
            pool[:, table[row, position // PAGE], :, position % PAGE] = rng.standard_normal((2, KV_HEADS, HEAD_DIM))
        sealed = table[row, : length // PAGE]
        keys = pool[0, sealed].reshape(len(sealed), KV_HEADS, PAGE // 4, 4, HEAD_DIM)
        index[sealed] = np.stack([keys.max(3), keys.min(3)], axis=3)
    new = rng.standard_normal((2, rows, num_tokens, KV_HEADS, HEAD_DIM))
    q = 4 * rng.standard_normal((rows, num_tokens, KV_HEADS * group, HEAD_DIM))
    arrays = {"k_pages": pool[0], "v_pages": pool[1], "index": index, "k": new[0], "v": new[1], "q": q}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    return arrays | {"table": jnp.asarray(table), "lengths": jnp.asarray(COMMITTED, jnp.int32)}


@functools.partial(jax.jit, static_argnames="name")
def step(k_pages, v_pages, index, k, v, q, table, lengths, *, name: str):
    """Pages, index, out and lists after T tokens at positions `lengths` and on."""
    positions = lengths[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)
    arrays = (k_pages, v_pages, {"index": index}, k, v, positions, jnp.ones(positions.shape, bool), table)
    k_pages, v_pages, built = append_tokens(*arrays, kinds=KINDS, implementation="reference" if name == "reference" else None)
    attended = (q, k_pages, v_pages, built["index"], table, lengths + k.shape[1])
    out, _, ids = selected_attention(*attended, **SELECT, implementation=name)
    return k_pages, v_pages, built["index"], out, ids


@functools.cache
def one_by_one(num_tokens: int, group: int):
    """What steps of one token make of the same input."""
    state, outs, lists = dict(inputs(num_tokens, group)), [], []
    for t in range(num_tokens):
        own = {name: state[name][:, t : t + 1] for name in ("k", "v", "q")}
        *pools, out, ids = step(**(state | own), name="composed")
        state |= dict(zip(("k_pages", "v_pages", "index"), pools, strict=True)) | {"lengths": state["lengths"] + 1}
        outs.append(out)
        lists.append(ids)
    return *(state[name] for name in ("k_pages", "v_pages", "index")), jnp.concatenate(outs, 1), jnp.concatenate(lists, 1)


@pytest.fixture
def check(tools):
    def run(op, case) -> None:
        found, alone = op(**inputs(*case)), one_by_one(*case)
        np.testing.assert_array_equal(np.asarray(found[4]), np.asarray(alone[4]))
        tools.assert_rows_close(found[3], alone[3], 1e-5)
        for a, b in zip(found[:3], alone[:3], strict=True):
            tools.assert_same_bits(a, b)

    return run


CASES = [(1, 4), (4, 1), (4, 7), (8, 4), (8, 8), (16, 7), (16, 8)]


QUICK = ((4, 1), (4, 7), (16, 8))
"""Groups of one and more, drafts within a page and past it."""


@pytest.mark.quick_but("composed-(4, 1)", "composed-(16, 8)", "reference-(16, 8)")
@pytest.mark.parametrize("case", rest_long(CASES, *QUICK), ids=str)
@pytest.mark.parametrize("name", ["composed", "reference"])
def test_a_drafted_step_is_as_many_steps_of_one_token(check, name, case):
    check(functools.partial(step, name=name), case)


def _sealed_after_selecting(index, **arrays):
    """Pages that fill in the step are sealed when it is over: queries past their end score what was there before."""
    *pools, built, _, _ = step(index=index, **arrays, name="composed")
    attended = (arrays["q"], *pools, index, arrays["table"], arrays["lengths"] + arrays["q"].shape[1])
    out, _, ids = selected_attention(*attended, **SELECT, implementation="composed")
    return *pools, built, out, ids


def _selected_once(q, **arrays):
    """Every query reads the list of the first."""
    *pools, out, ids = step(q=q, **arrays, name="composed")
    return *pools, out, jnp.broadcast_to(ids[:, :1], ids.shape)


def _drafts_visible(q, lengths, **arrays):
    """Every query as the last one of the step."""
    *pools, _, _ = step(q=q, lengths=lengths, **arrays, name="composed")
    seen = (*pools, arrays["table"], lengths + q.shape[1])
    each = [selected_attention(q[:, t : t + 1], *seen, **SELECT, implementation="composed") for t in range(q.shape[1])]
    return *pools, jnp.concatenate([out for out, _, _ in each], 1), jnp.concatenate([ids for *_, ids in each], 1)


def _first_draft_written_twice(k, **arrays):
    return step(k=k.at[:, 1:2].set(k[:, :1]), **arrays, name="composed")


MUTANTS = {
    "sealed after selecting": _sealed_after_selecting,
    "selected once": _selected_once,
    "drafts see each other": _drafts_visible,
    "the first draft is written twice": _first_draft_written_twice,
}


@pytest.mark.quick_but("sealed after selecting")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, MUTANTS[mutant], [(8, 4)])
