"""Wrong versions of block_sparse_attention, which suites must reject: called with the op that they are made from, then
its arguments."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def _with(change=None, result=None, **keyword_changes):
    """A mutant: arguments by name changed by `change`, keywords by functions of the same name, results by `result`."""

    def op(base, *arrays, **keywords):
        names = ("q", "k", "v", "table", "starts", "lengths")
        given = dict(zip(names, arrays, strict=True)) | keywords
        given |= change(given) if change else {}
        given |= {name: of(given[name]) for name, of in keyword_changes.items()}
        operands = [given.pop(name) for name in names]
        found = base(*operands, **given)
        return result(*found) if result else found

    return op


def _window_counted_twice(given):
    """Listed keys of the window once more: what adding two partial attentions that overlap gives."""
    return {"blocks": jnp.concatenate([given["blocks"], given["blocks"][..., :1]], axis=-1)}


def _of_kv_head(given):
    group = given["q"].shape[2] // given["k"].shape[1]
    return {"blocks": jnp.repeat(given["blocks"][:, :, ::group], group, axis=2)}


MUTANTS = {
    "zeros": _with(result=lambda out, lse: (jnp.zeros_like(out), jnp.zeros_like(lse))),
    "V read from K": _with(lambda given: {"v": given["k"]}),
    "K read from V": _with(lambda given: {"k": given["v"]}),
    "one page dropped": _with(table=lambda table: table.at[:, -1].set(-1)),
    "one page read for another": _with(table=lambda table: table.at[:, 1].set(table[:, 0])),
    "the neighbour's table": _with(table=lambda table: jnp.roll(table, 1, axis=0)),
    "-1 in the table wraps": _with(lambda given: {"table": jnp.where(given["table"] < 0, len(given["k"]) - 1, given["table"])}),
    "scale times sqrt(D)": _with(lambda given: {"sm_scale": given["sm_scale"] * given["q"].shape[3] ** 0.5}),
    "length one short": _with(lengths=lambda lengths: jnp.maximum(lengths - 1, 0)),
    "causal mask one late": _with(starts=lambda starts: starts + 1),
    "causal mask one early": _with(starts=lambda starts: starts - 1),
    "starts rounded to pages": _with(starts=lambda starts: starts // 16 * 16),
    "the neighbour tile's list": _with(blocks=lambda blocks: jnp.roll(blocks, 1, axis=1)),
    "the neighbour head's list": _with(blocks=lambda blocks: jnp.roll(blocks, 1, axis=2)),
    "one list per KV head": _with(_of_kv_head),
    "first block of a list lost": _with(blocks=lambda blocks: blocks.at[..., 0].set(-1)),
    "last block of a list lost": _with(blocks=lambda blocks: blocks.at[..., -1].set(-1)),
    "a list ends at its first -1": _with(blocks=lambda blocks: jnp.where(jnp.cumsum(blocks < 0, axis=-1) > 0, -1, blocks)),
    "-1 is block 0": _with(blocks=lambda blocks: jnp.where((blocks < 0) & ~(blocks == 0).any(-1, keepdims=True), 0, blocks)),
    "a block counted twice": _with(_window_counted_twice),
    "window lost": _with(window=lambda window: None),
    "window one token wider": _with(window=lambda window: window and (window[0], window[1] + 1)),
    "one sink token more": _with(window=lambda window: window and (window[0] + 1, window[1])),
    "LSE in base 2": _with(result=lambda out, lse: (out, lse / np.log(2))),
    "last tile of queries lost": _with(result=lambda out, lse: (out.at[:, -1:].set(0), lse)),
}
