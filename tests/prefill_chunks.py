"""A chunk of queries over pages, the attention that it pays, written out plainly, and the peers of benchmarks/ in tiny
sizes."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import PagedKV
from kvjax.policies.prefill import PrefillContext, parse_prefill
from kvjax.policies.prefill.naming import PEERS
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

SIZES = {"chi": 8, "key_block": 8, "sink_tokens": 8, "window_tokens": 12}
PAGE_WINDOW = {"window_tokens": 16}
SCALE = 0.35
FOLDER = Path(__file__).parents[1] / "benchmarks" / "peers"


def named(word, *args):
    """The name of a peer with tiny sizes."""
    sizes = {"delta": {}, "bounds-share": SIZES | PAGE_WINDOW}.get(word, SIZES)
    settings = "/".join([*map(str, args), *(f"{name}={size}" for name, size in sizes.items())])
    return f"{FOLDER}/{PEERS[word]}:{settings}"


def peer(word, *args):
    return parse_prefill(named(word, *args))


@functools.partial(jax.jit, static_argnames="policy")
def attend(policy, query, layer, ctx):
    """Compiled once per policy and shapes, whatever number of tests ask."""
    return policy.attend(query, layer, ctx)


@functools.partial(jax.jit, static_argnames="policy")
def attend_sparse(policy, query, layer, ctx):
    return policy.attend_sparse(query, layer, ctx)


@functools.partial(jax.jit, static_argnames="policy")
def find_lists(policy, query, layer, ctx):
    return policy.lists(query, layer, ctx)


@functools.cache
def chunk(seed=0, start=64, length=120, num_queries=64, page_size=16, capacity=128):
    """(query, layer, context): a chunk at the end of one sequence on permuted pages; padding after it and NaN wherever
    nothing is."""
    rng = np.random.default_rng(seed)
    pages = capacity // page_size
    table = rng.permutation(pages + 3)[:pages]
    pool = np.full((2, pages + 3, 2, page_size, 8), np.nan, np.float32)
    for position in range(length):
        pool[:, table[position // page_size], :, position % page_size] = rng.standard_normal((2, 2, 8))
    query = 2 * rng.standard_normal((1, num_queries, 6, 8))
    used = -(-length // page_size)
    table = np.where(np.arange(pages) < used, table, -1)[None].astype(np.int32)
    k, v = map(jnp.asarray, pool)
    layer = PagedKV(Pages(k, v), {"bounds8": page_index(k, kind="bounds", block_size=8)} if page_size == 16 else {})
    positions = (jnp.asarray(table), jnp.array([start], jnp.int32), jnp.array([length], jnp.int32))
    return jnp.asarray(query, jnp.float32), layer, PrefillContext(*positions, layer=0, sm_scale=SCALE)


def laid_out(query, layer, ctx):
    """(q, keys, positions of the written queries, length) of the one sequence as numpy, keys per query head: [T H D],
    [S H D]."""
    length, start = int(ctx.lengths[0]), int(ctx.starts[0])
    keys = np.asarray(layer.pages.k)[np.asarray(ctx.page_table[0])].swapaxes(1, 2).reshape(-1, 2, 8)[:length].repeat(3, axis=1)
    positions = np.arange(start, min(start + query.shape[1], length))
    return np.asarray(query[0], np.float64)[: len(positions)], keys.astype(np.float64), positions, length


def paid(query, layer, ctx):
    """The attention of every written query of the chunk to every key, float64, `[H T S]`."""
    q, keys, positions, length = laid_out(query, layer, ctx)
    logits = np.where(np.arange(length) <= positions[:, None], np.einsum("thd,shd->hts", q, keys) * SCALE, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def distant(first, last):
    """Blocks of 8 with a key before `last`'s window of 12 and after the sink of 8."""
    return [block for block in range(16) if block * 8 + 8 > 8 and block * 8 <= last - 12]


def tiles(positions):
    """(tile, indices of its queries, first and last position)."""
    for number, start in enumerate(range(0, len(positions), 8)):
        of_tile = range(start, min(start + 8, len(positions)))
        yield number, list(of_tile), positions[of_tile[0]], positions[of_tile[-1]]


def listed(ids):
    return [block for block in np.asarray(ids).tolist() if block >= 0]


def close(a, b, rows=56, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a)[:, :rows], np.asarray(b)[:, :rows], rtol=0, atol=tolerance)
