"""How a case calls its op: through the public functions, so that any implementation can be named."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.block_sparse_attention import block_sparse_attention
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.attention.selected_attention import selected_attention
from pallas_kernels.bench.cases import CHUNK_WINDOW, PAGE_SIZE, Case
from pallas_kernels.bench.inputs import Pool
from pallas_kernels.cache.append_tokens import append_tokens
from pallas_kernels.selection.page_index import page_index
from pallas_kernels.selection.select_blocks import select_blocks

Own = tuple[Any, ...]
"""The arguments that differ between two ops of one program: q, page table, lengths and, for lists, the list; for
`append` the tokens, their positions and the page table."""


def op_of(case: Case, implementation: str | None) -> Callable[[Pool, Own], Any]:
    """The op of a case as a function of the pool and one op's own arguments. Ops that attend return out and lse first;
    `sparse` and `pair` then the list. `append` returns the pool."""
    sm_scale = case.sizes.head_dim**-0.5

    def select(pool: Pool, q, table, lengths):
        budget = case.budget
        sizes = {"page_size": PAGE_SIZE, "block_size": budget.block_size, "k": budget.k, "sink": budget.sink, "local": budget.local}
        return select_blocks(q, pool.index, table, lengths, kind="bounds", **sizes, implementation=implementation)

    def gather(pool: Pool, q, table, lengths, blocks=None):
        listed = {"blocks": blocks, "block_size": case.block_size, "sm_scale": sm_scale}
        return gather_attention(q, pool.pages, table, lengths, **listed, implementation=implementation)

    def chunk(pool: Pool, q, table, lengths, blocks=None):
        arrays = q, pool.pages, table, lengths - case.queries, lengths
        if blocks is None:
            return flash_attention(*arrays, sm_scale=sm_scale, implementation=implementation)
        listed = {"block_size": PAGE_SIZE, "query_tile": PAGE_SIZE, "window": (PAGE_SIZE, CHUNK_WINDOW)}
        return block_sparse_attention(*arrays, blocks=blocks, **listed, sm_scale=sm_scale, implementation=implementation)

    def pair(pool: Pool, q, table, lengths):
        blocks = select(pool, q, table, lengths)
        return *gather(pool, q, table, lengths, blocks), blocks

    def sparse(pool: Pool, q, table, lengths):
        budget = case.budget
        sizes = {"block_size": budget.block_size, "budget": budget.k, "sink": budget.sink, "local": budget.local, "sm_scale": sm_scale}
        arrays = q, pool.pages, pool.index, table, lengths
        if budget.shortlist is not None:
            sizes |= {"shortlist": budget.shortlist, "codes": pool.codes, "codes_kind": budget.codes}
        return selected_attention(*arrays, kind="bounds", **sizes, implementation=implementation)

    def index(pool: Pool, keys):
        return page_index(keys, kind="bounds", block_size=case.block_size, implementation=implementation)

    def append(pool: Pool, k, v, positions, table):
        arrays = pool.pages, {"index": pool.index}, k, v, positions, jnp.ones(positions.shape, bool), table
        kinds = (("index", "bounds", case.block_size),)
        pages, indexes = append_tokens(*arrays, kinds=kinds, implementation=implementation)
        return Pool(pages, indexes["index"])

    attending = {"dense": gather, "gather": gather, "sparse": sparse, "pair": pair}
    return (attending | {"chunk": chunk, "select": select, "index": index, "append": append})[case.op]


def contiguous_attention(case: Case, implementation: str) -> Callable[[None, Own], jax.Array]:
    """`jax.nn.dot_product_attention` over keys `[B, S, K, D]`: the dense baseline."""
    sm_scale = case.sizes.head_dim**-0.5

    def attend(pool: None, q, k, v):
        return jax.nn.dot_product_attention(q, k, v, scale=sm_scale, implementation=implementation)

    return attend


def chained(op: Callable[[Any, Own], Any]) -> Callable[[Any, Sequence[Own]], list]:
    """A compiled program that runs the op once for each of `owns`, one after the other, and returns every result.

    As in a decode step, the launches of such a program can be captured as one CUDA graph. A barrier on all of an op's
    own arguments keeps the order. Without it XLA copies the pages of several ops at once, and reads a page that they
    share only once.
    """
    inner = jax.jit(op)

    @jax.jit
    def program(pool, owns):
        results = []
        for own in owns:
            if results:
                own, results[-1] = jax.lax.optimization_barrier((own, results[-1]))
            results.append(inner(pool, *own))
        return results

    return program


def in_place(op: Callable[[Pool, Own], Pool]) -> Callable[[Pool, Sequence[Own]], Pool]:
    """A compiled program that runs the op once for each of `owns`, each on the pool that the op before returned.
    DONATES pool."""
    inner = jax.jit(op)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(pool, owns):
        for own in owns:
            pool = inner(pool, *own)
        return pool

    return program


def poison(results: Any) -> None:
    """Fill freed memory of the size of `results` with NaN, so that unwritten elements are likely to show."""
    filled = [jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else -2, x.dtype) for x in jax.tree.leaves(results)]
    jax.block_until_ready(filled)
