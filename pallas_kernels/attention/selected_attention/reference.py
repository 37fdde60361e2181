"""selected_attention by definition: the references of its two ops, and between them, of a shortlist, attention by codes
or keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.attention.selected_attention.api import Call
from pallas_kernels.core.soft_cap import scaled
from pallas_kernels.selection.page_index import coded_keys
from pallas_kernels.selection.select_blocks import select_blocks


def selected_attention(call: Call, q, pages, index, table, lengths, frames, codes):
    """See `pallas_kernels.selected_attention`; takes no config."""
    blocks = select_blocks(q, index, table, lengths, **dataclasses.asdict(call.selection(pages.page_size)), implementation="reference")
    listed = {"block_size": call.block_size, "implementation": "reference", "sm_scale": call.sm_scale}
    places = (pages, table if frames is None else frames, lengths)
    if call.refines:
        distant = _distant(call, pages.page_size, lengths, blocks)
        _, near = gather_attention(q, *places, blocks=jnp.where(distant, -1, blocks), **listed)
        *_, of_blocks = gather_attention(q, *places, blocks=blocks, return_block_lse=True, **listed)
        blocks = _refined(call, pages.page_size, q, codes, table, blocks, distant, near, of_blocks)
    out, lse = gather_attention(q, *places, blocks=blocks, **listed)
    return out, lse, blocks


def _distant(call: Call, page_size: int, lengths, blocks):
    """Which listed blocks lie between the sinks and the first local one: those before the last `local` blocks and the
    query's page."""
    last = (lengths[:, None] - blocks.shape[1] + jnp.arange(blocks.shape[1]))[:, :, None, None]
    before_local = (blocks <= last // call.block_size - call.local) & ((blocks + 1) * call.block_size <= last // page_size * page_size)
    return (blocks >= call.sink) & before_local


def _refined(call: Call, page_size: int, q, codes, table, blocks, distant, near, of_blocks):
    """The list with the `budget` distant blocks of it that fewer than `budget` others beat. of_blocks: LSE of all
    blocks by the keys of pages, which counts without codes."""
    group, scale = q.shape[2] // blocks.shape[2], call.sm_scale

    def by_codes(q, kv_head, table, blocks):
        first = blocks * call.block_size
        rows = codes[table[first // page_size], kv_head, first % page_size // call.block_size]
        logits = scaled(jnp.einsum("gd,nsd->gns", q.astype(jnp.float32), coded_keys(call.codes_kind, rows), precision="highest"), scale)
        return jax.nn.logsumexp(logits, axis=2)

    def of_head(q, near, of_blocks, kv_head, table, blocks, distant):  # q [G, D], near [G], of_blocks [G, W]
        found = jnp.where(distant, of_blocks if codes is None else by_codes(q, kv_head, table, blocks), -jnp.inf)
        log_shares = jax.nn.log_softmax(jnp.concatenate([near[:, None], found], axis=1), axis=1)[:, 1:]
        score = jax.nn.logsumexp(log_shares, axis=0)
        score = jnp.where(jnp.isnan(score), -jnp.inf, score).clip(jnp.finfo(jnp.float32).min)
        higher = (score > score[:, None]) | ((score == score[:, None]) & (blocks < blocks[:, None]))
        best = distant & ((distant & higher).sum(1) < call.budget)
        kept = jnp.sort(jnp.where((blocks >= 0) & (best | ~distant), blocks, jnp.iinfo(jnp.int32).max))[: call.width(page_size)]
        return jnp.where(kept == jnp.iinfo(jnp.int32).max, -1, kept)

    grouped = [x.reshape(*x.shape[:2], -1, group, *x.shape[3:]) for x in (q, near, of_blocks)]
    of_heads = jax.vmap(of_head, in_axes=(0, 0, 0, 0, None, 0, 0))
    of_queries = jax.vmap(of_heads, in_axes=(0, 0, 0, None, None, 0, 0))
    of_rows = jax.vmap(of_queries, in_axes=(0, 0, 0, None, 0, 0, 0))
    return of_rows(*grouped, jnp.arange(blocks.shape[2]), table, blocks, distant)
