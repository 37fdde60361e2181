"""place_tiles by definition: listed tiles are looked up one after the other, then missing ones are placed. Not for use
under jit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache.place_tiles.api import WAYS, Call, Placed


def place_tiles(call: Call, blocks, page_table, frames, lengths, tags, ages, now):
    """See `pallas_kernels.place_tiles`; takes no config. Of missing tiles that choose one place, the last in order gets
    it."""
    blocks, page_table, frames, lengths, now = (np.asarray(x) for x in (blocks, page_table, frames, lengths, now))
    tags, ages = np.array(tags), np.array(ages)
    batch, kv_heads, width = blocks.shape
    found_frames = np.full(blocks.shape, -1, np.int32)
    sources, targets = (np.full((batch * width, kv_heads), -1, np.int32) for _ in range(2))
    for head in range(kv_heads):
        entries = {}
        for row, w in np.ndindex(batch, width):
            block = blocks[row, head, w]
            if not 0 <= block < page_table.shape[1]:
                continue
            frame, page = frames[row, block], page_table[row, block]
            found_frames[row, head, w] = frame
            if frame >= call.border and page >= 0 and (block + 1) * call.page_size <= lengths[row] - call.num_queries:
                entries[row, w] = (page, frame, page % tags.shape[1])
        present = {at: page in tags[head, s] for at, (page, _, s) in entries.items()}
        for at, (page, _, s) in entries.items():
            if present[at]:
                ages[head, s, list(tags[head, s]).index(page)] = now
        chosen = {at: int(ages[head, s].argmin()) for at, (_, _, s) in entries.items() if not present[at]}
        for at, way in chosen.items():
            page, _, s = entries[at]
            tags[head, s, way] = page
        for (row, w), (page, frame, s) in entries.items():
            ways = [way for way in range(WAYS) if tags[head, s, way] == page]
            if not ways or ((row, w) in chosen and chosen[row, w] != ways[0]):
                continue
            place = call.first + s * WAYS + ways[0]
            found_frames[row, head, w] = place
            if (row, w) in chosen:
                ages[head, s, ways[0]] = now
                sources[row * width + w, head], targets[row * width + w, head] = frame, place
    return Placed(*(jnp.asarray(x) for x in (found_frames, sources, targets, tags, ages)))
