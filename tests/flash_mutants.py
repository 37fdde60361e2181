"""Wrong versions of flash_attention, which its suites must reject: called with the op that they are made from, then its
arguments."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.core import merge


def _zeros(base, *arrays, **keywords):
    return tuple(jnp.zeros_like(x) for x in base(*arrays, **keywords))


def _values_from_keys(base, q, k, v, *arrays, **keywords):
    return base(q, k, k, *arrays, **keywords)


def _keys_from_values(base, q, k, v, *arrays, **keywords):
    return base(q, v, v, *arrays, **keywords)


def _on_table(change):
    def op(base, q, k, v, table, starts, lengths, **keywords):
        return base(q, k, v, change(table, k.shape[0]), starts, lengths, **keywords)

    return op


def _page_doubled(base, q, k, v, table, *positions, **keywords):
    parts = [base(q, k, v, x, *positions, **keywords) for x in (table, table.at[:, 1:].set(-1))]
    return merge.merge_attention(*zip(*parts, strict=True))


def _scaled(factor):
    def op(base, *arrays, sm_scale, **keywords):
        return base(*arrays, sm_scale=sm_scale * arrays[0].shape[-1] ** factor, **keywords)

    return op


def _moved(starts_by, lengths_by):
    def op(base, q, k, v, table, starts, lengths, **keywords):
        return base(q, k, v, table, starts + starts_by, jnp.maximum(lengths + lengths_by, 0), **keywords)

    return op


def _not_causal(base, q, k, v, table, starts, lengths, **keywords):
    return base(q, k, v, table, lengths, lengths, **keywords)


def _starts_at_a_page(base, q, k, v, table, starts, lengths, **keywords):
    return base(q, k, v, table, starts // k.shape[2] * k.shape[2], lengths, **keywords)


def _window(sink, recent):
    def op(base, *arrays, window, **keywords):
        return base(*arrays, window=window and (window[0] + sink, window[1] + recent), **keywords)

    return op


def _heads_interleaved(base, q, k, *arrays, **keywords):
    split = q.reshape(*q.shape[:2], -1, k.shape[1], q.shape[3]).swapaxes(2, 3).reshape(q.shape)
    return base(split, k, *arrays, **keywords)


def _lse_in_base_2(base, *arrays, **keywords):
    out, lse = base(*arrays, **keywords)
    return out, lse / np.log(2)


def _multiplied_in_bfloat16(base, q, k, v, *arrays, **keywords):
    out, lse = base(*(x.astype(jnp.bfloat16) for x in (q, k, v)), *arrays, **keywords)
    return out.astype(q.dtype), lse


def _last_tile_lost(base, q, *arrays, **keywords):
    out, lse = base(q, *arrays, **keywords)
    return out.at[:, -(q.shape[1] % 8 or 8) :].set(0), lse


MUTANTS = {
    "zeros": _zeros,
    "V read from K": _values_from_keys,
    "K read from V": _keys_from_values,
    "one page dropped": _on_table(lambda table, pages: table.at[:, -1].set(-1)),
    "one page read for another": _on_table(lambda table, pages: table.at[:, 1].set(table[:, 0])),
    "the neighbour's table": _on_table(lambda table, pages: jnp.roll(table, 1, axis=0)),
    "-1 in the table wraps": _on_table(lambda table, pages: jnp.where(table < 0, pages - 1, table)),
    "one page doubled": _page_doubled,
    "scale times sqrt(D)": _scaled(0.5),
    "scale over sqrt(D)": _scaled(-0.5),
    "length one short": _moved(0, -1),
    "length and chunk one late": _moved(1, 1),
    "causal mask one late": _moved(1, 0),
    "causal mask one early": _moved(-1, 0),
    "not causal": _not_causal,
    "starts rounded to pages": _starts_at_a_page,
    "one sink token more": _window(1, 0),
    "window one token wider": _window(0, 1),
    "heads interleaved": _heads_interleaved,
    "LSE in base 2": _lse_in_base_2,
    "multiplied in bfloat16": _multiplied_in_bfloat16,
    "last tile of queries lost": _last_tile_lost,
}
