"""What every implementation of selected_attention is tested with: the checker, and mutants that it must reject."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from paging import gather_attention, selected_attention

from pallas_kernels.selection.page_index import page_index
from pallas_kernels.selection.select_blocks import selection_width

SIZES = {"kind": "bounds", "block_size": 16, "budget": 5, "sink": 1, "local": 2}
"""Of a selection."""


def arguments_of(tools, cases: dict[str, dict]) -> Callable:
    """case -> (positional arguments, keywords) of the op. cases: inputs of `make_paged`, and `SIZES`."""

    @functools.cache
    def build(case: str):
        spec = dict(cases[case])
        sizes = {name: spec.pop(name) for name in SIZES}
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        index = page_index(paged.k, kind=sizes["kind"], block_size=sizes["block_size"])
        return (paged.q, paged.k, paged.v, index, paged.page_table, paged.lengths), sizes | {"sm_scale": paged.sm_scale}

    return build


def checker(tools, arguments: Callable) -> Callable:
    """(op, case) -> asserts the very lists of the reference, then its attention over them."""

    @functools.cache
    def expected(case: str):
        arrays, keywords = arguments(case)
        return selected_attention(*arrays, **keywords, implementation="reference")

    def run(op, case: str) -> None:
        arrays, keywords = arguments(case)
        out, lse, ids = op(*arrays, **keywords)
        ref_out, ref_lse, ref_ids = expected(case)
        assert ids.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(ids), np.asarray(ref_ids))
        tolerance = tools.row_error[arrays[0].dtype.name]
        tools.assert_rows_close(out, ref_out, 2 * tolerance)  # weights are rounded, too
        tools.assert_lse_close(lse, ref_lse)

    return run


# Mutants: what an implementation gets wrong, expressed on its arguments or its results.


def _results(change):
    return lambda op: lambda *arrays, **keywords: change(*op(*arrays, **keywords))


def _arrays(change):
    return lambda op: lambda *arrays, **keywords: op(*change(*arrays), **keywords)


def _scaled(factor):
    return lambda op: lambda *arrays, sm_scale, **keywords: op(*arrays, sm_scale=sm_scale * factor, **keywords)


def _sized(**by):
    """With sizes off by some, the list cut or filled to the right width."""

    def mutant(op):
        def run(q, k, *rest, **keywords):
            sizes = {name: keywords[name] for name in ("block_size", "sink", "local")} | {"k": keywords["budget"]}
            width = selection_width(page_size=k.shape[2], **sizes)
            out, lse, ids = op(q, k, *rest, **(keywords | {name: keywords[name] + n for name, n in by.items()}))
            return out, lse, jnp.pad(ids, ((0, 0), (0, 0), (0, 0), (0, width)), constant_values=-1)[..., :width]

        return run

    return mutant


def _over(change):
    """Attention over another list than the one that is returned."""

    def mutant(op):
        def run(q, k, v, index, table, lengths, *, sm_scale, block_size, **keywords):
            *_, ids = op(q, k, v, index, table, lengths, sm_scale=sm_scale, block_size=block_size, **keywords)
            return *gather_attention(q, k, v, table, lengths, blocks=change(ids), block_size=block_size, sm_scale=sm_scale), ids

        return run

    return mutant


def _later_drafts_visible(op):
    """Every query as if it were the last one of the step."""

    def run(q, *arrays, **keywords):
        each = [op(q[:, t : t + 1], *arrays, **keywords) for t in range(q.shape[1])]
        return tuple(jnp.concatenate(x, axis=1) for x in zip(*each, strict=True))

    return run


def _sealed_too_early(op):
    """As if a page were sealed for the query that fills it, too: its own page is listed only where it scores among the
    best."""

    def run(q, k, v, index, table, lengths, *, local, sm_scale, block_size, **keywords):
        *_, ids = op(q, k, v, index, table, lengths + 1, local=local + 1, sm_scale=sm_scale, block_size=block_size, **keywords)
        current = (lengths[:, None] - q.shape[1] + jnp.arange(q.shape[1])) // block_size
        ids = jnp.where(ids > current[..., None, None], -1, ids)
        attended = gather_attention(q, k, v, table, lengths, blocks=ids, block_size=block_size, sm_scale=sm_scale)
        sizes = {"block_size": block_size, "sink": keywords["sink"], "local": local, "k": keywords["budget"]}
        width = selection_width(page_size=k.shape[2], **sizes)
        return *attended, jnp.pad(ids, ((0, 0), (0, 0), (0, 0), (0, width)), constant_values=-1)[..., :width]

    return run


def _last_dropped(ids):
    return jnp.where((ids >= 0) & (ids == ids.max(-1, keepdims=True)), -1, ids)


def _heads_interleaved(q, k, *rest):
    return q.reshape(*q.shape[:2], -1, k.shape[1], q.shape[3]).swapaxes(2, 3).reshape(q.shape), k, *rest


MUTANTS = {
    "zeros": _results(lambda *results: tuple(map(jnp.zeros_like, results))),
    "V read from K": _arrays(lambda q, k, v, *rest: (q, k, k, *rest)),
    "K read from V": _arrays(lambda q, k, v, *rest: (q, v, v, *rest)),
    "one page dropped": _arrays(lambda q, k, v, index, table, n: (q, k, v, index, table.at[:, -1].set(-1), n)),
    "the neighbour's table": _arrays(lambda q, k, v, index, table, n: (q, k, v, index, jnp.roll(table, 1, 0), n)),
    "index of another head": _arrays(lambda q, k, v, index, *rest: (q, k, v, jnp.roll(index, 1, 1), *rest)),
    "index of another page": _arrays(lambda q, k, v, index, *rest: (q, k, v, jnp.roll(index, 1, 0), *rest)),
    "lower bounds": _arrays(lambda q, k, v, index, *rest: (q, k, v, index[..., ::-1, :], *rest)),
    "heads interleaved": _arrays(_heads_interleaved),
    "length one short": _arrays(lambda *arrays: (*arrays[:5], jnp.maximum(arrays[5] - 1, 0))),
    "length one long": _arrays(lambda *arrays: (*arrays[:5], arrays[5] + 1)),
    "scale times sqrt(D)": _scaled(8.0),
    "scale over sqrt(D)": _scaled(1 / 8),
    "one distant block less": _sized(budget=-1),
    "one sink block less": _sized(sink=-1),
    "one sink block more": _sized(sink=1),
    "one local block less": _sized(local=-1),
    "the first head's list": _results(lambda out, lse, ids: (out, lse, jnp.broadcast_to(ids[:, :, :1], ids.shape))),
    "attends to the first head's list": _over(lambda ids: jnp.broadcast_to(ids[:, :, :1], ids.shape)),
    "attends to the last draft's list": _over(lambda ids: jnp.broadcast_to(ids[:, -1:], ids.shape)),
    "later drafts are visible": _later_drafts_visible,
    "a page is sealed too early": _sealed_too_early,
    "the current block is not attended to": _over(_last_dropped),
    "the sink is not attended to": _over(lambda ids: jnp.where(ids == 0, -1, ids)),
    "a block is attended to twice": _over(lambda ids: ids.at[..., 1].set(ids[..., 0])),
    "LSE in base 2": _results(lambda out, lse, ids: (out, lse / np.log(2), ids)),
    "nothing to read is not 0": _results(lambda out, lse, ids: (jnp.where(lse[..., None] == -jnp.inf, 1, out), lse, ids)),
}
