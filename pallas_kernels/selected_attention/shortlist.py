"""The blocks of a shortlist that get the most attention by their keys, in few bits or as pages have them, for any backend.

Memory traffic: the codes or keys of the shortlist, and the keys of sink and local blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.gather_attention import gather_attention
from pallas_kernels.select_blocks import block_lse, block_shares
from pallas_kernels.selected_attention.api import Call

_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every block


def refined_list(call: Call, q, pages, codes, table, lengths, frames, ids: Int[Array, "B T K S"]) -> Int[Array, "B T K W"]:
    """Of the list `ids` (sink, shortlist, local, ascending) what `selected_attention` lists; ascending, -1 at the end."""
    candidate = _candidates(call, pages.page_size, lengths, ids)
    always = jnp.sort(jnp.where(candidate | (ids < 0), _NONE, ids), axis=-1)[..., : ids.shape[-1] - call.shortlist]
    always = jnp.where(always == _NONE, -1, always)
    places = table if frames is None else frames, lengths
    sizes = {"block_size": call.block_size, "sm_scale": call.sm_scale}
    _, near = gather_attention(q, pages, *places, blocks=always, **sizes)
    if codes is None:
        listed = jnp.where(candidate, ids, -1)
        _, _, found = gather_attention(q, pages.without_values, *places, blocks=listed, return_block_lse=True, **sizes)
    else:
        per_page = pages.page_size // call.block_size
        page = jnp.take_along_axis(table[:, None, None], jnp.maximum(ids, 0) // per_page, axis=3)
        rows = jnp.where(candidate, page * per_page + ids % per_page, -1)
        found = block_lse(q, codes, rows, kind=call.codes_kind, sm_scale=call.sm_scale)
    scores, _ = block_shares(near, found, ids.shape[2])

    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(candidate, jnp.where(scores >= lowest, scores, lowest), -jnp.inf)  # NaN and -inf count as the lowest number
    best, places = jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), min(call.budget, ids.shape[-1]))  # of equal ones the lower block
    chosen = jnp.where(best > -jnp.inf, jnp.take_along_axis(ids, places, axis=3), -1)
    listed = jnp.concatenate([always, chosen], axis=3)
    listed = jnp.sort(jnp.where(listed < 0, _NONE, listed), axis=3)[..., : call.width(pages.page_size)]
    return jnp.where(listed == _NONE, -1, listed)


def _candidates(call: Call, page_size: int, lengths, ids):
    """Which entries of the list are distant, see `pallas_kernels.select_blocks.select_blocks`."""
    num_queries, per_page = ids.shape[1], page_size // call.block_size
    position = (lengths[:, None] - num_queries + jnp.arange(num_queries, dtype=jnp.int32))[..., None, None]
    first_local = jnp.clip(jnp.minimum(position // call.block_size - call.local + 1, position // page_size * per_page), 0)
    return (ids >= call.sink) & (ids < first_local)
