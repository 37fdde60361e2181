"""Rows of state of recurrent layers: a chunk of prefill, a decode step, and the fold of a full page.

All functions are pure; under jit with a donated cache the updates are in place. Everything that decides bits is
computed row by row, in loops whose length the compiler does not know, so that bits are the same in every program.
`step` is the exception (see `delta_step`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.arrays import SlotLayer
from kvjax.model.protocols import Recurrence
from pallas_kernels.recurrent.gated_delta import causal_convolution, delta_fold, delta_page, delta_step


def prefill(
    layer: SlotLayer,
    rows: Int[Array, "B"],
    given: Recurrence,
    starts: Int[Array, "B"],
    fresh: Int[Array, "B"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T H Dv"], SlotLayer]:
    """The recurrence of one chunk of prefill.

    The chunk covers positions [starts, starts + T), which are whole pages. Of these, [fresh, lengths) are new. rows:
    rows of `layer`, all different. Returns what the new tokens read, 0 elsewhere, and the rows with these tokens. Bits
    do not depend on how tokens were cut into calls.
    """
    layer = catch_up(layer, rows, fresh, fresh < lengths, given)

    def of_row(number, carry):
        outs, layer = carry
        one = [jax.lax.dynamic_slice_in_dim(x, number, 1) for x in (rows, given.x, given.g, given.beta, starts, fresh, lengths)]
        out, layer = _prefill_row(layer, *one, given)
        return jax.lax.dynamic_update_slice_in_dim(outs, out, number, 0), layer

    shape = (*given.x.shape[:2], given.value_heads, given.value_dim)
    return jax.lax.fori_loop(0, rows.shape[0], of_row, (jnp.zeros(shape, given.x.dtype), layer))


def step(
    layer: SlotLayer, rows: Int[Array, "B"], given: Recurrence, written: Int[Array, "B"], active: Bool[Array, "B"]
) -> tuple[Float[Array, "B T H Dv"], SlotLayer]:
    """The recurrence of a decode step: T tokens of every active row, after the `written` ones. T is at most
    MAX_STEP_TOKENS and a page.

    `written` of the next call says how many of them stay; the others are never read. Returns what the tokens read, and
    the layer.
    """
    num_tokens, past = given.x.shape[1], given.width - 1
    most = layer.g.shape[1] - layer.page_size + 1
    if num_tokens > most:
        raise ValueError(f"a step writes at most {most} tokens to a recurrent layer with pages of {layer.page_size}, got {num_tokens}")
    layer = catch_up(layer, rows, written, active, given)
    own = jnp.where(active, rows, 0)
    counts = jnp.where(active, written - layer.first[own], 0)
    lengths = jnp.where(active, num_tokens, 0).astype(jnp.int32)
    inputs, page_g, corrections, start = layer.inputs[own], layer.g[own], layer.corrections[own], layer.start[own]
    tail = jax.vmap(lambda x, count: jax.lax.dynamic_slice_in_dim(x, count, past))(inputs, counts)
    convolved, _ = causal_convolution(given.x, given.weight, tail, lengths)
    q, k, v = given.split(convolved)
    page_k = _keys(inputs, counts, given)
    out, new = delta_step(q, k, v, given.g, given.beta, page_k, page_g, corrections, start, counts, lengths, scale=given.scale)
    # The writes come after all reads, so that they need no copy of the pool.
    layer, new = jax.lax.optimization_barrier((layer, new))
    places = counts[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
    at = jnp.where(active, rows, layer.first.shape[0])[:, None]
    return out, layer.replace(
        inputs=layer.inputs.at[at, past + places].set(given.x, mode="drop"),
        g=layer.g.at[at, places].set(given.g, mode="drop"),
        beta=layer.beta.at[at, places].set(given.beta, mode="drop"),
        corrections=layer.corrections.at[at, places].set(new, mode="drop"),
    )


def whole(given: Recurrence, chunk: int = 64) -> Float[Array, "B T H Dv"]:
    """The recurrence of whole sequences of T tokens, without a cache. It has no gradient."""
    (batch, num_tokens, _), heads = given.x.shape, given.value_heads
    pad = -num_tokens % chunk
    x, g, beta = (jnp.pad(array, ((0, 0), (0, pad), (0, 0))) for array in (given.x, given.g, given.beta))
    lengths = jnp.full(batch, num_tokens, jnp.int32)
    convolved, _ = causal_convolution(x, given.weight, jnp.zeros((batch, given.width - 1, x.shape[2]), x.dtype), lengths)
    nothing = jnp.zeros((batch, num_tokens + pad, heads, given.value_dim), jnp.float32)
    start = jnp.zeros((batch, heads, given.key_dim, given.value_dim), jnp.float32)
    static = {"scale": given.scale, "chunk": chunk}
    out, _ = delta_page(*given.split(convolved), g, beta, nothing, start, 0 * lengths, lengths, **static)
    return out[:, :num_tokens]


def catch_up(layer: SlotLayer, rows: Int[Array, "B"], written: Int[Array, "B"], active: Bool[Array, "B"], given: Recurrence) -> SlotLayer:
    """Move every active row to the page of its next token: a full page is folded, and a row without tokens starts from
    zero.

    written: tokens that the sequences have; a row is at most one page behind.
    """
    size, past = layer.page_size, given.width - 1
    behind = active & ((written == 0) | (written - layer.first[jnp.where(active, rows, 0)] >= size))
    order = jnp.argsort(~behind)

    def turn(number, layer: SlotLayer) -> SlotLayer:
        row, none = rows[order[number]], written[order[number]] == 0
        page = _row_of(layer, row)
        full = jnp.full(1, size, jnp.int32)
        k = _keys(page.inputs[:, : past + size], full, given)
        k, g, corrections = jax.lax.optimization_barrier((k, page.g[:, :size], page.corrections[:, :size]))
        start = delta_fold(k, g, corrections, page.start, full)
        ahead = page.replace(
            start=start,
            **{name: jnp.roll(getattr(page, name), -size, axis=1) for name in ("inputs", "g", "beta", "corrections")},
            first=page.first + size,
        )
        ahead = jax.tree.map(lambda x: jnp.where(none, 0, x), ahead)
        return jax.tree.map(lambda pool, x: jax.lax.dynamic_update_slice_in_dim(pool, x, row, 0), layer, ahead)

    return jax.lax.fori_loop(0, jnp.sum(behind), turn, layer)


def _prefill_row(layer: SlotLayer, row, x, g, beta, starts, fresh, lengths, given: Recurrence) -> tuple[Array, SlotLayer]:
    """`prefill` of one row, which is at the page of its first new token."""
    size, past, num_tokens = layer.page_size, given.width - 1, x.shape[1]
    page = _row_of(layer, row[0])
    start, first_new, end = starts[0], fresh[0], lengths[0]

    def joined(old: Float[Array, "1 n ..."], new: Float[Array, "1 T ..."], before: int):
        """Of positions start - before and following: the row's old tokens, of which `before` more lie before its first,
        then new ones."""
        position = start - before + jnp.arange(before + num_tokens, dtype=jnp.int32)
        at = position - page.first[0] + before
        there = ((position < first_new) & (at >= 0)).reshape(1, -1, *[1] * (new.ndim - 2))
        behind = jnp.pad(new, ((0, 0), (before, 0), *[(0, 0)] * (new.ndim - 2)))
        known = (position >= first_new).reshape(there.shape)
        return jnp.where(there, old.at[:, at].get(mode="clip"), jnp.where(known, behind, 0))

    inputs, g, beta = joined(page.inputs, x, past), joined(page.g, g, 0), joined(page.beta, beta, 0)
    convolved, _ = causal_convolution(inputs[:, past:], given.weight, inputs[:, :past], jnp.maximum(lengths - starts, 0))
    tokens = jax.lax.optimization_barrier((*given.split(convolved), g, beta))
    first_page, last_page = first_new // size, (end - 1) // size

    def of_page(number, carry):
        outs, corrections, state, _ = carry
        begin = number * size - start
        q, k, v, g, beta = (jax.lax.dynamic_slice_in_dim(array, begin, size, axis=1) for array in tokens)
        count = jnp.maximum(fresh - number * size, 0)
        length = jnp.minimum(lengths - number * size, size) - count
        static = {"scale": given.scale, "chunk": layer.chunk}
        out, corrections = delta_page(q, k, v, g, beta, corrections, state, count, length, **static)
        k, g, corrections = jax.lax.optimization_barrier((k, g, corrections))
        full = jnp.full(1, size, jnp.int32)
        following = jax.lax.cond(number < last_page, lambda: delta_fold(k, g, corrections, state, full), lambda: state)
        return jax.lax.dynamic_update_slice_in_dim(outs, out, begin, axis=1), corrections, following, state

    outs = jnp.zeros((1, num_tokens, given.value_heads, given.value_dim), x.dtype)
    carry = (outs, page.corrections[:, :size], page.start, page.start)
    outs, corrections, _, state = jax.lax.fori_loop(first_page, last_page + 1, of_page, carry)
    begin, there = last_page * size - start, end > first_new

    def kept(name: str, rows: Array) -> Array:
        """The page's rows in the layer, where there are new tokens."""
        whole = getattr(page, name)
        changed = jax.lax.dynamic_update_slice_in_dim(whole, rows, 0, axis=1) if rows.ndim > 1 and whole.ndim > 1 else rows
        return jax.lax.dynamic_update_slice_in_dim(getattr(layer, name), jnp.where(there, changed, whole), row[0], 0)

    return outs, layer.replace(
        start=kept("start", state),
        inputs=kept("inputs", jax.lax.dynamic_slice_in_dim(inputs, begin, past + size, axis=1)),
        g=kept("g", jax.lax.dynamic_slice_in_dim(g, begin, size, axis=1)),
        beta=kept("beta", jax.lax.dynamic_slice_in_dim(beta, begin, size, axis=1)),
        corrections=kept("corrections", corrections),
        first=kept("first", jnp.full(1, last_page * size, jnp.int32)),
    )


def _row_of(layer: SlotLayer, row: Int[Array, ""]) -> SlotLayer:
    """One row. It is read before any write, so that writes need no copy of the pool."""
    return jax.lax.optimization_barrier(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), layer))


def _keys(inputs: Float[Array, "B n E"], counts: Int[Array, "B"], given: Recurrence) -> Float[Array, "B n-W+1 K Dk"]:
    """Keys of each row's first `counts` tokens, 0 after them."""
    dim, past = given.key_heads * given.key_dim, given.width - 1
    own = inputs[..., dim : 2 * dim]
    convolved, _ = causal_convolution(own[:, past:], given.weight[dim : 2 * dim], own[:, :past], counts)
    return convolved.reshape(*convolved.shape[:2], given.key_heads, given.key_dim)
