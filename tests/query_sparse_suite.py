"""What every implementation of query_sparse_attention is tested with: the checker, and wrong versions, which it must
reject: they are called with the op that they are made from, then its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from paging import query_sparse_attention

SELECTION = {"gamma": 3, "block_size": 4, "k_blocks": 5, "window": None, "tournament": False, "estimate": "quantile"}
"""Of cases that do not say."""


def arguments_of(tools, cases: dict[str, dict]) -> Callable:
    """case -> (positional arguments, keywords) of the op. cases: inputs of `make_paged`, `starts` and sizes of a
    selection."""

    @functools.cache
    def build(case: str):
        spec = dict(cases[case])
        keywords = {name: spec.pop(name, value) for name, value in SELECTION.items()}
        keywords["k_exact"] = spec.pop("k_exact", keywords["k_blocks"])
        starts, keys = jnp.asarray(spec.pop("starts"), jnp.int32), spec.get("keys")
        if keys in ("ties", "infinite"):
            spec.pop("keys")
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        q, k, v, table, lengths = paged.arrays
        if keys in ("equal", "ties"):  # small integers: dot products are exact, and often the same
            q = jnp.round(q / 4)
        if keys == "ties":
            k = jnp.clip(jnp.round(k), -1, 1).at[..., 6:].multiply(0)
        elif keys == "infinite":
            q, k = jnp.abs(q) + 1, k.at[table[-2:, 1:3]].set(-3e38)
        return (q, k, v, table, starts, lengths), keywords | {"sm_scale": paged.sm_scale}

    return build


def checker(tools, arguments: Callable, slack: float = 1) -> Callable:
    """(op, case) -> asserts the reference's results; lists have to be the same slot by slot. slack: times the rounding
    of out."""

    @functools.cache
    def expected(case: str):
        arrays, keywords = arguments(case)
        return query_sparse_attention(*arrays, **keywords, implementation="reference")

    def run(op, case: str) -> None:
        arrays, keywords = arguments(case)
        out, lse, ids, scores = op(*arrays, **keywords)
        ref_out, ref_lse, ref_ids, ref_scores = expected(case)
        tools.assert_rows_close(out, ref_out, slack * tools.row_error[arrays[0].dtype.name])
        tools.assert_lse_close(lse, ref_lse)
        assert ids.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(ids), np.asarray(ref_ids))
        tools.assert_lse_close(scores, ref_scores)

    return run


def _zeros(base, *arrays, **keywords):
    return tuple(jnp.zeros_like(x) for x in base(*arrays, **keywords))


def _results(change):
    """change: (out, lse, ids, scores) -> the same, wrong."""
    return lambda base, *arrays, **keywords: change(*base(*arrays, **keywords))


def _by_id(out, lse, ids, scores):
    order = jnp.argsort(jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids), axis=-1)
    return out, lse, *(jnp.take_along_axis(x, order, axis=-1) for x in (ids, scores))


def _keywords(**change):
    """change: name -> function of the keyword."""

    def op(base, *arrays, **keywords):
        return base(*arrays, **keywords | {name: wrong(keywords[name]) for name, wrong in change.items()})

    return op


def _arrays(change):
    """change: (q, k, v, table, starts, lengths) -> the same, wrong."""
    return lambda base, *arrays, **keywords: base(*change(*arrays), **keywords)


def _on_table(change):
    return _arrays(lambda q, k, v, table, *positions: (q, k, v, change(table, k.shape[0]), *positions))


def _moved(starts_by, lengths_by):
    return _arrays(lambda q, k, v, table, starts, lengths: (q, k, v, table, starts + starts_by, jnp.maximum(lengths + lengths_by, 0)))


def _last_query_of_each(base, q, *arrays, gamma, **keywords):
    return base(jnp.roll(q, 1 - gamma, axis=1), *arrays, gamma=gamma, **keywords)


def _positions_not_stretched(base, q, *arrays, gamma, **keywords):
    return base(q[:, ::gamma], *arrays, gamma=1, **keywords)


def _padding_selects(base, q, k, v, table, starts, lengths, **keywords):
    longer = jnp.where(lengths > 0, jnp.maximum(lengths, starts + q.shape[1]), 0)
    wrong = base(q, k, v, table, starts, longer, **keywords)
    return *base(q, k, v, table, starts, lengths, **keywords)[:2], *wrong[2:]


def _heads_interleaved(base, q, k, *arrays, **keywords):
    split = q.reshape(*q.shape[:2], -1, k.shape[1], q.shape[3]).swapaxes(2, 3).reshape(q.shape)
    return base(split, k, *arrays, **keywords)


def _selects_only_whole_blocks(base, q, k, v, table, starts, lengths, *, window, block_size, gamma, **keywords):
    """The paper's Algorithm 1 stops before the diagonal."""
    keywords |= {"block_size": block_size, "gamma": gamma}
    out, lse, *_ = base(q, k, v, table, starts, lengths, window=window, **keywords)
    return out, lse, *base(q, k, v, table, starts, lengths, window=window or (0, block_size - 1 or 1), **keywords)[2:]


