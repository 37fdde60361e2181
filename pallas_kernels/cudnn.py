"""Attention of NVIDIA's cuDNN over pages that are copied next to each other, through `jax.nn.dot_product_attention`. The `cudnn`
implementations share it.

cuDNN reads keys and values of one sequence as one array, so a tile of pages is copied first. It has no tables, no windows with sinks, and
its causal mask begins at the first key. So history and chunk are separate calls, which their log-sum-exps combine. JAX rounds these
to 16 bits, and XLA leaves that out, because the way back follows at once. Only with `--xla_allow_excess_precision=false` it does not:
then results are less accurate.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, tiles
from pallas_kernels.merge import merge_attention
from pallas_kernels.pages import Pages, unlike

Attended = tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]
"""Output and log-sum-exp (float32)."""


def unsupported(q: Array, pages: Pages, window: tuple[int, int] | None) -> str | None:
    """Why cuDNN cannot attend to these pages, or None if it can."""
    most = 256 if dispatch.compute_capability() >= (9, 0) else 128
    if window is not None:
        return "cuDNN has no window with sinks"
    if reason := unlike(pages):
        return reason
    if q.dtype != pages.k.dtype or q.dtype.itemsize != 2:
        return f"cuDNN takes bfloat16 or float16, the same in q and pages; got {q.dtype} and {pages.k.dtype}"
    if pages.head_dim % 8 or pages.head_dim > most:
        return f"cuDNN takes head dims of multiples of 8 up to {most} on this GPU; got {pages.head_dim}"
    return None


def attend(q: Float[Array, "B T H D"], k: Array, v: Array, counts: Int[Array, "B"], *, sm_scale: float, is_causal: bool) -> Attended:
    """Attention to the first keys, `counts` of the S, of k and v `[B, S, K, D]`. is_causal: query t sees only keys up to t. The
    log-sum-exp is -inf where a count is 0, and then the output means nothing.

    Keys and values from a count on must be finite.
    """
    options = {"scale": sm_scale, "is_causal": is_causal, "key_value_seq_lengths": jnp.maximum(counts, 1), "return_residual": True}
    out, lse = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)
    return out, jnp.where((counts > 0)[:, None, None], lse.astype(jnp.float32), -jnp.inf)


def attend_history(
    cut: tiles.Cut, q: Float[Array, "B T H D"], pages: Pages, table: Int[Array, "B M"], counts: Int[Array, "B"], sm_scale: float
) -> Attended:
    """Attention of every query to the first `counts` positions of its sequence, in float32; 0 and -inf where there are none. cut: of the
    pages into tiles."""
    page_size, width = pages.page_size, table.shape[1]
    held = jnp.clip(counts[:, None] - page_size * jnp.arange(width, dtype=jnp.int32), 0, page_size)  # tokens of each page
    held = jnp.where(table >= 0, held, 0)
    # Pages that are there first. Then only the last of these can be filled in part, and the tokens need no mask but their number.
    order = jnp.argsort(held == 0, axis=1, stable=True)
    frames = jnp.pad(jnp.take_along_axis(jnp.maximum(table, 0), order, axis=1), ((0, 0), (0, cut.width - width)))
    total = held.sum(axis=1, dtype=jnp.int32)

    def fold(first, size, state):
        frame = jax.lax.dynamic_slice_in_dim(frames, first, size, axis=1)
        count = jnp.clip(total - first * page_size, 0, size * page_size)
        written = (jnp.arange(size * page_size) < count[:, None])[..., None, None]  # what is not may be NaN
        k, v = (jnp.where(written, _together(pool[frame]), 0) for pool in (pages.k, pages.v))
        out, lse = attend(q, k, v, count, sm_scale=sm_scale, is_causal=False)
        merged = merge_attention((state[0], out.astype(jnp.float32)), (state[1], lse))
        return jax.lax.optimization_barrier(merged)  # compiled alone, so with the same bits whatever follows

    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)
    return tiles.walk(cut, -(-total.max() // page_size), fold, nothing)


def attend_chunk(
    q: Float[Array, "B T H D"], pages: Pages, table: Int[Array, "B M"], starts: Int[Array, "B"], lengths: Int[Array, "B"], sm_scale: float
) -> Attended:
    """Causal attention of chunks to their own keys, from positions `starts` on. All of their pages must be there."""
    position = starts[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)
    frame = jnp.take_along_axis(table, position // pages.page_size, axis=1, mode="fill", fill_value=0)
    written = (position < lengths[:, None])[..., None, None]  # what is not may be NaN
    k, v = (jnp.where(written, pool[jnp.maximum(frame, 0), :, position % pages.page_size], 0) for pool in (pages.k, pages.v))
    return attend(q, k, v, jnp.clip(lengths - starts, 0, q.shape[1]), sm_scale=sm_scale, is_causal=True)


def _together(read: Float[Array, "B n K P D"]) -> Float[Array, "B n*P K D"]:
    """The tokens of pages in order."""
    batch, _, kv_heads, _, head_dim = read.shape
    return read.swapaxes(2, 3).reshape(batch, -1, kv_heads, head_dim)
