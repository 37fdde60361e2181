"""copy_tiles by definition: one tile after the other."""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels.cache.copy_tiles.api import Call


def copy_tiles(call: Call, pages, sources, targets):
    """See `pallas_kernels.copy_tiles`; takes no config. Not for use under jit."""
    from_frames, to_frames = np.asarray(sources), np.asarray(targets)
    for i, head in np.ndindex(*from_frames.shape):
        source, target = int(from_frames[i, head]), int(to_frames[i, head])
        if source >= 0 and target >= 0:
            pages = jax.tree.map(lambda pool, s=source, t=target, h=head: pool.at[t, h].set(pool[s, h]), pages)
    return pages