def _multiplied_in_bfloat16(base, q, k, v, *arrays, **keywords):
    out, *rest = base(*(x.astype(jnp.bfloat16) for x in (q, k, v)), *arrays, **keywords)
    return out.astype(q.dtype), *rest


MUTANTS = {
    "zeros": _zeros,
    "V read from K": _arrays(lambda q, k, v, *others: (q, k, k, *others)),
    "K read from V": _arrays(lambda q, k, v, *others: (q, v, v, *others)),
    "one page dropped": _on_table(lambda table, pages: table.at[:, -1].set(-1)),
    "one page read for another": _on_table(lambda table, pages: table.at[:, 1].set(table[:, 0])),
    "one page doubled": _on_table(lambda table, pages: jnp.roll(table, 1, axis=1).at[:, 0].set(table[:, 0])),
    "the neighbour's table": _on_table(lambda table, pages: jnp.roll(table, 1, axis=0)),
    "-1 in the table wraps": _on_table(lambda table, pages: jnp.where(table < 0, pages - 1, table)),
    "scale times sqrt(D)": _keywords(sm_scale=lambda scale: 1.0),
    "length one short": _moved(0, -1),
    "length and chunk one late": _moved(1, 1),
    "causal mask one late": _moved(1, 0),
    "causal mask one early": _moved(-1, 0),
    "another query of the gamma": _last_query_of_each,
    "positions not stretched": _positions_not_stretched,
    "padding selects": _padding_selects,
    "heads interleaved": _heads_interleaved,
    "LSE in base 2": _results(lambda out, lse, ids, scores: (out, lse / np.log(2), ids, scores)),
    "scores relative to the LSE": _results(lambda out, lse, ids, scores: (out, lse, ids, scores - lse[..., None])),
    "scores of the unscaled products": _results(lambda out, lse, ids, scores: (out, lse, ids, scores * np.sqrt(32))),
    "ascending, not by slot": _results(_by_id),
    "list of the first head": _results(lambda out, lse, ids, scores: (out, lse, jnp.broadcast_to(ids[:, :, :1], ids.shape), scores)),
    "blocks one late": _results(lambda out, lse, ids, scores: (out, lse, jnp.where(ids < 0, ids, ids + 1), scores)),
    "an empty slot is block 0": _results(lambda out, lse, ids, scores: (out, lse, jnp.maximum(ids, 0), scores)),
    "whole blocks only": _selects_only_whole_blocks,
    "window ignored": _keywords(window=lambda window: None),
    "window one token wider": _keywords(window=lambda window: window and (window[0], window[1] + 1)),
    "a sink block that is cut counts": _keywords(window=lambda window: window and (window[0] + 3, window[1])),
    "all exact": lambda base, *arrays, **keywords: base(*arrays, **keywords | {"k_exact": keywords["k_blocks"]}),
    "the other estimate": _keywords(estimate=lambda estimate: "quantile" if estimate == "buckets" else "buckets"),
    "all estimated": _keywords(k_exact=lambda k: 0),
    "one exact slot less": _keywords(k_exact=lambda k: max(k - 1, 0)),
    "multiplied in bfloat16": _multiplied_in_bfloat16,
}
