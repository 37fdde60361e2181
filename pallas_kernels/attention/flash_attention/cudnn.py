"""flash_attention by NVIDIA's cuDNN, through `jax.nn.dot_product_attention`, for NVIDIA GPUs from Ampere on.

cuDNN reads keys and values of a sequence as one array, and its causal mask begins at the first key. So pages are
copied, and there is one call for the chunk's own keys and one for each tile of the history, which their log-sum-exps
combine. JAX rounds a log-sum-exp to 16 bits, and XLA leaves that out, because the way back follows at once (with
`--xla_allow_excess_precision=false` it does not, and results are less accurate). Memory traffic: the history is read,
copied and read again once per chunk; cuDNN reads a tile's keys once per tile of queries. Memory needed: a tile of keys
and values, and the output in float32. If a page of a chunk is missing (-1), `xla` takes the call.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.flash_attention import xla
from pallas_kernels.attention.flash_attention.api import Call
from pallas_kernels.core import dispatch
from pallas_kernels.core.merge import merge_attention
from pallas_kernels.core.pages import Pages, unlike
from pallas_kernels.xla import key_tiles

MIN_QUERIES = 128
"""For fewer cuDNN shares the keys of a head between its blocks, and two calls may differ in their bits."""

Attended = tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]
"""Output and log-sum-exp (float32)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """tile_tokens: of the history, copied at a time, rounded down to whole pages, at least one."""

    tile_tokens: int = 32768

    def __post_init__(self):
        if not isinstance(self.tile_tokens, int) or self.tile_tokens < 1:
            raise ValueError(f"tile_tokens must be a positive int, got {self.tile_tokens!r}")


def unsupported(call: Call, q, pages, table, starts, lengths, fresh) -> str | None:
    """Why this implementation cannot take this valid input, or None if it can."""
    most = 256 if dispatch.compute_capability() >= (9, 0) else 128
    if call.window is not None:
        return "cuDNN has no window with sinks"
    if reason := unlike(pages):
        return reason
    if q.dtype != pages.k.dtype or q.dtype.itemsize != 2:
        return f"cuDNN takes bfloat16 or float16, the same in q and pages; got {q.dtype} and {pages.k.dtype}"
    if pages.head_dim % 8 or pages.head_dim > most:
        return f"cuDNN takes head dims that are multiples of 8, up to {most} on this GPU; got {pages.head_dim}"
    if q.shape[1] < MIN_QUERIES:
        return f"it takes at least {MIN_QUERIES} queries, because for fewer cuDNN's bits vary; got {q.shape[1]}"
    return None


def flash_attention(call: Call, q, pages, table, starts, lengths, fresh):
    """See `pallas_kernels.flash_attention`. It leaves no row out. config: a `Config`, or None for the default."""
    if reason := unsupported(call, q, pages, table, starts, lengths, fresh):
        raise NotImplementedError(f"flash_attention 'cudnn': {reason}")
    return _attend(dataclasses.replace(call, config=call.config or Config()), q, pages, table, starts, lengths, fresh)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, starts, lengths, fresh):
    position = starts[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)
    frame = jnp.take_along_axis(table, position // pages.page_size, axis=1, mode="fill", fill_value=-1)
    missing = ((frame < 0) & (position < lengths[:, None])).any()
    history = jnp.minimum(starts, lengths)

    own = _attend_chunk(q, pages, jnp.maximum(frame, 0), position, lengths, call.sm_scale)

    def with_history():
        before, before_lse = _attend_history(call, q, pages, table, history)
        out, lse = merge_attention((before, own[0].astype(jnp.float32)), (before_lse, own[1]))
        return out.astype(q.dtype), lse

    def by_xla():
        return xla.flash_attention(dataclasses.replace(call, config=None), q, pages, table, starts, lengths, fresh)

    # One question to the device. While the host waits for the answer, the device attends to the chunk itself.
    case = jnp.where(missing, 2, (history > 0).any().astype(jnp.int32))
    return jax.lax.switch(case, (lambda: own, with_history, by_xla))


def _attend_chunk(
    q: Array, pages: Pages, frame: Int[Array, "B T"], position: Int[Array, "B T"], lengths: Array, sm_scale: float
) -> Attended:
    """Causal attention of chunks to their own keys."""
    written = (position < lengths[:, None])[..., None, None]  # what is not may be NaN
    k, v = (jnp.where(written, pool[frame, :, position % pages.page_size], 0) for pool in (pages.k, pages.v))
    return _product(q, k, v, jnp.clip(lengths - position[:, 0], 0, q.shape[1]), sm_scale=sm_scale, is_causal=True)


def _attend_history(call: Call, q: Float[Array, "B T H D"], pages: Pages, table: Int[Array, "B M"], counts: Int[Array, "B"]) -> Attended:
    """Attention of every query to the first `counts` positions of its sequence, in float32; 0 and -inf where there are
    none."""
    page_size, width = pages.page_size, table.shape[1]
    tile = max(1, call.config.tile_tokens // page_size)
    cut = key_tiles.Cut(width, tile, tile)
    held = jnp.clip(counts[:, None] - page_size * jnp.arange(width, dtype=jnp.int32), 0, page_size)  # tokens of each page
    held = jnp.where(table >= 0, held, 0)
    # Pages that are there first. Then only the last of these can be filled in part, and the tokens need no mask but
    # their number.
    order = jnp.argsort(held == 0, axis=1, stable=True)
    frames = jnp.pad(jnp.take_along_axis(jnp.maximum(table, 0), order, axis=1), ((0, 0), (0, cut.width - width)))
    total = held.sum(axis=1, dtype=jnp.int32)

    def fold(first, size, state):
        frame = jax.lax.dynamic_slice_in_dim(frames, first, size, axis=1)
        count = jnp.clip(total - first * page_size, 0, size * page_size)
        written = (jnp.arange(size * page_size) < count[:, None])[..., None, None]  # what is not may be NaN
        k, v = (jnp.where(written, _together(pool[frame]), 0) for pool in (pages.k, pages.v))
        out, lse = _product(q, k, v, count, sm_scale=call.sm_scale, is_causal=False)
        merged = merge_attention((state[0], out.astype(jnp.float32)), (state[1], lse))
        return jax.lax.optimization_barrier(merged)  # compiled alone, so with the same bits whatever follows

    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)
    return key_tiles.walk(cut, -(-total.max() // page_size), fold, nothing)


def _product(q: Float[Array, "B T H D"], k: Array, v: Array, counts: Int[Array, "B"], *, sm_scale: float, is_causal: bool) -> Attended:
    """Attention to the first `counts` keys of k and v `[B, S, K, D]`. is_causal: query t sees only keys up to t. The
    log-sum-exp is -inf where a count is 0, and then the output means nothing. Keys and values from a count on must be
    finite."""
    options = {"scale": sm_scale, "is_causal": is_causal, "key_value_seq_lengths": jnp.maximum(counts, 1), "return_residual": True}
    out, lse = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)
    return out, jnp.where((counts > 0)[:, None, None], lse.astype(jnp.float32), -jnp.inf)


def _together(read: Float[Array, "B n K P D"]) -> Float[Array, "B n*P K D"]:
    """The tokens of pages in order."""
    batch, _, kv_heads, _, head_dim = read.shape
    return read.swapaxes(2, 3).reshape(batch, -1, kv_heads, head_dim)
